"""How long the stages of a video take, on the device's own clock, and how much memory it needs at its peak."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Mark = Any  # a moment: seconds of the host's clock, or a CUDA event


class Stopwatch:
    """Moments on a device's own time line.

    On a GPU a moment is an event in the stream: it is reached when all that was asked for before is done, and setting it makes nobody wait. So the
    time between two is the GPU's, not that of the program which runs ahead of it. Elsewhere it is the host's clock.

    Args:
        device: where the work to be timed runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """This moment."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds from one moment to a later one; waits until the device has reached it."""
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def reset_peak_memory(device: torch.device) -> None:
    """From here on `peak_memory` counts."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (refs := Path("/proc/self/clear_refs")).exists():
        try:
            refs.write_text("5")  # Linux: sets the process's high-water mark back to what it holds now
        except OSError:
            return  # not permitted in some containers: the mark is then that of the whole process


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the highest moment since `reset_peak_memory`: on a GPU what torch had allocated there, on the CPU what the process held in memory.

    None where the system doesn't tell.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) * 1024 if lines else None


def total_memory(device: torch.device) -> int:
    """Bytes of memory that a device, or for the CPU the machine, has altogether."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def watched(owner: Any, method: str, after: Callable[[Mark, Mark, Any], None], mark: Callable[[], Mark]) -> Iterator[None]:
    """While open, every `owner.method(...)` is followed by `after(start, end, result)`; the result itself passes unchanged."""
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = mark()
        result = original(*args, **kwargs)
        after(start, mark(), result)
        return result

    setattr(owner, method, call)
    try:
        yield
    finally:
        delattr(owner, method)
