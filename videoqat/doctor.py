"""`videoqat doctor`: what this machine can run, and what a model needs, before anything is loaded."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from videoqat.attention.backends import resolve
from videoqat.config import DoctorConfig, TrainConfig, parse_bucket, require
from videoqat.console import say
from videoqat.errors import AttentionError, CheckpointError
from videoqat.generation.memory import decoding_memory, generation_memory
from videoqat.models.hub import origin
from videoqat.models.published import TINY, published, write_folder
from videoqat.models.spec import family_of, read_recipe
from videoqat.models.weights import num_weights, parts_of, stem_of
from videoqat.parallel.mesh import Layout, divisors
from videoqat.provenance import device_name, versions
from videoqat.recipes import RECIPES
from videoqat.training.memory import GIB, typical_layouts
from videoqat.training.throughput import forward_cost


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def _kernels(device: str) -> dict[str, str]:
    """Recipe -> kernel that would serve it on `device` (head_dim 128), or why none would."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    served = {}
    for name, recipe in RECIPES.items():
        try:
            receipt = resolve(recipe, torch.device(device), dtype, 128)
            served[name] = f"{receipt.kernel} ({'native' if receipt.native else 'emulated'})"
        except AttentionError as error:
            served[name] = f"none: {error}"
    return served


def _model(folder: Path, size: str, encoders: dict[str, int] | None) -> dict[str, Any]:
    """What the model in `folder` needs for videos of `size`; `encoders` as in `generation_memory`, None where nobody knows."""
    family = family_of(folder)
    frames, height, width = parse_bucket("size", size)
    described: dict[str, Any] = {"model": str(folder), "origin": origin(folder), "family": family.name}
    recipe = read_recipe(folder)
    described["recipe"] = recipe.name if recipe else "none recorded (bf16)"
    text_tokens, trained_for = family.text_tokens(folder), RECIPES[TrainConfig.recipe]
    for component in family.components(folder):
        geometry = family.geometry(folder, component)
        geometry.check_size("size", frames, height, width)
        cost = forward_cost(str(folder), component, size, text_tokens, trained_for)
        described[component] = {
            "parameters": cost.parameters,
            "num_layers": geometry.num_layers,
            "num_heads": geometry.num_heads,
            "head_dim": geometry.head_dim,
            "quantised_layers": len(cost.quantised_layers),
            "num_tokens": geometry.num_tokens(frames, height, width),
            "text_tokens": text_tokens,
            "sequence_parallel_degrees": divisors(geometry.num_heads),
            "training_memory": _training_memory(folder, component, geometry.num_heads, size, text_tokens),
        }
    if encoders is not None:
        described["generation_memory"] = generation_memory(str(folder), (frames, height, width), encoders)
    return described


def _training_memory(folder: Path, component: str, num_heads: int, size: str, text_tokens: int) -> list[dict[str, Any]]:
    """Bytes on each GPU by layout and checkpointing, for one sample of `size` at a time, in training with 4-bit attention; and what a teacher
    (objective.distill_weight) would add."""
    rows = typical_layouts(str(folder), component, num_heads, size, text_tokens, RECIPES[TrainConfig.recipe])
    return [
        {
            "gpus": layout.world_size,
            "layout": dataclasses.asdict(layout),
            "bytes": {mode: parts["total"] for mode, parts in by_mode.items()},
            "teacher_bytes": teacher,
        }
        for layout, by_mode, teacher in rows
    ]


def _encoders_in(folder: Path) -> dict[str, int] | None:
    """Part -> numbers of its weights, of a folder's encoders; None, and a word, where their files aren't there or torn."""
    others = {*family_of(folder).components(folder), "vae"}
    encoders = {part: stem_of(part, library) for part, (library, _) in parts_of(folder).items() if part not in others}
    try:
        return {part: num_weights(folder / part, stem) for part, stem in encoders.items() if stem is not None}
    except CheckpointError as error:
        say(f"what generation needs can't be told: {error}")
        return None


def describe_published(name: str, size: str = "", *, decoding: bool = False) -> dict[str, Any]:
    """What the published model `name` needs for videos of `size`, its own if empty; without weights. `decoding`: the VAE, too, which takes longer.

    Raises:
        ConfigError: the size is not legal for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = published()[name]
        written = write_folder(Path(folder) / name, name)
        described = _model(written, size or model.size, model.encoders)
        if decoding:
            described["decoding_memory"] = decoding_memory(str(written), parse_bucket("size", size or model.size))
    about = {"model": name, "origin": {"hub": model.repository}, "size": size or model.size}
    return described | about


def _say_component(name: str, described: dict[str, Any], size: str) -> None:
    say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in described.items() if key != "training_memory"))
    say(f"{name}: GiB on each GPU to train with recipe {TrainConfig.recipe}, one sample of {size} at a time, by activation checkpointing")
    for row in described["training_memory"]:
        by_mode = ", ".join(f"{mode} {size / GIB:.1f}" for mode, size in row["bytes"].items())
        say(f"  {Layout(**row['layout'])}: {by_mode}; a teacher adds {row['teacher_bytes'] / GIB:.1f}")


def model_table(models: list[dict[str, Any]]) -> list[str]:
    """A Markdown table of what published models need, each as `describe_published` tells it."""
    heads = ["model", "weights, 10^9", "quantised layers", "size", "video + text tokens", "sp", "train: 1 GPU", "8 GPUs", "denoise", "offloaded"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * 2 + "|---:|---" + "|---:" * 6 + "|"]
    return lines + [_row(described) for described in models]


def _row(described: dict[str, Any]) -> str:
    first = described["transformer"]
    pair = "2 x " if "transformer_2" in described else ""
    full = {row["gpus"]: row["bytes"]["full"] / GIB for row in first["training_memory"] if row["layout"]["sp"] == 1}
    memory = described["generation_memory"]
    cells = [
        f"`{described['model']}`",
        f"{pair}{first['parameters'] / 1e9:.2f}",
        f"{pair}{first['quantised_layers']}",
        described["size"],
        f"{first['num_tokens']:,} + {first['text_tokens']}",
        ", ".join(map(str, first["sequence_parallel_degrees"])),
        f"{full[1]:.1f}",
        f"{full[8]:.1f}",
        f"{memory['total'] / GIB:.1f}",
        f"{memory['offloaded'] / GIB:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def doctor(config: DoctorConfig) -> dict[str, Any]:
    """Devices, the kernel that serves each recipe there, versions; with `model`, its shape, tokens, legal sequence-parallel degrees and memory; with
    `models`, those of every published model, at its own size.

    Raises:
        UserError: there is no such model, its folder can't be read, or the size is not legal for it.
    """
    result: dict[str, Any] = {"versions": versions(), "devices": {}}
    for device in _devices():
        result["devices"][device] = {"name": device_name(device), "kernels": _kernels(device)}
        say(f"{device}: {device_name(device)}")
        for recipe, kernel in result["devices"][device]["kernels"].items():
            say(f"  {recipe:20} {kernel}")
    say("versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    if config.models:
        result["models"] = [describe_published(name, config.size) for name in published() if name != TINY]
        say("\n".join(model_table(result["models"])))
    if config.model:
        described = _described(config)
        result |= described
        for component in ("transformer", "transformer_2"):
            if component in described:
                _say_component(component, described[component], described["size"])
        for what in ("generation_memory", "decoding_memory"):
            if what in described:
                parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in described[what].items())
                say(f"{what.replace('_', ' ')} for {described['size']}, GiB: {parts}")
    return result


def _described(config: DoctorConfig) -> dict[str, Any]:
    """The model that is meant: a folder's, or a published one's.

    Raises:
        ConfigError: there is neither.
    """
    if Path(config.model).is_dir():
        size = config.size or "17x64x64"
        return _model(Path(config.model), size, _encoders_in(Path(config.model))) | {"size": size}
    legal = f"an existing folder, org/name[@REVISION] on the hub, or one of {', '.join(published())}"
    require(config.model in published(), "model", config.model, legal)
    return describe_published(config.model, config.size, decoding=True)
