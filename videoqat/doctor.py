"""`videoqat doctor`: what this machine can run, and what a model needs, before anything is loaded."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from videoqat.attention.backends import resolve
from videoqat.config import DoctorConfig, TrainConfig, parse_bucket
from videoqat.console import say
from videoqat.errors import AttentionError
from videoqat.models.spec import family_of, read_recipe
from videoqat.parallel.mesh import Layout, divisors
from videoqat.provenance import device_name, versions
from videoqat.recipes import RECIPES
from videoqat.training.memory import GIB, typical_layouts


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


def _model(config: DoctorConfig) -> dict[str, Any]:
    folder = Path(config.model)
    family = family_of(folder)
    frames, height, width = parse_bucket("size", config.size)
    described: dict[str, Any] = {"model": str(folder), "family": family.name}
    recipe = read_recipe(folder)
    described["recipe"] = recipe.name if recipe else "none recorded (bf16)"
    for component in family.components(folder):
        geometry = family.geometry(folder, component)
        geometry.check_size("size", frames, height, width)
        heads = geometry.num_heads
        described[component] = {
            "num_layers": geometry.num_layers,
            "num_heads": heads,
            "head_dim": geometry.head_dim,
            "num_tokens": geometry.num_tokens(frames, height, width),
            "sequence_parallel_degrees": divisors(heads),
            "training_memory": _training_memory(config, component, heads, family.text_tokens(folder)),
        }
    return described


def _training_memory(config: DoctorConfig, component: str, num_heads: int, text_tokens: int) -> list[dict[str, Any]]:
    """Bytes on each GPU by layout and checkpointing, for one sample of `config.size` at a time, in training with 4-bit attention."""
    rows = typical_layouts(config.model, component, num_heads, config.size, text_tokens, RECIPES[TrainConfig.recipe])
    return [
        {"gpus": layout.world_size, "layout": dataclasses.asdict(layout), "bytes": {mode: parts["total"] for mode, parts in by_mode.items()}}
        for layout, by_mode in rows
    ]


def _say_component(name: str, described: dict[str, Any], size: str) -> None:
    say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in described.items() if key != "training_memory"))
    say(f"{name}: GiB on each GPU to train with recipe {TrainConfig.recipe}, one sample of {size} at a time, by activation checkpointing")
    for row in described["training_memory"]:
        say(f"  {Layout(**row['layout'])}: " + ", ".join(f"{mode} {size / GIB:.1f}" for mode, size in row["bytes"].items()))


def doctor(config: DoctorConfig) -> dict[str, Any]:
    """Devices, the kernel that serves each recipe there, versions; with `model`, its shape, tokens, legal sequence-parallel degrees and memory.

    Raises:
        UserError: the model's folder can't be read, or the size is not legal for it.
    """
    result: dict[str, Any] = {"versions": versions(), "devices": {}}
    for device in _devices():
        result["devices"][device] = {"name": device_name(device), "kernels": _kernels(device)}
        say(f"{device}: {device_name(device)}")
        for recipe, kernel in result["devices"][device]["kernels"].items():
            say(f"  {recipe:20} {kernel}")
    say("versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    if config.model:
        described = _model(config)
        result |= described
        for component in ("transformer", "transformer_2"):
            if component in described:
                _say_component(component, described[component], config.size)
    return result
