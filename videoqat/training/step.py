"""One optimiser step on any number of ranks, and what all of them must learn in it.

A rank has `accumulation` micro-batches of a step. Its part of the loss is the sum over its samples divided by their number: averaged over ranks by
the engine, that is the mean over all samples of the step, so that one batch of two, two accumulated batches of one and one on each of two ranks give
the same gradient. Where a sequence is divided (sp), each rank's backward only holds what flows through its own tokens; the engine averages over
those ranks, too, so the loss is multiplied by sp.

Chance is a pure function of (seed, step, rank), so a run that goes on needs no generator's state to continue as if it had never stopped.
"""

import functools
import hashlib
import math
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from videoqat.console import say
from videoqat.errors import CheckpointError, TrainingDiverged
from videoqat.parallel.mesh import Mesh
from videoqat.training import state
from videoqat.training.agreement import Faults
from videoqat.training.batches import Ahead, MicroBatch, batches_of, tokens_of, work_of
from videoqat.training.engines import Engine
from videoqat.training.health import first_nonfinite, nonfinite_gradient
from videoqat.training.job import Job
from videoqat.training.objective import denoising_loss, distilled_losses
from videoqat.training.optim import learning_rate
from videoqat.training.runlog import StopRequest
from videoqat.training.throughput import flops_per_sample, peak_flops
from videoqat.training.trace import Clock


@dataclass
class Run:
    """A job at work on one rank. `teacher` is there if it is to be distilled from (`teacher.load_teacher`)."""

    job: Job
    mesh: Mesh
    engine: Engine
    teacher: nn.Module | None
    saver: state.Saver
    ahead: Ahead
    faults: Faults
    stop: StopRequest


@dataclass
class Step:
    """A step that was taken. `stop` is the signal by which some rank was asked to stop, None if none was."""

    job: Job
    mesh: Mesh
    row: dict[str, Any]
    clock: Clock
    stop: signal.Signals | None

    def finished_row(self) -> dict[str, Any]:
        """The row for the log, times included. Waits for the GPU to finish the step, if it hasn't yet."""
        number = self.row["step"]
        seconds = self.clock.seconds()
        step_time = sum(seconds.values())
        tokens = work_of(self.job, number, functools.partial(tokens_of, self.job))
        peak, mfu = peak_flops(self.mesh.device), None
        if peak is not None:
            mfu = work_of(self.job, number, functools.partial(flops_per_sample, self.job)) / (step_time * peak * self.mesh.world_size)
        times = {"step_time": step_time, "tokens_per_second": tokens / step_time, "mfu": mfu}
        return self.row | times | {f"{part}_seconds": spent for part, spent in seconds.items()}


def batch_loss(run: Run, batch: MicroBatch) -> Tensor:
    """The denoising loss of each of its samples, (B,) fp32."""
    return denoising_loss(run.job.family, run.job.schedule, run.engine.transformer, *batch.inputs)


def _losses(run: Run, batch: MicroBatch) -> dict[str, Tensor]:
    """Of each of its samples, (B,) fp32: `loss`, which is minimised, and with a teacher the two that it is made of."""
    if run.teacher is None:
        return {"loss": batch_loss(run, batch)}
    job = run.job
    return distilled_losses(job.family, job.schedule, run.engine.transformer, run.teacher, job.config.objective.distill_weight, *batch.inputs)


def _seed(seed: int, step: int, dp_rank: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"step {seed} {step} {dp_rank}".encode(), digest_size=7).digest(), "big")


def _memory(device: torch.device) -> int:
    """Bytes: the most that CUDA has held so far, or the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class _Told:
    losses: dict[str, float]  # means over all samples of the step
    memory: int  # the most on any rank
    stop: signal.Signals | None
    fault: bool


def _tell(run: Run, loss_sums: dict[str, Tensor], num_samples: int) -> _Told:
    """What each rank knows, to all: one small collective, by which the step also learns its losses."""
    mesh, wish = run.mesh, run.stop.signal
    known = torch.tensor([_memory(mesh.device), wish or 0, run.faults.first is not None], dtype=torch.float64)
    mine = torch.cat([torch.stack(list(loss_sums.values())), known.to(mesh.device)])
    table = [torch.empty_like(mine) for _ in range(mesh.world_size)]
    dist.all_gather(table, mine)
    *sums, memory, wishes, faults = torch.stack(table).T.tolist()
    # Ranks that divide a sequence have the same samples.
    means = [math.fsum(by_rank[:: mesh.layout.sp]) / (num_samples * mesh.layout.dp) for by_rank in sums]
    return _Told(
        losses=dict(zip(loss_sums, means, strict=True)),
        memory=int(max(memory)),
        stop=next((signal.Signals(int(wish)) for wish in wishes if wish), None),
        fault=any(faults),
    )


def take_step(run: Run, step: int) -> Step:
    """One optimiser step, counted from 1. Collective.

    Raises:
        TrainingDiverged: loss or gradient norm is NaN or inf, on all ranks alike; the weights are then still those before the step.
        UserError: a rank met an error since the last step (`Faults`); likewise.
    """
    job, mesh, engine = run.job, run.mesh, run.engine
    torch.manual_seed(_seed(job.config.train.seed, step, mesh.dp_rank))
    clock = Clock(mesh.device)
    batches = run.ahead.take(step, mesh.device)
    if step < job.config.train.steps:
        run.ahead.begin(step + 1)
    clock.mark("data")
    num_samples = sum(len(batch.samples) for batch in batches)
    loss_sums: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        losses = _losses(run, batch)
        clock.mark("forward")
        engine.backward(losses["loss"].sum() / num_samples * mesh.layout.sp, last=i == len(batches) - 1)
        for name, loss_B in losses.items():
            loss_sums[name] = loss_sums.get(name, 0) + loss_B.detach().double().sum()
        clock.mark("backward")
    run.ahead.finish()  # a GPU is still at work on the backward
    clock.mark("data")
    norm = engine.gradient_norm()
    told = _tell(run, loss_sums, num_samples)
    if not (math.isfinite(told.losses["loss"]) and math.isfinite(norm)):
        _diverged(run, step, batches, told.losses["loss"], norm)
    if told.fault:
        run.faults.settle(mesh)
    rate = learning_rate(job.config.optimizer, step, job.config.train.steps)
    engine.update(rate, norm, step)
    clock.mark("optimizer")
    row = {"step": step, "epoch": batches_of(job, step)[0][0], **told.losses, "grad_norm": norm, "lr": rate, "memory_bytes": told.memory}
    return Step(job, mesh, row, clock, told.stop)


def _bad_sample(job: Job, batches: list[MicroBatch]) -> str | None:
    for batch in batches:
        for row, index in enumerate(batch.samples):
            if not all(tensor[row].isfinite().all() for tensor in (batch.latents_BCFHW, *batch.condition.values())):
                return f"the cache's sample {job.cache.samples[index].id}"
    return None


def _diverged(run: Run, step: int, batches: list[MicroBatch], loss: float, norm: float) -> NoReturn:
    """Finds where it began, on which rank, and says so on all. All ranks look, since a forward of sharded weights takes all of them."""
    transformer = run.engine.transformer
    gradient = nonfinite_gradient(transformer)  # before a forward gathers the weights: gradients belong to their shards
    place = first_nonfinite(transformer, [functools.partial(batch_loss, run, batch) for batch in batches])
    if run.teacher is not None:
        taught = [functools.partial(denoising_loss, run.job.family, run.job.schedule, run.teacher, *batch.inputs) for batch in batches]
        of_teacher = first_nonfinite(run.teacher, taught)
        place = place or (of_teacher and f"{of_teacher} of the teacher")
    found = (_bad_sample(run.job, batches), place, gradient)
    try:
        run.saver.finish()
    except CheckpointError as error:
        say(f"WARNING: {error}")
    kept = state.whole(Path(run.job.config.out) / "checkpoints")
    reports = run.mesh.gather_objects((found, str(kept[-1]) if kept else "none was saved yet"))
    where = "no single tensor (a sum over finite numbers overflowed)"
    for kind, words in enumerate(("", "", "gradient of ")):  # what is told of a sample says more than what it did to a module
        seen = next(((rank, places[kind]) for rank, (places, _) in enumerate(reports) if places[kind]), None)
        if seen is not None:
            where = f"{words}{seen[1]}" + (f" (on rank {seen[0]})" if run.mesh.world_size > 1 else "")
            break
    raise TrainingDiverged(
        f"step {step}: loss is {loss:g} and the gradient norm {norm:g}; the first number that is not finite is in: {where}; "
        f"last good checkpoint: {reports[0][1]}"
    )
