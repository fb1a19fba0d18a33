"""The training loop, in one process or in many: check, agree, load, resume, step, log, look, save.

One process is a group of one and goes the same road as 64. Rank 0 alone writes the run's logs. Whatever decides where the road goes on (errors,
signals, NaN, which checkpoint) is known to all ranks before any of them acts on it.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from videoqat.attention.backends import Receipt, record_receipts
from videoqat.config import TrainConfig, to_yaml
from videoqat.console import is_rank_zero, progress, say
from videoqat.data.dataset import CachedVideos
from videoqat.errors import NonFiniteError, UserError
from videoqat.files import atomic_path, check_writable, writable_folder, write_json
from videoqat.models.hub import origin
from videoqat.models.install import divided_by
from videoqat.parallel.mesh import Mesh, collective_errors, open_mesh
from videoqat.provenance import provenance, versions
from videoqat.training import state
from videoqat.training.agreement import Faults, together
from videoqat.training.batches import Ahead
from videoqat.training.engines import make_engine
from videoqat.training.job import Job, check
from videoqat.training.looks import Looks, check_looks
from videoqat.training.memory import estimate, warn_if_too_large
from videoqat.training.resume import agreed_checkpoint, choose_checkpoint
from videoqat.training.runlog import RunLog, disk_errors, only_run, read_log, stop_on_signal
from videoqat.training.step import Run, Step, take_step
from videoqat.training.teacher import load_teacher
from videoqat.training.trace import traced_communication

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL: stopped by a signal with everything saved; start it again to continue
INTERRUPTED_EXIT_CODE = 130  # likewise, with nothing saved
FIRST_TRACED = 3  # of a session's steps: later than what is slow only once


class _Rows:
    """The log's rows, on rank 0. A row waits until the next step is under way: only then has a GPU surely finished the one it tells of."""

    def __init__(self, log: RunLog | None, bar: Any, receipts: list[Receipt], faults: Faults, log_every: int) -> None:
        self._log, self._bar, self._receipts, self._faults, self._log_every = log, bar, receipts, faults, log_every
        self._waiting: Step | None = None
        self._announced = False

    def put(self, step: Step, more: dict[str, Any]) -> None:
        """Adds a step, with `more` for its row."""
        self.flush()
        self._waiting = step
        step.row |= more
        if not self._announced:
            step.row["receipts"] = [receipt.to_dict() for receipt in self._receipts]

    def flush(self, more: dict[str, Any] | None = None) -> None:
        """Writes the row that waits, with `more` in it; waits for the GPU if need be."""
        step, self._waiting = self._waiting, None
        if step is None or self._log is None:
            return
        row = step.finished_row() | (more or {})
        used = "" if row["mfu"] is None else f", {row['mfu']:.0%} mfu"
        self._bar.set_postfix_str(f"loss {row['loss']:.4g}, {row['tokens_per_second']:.4g} tokens/s{used}", refresh=False)
        self._bar.update(1)
        special = row.keys() & {"receipts", "health", "validation", "communication_seconds"}
        if row["step"] == 1 or row["step"] % self._log_every == 0 or special:
            with self._faults.noted():
                self._log.write(row)
            self._announced = True


@contextlib.contextmanager
def _traced(job: Job, mesh: Mesh, step: int, first: int) -> Iterator[dict[str, float]]:
    """Yields what is to be added to the row of the step in the block: its communication, on rank 0 where that is due; else nothing."""
    every = job.config.train.profile_every
    due = every > 0 and mesh.world_size > 1 and (step == first + FIRST_TRACED - 1 or step % every == 0)
    if not due or mesh.rank != 0:
        yield {}
        return
    with traced_communication(mesh.device) as found:
        yield found


def _start_saving(run: Run, row: dict[str, Any]) -> None:
    meta = run.job.identity | {
        "step": row["step"],
        "epoch": row["epoch"],
        "loss": row["loss"],
        "model_folder": str(Path(run.job.config.model.path).resolve()),
        "max_text_tokens": run.job.cache.settings["max_text_tokens"],
        "layout": str(run.mesh.layout),
        "versions": versions(),
    }
    run.saver.start(row["step"], run.engine.tensors(), meta)


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains, from the start or from a checkpoint of the same run, to `config.train.steps`.

    SIGTERM, SIGINT and SIGUSR1, sent to any of the processes, let the step finish, save, and return with `exit_code` 75 in the result; the same
    command continues it.

    Returns:
        `steps`, `last_loss`, `mean_loss_first` and `mean_loss_last` (over the first and last 50 rows of the log), `checkpoints`, `receipts`,
        `provenance`, `resumed_from`, and `exit_code` with `stopped_by` where a signal stopped it. The same on all ranks.

    Raises:
        UserError: the job can't be done as configured; nothing was overwritten. On all ranks.
        TrainingDiverged: NaN or inf, with the step, the place and the last good checkpoint. On all ranks.
        WorkerLost: another process ended.
    """
    job = check(config)
    held_out = check_looks(job)
    if job.device.type == "cuda" and is_rank_zero():
        warn_if_too_large(job)
    with open_mesh(config.parallel, job.device, num_heads=job.geometry.num_heads) as mesh, contextlib.ExitStack() as stack:
        return _train(job, held_out, mesh, stack)


def _train(job: Job, held_out: CachedVideos | None, mesh: Mesh, stack: contextlib.ExitStack) -> dict[str, Any]:
    config, loop, out = job.config, job.config.train, Path(job.config.out)
    with collective_errors("start"):
        identity = job.identity
        mesh.agree(dict(state.flat(identity.pop("config"))) | dict(state.flat(identity | {"versions": versions()})))
        with together(mesh):
            if mesh.rank == 0:
                stack.enter_context(only_run(writable_folder("out", out)))
        chosen = agreed_checkpoint(job, mesh)
        last: dict[str, Any] = state.read_meta(chosen) if chosen else {"step": 0}
        first = last["step"] + 1
        if first > loop.steps:
            say(f"{chosen} has all of train.steps={loop.steps} already; nothing is left to train")
        looks = Looks(job, mesh, held_out)
        engine = make_engine(job, mesh)
        if chosen:
            engine.restore(chosen)
        weight = config.objective.distill_weight
        teacher = load_teacher(job, mesh) if weight else None
        state.remove_leftovers(out / "checkpoints")
        session: dict[str, Any] = provenance(str(mesh.device)) | {
            "layout": str(mesh.layout),
            "first_step": first,
            "model": origin(config.model.path),
        }
        session["resumed_from"] = str(chosen) if chosen else None
        ulysses = divided_by(engine.transformer)
        session |= {"engine": config.parallel.engine, "ulysses": None if ulysses is None else ulysses.describe(job.recipe)}
        if teacher is not None:
            session["teacher"] = {"model": str(Path(config.model.path).resolve()), "fingerprint": job.model_fingerprint, "distill_weight": weight}
        log: RunLog | None = None
        earlier: list[dict[str, Any]] = []
        with together(mesh):
            if mesh.rank == 0:
                earlier = json.loads((out / "provenance.json").read_text())["sessions"] if chosen and (out / "provenance.json").is_file() else []
                with disk_errors(out), atomic_path(out / "config.yaml") as aside:
                    aside.write_text(to_yaml(config))
                _write_provenance(job, out, [*earlier, session])
                log = stack.enter_context(RunLog(out, first - 1))
        num_weights = sum(getattr(p, "ds_numel", p.numel()) for p in engine.transformer.parameters())  # ZeRO-3 leaves modules empty
        size = f"{num_weights:,} weights, {len(job.cache)} samples, steps {first} to {loop.steps}"
        say(f"training {config.model.component} of {config.model.path} on {mesh.device}: {size}; world size {mesh.layout}")
        how = f"kernel {job.receipt.kernel}, {'native' if job.receipt.native else 'emulated'}"
        wire = "" if ulysses is None else f"; q, k and v travel {'as 4-bit codes' if session['ulysses']['wire'] == 'packed' else 'as they are'}"
        say(f"attention: recipe {job.recipe.name} in {len(engine.layers)} layers ({how}){wire}")
        if teacher is not None:
            say(f"{weight:g} of the loss is the distance to what {config.model.path} itself predicts in bf16")
        if job.recipe.keep_first_steps or job.recipe.keep_last_steps:
            say(f"recipe {job.recipe.name} keeps denoising steps in bf16; training has no steps, and quantises at all times")

    faults = Faults()
    receipts = stack.enter_context(record_receipts())
    stop = stack.enter_context(stop_on_signal())
    saver = stack.enter_context(state.Saver(mesh, out / "checkpoints", loop.keep_last, background=loop.async_save))
    bar = stack.enter_context(progress(total=loop.steps, initial=first - 1, desc="train", unit="step"))
    run = Run(job, mesh, engine, teacher, saver, Ahead(job, mesh.dp_rank, pin=mesh.device.type == "cuda", faults=faults), faults, stop)
    rows = _Rows(log, bar, receipts, faults, loop.log_every)
    stopped_by = None
    with collective_errors("start"):
        looks.attach(run)
        if first <= loop.steps:
            run.ahead.begin(first)
            run.ahead.finish()
        faults.settle(mesh)
    try:
        for step in range(first, loop.steps + 1):
            with collective_errors(f"step {step}"):
                health = looks.health(step)
                with _traced(job, mesh, step, first) as communication:
                    taken = take_step(run, step)
                last = taken.row
                rows.put(taken, health | communication)
                stopped_by = taken.stop if step < loop.steps else None
                if looks.due(step) and not stopped_by:
                    rows.flush(looks.validate(step, log))
                if loop.save_every and (step % loop.save_every == 0 or step == loop.steps or stopped_by):
                    rows.flush()  # a log without steps that a checkpoint has would stay so
                    _start_saving(run, taken.row)
                else:
                    saver.poll()
                if step == first:
                    mesh.steady()
            if stopped_by:
                break
    except (NonFiniteError, UserError):
        rows.flush()  # of the last step that was good
        raise
    with collective_errors("the last save"):
        rows.flush()
        saver.finish()
        faults.settle(mesh)
    if stopped_by:
        again = "the same command" if loop.resume == "latest" else f"train.resume=latest, instead of {loop.resume},"
        kept = f"and saved; {again} continues from there" if loop.save_every else "and nothing is saved (train.save_every=0)"
        say(f"{stopped_by.name}: step {step} is done {kept}")
    session["receipts"] = [receipt.to_dict() for receipt in receipts]

    def summary() -> dict[str, Any]:
        _write_provenance(job, out, [*earlier, session])
        return _summary(out, last, session)

    with collective_errors("the end"):
        result = mesh.on_rank_zero(summary)
    exit_code = STOPPED_EXIT_CODE if loop.save_every else INTERRUPTED_EXIT_CODE
    return result | ({"stopped_by": stopped_by.name, "exit_code": exit_code} if stopped_by else {})


def _summary(out: Path, last: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
    """What `train` returns. `last`: the last step that was taken, in this session or, if it had none to take, before; the rest is on the disk."""
    kept = state.whole(out / "checkpoints")
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
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _write_provenance(job: Job, out: Path, sessions: list[dict[str, Any]]) -> None:
    """One entry for each start of this training: when, where, with what, from which step."""
    with disk_errors(out):
        write_json(out / "provenance.json", {"recipe": job.recipe.to_dict(), "sessions": sessions})


def plan(config: TrainConfig) -> dict[str, Any]:
    """Checks everything `train` would, and says what it amounts to; loads no weights and writes nothing.

    With `parallel.world_size` it answers for that many processes, wherever it runs.

    Returns:
        What `memory.estimate` does, and `resumed_from`.
    """
    job = check(config, config.parallel.world_size or None)
    check_looks(job)
    check_writable("out", config.out)
    chosen = choose_checkpoint(job)
    return estimate(job) | {"resumed_from": str(chosen) if chosen else None}
