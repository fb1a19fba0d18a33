"""What a person watching a command sees: lines and progress bars on rank 0, on standard error.

Standard output is left to results (`--json -`), so that they can be piped.
"""

import os
import sys
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def is_rank_zero() -> bool:
    """Whether this process may speak. Before a process group exists, torchrun's RANK tells: one voice from the first line on."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return bool(torch.distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def own_rank() -> str:
    """` [rank 3]` under torchrun, to begin the lines that every rank may write; empty in a process of its own."""
    return f" [rank {os.environ['RANK']}]" if "RANK" in os.environ else ""


def say(message: str) -> None:
    """One line on standard error, rank 0 only; an open progress bar is not torn."""
    if is_rank_zero():
        from tqdm import tqdm

        tqdm.write(message, file=sys.stderr)


def progress(items: Iterable[T] | None = None, *, total: int | None = None, initial: int = 0, desc: str, unit: str = "it"):  # type: ignore[no-untyped-def]
    """A tqdm bar with rate and time left, on rank 0 only. Where standard error is no terminal it prints a line every 10 seconds at most."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    return tqdm(
        items,
        total=total,
        initial=initial,
        desc=desc,
        unit=unit,
        disable=not is_rank_zero(),
        mininterval=0.2 if terminal else 10.0,
        maxinterval=1.0 if terminal else 30.0,
        dynamic_ncols=terminal,
        ascii=not terminal,
        delay=0.5,  # what is over at once needs no bar
        file=sys.stderr,
    )
