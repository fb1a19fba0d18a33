"""What must hold of every family's transformer: diffusers' own processors, an independent evaluation of 4-bit attention, and the undivided sequence
are what it is held against, by its output and by every parameter's gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.naive_attention import NaiveAttention
from torch import Tensor, nn

from videoqat.models.install import observe, shard_sequence
from videoqat.models.spec import Condition, ModelFamily
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import RECIPES

Inputs = tuple[Tensor, Tensor, Condition]  # x (B, C, F, H, W), t (B,), and what the model is told beside
Evaluate = Callable[[nn.Module, Inputs], dict[str, Tensor]]


def outputs_and_gradients(family: ModelFamily, model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """`out`, and each gradient by its parameter's name."""
    model.zero_grad()
    out = family.forward(model, *inputs)
    out.float().square().mean().backward()
    return {"out": out.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def different(found: dict[str, Tensor], truths: dict[str, Tensor]) -> list[str]:
    """Names of what isn't the same bit for bit, or is there on one side alone."""
    both = found.keys() & truths.keys()
    return sorted((found.keys() | truths.keys()) - {name for name in both if torch.equal(found[name], truths[name])})


def relative(found: dict[str, Tensor], truths: dict[str, Tensor]) -> dict[str, float]:
    """Errors in L2, each relative to its truth. Some gradients are nothing but rounding (a bias of all keys alike moves no softmax, so norm_k.bias
    has none in CogVideoX-2B): none is taken for smaller than 1e-3 of the largest."""
    assert found.keys() == truths.keys()
    floor = 1e-3 * max(float(truth.norm()) for name, truth in truths.items() if name != "out")
    return {name: float((found[name] - truth).norm()) / max(float(truth.norm()), floor) for name, truth in truths.items()}


def with_lively_norms(model: Any) -> Any:
    """Norms of exactly 1 and 0 would hide a norm that is left out, and gates and shifts that are nearly zero, what they gate."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, **({"std": 0.2} if "linear" in name else {"mean": 1.0, "std": 0.3}))
    return model


def in_bf16(model: Any) -> Any:
    return model.to(torch.bfloat16)


def fused_one_by_one(family: ModelFamily, model: Any) -> Any:
    """Where the transformer's own method doesn't reach them; diffusers' processor goes on with the projections that were there."""
    for layer in family.attention_layers(model):
        layer.module.fuse_projections()  # type: ignore[operator]
    return model


def assert_same_under_autocast(evaluate: Evaluate, model: nn.Module, inputs: Inputs, put: Callable[[nn.Module], object]) -> None:
    """What `put` puts into the model changes nothing, bit for bit; and attention's inputs are bfloat16 there."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = evaluate(model, inputs)
        put(model)
        seen: list[torch.dtype] = []
        observe(model, lambda name, q, k, v: seen.extend((q.dtype, k.dtype, v.dtype)))
        ours = evaluate(model, inputs)
    assert set(seen) == {torch.bfloat16}
    assert len(stock) > 1
    assert different(ours, stock) == []


class _Naive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None) -> Tensor:
        ctx.naive = NaiveAttention(*(x.detach().transpose(1, 2) for x in (q, k, v)), RECIPES["attn_qat"], kv_len=kv_len)
        return ctx.naive.forward()[0].transpose(1, 2).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(x.transpose(1, 2).float() for x in ctx.naive.backward(grads[0].transpose(1, 2))), None


def naive_sdpa(query: Tensor, key: Tensor, value: Tensor, kv_len: Tensor | None = None) -> Tensor:
    """`NaiveAttention` by attn_qat in the place of scaled_dot_product_attention: (B, H, N, D), of which the first kv_len (B,) keys are real."""
    out: Tensor = _Naive.apply(query, key, value, kv_len)
    return out


def assert_gradients_of_an_independent_evaluation(
    evaluate: Callable[[], dict[str, Tensor]], naive: Callable[..., Tensor], quantise: Callable[[], object]
) -> dict[str, float]:
    """`evaluate` gives after `quantise` what it gave before with `naive` in the place of scaled_dot_product_attention.

    Returns the errors of what is not quantised, by name, for the test to require that they are larger.
    """
    unquantised = evaluate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", naive)
        expected = evaluate()
    quantise()
    # A code that hangs on the last bits of its input may fall either way; without quantisation everything is further off.
    assert {name: error for name, error in relative(evaluate(), expected).items() if error > 2e-3} == {}
    return relative(unquantised, expected)


def error_of_division(evaluate: Evaluate, model: nn.Module, inputs: Inputs, ulysses: Ulysses) -> float:
    """On each rank: the largest error of any output and gradient, of a sequence divided among `ulysses`' ranks against the whole one. The model has
    its recipe already."""
    whole = evaluate(model, inputs)
    shard_sequence(model, ulysses)
    divided = evaluate(model, inputs)
    for name, gradient in divided.items():
        if name != "out":
            dist.all_reduce(gradient)
    return max(relative(divided, whole).values())
