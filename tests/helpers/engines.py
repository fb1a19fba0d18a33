"""Training engines on tiny transformers: jobs without a cache, samples drawn from their number, and one plain process to compare with."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from videoqat.config import LoopConfig, ModelConfig, OptimizerConfig, ParallelConfig, RuntimeConfig, TrainConfig
from videoqat.models.install import install
from videoqat.models.spec import Condition, ModelFamily, family_of
from videoqat.parallel.mesh import Mesh
from videoqat.recipes import get_recipe
from videoqat.training.engines import Engine


def tiny_job(folder: Path, recipe: str = "attn_qat", **changes: Any) -> Any:
    """What an engine looks at in a Job; `changes` are keys such as train__batch_size=2. fp32 on the CPU."""
    config = TrainConfig(
        model=ModelConfig(path=str(folder)),
        cache="none",
        out="none",
        recipe=recipe,
        optimizer=OptimizerConfig(lr=1e-2),
        train=LoopConfig(compute_dtype="float32"),
        parallel=ParallelConfig(),
        runtime=RuntimeConfig(device="cpu"),
    )
    for key, value in changes.items():
        *parents, last = key.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        assert last in {field.name for field in dataclasses.fields(target)}, key
        setattr(target, last, value)
    return SimpleNamespace(config=config, family=family_of(folder), recipe=get_recipe(recipe))


def batch(folder: Path, samples: list[int]) -> tuple[Tensor, Tensor, Condition, Tensor]:
    """Noisy latents (B, C, F, H, W), times (B,), the condition, with a first frame where the model takes one, and targets, each a function of the
    sample's number. 27 video tokens each; where a text's padding is masked, texts of different length."""
    family = family_of(folder)
    geometry = family.geometry(folder)
    frames, height, width = (3 * part for part in geometry.patch)

    def draw(sample: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * sample + len(shape)))

    x_BCFHW = torch.stack([draw(sample, geometry.in_channels, frames, height, width) for sample in samples])
    masked = family.name in ("hunyuanvideo", "hunyuan15")
    any_length = masked or (family.name == "wan" and family.takes_image(folder) != "required")
    text_tokens = 7 if any_length else family.text_tokens(folder)
    size = (1 + (frames - 1) * geometry.vae_temporal, height * geometry.vae_spatial, width * geometry.vae_spatial)
    shapes = family.condition_shapes(folder, size, text_tokens, image=True)
    conditions = [{part: draw(sample, *shape) for part, shape in shapes.items()} for sample in samples]
    if masked:
        conditions = [one | {"text": one["text"][: 7 - sample % 4]} for sample, one in zip(samples, conditions, strict=True)]
    if family.name == "hunyuan15":
        conditions = [one | {"glyph": one["glyph"][: 2 * (sample % 3)]} for sample, one in zip(samples, conditions, strict=True)]
    t_B = torch.tensor([(0.3 + 0.37 * sample) % 1 for sample in samples])
    return x_BCFHW, t_B, family.batch_conditions(conditions, text_tokens), x_BCFHW.flip(1, 2)


def loss_of(family: ModelFamily, transformer: nn.Module, folder: Path, samples: list[int]) -> Tensor:
    """(B,)."""
    x_BCFHW, t_B, condition, target = batch(folder, samples)
    error_BCFHW = family.forward(transformer, x_BCFHW, t_B, condition).float() - target
    return error_BCFHW[:, :, family.given_frames(condition) :].square().mean(dim=(1, 2, 3, 4))


def plain_gradients(folder: Path, recipe: str, num_samples: int) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over samples 0, 1, ... and its gradient by parameter name: all in one batch, in one process, by nothing but autograd."""
    family = family_of(folder)
    transformer = family.load_transformer(folder, "transformer", dtype=torch.float32).train()
    install(transformer, recipe)
    loss = loss_of(family, transformer, folder, list(range(num_samples))).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}


def full_gradients(engine: Any) -> dict[str, Tensor]:
    """Every trained parameter's gradient by name, whole, before clipping. Collective."""
    if hasattr(engine, "zero"):
        from deepspeed.utils import safe_get_full_grad  # DeepSpeed's own, not the view that our engine has of it

        return {name: safe_get_full_grad(p) for name, p in engine.parameters.items() if p.requires_grad}
    return {name: p.grad.full_tensor() for name, p in engine.parameters.items() if p.grad is not None}


def accumulate(engine: Engine, job: Any, mesh: Mesh, num_samples: int) -> float:
    """One step's forwards and backwards over samples 0, 1, ..., dealt out as the trainer does; returns the mean loss over all of them."""
    size, folder = job.config.train.batch_size, Path(job.config.model.path)
    accumulation = num_samples // (size * mesh.layout.dp)
    total = torch.zeros(())
    for i in range(accumulation):
        first = (i * mesh.layout.dp + mesh.dp_rank) * size
        loss_B = loss_of(job.family, engine.transformer, folder, list(range(first, first + size)))
        engine.backward(loss_B.sum() / (size * accumulation) * mesh.layout.sp, last=i == accumulation - 1)
        total += loss_B.detach().sum()
    return (mesh.sum_over_dp(total) / num_samples).item()


def worst_gradient(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of a parameter's gradient, and whose it is: norm of the difference / norm of the expected gradient.

    Where that is less than 1e-3 of what it would be if the whole gradient were spread evenly over its elements, rounding is all there is to
    compare (a bias that softmax cancels, say); there the difference is divided by this floor.
    """
    assert found.keys() == expected.keys()
    whole = torch.cat([g.flatten() for g in expected.values()])
    floor = 1e-3 * whole.norm() / whole.numel() ** 0.5
    return max((((found[name] - g).norm() / max(g.norm(), floor * g.numel() ** 0.5)).item(), name) for name, g in expected.items())
