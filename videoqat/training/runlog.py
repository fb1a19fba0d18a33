"""What a run writes while it goes (log.jsonl, validation.jsonl, TensorBoard), on rank 0 alone; and what it heeds: signals and other runs."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videoqat.console import say
from videoqat.errors import UserError
from videoqat.files import atomic_path
from videoqat.parallel.folder import keep_others_out

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ONE_WISH_S = 5.0  # launchers pass a signal on and add their own: what comes within this time of the first is the same wish


@contextlib.contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Keeps other trainings out of `out`: two that save into one folder would mix their files. The lock goes with the process, however it ends.

    Raises:
        UserError: another training is at work there.
    """
    with open(out / ".lock", "w") as handle:
        keep_others_out(handle, out, "training")
        yield


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a failed write (disk full, say) into one line that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror or error}") from error


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log.jsonl. A last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class RunLog:
    """log.jsonl, validation.jsonl and TensorBoard of one run, open from `with` to its end.

    Opening it to continue after `step` drops later rows: they belong to steps that will be run again.
    """

    def __init__(self, out: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path, self._validation = out / "log.jsonl", out / "validation.jsonl"
        with disk_errors(self._path):
            for path in (self._path, self._validation) if self._validation.is_file() else (self._path,):
                kept = [row for row in read_log(path) if row["step"] <= step]
                with atomic_path(path) as aside:
                    aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    @staticmethod
    def _append(path: Path, row: dict[str, Any]) -> None:
        """Opened and closed for each row, so that neither a kill nor a file system that was away for a while loses one."""
        with open(path, "a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def write(self, row: dict[str, Any]) -> None:
        """One step's row."""
        with disk_errors(self._path):
            self._append(self._path, row)
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"train/{name}", value, row["step"])
            for layer, numbers in row.get("health", {}).items():
                for name, value in numbers.items():
                    self._board.add_scalar(f"health/{name}/{layer}", value, row["step"])
            for recipe, numbers in row.get("validation", {}).items():
                for name in ("loss", "difference"):
                    self._board.add_scalar(f"validation/{name}/{recipe}", numbers[name], row["step"])

    def write_validation(self, row: dict[str, Any]) -> None:
        """What one validation found, in full."""
        with disk_errors(self._validation):
            self._append(self._validation, row)

    def show(self, name: str, picture_HWC: NDArray[np.uint8], step: int) -> None:
        """A picture for TensorBoard."""
        with disk_errors(self._path):
            self._board.add_image(name, picture_HWC, step, dataformats="HWC")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with disk_errors(self._path.parent / "tensorboard"):
                self._board.close()  # its thread's error, which `write` told already, comes out once more
        except UserError as late:
            if error is None:
                raise
            say(f"WARNING: {late}")  # the error under way matters more


class StopRequest:
    """Which signal asked this process to stop, if any (`signal`)."""

    signal: "signal.Signals | None" = None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Within the block SIGTERM, SIGINT and SIGUSR1 are noted instead of ending the process; a second one, some seconds later, ends it as usual.

    Python hears signals in the main thread only; elsewhere nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if request.signal is None:
            request.signal, first = signal.Signals(number), time.monotonic()
        elif time.monotonic() - first > ONE_WISH_S:
            for each, handler in before.items():
                signal.signal(each, handler)
            signal.raise_signal(number)

    for number in STOP_SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
