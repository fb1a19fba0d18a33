"""A checkpoint of a training run as a diffusers folder: the base pipeline with the trained transformer in it, and `videoqat.json` beside them.

One process does it, whatever the number that trained: it reads the weights, and nothing of the optimiser. The folder is written aside, its
transformer is loaded back strictly and compared tensor by tensor, and only then is it given its name.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from videoqat.config import ExportConfig, require
from videoqat.console import is_rank_zero, say
from videoqat.errors import CheckpointError, UserError
from videoqat.files import atomic_folder, check_writable, writable_folder, write_json
from videoqat.models.spec import ModelFamily, family_of
from videoqat.provenance import provenance
from videoqat.training import state
from videoqat.training.job import transformer_fingerprint


@dataclass(frozen=True)
class _Source:
    """What is to be exported, checked."""

    checkpoint: Path
    meta: dict[str, Any]
    weights: str  # ema or raw
    base: Path
    component: str
    family: ModelFamily
    dtype: torch.dtype | None  # of floating point weights; None: as in the base


def _check(config: ExportConfig) -> _Source:
    require(not Path(config.out).exists(), "out", config.out, "a folder that is not there yet")
    check_writable("out", Path(config.out).parent)
    if config.checkpoint == "latest":
        kept = state.whole(Path(config.run) / "checkpoints")
        if not kept:
            raise CheckpointError(f"run={config.run!r} holds no whole checkpoint")
        checkpoint = kept[-1]
    else:
        checkpoint = Path(config.checkpoint)
    meta = state.read_meta(checkpoint)
    trained = meta["config"]
    has_ema = trained["optimizer"]["ema_decay"] > 0
    require(has_ema or config.weights != "ema", "weights", config.weights, "auto or raw: this run kept no EMA (optimizer.ema_decay=0)")
    base, component = Path(meta["model_folder"]), trained["model"]["component"]
    if not base.is_dir():
        raise CheckpointError(f"{checkpoint} was trained from {base}, which is not there any more; export copies VAE and text encoder from it")
    if transformer_fingerprint(base, component, weights=not trained["from_scratch"]) != meta["model_fingerprint"]:
        raise CheckpointError(f"{base} is no longer the model that {checkpoint} was trained from: its {component} differs")
    dtype = None if config.dtype == "base" else getattr(torch, config.dtype)
    return _Source(checkpoint, meta, "ema" if has_ema and config.weights != "raw" else "raw", base, component, family_of(base), dtype)


def _trained_transformer(source: _Source) -> nn.Module:
    """The transformer with the checkpoint's weights, each in the dtype that is wanted or that it has in the base folder."""
    transformer = source.family.build(source.base, source.component)
    dtypes, stored = _stored_dtypes(source.base / source.component), state.tensor_keys(source.checkpoint)
    if source.dtype is not None:
        dtypes = {name: source.dtype for name, tensor in transformer.state_dict().items() if tensor.is_floating_point()}
    tensors = {name: torch.empty(tensor.shape, dtype=dtypes.get(name, tensor.dtype)) for name, tensor in transformer.state_dict().items()}
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}}
    for name, tensor in tensors.items():
        # Buffers have no average.
        parts["ema" if source.weights == "ema" and f"ema.{name}" in stored else "model"][name] = tensor
    state.load(source.checkpoint, parts)
    transformer.load_state_dict(tensors, assign=True)
    return transformer


def _stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor of floating point numbers in the folder's safetensors files, from their headers."""
    found: dict[str, torch.dtype] = {}
    floats = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: floats[entry["dtype"]] for name, entry in header.items() if entry.get("dtype") in floats}
    return found


def _load_back(source: _Source, folder: Path, transformer: nn.Module) -> None:
    """Loads the written transformer strictly (every key, every shape) and compares every number.

    Raises:
        CheckpointError: what was written is not what was trained.
    """
    written = source.family.load_transformer(folder, source.component, dtype=torch.float32).state_dict()
    for name, tensor in transformer.state_dict().items():
        if name not in written or not torch.equal(written[name].float(), tensor.float()):
            raise CheckpointError(f"export failed: {name} read back from {folder} differs from the checkpoint")


def _record(source: _Source) -> dict[str, Any]:
    """`videoqat.json`. Where the base folder has one, what it says of the other transformer and of earlier trainings is kept."""
    meta = source.meta
    before = source.base / "videoqat.json"
    earlier = json.loads(before.read_text()) if before.is_file() else {}
    training = {
        "steps": meta["step"],
        "loss": meta["loss"],
        "checkpoint": str(source.checkpoint.resolve()),
        "weights": source.weights,
        "component": source.component,
        "base": str(source.base),
        "base_fingerprint": meta["model_fingerprint"],
        "max_text_tokens": meta["max_text_tokens"],  # generation pads its text to as many
        "quantised_times": "all",  # training has no denoising steps: whatever steps the recipe keeps, it was trained for all
        "base_training": earlier.get("training"),
        "config": meta["config"],
        "versions": meta["versions"],
    }
    components = earlier.get("components", {}) | {source.component: {"recipe": meta["recipe"], "steps": meta["step"]}}
    return {"recipe": meta["recipe"], "components": components, "provenance": provenance("cpu"), "training": training}


def export(config: ExportConfig) -> dict[str, Any]:
    """Writes `config.out`, a diffusers folder, from a run's checkpoint.

    VAE, text encoder, scheduler and, of a pair, the other transformer are copied whole, not linked:
    tools that write weights in place would otherwise change the base through the export. Under torchrun rank 0 alone works.

    Returns:
        On rank 0 `out`, `checkpoint`, `weights` (ema or raw), `recipe`, `steps`, `loss`, `tensors` (how many were compared).

    Raises:
        UserError: `out` exists, run, checkpoint or base can't be used, or the disk is full; nothing is left then.
    """
    if not is_rank_zero():
        return {}
    source = _check(config)
    transformer = _trained_transformer(source)
    record = _record(source)
    writable_folder("out", Path(config.out).parent)
    try:
        with atomic_folder(config.out) as aside:
            ignored = shutil.ignore_patterns(".*", "videoqat.json")
            shutil.copytree(source.base, aside, dirs_exist_ok=True, ignore=lambda folder, names: ignored(folder, names) | _replaced(source, folder))
            transformer.save_pretrained(aside / source.component)  # type: ignore[operator]
            write_json(aside / "videoqat.json", record)
            _load_back(source, aside, transformer)
    except (OSError, SafetensorError) as error:
        # copytree goes on after an error, and lists (from, to, why) of them all.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise UserError(f"out={config.out!r} can't be written: {reason}; nothing of it is left") from error
    recipes = {name: entry["recipe"]["name"] for name, entry in record["components"].items()}
    if len(set(recipes.values())) > 1:
        say(f"the transformers of {config.out} were trained for different recipes: {recipes}")
    say(f"exported {source.checkpoint} ({source.weights} weights, recipe {source.meta['recipe']['name']}) to {config.out}")
    return _summary(config, source) | {"tensors": len(transformer.state_dict())}


def _replaced(source: _Source, folder: str) -> set[str]:
    return {source.component} if Path(folder) == source.base else set()


def _summary(config: ExportConfig, source: _Source) -> dict[str, Any]:
    meta = source.meta
    return {
        "out": config.out,
        "checkpoint": str(source.checkpoint),
        "weights": source.weights,
        "base": str(source.base),
        "component": source.component,
        "recipe": meta["recipe"]["name"],
        "steps": meta["step"],
        "loss": meta["loss"],
    }


def plan(config: ExportConfig) -> dict[str, Any]:
    """Checks everything `export` would and says what it would write; reads no weights and writes nothing."""
    return _summary(config, _check(config))
