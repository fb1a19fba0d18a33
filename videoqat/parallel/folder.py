"""An output folder that one command at a time may change, however many processes that command has."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from videoqat.console import say
from videoqat.errors import UserError
from videoqat.files import writable_folder
from videoqat.parallel.mesh import Mesh


def check_ours(out: Path, mark: str, command: str) -> None:
    """Requires `out` to be new, empty, or a folder in which the file `mark` says that `command` writes there.

    Raises:
        UserError: it is a file, or holds something else.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"out={str(out)!r} is a file; legal: a folder")
    if any(out.iterdir()) and not (out / mark).is_file():
        raise UserError(f"out={str(out)!r} holds something else; legal: a new or empty folder, or one that {command} wrote")


def keep_others_out(handle: IO[str], out: Path, command: str) -> None:
    """Locks an open file of the folder `out` until it is closed, or this process ends, however it does.

    Raises:
        UserError: another `command` holds it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"out={str(out)!r}: another {command} is at work in this folder; wait for its end, or choose another out") from None
    except OSError as error:  # some network file systems have no locks
        say(f"WARNING: {out} can't be locked ({error.strerror}); see to it that no other {command} uses it")


@contextlib.contextmanager
def sole_user(out: Path, mark: str, command: str, mesh: Mesh) -> Iterator[None]:
    """Collective: makes the folder with its mark and keeps others out of it until the block ends. The lock goes with rank 0's process.

    Raises:
        UserError: on every rank: the folder can't be written, or another `command` is at work in it.
    """
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            keep_others_out(stack.enter_context(open(writable_folder("out", out) / mark, "w")), out, command)

        mesh.on_rank_zero(lock)
        yield
