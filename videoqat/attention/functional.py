"""The one entry to attention: `attention(q, k, v, recipe)`.

Quantised recipes run as the operator `videoqat::attention_forward` (with `videoqat::attention_backward`), known to `torch.library` with shapes
and gradient, so autograd, fake tensors, full-graph torch.compile and activation checkpointing work; the recipe travels through it as JSON.
Recipes that quantise nothing go to torch's own SDPA.
"""

import functools
import json
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from videoqat.attention import backends, sdpa_backend
from videoqat.attention.rotation import rotated
from videoqat.errors import AttentionError
from videoqat.recipes import AttentionRecipe, get_recipe, recipe_from_dict

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@overload
def attention(
    q_BNHD: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    recipe: AttentionRecipe | str,
    *,
    scale: float | None = ...,
    kv_len: Tensor | None = ...,
    causal: bool = ...,
    kernel: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q_BNHD: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    recipe: AttentionRecipe | str,
    *,
    scale: float | None = ...,
    kv_len: Tensor | None = ...,
    causal: bool = ...,
    kernel: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q_BNHD: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    recipe: AttentionRecipe | str,
    *,
    scale: float | None = None,
    kv_len: Tensor | None = None,
    causal: bool = False,
    kernel: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T) V, quantised as `recipe` says, with straight-through gradients (Attn-QAT; `docs/numerics.md`).

    Args:
        q_BNHD: (B, Nq, H_q, d), fp32, bf16 or fp16, any strides. d is a multiple of 16.
        k_BNHD, v_BNHD: (B, Nk, H_kv, d), same dtype and device. H_q is a multiple of H_kv: query head h meets head h // (H_q / H_kv).
        recipe: what is quantised and how; an object, a name or a file.
        scale: factor on the logits; 1 / sqrt(d) if None.
        kv_len: (B,) int32 or int64: how many keys of each sample are real (0 to Nk). What lies behind them has no influence, even NaN.
        causal: query i sees keys j <= i + (kv_len or Nk) - Nq: aligned to the bottom right, as FlashAttention is.
        kernel: `auto`, or the name of one in `backends.KERNELS`, which then runs or raises.
        return_lse: whether to return log-sum-exp, too.

    Returns:
        out (B, Nq, H_q, d) in q's dtype; with return_lse also lse (B, H_q, Nq) fp32, the natural logarithm of the sum of exp of the row's
        logits, without gradient. A row that sees no key gives out 0, lse -inf and no gradient.

    Raises:
        AttentionError: shapes, dtypes or devices that don't fit, or a kernel that doesn't exist or can't serve.
    """
    recipe = get_recipe(recipe)
    check_tensors(q_BNHD, k_BNHD, v_BNHD, kv_len)
    training = torch.is_grad_enabled() and (q_BNHD.requires_grad or k_BNHD.requires_grad or v_BNHD.requires_grad)
    receipt = backends.resolve(recipe, q_BNHD.device, q_BNHD.dtype, q_BNHD.shape[3], kernel, training)
    if receipt.kernel == "sdpa":
        if kv_len is not None and not torch.compiler.is_compiling():
            _check_kv_len_values(kv_len, k_BNHD.shape[1])
        _record_sdpa(receipt.reason, receipt.device, recipe.name)
        out = sdpa_backend.forward(q_BNHD, k_BNHD, v_BNHD, kv_len, scale, causal)
        return (out, sdpa_backend.log_sum_exp(q_BNHD, k_BNHD, kv_len, scale, causal)) if return_lse else out
    if scale is None:
        scale = q_BNHD.shape[3] ** -0.5
    out, lse, *_ = attention_forward(q_BNHD, k_BNHD, v_BNHD, kv_len, _to_json(recipe), scale, causal, kernel, training)
    return (out, lse) if return_lse else out


@torch.compiler.assume_constant_result
def _record_sdpa(reason: str, device: str, recipe: str) -> None:
    """Eagerly, each call is recorded. A compiled graph holds SDPA itself and no Python: there it is recorded when the graph is traced.

    The receipt is made anew, because dynamo calls this with plain constants only.
    """
    backends.record(backends.Receipt("sdpa", True, reason, device, recipe))


def check_tensors(q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None) -> None:
    """Requires shapes, dtypes and devices that fit together, as `attention` says them.

    Raises:
        AttentionError: they don't; names what was got.
    """
    named = (("q", q), ("k", k), ("v", v))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(x.ndim != 4 for _, x in named):
        raise AttentionError(f"attention takes (batch, tokens, heads, head_dim), got {shapes}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        got = ", ".join(f"{name} {x.dtype}" for name, x in named)
        raise AttentionError(f"q, k and v must share one dtype of {', '.join(map(str, DTYPES))}; got {got}")
    if k.device != q.device or v.device != q.device:
        raise AttentionError(f"q, k and v must be on one device; got {', '.join(f'{name} {x.device}' for name, x in named)}")
    B, num_queries, H, d = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    if d == 0 or d % 16 != 0:
        raise AttentionError(f"head_dim={d} is not a multiple of 16, the NVFP4 block ({shapes})")
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != d:
        raise AttentionError(f"k and v must be (batch={B}, Nk, heads, head_dim={d}) both, as q is; got {shapes}")
    if B == 0 or num_queries == 0 or num_keys == 0 or H == 0 or num_kv_heads == 0:
        raise AttentionError(f"batch, tokens and heads must be at least 1, got {shapes}")
    if H % num_kv_heads != 0:
        raise AttentionError(f"{H} query heads are not a multiple of {num_kv_heads} key heads ({shapes})")
    if kv_len is not None:
        if kv_len.shape != (B,) or kv_len.dtype not in (torch.int32, torch.int64):
            raise AttentionError(f"kv_len must be ({B},) of int32 or int64, got {tuple(kv_len.shape)} of {kv_len.dtype}")
        if kv_len.device != q.device:
            raise AttentionError(f"kv_len must be on q's device {q.device}, got {kv_len.device}")


def _check_kv_len_values(kv_len: Tensor, num_keys: int) -> None:
    """On the CPU only: elsewhere it would make the host wait for the device. Fake tensors have no values."""
    if kv_len.device.type == "cpu" and not isinstance(kv_len, FakeTensor) and not bool(((kv_len >= 0) & (kv_len <= num_keys)).all()):
        raise AttentionError(f"kv_len={kv_len.tolist()} must be between 0 and {num_keys}, the number of keys")


def _to_json(recipe: AttentionRecipe) -> str:
    return recipe.as_json


@functools.lru_cache(maxsize=256)
def _from_json(recipe: str) -> AttentionRecipe:
    return recipe_from_dict(json.loads(recipe), "attention operator")


@torch.library.custom_op("videoqat::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Tensor | None,
    recipe: str,
    scale: float,
    causal: bool,
    kernel: str,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """out (B, Nq, H, d), and lse, m, l (B, H, Nq) fp32, and in training what else the kernel keeps for its backward."""
    if kv_len is not None:
        _check_kv_len_values(kv_len, k.shape[1])
    parsed = _from_json(recipe)
    receipt = backends.resolve(parsed, q.device, q.dtype, q.shape[3], kernel, training)
    with torch.autocast(q.device.type, enabled=False):  # it would run the fp32 products of an emulated kernel in bf16
        q, k = rotated(q, parsed), rotated(k, parsed)
        result = backends.KERNELS[receipt.kernel].forward(q, k, v, kv_len, parsed, scale, causal, training)
    backends.record(receipt)
    return result


@attention_forward.register_fake
def _attention_forward_fake(
    q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None, recipe: str, scale: float, causal: bool, kernel: str, training: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    B, num_queries, H, d = q.shape
    lse, m_BHN, l_BHN = (q.new_empty((B, H, num_queries), dtype=torch.float32) for _ in range(3))
    kept = _kernel(recipe, q, kernel, training).empty_kept(q, k, _from_json(recipe)) if training else []
    return q.new_empty((B, num_queries, H, d)), lse, m_BHN, l_BHN, kept


def _kernel(recipe: str, x: Tensor, kernel: str, training: bool) -> Any:
    receipt = backends.resolve(_from_json(recipe), x.device, x.dtype, x.shape[3], kernel, training)
    return backends.KERNELS[receipt.kernel]


@torch.library.custom_op("videoqat::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor | None,
    m_BHN: Tensor,
    l_BHN: Tensor,
    kept: list[Tensor],
    kv_len: Tensor | None,
    num_keys: int,
    num_kv_heads: int,
    recipe: str,
    scale: float,
    causal: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV, contiguous, of the shapes and dtypes of q, k, v. Of q, k, v and out those that the kernel `keeps`; `kept` as it was returned."""
    module, parsed = _kernel(recipe, grad_out, kernel, training=True), _from_json(recipe)
    with torch.autocast(grad_out.device.type, enabled=False):
        q, k = (None if x is None else rotated(x, parsed) for x in (q, k))
        dq, dk, dv = module.backward(grad_out, q, k, v, out, m_BHN, l_BHN, kept, kv_len, num_keys, parsed, scale, causal)
        return rotated(dq, parsed), rotated(dk, parsed), dv


@attention_backward.register_fake
def _attention_backward_fake(
    grad_out: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor | None,
    m_BHN: Tensor,
    l_BHN: Tensor,
    kept: list[Tensor],
    kv_len: Tensor | None,
    num_keys: int,
    num_kv_heads: int,
    recipe: str,
    scale: float,
    causal: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    B, _, _, d = grad_out.shape
    dk, dv = (grad_out.new_empty((B, num_keys, num_kv_heads, d)) for _ in range(2))
    return grad_out.new_empty(grad_out.shape), dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, kv_len, ctx.recipe, ctx.scale, ctx.causal, ctx.kernel, training = inputs
    out, lse, m_BHN, l_BHN, kept = output
    ctx.mark_non_differentiable(lse, m_BHN, l_BHN)
    ctx.num_keys, ctx.num_kv_heads = k.shape[1], k.shape[2]
    if training:
        needed = _kernel(ctx.recipe, q, ctx.kernel, training).keeps(_from_json(ctx.recipe))
        named = (x if keep else None for x, keep in zip((q, k, v, out), needed, strict=True))
        ctx.save_for_backward(*named, kv_len, m_BHN, l_BHN, *kept)


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, kv_len, m_BHN, l_BHN, *kept = ctx.saved_tensors
    numbers = (ctx.num_keys, ctx.num_kv_heads, ctx.recipe, ctx.scale, ctx.causal, ctx.kernel)
    dq, dk, dv = attention_backward(grad_out, q, k, v, out, m_BHN, l_BHN, kept, kv_len, *numbers)
    return dq, dk, dv, None, None, None, None, None, None


attention_forward.register_autograd(_backward, setup_context=_setup_context)
