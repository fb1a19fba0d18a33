"""Where a step's time goes: its parts by a clock that does not slow it, and the share of communication by a trace of a single step.

A GPU works through what the host has queued long before. So on CUDA the clock's marks are events in the GPU's own queue: `data` is the time for
which the GPU had to wait for samples, not the time that loading them took, and reading the marks waits for nothing if it is done after a
synchronisation that the step needs anyway. On a CPU the marks are the time of day.
"""

import contextlib
import os
import time
from collections.abc import Iterator

import torch

PARTS = ("data", "forward", "backward", "optimizer")

Span = tuple[float, float]  # start and end


class Clock:
    """Measures one step. `mark(part)` says that all since the mark before belonged to `part`."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = [("", self._now())]

    def _now(self) -> float | torch.cuda.Event:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, part: str) -> None:
        """Ends a stretch of time that belongs to `part`, one of `PARTS`."""
        self._marks.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds by part, each of `PARTS`. Waits until the GPU has passed the last mark."""
        found = dict.fromkeys(PARTS, 0.0)
        last = self._marks[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                found[part] += start.elapsed_time(end) / 1000
            elif isinstance(start, float) and isinstance(end, float):
                found[part] += end - start
        return found


def merged(spans: list[Span]) -> list[Span]:
    """The same points in time, as spans that don't touch, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def exposed(spans: list[Span], cover: list[Span]) -> tuple[float, float]:
    """How long `spans` last together, and how long of that nothing of `cover` was going on."""
    spans, cover = merged(spans), merged(cover)
    total = hidden = 0.0
    first = 0
    for start, end in spans:
        total += end - start
        while first < len(cover) and cover[first][1] <= start:
            first += 1
        for begin, stop in cover[first:]:
            if begin >= end:
                break
            hidden += min(end, stop) - max(start, begin)
    return total, total - hidden


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Standard error leads nowhere: torch's tracer announces every start and stop there."""
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)


@contextlib.contextmanager
def traced_communication(device: torch.device) -> Iterator[dict[str, float]]:
    """Yields a dict that, after the block, tells of this process what its collectives took in it.

    `communication_seconds`: NCCL's kernels on a GPU, gloo's work on a CPU, each moment once; waiting for a slower rank is part of it.
    `communication_exposed_seconds`: that part of it in which nothing was computed meanwhile. Both are empty if the trace saw nothing at all.
    """
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    found: dict[str, float] = {}
    # The device's activity alone where there is one: the host's many thousand calls would only slow the step and the reading.
    profiler = profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU], acc_events=True)
    with _muted():
        profiler.start()
    try:
        yield found
    finally:
        with _muted():
            profiler.stop()
    spans: dict[str, list[Span]] = {"communication": [], "computing": []}
    for event in profiler.events():
        if not gpu or (event.device_type.name == "CUDA" and not event.is_user_annotation):
            kind = _gpu_kind(event.name) if gpu else _cpu_kind(event.name)
            if kind:
                spans[kind].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    if any(spans.values()):
        found["communication_seconds"], found["communication_exposed_seconds"] = exposed(spans["communication"], spans["computing"])


def _gpu_kind(name: str) -> str | None:
    """What a thing on the GPU's time line is. Stretches that libraries have named there (`nccl:all_gather`, `FSDP::pre_forward`) are no work."""
    if name.startswith(("nccl:", "FSDP::", "ProfilerStep", "Memcpy", "Memset")):
        return None
    return "communication" if name.startswith("nccl") else "computing"


def _cpu_kind(name: str) -> str | None:
    if name.startswith("gloo:"):
        return "communication"
    return "computing" if name.startswith(("aten::", "videoqat::")) else None
