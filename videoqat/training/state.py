"""Checkpoints of a training run on disk, by torch.distributed.checkpoint (DCP).

    checkpoints/step-000100/   __0_0.distcp, .metadata   model, optimiser, EMA (fp32)
                               meta.json                 step, epoch, configuration, recipe, fingerprints, versions, loss
                               COMMITTED                 name and size of every file above; written last

A checkpoint is written to `.step-000100.partial` and renamed when everything is on the disk, so a run killed at any moment leaves either the whole
of it or a `.partial` folder, which nobody reads and the next start removes. COMMITTED is for what happens afterwards: a copy that broke off, a
file that was lost or cut. Nothing without a matching COMMITTED is ever resumed from, exported, or counted as kept.

DCP shards by process and reshards on loading; in one process it needs no process group.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from videoqat.console import is_rank_zero
from videoqat.errors import CheckpointError
from videoqat.files import write_json

MARKER = "COMMITTED"

# What may differ between a checkpoint's configuration and the one that resumes it: where things lie (their content is compared by fingerprint),
# how long the run is, what is written when, what it runs on, and how memory is saved. All else decides the numbers and must be equal.
FREE_KEYS = frozenset(
    (
        *("model.path", "cache", "out", "recipe"),
        *("train.steps", "train.log_every", "train.save_every", "train.keep_last", "train.health_every", "train.resume"),
        *("train.activation_checkpointing", "runtime.device", "runtime.dtype", "runtime.kernel"),
    )
)


def _no_dist() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def _reason(error: BaseException) -> str:
    """The cause in one line; DCP wraps what went wrong on each rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.splitlines()[0]


def _sync_folder(path: Path) -> None:
    """A rename is on the disk only when its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(checkpoints: Path, step: int, tensors: dict[str, Any], meta: dict[str, Any], keep_last: int) -> Path:
    """Writes `checkpoints/step-NNNNNN` and, once it is whole, removes all but the last `keep_last`. All ranks call it.

    Args:
        checkpoints: the run's folder of checkpoints.
        step: its number.
        tensors: nested dict of tensors (DTensors when sharded) and plain values, for DCP.
        meta: JSON-able; becomes meta.json.
        keep_last: whole checkpoints that stay, this one included.

    Raises:
        CheckpointError: it can't be written (disk full, say). Older checkpoints are untouched then.
    """
    final = checkpoints / f"step-{step:06d}"
    aside = checkpoints / f".{final.name}.partial"
    try:
        if is_rank_zero():
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, as intended
            dcp_save(tensors, checkpoint_id=aside, no_dist=_no_dist())
        if is_rank_zero():
            write_json(aside / "meta.json", meta)
            write_json(aside / MARKER, {"files": {p.name: p.stat().st_size for p in sorted(aside.iterdir())}})
            _sync_folder(aside)
            if final.exists():  # torn, or the trainer would have refused to start
                shutil.rmtree(final)
            os.rename(aside, final)
            _sync_folder(checkpoints)
            for old in whole(checkpoints)[:-keep_last]:
                shutil.rmtree(old)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} can't be written: {_reason(error)}; older checkpoints are untouched") from error
    return final


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
    """Removes what a killed save left aside."""
    for path in checkpoints.glob(".step-*.partial"):
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
    """Flat keys of all that DCP stored: `model.blocks.0.attn1.to_q.weight`, `optimizer.state....exp_avg`, `ema....`."""
    return set(_read(checkpoint, lambda: FileSystemReader(checkpoint).read_metadata()).state_dict_metadata)


def load(checkpoint: Path, tensors: dict[str, Any]) -> None:
    """Reads `tensors` (nested, as for `save`, of the right shapes) from `checkpoint`, in place. Every key must be there.

    Raises:
        CheckpointError: unreadable, a key is missing or a shape differs.
    """

    def run() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(tensors, checkpoint_id=checkpoint, no_dist=_no_dist())

    _read(checkpoint, run)


def _read(checkpoint: Path, action: Callable[[], Any]) -> Any:
    # DCP pickles its metadata and zips its tensors: damaged bytes can raise nearly anything, and all of it means the same.
    try:
        return action()
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{checkpoint} can't be read: {_reason(error)}") from error


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def check_resumable(checkpoint: Path, meta: dict[str, Any], now: dict[str, Any]) -> None:
    """Requires that continuing `checkpoint` under `now` is the same training.

    Args:
        checkpoint: named in the error.
        meta: its meta.json.
        now: the same keys `config`, `recipe`, `model_fingerprint`, `cache_fingerprint` for the run that wants to resume.

    Raises:
        CheckpointError: recipe, model, cache or a key of the configuration that is not in `FREE_KEYS` differs; both values are named.
    """
    was, wants = dict(_flat(meta["config"])), dict(_flat(now["config"]))
    faults = []
    if meta["recipe"] != now["recipe"]:
        fields = [f"{k}={meta['recipe'].get(k)!r} not {v!r}" for k, v in now["recipe"].items() if meta["recipe"].get(k) != v]
        faults.append(f"recipe {meta['recipe']['name']!r}, not {now['recipe']['name']!r} ({', '.join(fields)})")
    for thing, key in (("model", "model.path"), ("cache", "cache")):
        if meta[f"{thing}_fingerprint"] != now[f"{thing}_fingerprint"]:
            faults.append(f"{thing} {was.get(key)} ({meta[f'{thing}_fingerprint'][:12]}), not {wants.get(key)} ({now[f'{thing}_fingerprint'][:12]})")
    for key in sorted(was.keys() | wants.keys() - FREE_KEYS):
        if key not in FREE_KEYS and was.get(key) != wants.get(key):
            faults.append(f"{key}={was.get(key)!r}, not {wants.get(key)!r}")
    if faults:
        raise CheckpointError(f"{checkpoint} was trained with another setting and can't be resumed: it has {'; '.join(faults)}")
