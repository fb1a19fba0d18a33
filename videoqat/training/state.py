"""Checkpoints of a training run on disk, by torch.distributed.checkpoint (DCP).

    checkpoints/step-000100/   __0_0.distcp, __1_0.distcp, ...   model, optimiser, EMA (fp32): what rank 0 wrote, rank 1, ...
                               .metadata                         which part of which tensor lies where
                               meta.json                         step, epoch, configuration, recipe, fingerprints, versions, loss
                               COMMITTED                         name and size of every file above; written last

A checkpoint is written to `.step-000100.partial` and renamed when everything is on the disk, so a run killed at any moment leaves either the whole
of it or a `.partial` folder, which nobody reads and the next start removes. COMMITTED is for what happens afterwards: a copy that broke off, a
file that was lost or cut. Nothing without a matching COMMITTED is ever resumed from, exported, or counted as kept.

Every rank writes its own shards, each part of a tensor once however many replicas there are; nothing is gathered. DCP reshards on loading, so
another number of processes, another layout, or one process without a group can read what was written.
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from videoqat.console import is_rank_zero, say
from videoqat.errors import CheckpointError
from videoqat.files import sync_folder, write_json
from videoqat.parallel.mesh import Mesh

MARKER = "COMMITTED"

# What may differ between a checkpoint's configuration and the one that resumes it: where things lie (their content is compared by fingerprint),
# how long the run is, what is written and looked at when, what it runs on, how many processes divide the work, and how memory or time is saved.
# All else decides the numbers and must be equal.
FREE_KEYS = frozenset(
    (
        *("model.path", "cache", "out", "recipe"),
        *("train.steps", "train.log_every", "train.save_every", "train.keep_last", "train.health_every", "train.profile_every", "train.resume"),
        *("train.async_save", "train.activation_checkpointing", "train.offload_block_inputs", "train.compile"),
    )
)
FREE_GROUPS = ("parallel.", "validation.", "runtime.")
# Keys that earlier versions didn't have, with the value that stands for what those did.
LATER_KEYS = {"objective.distill_weight": 0.0}


def _no_dist() -> bool:
    return not (dist.is_available() and dist.is_initialized())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a process group, which is as intended then, DCP warns. With one this does nothing: filters are the process's, not a thread's."""
    if not _no_dist():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    """The cause in one line, with the rank that met it. DCP wraps what went wrong on each rank, and tells it to all."""
    rank = 0 if _no_dist() else dist.get_rank()
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    alone = _no_dist() or dist.get_world_size() == 1
    return text.splitlines()[0] + ("" if alone else f" (rank {rank})")


@contextlib.contextmanager
def _all_or_none(final: Path, group: dist.ProcessGroup | None) -> Iterator[None]:
    """What goes wrong in the block on any rank becomes a CheckpointError on every rank, so that none goes on alone and waits for the others."""
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as caught:
        error = caught
    reasons = [_reason(error) if error else None]
    if not _no_dist():
        reasons *= dist.get_world_size(group)
        dist.all_gather_object(reasons, reasons[0], group=group)
    for reason in filter(None, reasons):
        raise CheckpointError(f"checkpoint {final} can't be written: {reason}; older checkpoints are untouched") from error


class _Writer(FileSystemWriter):
    """DCP's own, but it tells why a write failed (disk full, say): torch's archives tell where in its file the failure left them."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _aside(final: Path) -> Path:
    """The name under which a checkpoint comes and goes."""
    return final.with_name(f".{final.name}.partial")


def save(checkpoints: Path, step: int, tensors: dict[str, Any], meta: dict[str, Any], keep_last: int, group: dist.ProcessGroup | None = None) -> Path:
    """Writes `checkpoints/step-NNNNNN` and, once it is whole, removes all but the last `keep_last`. All ranks call it.

    Args:
        checkpoints: the run's folder of checkpoints, the same one for all ranks.
        step: its number.
        tensors: nested dict for DCP. Of a DTensor each rank writes its shard; plain tensors and values are equal on all ranks, and one writes them.
        meta: JSON-able; becomes meta.json. Rank 0's counts.
        keep_last: whole checkpoints that stay, this one included.
        group: of all ranks, on CPU. Ranks wait there for each other's disks, so its timeout should be long. None: the default group, if any.

    Raises:
        CheckpointError: it can't be written (disk full, say), on whichever rank; raised on all. Older checkpoints are untouched then.
    """
    final = checkpoints / f"step-{step:06d}"
    aside = _aside(final)
    with _all_or_none(final, group):
        if is_rank_zero():
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
    try:
        with _all_or_none(final, group), _quiet():
            dcp_save(tensors, storage_writer=_Writer(aside), checkpoint_id=aside, process_group=group, no_dist=_no_dist())
            if is_rank_zero():
                _commit(aside, final, meta)
    except CheckpointError:
        if is_rank_zero():  # by now no rank is writing any more
            shutil.rmtree(aside, ignore_errors=True)
        raise
    if is_rank_zero():
        _remove_old(checkpoints, keep_last)
    return final


def _commit(aside: Path, final: Path, meta: dict[str, Any]) -> None:
    """Adds meta.json and COMMITTED to what all ranks wrote aside, and gives it its name."""
    write_json(aside / "meta.json", meta)
    sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    # Sizes as the ranks wrote them, not as this host sees them: a file of another host that isn't here, or not all of it, must not go unnoticed.
    extents: dict[str, int] = {}
    for item in FileSystemReader(aside).read_metadata().storage_data.values():
        extents[item.relative_path] = max(extents.get(item.relative_path, 0), item.offset + item.length)
    write_json(aside / MARKER, {"files": sizes | extents})
    if fault := problem(aside):
        raise OSError(f"{fault} (all processes must see the same folder)")
    sync_folder(aside)
    if final.exists():  # torn, or the trainer would have refused to start
        shutil.rmtree(final)
    os.rename(aside, final)
    sync_folder(final.parent)


def _remove_old(checkpoints: Path, keep_last: int) -> None:
    """Removes all but the last `keep_last` whole checkpoints. Each first loses its name: half-removed, it would lie there as a torn one for ever."""
    try:
        for old in whole(checkpoints)[:-keep_last]:
            leaving = _aside(old)
            os.rename(old, leaving)
            shutil.rmtree(leaving)
    except OSError as error:  # the new one is safe, so training goes on; a disk that fills up is an error when it is full
        say(f"WARNING: an older checkpoint can't be removed: {error}")


class Saver:
    """Saves a run's checkpoints while its training goes on.

    `start` copies what is to be saved to the host's memory and returns; a thread writes it (`save`) and commits it. `poll`, once a step, says when
    that is done. Every method is collective: all ranks call all of them, in the same order. Errors of the writing come out of the next `poll`,
    `finish` or `start`, on all ranks at the same call. Leaving the `with` block waits for what is being written, also after an error.

    Args:
        mesh: its `cpu_group` is the writing thread's alone.
        checkpoints, keep_last: as for `save`.
        background: False: `start` writes from where the tensors are, without a copy, and returns when the checkpoint is on the disk.
    """

    def __init__(self, mesh: Mesh, checkpoints: Path, keep_last: int, *, background: bool = True) -> None:
        self._mesh, self._checkpoints, self._keep_last, self._background = mesh, checkpoints, keep_last, background
        self._stager: BlockingAsyncStager | None = None
        self._staged: list[str] = []
        # A thread starts out with GPU 0 as its device, whatever this process uses.
        own_gpu = (lambda: torch.cuda.set_device(mesh.device)) if mesh.device.type == "cuda" else None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=own_gpu)
        self._task: concurrent.futures.Future[Path] | None = None

    def start(self, step: int, tensors: dict[str, Any], meta: dict[str, Any]) -> None:
        """Begins to save. `tensors` may change as soon as it returns. Waits first for a save that is still going on.

        Raises:
            CheckpointError: that earlier save failed.
        """
        self.finish()
        staged = self._copy(tensors) if self._background else tensors
        self._task = self._writer.submit(save, self._checkpoints, step, staged, meta, self._keep_last, self._mesh.cpu_group)
        if not self._background:
            concurrent.futures.wait([self._task])

    def _copy(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """`tensors` in the host's memory. From a GPU, into pinned buffers that stay from save to save, at the full speed of the bus."""
        keys = [key for key, _ in flat(tensors)]
        if self._stager is None or keys != self._staged:  # a parameter that now has moments, say
            self._stager = BlockingAsyncStager(cache_staged_state_dict=self._mesh.device.type == "cuda")
            self._staged = keys
        return self._stager.stage(tensors)

    def poll(self) -> Path | None:
        """The checkpoint that was begun, once it is whole on the disk (told once); None before, and while nothing is being saved. Doesn't wait.

        Raises:
            CheckpointError: it can't be written; older ones are untouched.
        """
        if self._task is None or self._mesh.any(not self._task.done()):
            return None
        return self.finish()

    def finish(self) -> Path | None:
        """Like `poll`, but waits until what was begun is on the disk."""
        if self._task is None:
            return None
        task, self._task = self._task, None
        return task.result()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.finish()
        except Exception as late:
            if error is None:
                raise
            say(f"WARNING: {late}")  # the error under way matters more
        finally:
            self._writer.shutdown()


def problem(checkpoint: Path) -> str | None:
    """What keeps `checkpoint` from being whole, or None. Compares every file with the sizes in COMMITTED."""
    marker = checkpoint / MARKER
    if not marker.is_file():
        return f"it has no {MARKER} file"
    try:
        sizes: dict[str, int] = json.loads(marker.read_text())["files"]
        expected = {"meta.json", ".metadata"} - set(sizes)
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} file can't be read"
    if expected:
        return f"its {MARKER} file does not list {sorted(expected)[0]}"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    return None


def _folders(checkpoints: Path) -> list[Path]:
    """Everything that has a checkpoint's name, oldest first, whole or not."""
    found = [p for p in checkpoints.glob("step-*") if p.is_dir() and p.name.removeprefix("step-").isdigit()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """`step-000100` -> 100."""
    return int(checkpoint.name.removeprefix("step-"))


def whole(checkpoints: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    return [p for p in _folders(checkpoints) if problem(p) is None]


def torn(checkpoints: Path) -> dict[Path, str]:
    """The torn checkpoints, oldest first, each with what is wrong with it."""
    return {p: fault for p in _folders(checkpoints) if (fault := problem(p)) is not None}


def remove_leftovers(checkpoints: Path) -> None:
    """Removes what a killed save left aside. On rank 0 alone: a late rank would find what the others are writing already."""
    for path in checkpoints.glob(".step-*.partial") if is_rank_zero() else ():
        shutil.rmtree(path)


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """meta.json of a whole checkpoint.

    Raises:
        CheckpointError: not a whole checkpoint; the reason is given.
    """
    fault = problem(checkpoint)
    if fault is not None:
        raise CheckpointError(f"{checkpoint} is not a whole checkpoint: {fault}")
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} is not a whole checkpoint: meta.json can't be read") from error
    return dict(meta)


def tensor_keys(checkpoint: Path) -> set[str]:
    """Flat keys of all that DCP stored: `model.blocks.0.attn1.to_q.weight`, `optimizer.blocks....exp_avg`, `ema.blocks....`."""
    return set(_read(checkpoint, lambda: FileSystemReader(checkpoint).read_metadata()).state_dict_metadata)


def load(checkpoint: Path, tensors: dict[str, Any]) -> None:
    """Reads `tensors` (nested, as for `save`, of the right shapes) from `checkpoint`, in place. Every key must be there. All ranks call it.

    Only what is asked for is read: of a DTensor this rank's shard, whatever the layout that wrote it; dtypes are converted.

    Raises:
        CheckpointError: unreadable, a key is missing or a shape differs.
    """

    with _quiet():
        _read(checkpoint, lambda: dcp_load(tensors, checkpoint_id=checkpoint, no_dist=_no_dist()))


def _read(checkpoint: Path, action: Callable[[], Any]) -> Any:
    # DCP pickles its metadata and zips its tensors: damaged bytes can raise nearly anything, and all of it means the same.
    try:
        return action()
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{checkpoint} can't be read: {_reason(error)}") from error


def flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of nested dicts."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def check_resumable(checkpoint: Path, meta: dict[str, Any], now: dict[str, Any]) -> None:
    """Requires that continuing `checkpoint` under `now` is the same training.

    Args:
        checkpoint: named in the error.
        meta: its meta.json.
        now: the same keys `config`, `recipe`, `model_fingerprint`, `cache_fingerprint` for the run that wants to resume. In both configurations
            train.global_batch_size is resolved: never 0.

    Raises:
        CheckpointError: recipe, model, cache or a key of the configuration that is not free differs; both values are named.
    """
    was, wants = ({key: value for key, value in flat(it["config"]) if not key.startswith(FREE_GROUPS)} for it in (meta, now))
    was = {key: value for key, value in LATER_KEYS.items() if key in wants} | was
    gone = [f"{key}={was[key]!r}" for key in sorted(was.keys() - wants.keys() - FREE_KEYS)]
    if gone:
        raise CheckpointError(
            f"{checkpoint} was written by another version of videoqat, with settings that this one doesn't have ({', '.join(gone)}), and can't be "
            "resumed; finish it with that version, or export it and train on from the export"
        )
    faults = []
    if meta["recipe"] != now["recipe"]:
        fields = [f"{k}={meta['recipe'].get(k)!r} not {v!r}" for k, v in now["recipe"].items() if meta["recipe"].get(k) != v]
        faults.append(f"recipe {meta['recipe']['name']!r}, not {now['recipe']['name']!r} ({', '.join(fields)})")
    for thing, key in (("model", "model.path"), ("cache", "cache")):
        if meta[f"{thing}_fingerprint"] != now[f"{thing}_fingerprint"]:
            faults.append(f"{thing} {was.get(key)} ({meta[f'{thing}_fingerprint'][:12]}), not {wants.get(key)} ({now[f'{thing}_fingerprint'][:12]})")
    for key in sorted(key for key in wants.keys() - FREE_KEYS if was.get(key) != wants[key]):
        faults.append(f"{key}={was.get(key)!r}, not {wants[key]!r}")
        if key == "train.global_batch_size":
            per_rank = "0 stands for train.batch_size on each data-parallel rank, and so changes with their number"
            faults[-1] += f" ({per_rank}; {key}={was.get(key)} continues this training)"
    if faults:
        raise CheckpointError(f"{checkpoint} was trained with another setting and can't be resumed: it has {'; '.join(faults)}")
