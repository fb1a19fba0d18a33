"""`videoqat doctor`: what this machine can run, and what a model needs, before anything is loaded."""

from pathlib import Path
from typing import Any

import torch

from videoqat.attention.backends import resolve
from videoqat.config import DoctorConfig, parse_bucket
from videoqat.console import say
from videoqat.errors import AttentionError
from videoqat.models.spec import family_of, read_recipe
from videoqat.provenance import device_name, versions
from videoqat.recipes import RECIPES


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
            "sequence_parallel_degrees": [degree for degree in range(1, heads + 1) if heads % degree == 0],
        }
    return described


def doctor(config: DoctorConfig) -> dict[str, Any]:
    """Devices, the kernel that serves each recipe there, versions; with `model`, its shape, tokens and legal sequence-parallel degrees.

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
                say(f"{component}: " + ", ".join(f"{key} {value}" for key, value in described[component].items()))
    return result
