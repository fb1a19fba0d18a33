"""Tiny pipelines that show something."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from videoqat.config import ExampleModelConfig
from videoqat.models.published import write_folder
from videoqat.models.tiny import build_pipeline


def enliven(tiny: Path, out: Path, seed: int = 0) -> Path:
    """A copy of a tiny pipeline whose transformers predict something: as built, their last layer is zero, so that attention would change nothing."""
    shutil.copytree(tiny, out)
    for folder in out.glob("transformer*"):
        change_weights(folder, {"proj_out.weight": lambda w: 0.2 * torch.randn(w.shape, generator=torch.Generator().manual_seed(seed))})
    return out


def change_weights(folder: Path, changes: dict) -> None:
    """Rewrites tensors of a diffusers model folder: name -> function of the old tensor."""
    path = folder / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    for name, change in changes.items():
        weights[name] = change(weights[name])
    save_file(weights, path, metadata={"format": "pt"})


def weightless_wan(folder: Path, size: str = "1.3b") -> Path:
    """A pipeline folder of Wan 2.1 T2V at its published size ("1.3b" or "14b"), configurations alone: for estimates, layouts and counts."""
    return write_folder(folder, f"wan2.1-t2v-{size}")


def small_and_alive(root: Path, family: str, num_layers: int = 3) -> Path:
    """A pipeline of `family` with `num_layers` blocks of two heads of 16, below `root`, whose transformer predicts something."""
    build_pipeline(ExampleModelConfig(out=str(root / "built"), family=family, num_layers=num_layers, num_heads=2, head_dim=16))
    return enliven(root / "built", root / "alive")
