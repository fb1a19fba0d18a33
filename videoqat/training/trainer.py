"""The training loop, in one process: check, load, resume, step, log, save.

A step is `train.accumulation` micro-batches of `train.batch_size` samples. Its loss is the mean over all of its samples: each micro-batch adds
sum(loss_B) / (samples of the step), so that one batch of two and two accumulated batches of one give the same gradient.

Which samples, noise, times and dropped captions a step sees is a pure function of (seed, step), so a resumed run needs nothing but the step's
number, the weights, the optimiser's moments and the moving average to continue as if it had never stopped.
"""

import functools
import json
import math
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict

from videoqat.attention.backends import record_receipts
from videoqat.config import TrainConfig, to_yaml
from videoqat.console import progress, say
from videoqat.errors import TrainingDiverged, UserError
from videoqat.files import atomic_path, writable_folder, write_json
from videoqat.models.install import install
from videoqat.models.spec import AttentionLayer
from videoqat.provenance import provenance, versions
from videoqat.training import state
from videoqat.training.health import first_nonfinite, nonfinite_gradient, quantisation_health
from videoqat.training.job import Job, check, estimate
from videoqat.training.objective import draw, flow_matching_loss
from videoqat.training.optim import Ema, gradient_norm, learning_rate, make_optimizer
from videoqat.training.runlog import RunLog, disk_errors, only_run, read_log, stop_on_signal

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL: stopped by a signal with everything saved; start it again to continue


@dataclass
class Run:
    """A job with its model: what changes from step to step."""

    job: Job
    transformer: nn.Module
    layers: list[AttentionLayer]  # the quantised ones
    optimizer: torch.optim.AdamW
    ema: Ema | None

    def tensors(self) -> dict[str, Any]:
        """All that a checkpoint holds, nested, by name; the tensors themselves, not copies."""
        optimizer = get_optimizer_state_dict(self.transformer, self.optimizer)
        return {
            "model": get_model_state_dict(self.transformer),
            # The groups' settings come from the configuration, and the rate from the step.
            "optimizer": optimizer["state"],
        } | ({"ema": self.ema.tensors} if self.ema else {})


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the transformer together, on its device. Latents and noise (B, C, F, H, W), t (B,), text (B, L, D), all fp32."""

    epoch: int
    samples: list[int]
    latents_BCFHW: Tensor
    noise_BCFHW: Tensor
    t_B: Tensor
    text_BLD: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order of `flow_matching_loss`."""
        return self.latents_BCFHW, self.noise_BCFHW, self.t_B, self.text_BLD


def load_batch(job: Job, epoch: int, samples: list[int]) -> MicroBatch:
    """Samples of the cache with what is drawn for them in `epoch`."""
    config = job.config
    loaded = [job.cache.load(index) for index in samples]
    draws = [
        draw(config.objective, config.train.seed, epoch, index, sample["latents"], job.time_range)
        for index, sample in zip(samples, loaded, strict=True)
    ]
    texts = [job.cache.null_text if d.drop_caption else sample["text"] for d, sample in zip(draws, loaded, strict=True)]
    return MicroBatch(
        epoch=epoch,
        samples=samples,
        latents_BCFHW=torch.stack([sample["latents"] for sample in loaded]).to(job.device, torch.float32),
        noise_BCFHW=torch.stack([d.noise_CFHW for d in draws]).to(job.device),
        t_B=torch.tensor([d.t for d in draws], device=job.device),
        text_BLD=job.family.pad_text(texts, job.cache.settings["max_text_tokens"]).to(job.device, torch.float32),
    )


def _start(job: Job) -> Run:
    """Loads the transformer (fp32), puts the recipe in, and makes a fresh optimiser and average."""
    config = job.config
    transformer = job.family.load_transformer(
        config.model.path, config.model.component, dtype=torch.float32, from_scratch=config.from_scratch, seed=config.train.seed
    )
    transformer.to(job.device).train()
    if config.train.activation_checkpointing == "full":
        transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    layers = install(transformer, job.recipe, kernel=config.runtime.kernel, family=job.family)
    ema = Ema(transformer, config.optimizer.ema_decay) if config.optimizer.ema_decay else None
    return Run(job, transformer, layers, make_optimizer(config.optimizer, transformer.parameters()), ema)


def _restore(run: Run, checkpoint: Path) -> None:
    """Weights, moments and average from `checkpoint`."""
    tensors = run.tensors()
    # A parameter that never got a gradient (a branch that the objective doesn't use) has no moments.
    stored = state.tensor_keys(checkpoint)
    tensors["optimizer"] = {name: moments for name, moments in tensors["optimizer"].items() if f"optimizer.{name}.exp_avg" in stored}
    state.load(checkpoint, tensors)
    groups = get_optimizer_state_dict(run.transformer, run.optimizer)["param_groups"]
    loaded = {"state": tensors["optimizer"], "param_groups": groups}
    set_optimizer_state_dict(run.transformer, run.optimizer, loaded, options=StateDictOptions(strict=False))


def _loss(run: Run, batch: MicroBatch) -> Tensor:
    with torch.autocast(run.job.device.type, dtype=torch.bfloat16, enabled=run.job.config.train.autocast == "bfloat16"):
        return flow_matching_loss(run.job.family, run.transformer, *batch.inputs)


def _memory(device: torch.device) -> int:
    """Bytes: the most that CUDA has held so far, or the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _bad_sample(job: Job, batches: list[MicroBatch]) -> str | None:
    for batch in batches:
        for index, latents_CFHW, text_LD in zip(batch.samples, batch.latents_BCFHW, batch.text_BLD, strict=True):
            if not (latents_CFHW.isfinite().all() and text_LD.isfinite().all()):
                return f"the cache's sample {job.cache.samples[index].id}"
    return None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _diverged(run: Run, step: int, batches: list[MicroBatch], loss: float, norm: float) -> NoReturn:
    """Finds where it began and says so."""
    where = _bad_sample(run.job, batches) or first_nonfinite(run.transformer, [functools.partial(_loss, run, batch) for batch in batches])
    if where is None:
        name = nonfinite_gradient(run.transformer)
        where = f"gradient of {name}" if name else "no single tensor (a sum over finite numbers overflowed)"
    kept = state.whole(Path(run.job.config.out) / "checkpoints")
    raise TrainingDiverged(
        f"step {step}: loss is {loss:g} and the gradient norm {norm:g}; the first number that is not finite is in: {where}; "
        f"last good checkpoint: {kept[-1] if kept else 'none was saved yet'}"
    )


def _step(run: Run, step: int) -> dict[str, Any]:
    """One optimiser step; returns its row for the log.

    Raises:
        TrainingDiverged: loss or gradient norm is NaN or inf; the weights are then still those before the step.
    """
    job, loop, cfg = run.job, run.job.config.train, run.job.config.optimizer
    started = time.monotonic()
    chosen = [job.order.batch((step - 1) * loop.accumulation + i) for i in range(loop.accumulation)]
    num_samples = sum(len(samples) for _, samples in chosen)
    batches = [load_batch(job, epoch, samples) for epoch, samples in chosen]
    data_time = time.monotonic() - started

    run.optimizer.zero_grad()
    observe_now = bool(run.layers) and loop.health_every > 0 and (step == 1 or step % loop.health_every == 0)
    health: dict[str, dict[str, float]] = {}
    total = torch.zeros((), device=job.device)
    for i, batch in enumerate(batches):
        if observe_now and i == 0:
            with quantisation_health(run.transformer, job.recipe, run.layers) as health:
                loss_B = _loss(run, batch)
        else:
            loss_B = _loss(run, batch)
        (loss_B.sum() / num_samples).backward()
        total += loss_B.detach().sum()
    norm = gradient_norm(run.transformer.parameters())
    loss, norm_value = (total / num_samples).item(), norm.item()
    if not (math.isfinite(loss) and math.isfinite(norm_value)):
        _diverged(run, step, batches, loss, norm_value)

    torch.nn.utils.clip_grads_with_norm_(run.transformer.parameters(), cfg.clip_norm, norm)
    rate = learning_rate(cfg, step, loop.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.step()
    if run.ema:
        run.ema.update(run.transformer)

    step_time = time.monotonic() - started
    num_tokens = sum(len(b.samples) * math.prod(n // p for n, p in zip(b.latents_BCFHW.shape[2:], job.geometry.patch, strict=True)) for b in batches)
    row = {
        "step": step,
        "epoch": batches[0].epoch,
        "loss": loss,
        "grad_norm": norm_value,
        "lr": rate,
        "step_time": step_time,
        "tokens_per_second": num_tokens / step_time,
        "data_time_share": data_time / step_time,
        "memory_bytes": _memory(job.device),
    }
    return row | ({"health": health} if health else {})


def _start_from(job: Job) -> Path | None:
    """The checkpoint to continue from, or None to begin; says which.

    Raises:
        UserError: going on would overwrite checkpoints that are there, or none of them is whole.
        CheckpointError: the checkpoint asked for is torn, or of another training.
    """
    resume, checkpoints = job.config.train.resume, Path(job.config.out) / "checkpoints"
    kept, broken = state.whole(checkpoints), state.torn(checkpoints)
    present = sorted([*kept, *broken], key=state.step_of)
    if resume == "latest":
        chosen = kept[-1] if kept else None
        if broken and chosen is None:
            path, fault = list(broken.items())[-1]
            raise UserError(f"{checkpoints} holds no whole checkpoint ({path.name}: {fault}); remove what is there, or choose another out")
        for path, fault in broken.items():
            if chosen and state.step_of(path) > state.step_of(chosen):
                say(f"{path} is newer but not whole, so it is passed over: {fault}")
    elif resume == "never":
        chosen = None
        if present:
            raise UserError(f"train.resume=never, but {checkpoints} holds {present[-1].name}; choose another out, or train.resume=latest")
    else:
        chosen = Path(resume)
        step = state.read_meta(chosen)["step"]
        mine = chosen.resolve().parent == checkpoints.resolve()
        in_the_way = [path for path in present if not mine or state.step_of(path) > step]
        if in_the_way:
            raise UserError(f"train.resume={resume!r}: {checkpoints} holds {in_the_way[-1].name}, which would be overwritten; choose another out")
    if chosen is not None:
        state.check_resumable(chosen, state.read_meta(chosen), job.identity)
        say(f"resuming from {chosen}")
    return chosen


def _save(run: Run, row: dict[str, Any]) -> Path:
    meta = run.job.identity | {
        "step": row["step"],
        "epoch": row["epoch"],
        "loss": row["loss"],
        "model_folder": str(Path(run.job.config.model.path).resolve()),
        "max_text_tokens": run.job.cache.settings["max_text_tokens"],
        "versions": versions(),
    }
    return state.save(Path(run.job.config.out) / "checkpoints", row["step"], run.tensors(), meta, run.job.config.train.keep_last)


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains, from the start or from a checkpoint of the same run, to `config.train.steps`.

    SIGTERM, SIGINT and SIGUSR1 let the step finish, save, and return with `exit_code` 75 in the result; the same command continues it.

    Returns:
        `steps`, `last_loss`, `mean_loss_first` and `mean_loss_last` (over the first and last 50 rows of the log), `checkpoints`, `receipts`,
        `provenance`, `resumed_from`, and `exit_code` with `stopped_by` where a signal stopped it.

    Raises:
        UserError: the job can't be done as configured; nothing was overwritten.
        TrainingDiverged: NaN or inf, with the step, the place and the last good checkpoint.
    """
    job = check(config)
    out = writable_folder("out", config.out)
    with only_run(out):
        return _train(job, out)


def _train(job: Job, out: Path) -> dict[str, Any]:
    config, loop = job.config, job.config.train
    chosen = _start_from(job)
    first = (state.read_meta(chosen)["step"] if chosen else 0) + 1
    if first > loop.steps:
        say(f"{chosen} has all of train.steps={loop.steps} already; nothing is left to train")
    run = _start(job)
    if chosen:
        _restore(run, chosen)
    state.remove_leftovers(out / "checkpoints")
    session: dict[str, Any] = provenance(str(job.device)) | {"first_step": first, "resumed_from": str(chosen) if chosen else None}
    earlier = json.loads((out / "provenance.json").read_text())["sessions"] if chosen and (out / "provenance.json").is_file() else []
    with disk_errors(out), atomic_path(out / "config.yaml") as aside:
        aside.write_text(to_yaml(config))
    _write_provenance(job, out, [*earlier, session])
    num_weights = sum(parameter.numel() for parameter in run.transformer.parameters())
    how = f"kernel {job.receipt.kernel}, {'native' if job.receipt.native else 'emulated'}"
    size = f"{num_weights:,} weights, {len(job.cache)} samples, steps {first} to {loop.steps}"
    say(f"training {config.model.component} of {config.model.path} on {job.device}: {size}")
    say(f"attention: recipe {job.recipe.name} in {len(run.layers)} layers ({how})")

    stopped_by, announced = None, False
    with (
        record_receipts() as receipts,
        stop_on_signal() as stop,
        RunLog(out, first - 1) as log,
        progress(total=loop.steps, initial=first - 1, desc="train", unit="step") as bar,
    ):
        for step in range(first, loop.steps + 1):
            row = _step(run, step)
            bar.update(1)
            bar.set_postfix_str(f"loss {row['loss']:.4g}", refresh=False)
            if step == 1 or step % loop.log_every == 0 or "health" in row:
                log.write(row if announced else row | {"receipts": [receipt.to_dict() for receipt in receipts]})
                announced = True
            stopped_by = stop.name if step < loop.steps else None
            if step % loop.save_every == 0 or step == loop.steps or stopped_by:
                _save(run, row)
            if stopped_by:
                say(f"{stopped_by}: step {step} is done and saved; the same command continues from there")
                break
    session["receipts"] = [receipt.to_dict() for receipt in receipts]
    _write_provenance(job, out, [*earlier, session])

    kept = state.whole(out / "checkpoints")
    newest = kept[-1] if kept else chosen  # none of its own: resumed by path from another run that was long enough already
    assert newest is not None
    last = state.read_meta(newest)
    losses = [row["loss"] for row in read_log(out / "log.jsonl")]
    return {
        "run": str(out),
        "steps": last["step"],
        "last_loss": last["loss"],
        "mean_loss_first": _mean(losses[:50]),
        "mean_loss_last": _mean(losses[-50:]),
        "checkpoints": [str(path) for path in kept],
        "resumed_from": session["resumed_from"],
        "receipts": session["receipts"],
        "provenance": session,
    } | ({"stopped_by": stopped_by, "exit_code": STOPPED_EXIT_CODE} if stopped_by else {})


def _write_provenance(job: Job, out: Path, sessions: list[dict[str, Any]]) -> None:
    """One entry for each start of this training: when, where, with what, from which step."""
    with disk_errors(out):
        write_json(out / "provenance.json", {"recipe": job.recipe.to_dict(), "sessions": sessions})


def plan(config: TrainConfig) -> dict[str, Any]:
    """Checks everything `train` would, and says what it amounts to; loads no weights and writes nothing.

    Returns:
        What `job.estimate` does, and `resumed_from`.
    """
    job = check(config)
    chosen = _start_from(job)
    return estimate(job) | {"resumed_from": str(chosen) if chosen else None}
