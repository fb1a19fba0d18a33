"""Tables of the evidence without processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from videoqat.commands import execute
from videoqat.evaluation import evidence_run


@contextmanager
def in_this_process() -> Iterator[list[list[str]]]:
    """Commands are run here, one after the other: starting a process takes seconds. Yields the words of each."""
    begun: list[list[str]] = []

    def command(runner: evidence_run._Runner, words: list[str], log: Path) -> None:
        begun.append(words)
        name = " ".join(words[: 1 + (words[0] == "evidence")])
        execute(name, None, words[1 + (words[0] == "evidence") :], show_config=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence_run._Runner, "_command", command)
        yield begun
