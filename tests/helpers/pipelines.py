"""Tiny pipelines that show something, and what holds of those of every family."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.config import ExampleModelConfig
from videoqat.models.published import write_folder
from videoqat.models.spec import ModelFamily
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


def edited(folder: Path, out: Path, file: str, **changes: Any) -> Path:
    """A copy without weights, one of its JSON files changed."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    (out / file).write_text(json.dumps(json.loads((out / file).read_text()) | changes))
    return out


def draw_video(frames: int = 9, height: int = 32, width: int = 48) -> Tensor:
    """(1, 3, frames, height, width) in [-1, 1]."""
    return torch.rand(1, 3, frames, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


def mosaic_of(video_BCFHW: Tensor) -> Tensor:
    """What the VAEs of `videoqat.models.tiny_mosaic` keep: the mean colour of each block of 4x4 pixels, and of 4 frames behind the first."""
    first, rest = F.avg_pool3d(video_BCFHW[:, :, :1], (1, 4, 4)), F.avg_pool3d(video_BCFHW[:, :, 1:], (4, 4, 4))
    return torch.cat([first, rest.repeat_interleave(4, 2)], 2).repeat_interleave(4, 3).repeat_interleave(4, 4)


def record_calls(transformer: nn.Module, seen: list[tuple[dict[str, Any], Tensor]]) -> RemovableHandle:
    """Appends the keyword arguments and the prediction of each forward."""
    return transformer.register_forward_hook(lambda module, args, kwargs, out: seen.append((kwargs, out[0])), with_kwargs=True)


def assert_a_function_of_its_configuration(tiny: Path, root: Path, family: str, changed: set[str]) -> dict[str, Any]:
    """`tiny`, of `family` with two layers of heads of 32, is built again to the last byte; another seed changes the files `changed` alone; and
    neither moves torch's own generator. Returns what `build_pipeline` reported."""
    before = torch.get_rng_state()
    for seed in (0, 1):
        report = build_pipeline(ExampleModelConfig(out=str(root / str(seed)), family=family, num_layers=2, head_dim=32, seed=seed))
    assert torch.equal(before, torch.get_rng_state())
    files = {path.relative_to(tiny): path.read_bytes() for path in tiny.rglob("*") if path.is_file()}
    assert {name: (root / "0" / name).read_bytes() for name in files} == files
    assert {str(name) for name, content in files.items() if (root / "1" / name).read_bytes() != content} == changed
    return report


def assert_from_scratch_is_a_function_of_the_seed(family: ModelFamily, tiny: Path) -> None:
    """In the dtype asked for, and of the shapes that `family.build` has without memory."""
    states = [family.load_transformer(tiny, "transformer", dtype=torch.bfloat16, from_scratch=True, seed=seed).state_dict() for seed in (5, 5, 6)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0]["proj_out.weight"], states[2]["proj_out.weight"])
    assert {value.dtype for value in states[0].values()} == {torch.bfloat16}
    built = family.build(tiny, "transformer")
    assert {name: value.shape for name, value in built.state_dict().items()} == {name: value.shape for name, value in states[0].items()}
    assert all(parameter.is_meta for parameter in built.parameters())
