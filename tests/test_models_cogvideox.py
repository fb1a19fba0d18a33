"""CogVideoX's processor and pipeline seam, held against diffusers itself; its quantised gradients against an independent evaluation."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel, CogVideoXVideoToVideoPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from helpers.naive_attention import NaiveAttention
from helpers.ranks import run_ranks
from torch import Tensor, nn

from videoqat.attention.backends import record_receipts
from videoqat.config import ExampleModelConfig, ParallelConfig
from videoqat.errors import AttentionError, CheckpointError, ConfigError
from videoqat.models.cogvideox import FAMILY, CogVideoXProcessor
from videoqat.models.install import install, installed_recipe, observe, shard_sequence, uninstall
from videoqat.models.spec import family_of, family_of_transformer
from videoqat.models.tiny import build_pipeline, cogvideox_transformer
from videoqat.parallel.mesh import open_mesh
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import RECIPES

# What sets the published models apart.
VARIANTS: dict[str, dict[str, Any]] = {
    "2b": {"use_rotary_positional_embeddings": False, "max_text_seq_length": 9},
    "5b": {},
    "1.5": {"patch_size_t": 2, "patch_bias": False},
}


def make_transformer(variant: str = "5b", seed: int = 0, **changes: Any) -> CogVideoXTransformer3DModel:
    torch.manual_seed(seed)
    sizes = {"attention_head_dim": 32, "text_embed_dim": 24, "time_embed_dim": 32}
    model = cogvideox_transformer(**sizes | VARIANTS[variant] | changes)
    for name, parameter in model.named_parameters():
        if "norm" in name and "linear" not in name:  # norms of exactly 1 and 0 would hide a norm that is left out
            nn.init.normal_(parameter, mean=1.0, std=0.3)
        if "linear" in name:  # gates and shifts that are nearly zero would hide what they gate
            nn.init.normal_(parameter, std=0.2)
    return model


def make_inputs(model: CogVideoXTransformer3DModel, dtype: torch.dtype = torch.float32, frames: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """x (2, C, F, 6, 10), t, text (2, 9, D)."""
    generator = torch.Generator().manual_seed(1)
    x, text = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, model.config.in_channels, frames, 6, 10), (2, 9, 24)))
    return x, torch.tensor([0.0175, 0.8035]), text


def outputs_and_gradients(model: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    model.zero_grad()
    out = FAMILY.forward(model, *inputs)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def relative(xs: list[Tensor], truths: list[Tensor]) -> list[float]:
    """Errors in L2, each relative to its truth. Some gradients are nothing but rounding (a bias of all keys alike moves no softmax, so norm_k.bias
    has none in 2B): none is taken for smaller than 1e-3 of the largest."""
    floor = 1e-3 * max(float(truth.norm()) for truth in truths[1:])
    return [float((x - truth).norm()) / max(float(truth.norm()), floor) for x, truth in zip(xs, truths, strict=True)]


def in_bf16(model: CogVideoXTransformer3DModel) -> CogVideoXTransformer3DModel:
    return model.to(torch.bfloat16)


def fused(model: CogVideoXTransformer3DModel) -> CogVideoXTransformer3DModel:
    with torch.no_grad():
        model.fuse_qkv_projections()
    return model


@pytest.mark.parametrize("convert", [lambda m: m, in_bf16, fused], ids=["fp32", "bf16", "fused"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_recipe_is_bitwise_the_stock_processor(variant: str, convert: Callable) -> None:
    model = convert(make_transformer(variant))
    inputs = make_inputs(model, model.dtype)
    stock = outputs_and_gradients(model, inputs)
    assert install(model, "bf16") == []
    ours = outputs_and_gradients(model, inputs)
    assert all(type(layer.module.processor) is CogVideoXProcessor for layer in FAMILY.attention_layers(model))
    assert len(stock) == len(ours) > 1
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


def test_bf16_recipe_is_bitwise_the_stock_processor_under_autocast() -> None:
    model = make_transformer()
    inputs = make_inputs(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = outputs_and_gradients(model, inputs)
        install(model, "bf16")
        seen: list[torch.dtype] = []
        observe(model, lambda name, q, k, v: seen.extend((q.dtype, k.dtype, v.dtype)))
        ours = outputs_and_gradients(model, inputs)
    assert set(seen) == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


class Naive(torch.autograd.Function):
    """`NaiveAttention` in the place of scaled_dot_product_attention: (B, H, N, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.naive = NaiveAttention(*(x.detach().transpose(1, 2) for x in (q, k, v)), RECIPES["attn_qat"])
        return ctx.naive.forward()[0].transpose(1, 2).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.transpose(1, 2).float() for x in ctx.naive.backward(grads[0].transpose(1, 2)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_gradients_are_those_of_an_independent_evaluation(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole model: diffusers' stock processors around an attention of single rows in fp64, which shares nothing with ours."""
    model = make_transformer(variant, attention_head_dim=16)
    inputs = make_inputs(model, frames=2)
    unquantised = outputs_and_gradients(model, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: Naive.apply(q, k, v))
        expected = outputs_and_gradients(model, inputs)
    install(model, "attn_qat", kernel="torch")
    ours = outputs_and_gradients(model, inputs)
    names = ["out", *(name for name, p in model.named_parameters() if p.grad is not None)]
    # A code that hangs on the last bits of its input may fall either way; without quantisation everything is further off.
    errors, plain_errors = relative(ours, expected), relative(unquantised, expected)
    assert {name: error for name, error in zip(names, errors, strict=True) if error > 2e-3} == {}
    assert min(error for name, error in zip(names, plain_errors, strict=True) if "attn1" in name and "weight" in name) > 1e-2


def on_each_rank(degree: int) -> dict[str, float]:
    """The largest error of any output and gradient, by variant and recipe, of a divided sequence against the whole one."""
    found = {}
    with open_mesh(ParallelConfig(sp=degree), torch.device("cpu")) as mesh:
        for variant in VARIANTS:
            for recipe in ("bf16", "attn_qat"):
                model = make_transformer(variant, num_attention_heads=4, attention_head_dim=16)
                inputs = make_inputs(model, frames=2)  # 30 video tokens (15 of two frames) and 9 of text
                install(model, recipe)
                whole = outputs_and_gradients(model, inputs)
                shard_sequence(model, Ulysses(mesh.sp_group))
                divided = outputs_and_gradients(model, inputs)
                for gradient in divided[1:]:
                    dist.all_reduce(gradient)
                found[f"{variant} {recipe}"] = max(relative(divided, whole))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("degree", [2, 4])
def test_divided_sequence_is_the_whole_one(degree: int) -> None:
    """Batch 2; neither 15 nor 30 video tokens nor 9 text tokens are divisible by 4 ranks, 15 and 9 not by 2."""
    for errors in run_ranks(on_each_rank, degree, degree):
        assert len(errors) == 6
        assert {key: error for key, error in errors.items() if error > 5e-6} == {}
