"""Quantise Q, K and V, and attend: the host's side. Inference only.

All memory is allocated here, by torch: the operands (4.5 bits a number), the output, and a number a row for m, l and lse. Nothing grows
with Nq * Nk, and nothing waits for the device, so that a CUDA graph can hold a call.
"""

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from videoqat_kernels.cuda.layout import TILE, pack_k, pack_q, pack_v, unpack_k, unpack_v
from videoqat_kernels.cuda.library import AttentionArguments, QuantizeArguments, call

LOG2_E = 1.4426950408889634


class Recipe(Protocol):
    """What is quantised and how; see videoqat/recipes.py."""

    p_gain_log2: int
    scale_divisors: tuple[float, ...]
    normalizer: str
    smooth_q: bool
    smooth_k: bool


class ForwardResult(NamedTuple):
    """out (B, Nq, H, d) in q's dtype; lse, m, l (B, H, Nq) fp32."""

    out: Tensor
    lse: Tensor
    m: Tensor
    l: Tensor


class QuantisedInputs(NamedTuple):
    """All that comes before the attention kernel.

    Attributes:
        q, kv: the operands (layout.cuh).
        mean_k: with smooth_k, fp32 (B, H_kv, 1, d): what was subtracted; else None.
        parts: from which block of 128 queries on, and what smooth_q adds to Q K^T there (None: nothing, for all). Made as it is asked for.
    """

    q: Tensor
    kv: Tensor
    mean_k: Tensor | None
    parts: Iterable[tuple[int, Tensor | None]]


def maximum_first(recipe: Recipe) -> bool:
    """Whether rescaling by a running maximum could change codes of P that matter: then it is found in a pass of its own, a third product."""
    return recipe.p_gain_log2 < 8


def forward(
    product: str, q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, kv_len_B: Tensor | None, recipe: Recipe, scale: float, causal: bool
) -> ForwardResult:
    """Attention of q (B, Nq, H, d) over k, v (B, Nk, H_kv, d); bf16 or fp16, d 64 or 128, none changed.

    Args:
        product: native or emulated.
        q_BNHd, k_BNHd, v_BNHd: any strides; copied if channels don't lie side by side or rows don't start at multiples of 16 bytes.
        kv_len_B: (B,) integers: how many keys of each sample are real; None: all.
        scale: factor on the logits, > 0.
        causal: query i sees keys j <= i + kv_len - Nq.
    """
    B, Nq, H, d = q_BNHd.shape
    Nk, H_kv = k_BNHd.shape[1:3]
    with _on(q_BNHd):
        kv_len = _lengths(kv_len_B)
        x = quantise_inputs(product, q_BNHd, k_BNHd, v_BNHd, kv_len, recipe)
        result = _attend(product, x.q, x.kv, kv_len, (B, Nq, H, d), Nk, q_BNHd.dtype, recipe, scale, causal, x.parts)
        if x.mean_k is not None:  # what smoothing took from every logit of the row
            mean_of_head = x.mean_k.repeat_interleave(H // H_kv, dim=1).squeeze(2)
            result.lse.add_(torch.einsum("bnhd,bhd->bhn", q_BNHd.float(), mean_of_head), alpha=scale)
    return result


def quantise_inputs(product: str, q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, kv_len: Tensor | None, recipe: Recipe) -> QuantisedInputs:
    """Smooths, if the recipe wants it, and quantises. Arguments as for `forward`, on the current device; kv_len int32."""
    q_BNHd, k_BNHd, v_BNHd = (_readable(x) for x in (q_BNHd, k_BNHd, v_BNHd))
    mean_q = mean_k = None
    parts: Iterable[tuple[int, Tensor | None]] = [(0, None)]
    if recipe.smooth_q or recipe.smooth_k:
        from videoqat_kernels.triton_ops.smoothing import biases, mean_over_blocks, mean_over_tokens

        B, Nk = k_BNHd.shape[:2]
        lengths = torch.full((B,), Nk, dtype=torch.int32, device=q_BNHd.device) if kv_len is None else kv_len
        mean_k = mean_over_tokens(k_BNHd, lengths) if recipe.smooth_k else None
        if recipe.smooth_q:
            mean_q = mean_over_blocks(q_BNHd)
            parts = biases(mean_q, k_BNHd, mean_k, lengths, 1.0)
    return QuantisedInputs(quantize_q(product, q_BNHd, recipe, mean_q), quantize_kv(product, k_BNHd, v_BNHd, kv_len, recipe, mean_k), mean_k, parts)


def encode(product: str, x_BNHd: Tensor, lengths_B: Tensor | None, along_tokens: bool, divisors: tuple[float, ...]) -> list[Tensor]:
    """Codes and scales of x in their plain order (layout.py), without padding: of V (`along_tokens`), of Q or K. Tokens past lengths are zeros."""
    x_BNHd = _readable(x_BNHd)
    B, N, H, d = x_BNHd.shape
    with _on(x_BNHd):
        lengths = _lengths(lengths_B)
        kv = _empty_kv(B, H, N, d, x_BNHd.device)
        _quantize(product, "videoqat_quantize_v" if along_tokens else "videoqat_quantize_k", x_BNHd, kv, lengths, divisors, None, 0)
        codes, scales = unpack_v(kv[:, :, 1:, 1]) if along_tokens else unpack_k(kv[:, :, :-1, 0])
    rows = (-(-N // 16) * 8, -(-N // 16)) if along_tokens else (N, N)
    return [codes[:, :, : rows[0]].contiguous(), scales[:, :, : rows[1]].contiguous()]


def forward_coded(
    product: str,
    codes: list[Tensor],
    v_BNHd: Tensor | None,
    kv_len_B: Tensor | None,
    head_dim: int,
    dtype: torch.dtype,
    recipe: Recipe,
    scale: float,
) -> ForwardResult:
    """`forward` from codes and scales of q, of k, and of v or v itself, in their plain order (layout.py). Tokens behind kv_len are zeros there."""
    B, H, Nq, _ = codes[0].shape
    H_kv, Nk = codes[2].shape[1:3]
    with _on(codes[0]):
        kv_len = _lengths(kv_len_B)
        q = pack_q(*(_whole_tiles(x, Nq, 1) for x in codes[:2]))
        kv = _empty_kv(B, H_kv, Nk, head_dim, q.device)
        kv[:, :, :-1, 0] = pack_k(*(_whole_tiles(x, Nk, 1) for x in codes[2:4]))
        if v_BNHd is None:
            kv[:, :, 1:, 1] = pack_v(_whole_tiles(codes[4], Nk, 2), _whole_tiles(codes[5], Nk, 16))
        else:
            _quantize(product, "videoqat_quantize_v", _readable(v_BNHd), kv, kv_len, recipe.scale_divisors, None, 0)
        return _attend(product, q, kv, kv_len, (B, Nq, H, head_dim), Nk, dtype, recipe, scale, False, [(0, None)])


def _attend(
    product: str,
    q: Tensor,
    kv: Tensor,
    kv_len: Tensor | None,
    shape: tuple[int, int, int, int],
    Nk: int,
    dtype: torch.dtype,
    recipe: Recipe,
    scale: float,
    causal: bool,
    parts: Iterable[tuple[int, Tensor | None]],
) -> ForwardResult:
    """Attention of operands. `parts`: from which block of 128 queries on, and what is added to Q K^T there (None: nothing, for all)."""
    B, Nq, H, d = shape
    out = torch.empty(shape, dtype=dtype, device=q.device)
    lse, m, l = (torch.empty((B, H, Nq), dtype=torch.float32, device=q.device) for _ in range(3))
    for first_block, bias in parts:
        first = first_block * TILE
        arguments = AttentionArguments(
            q=q.data_ptr(), kv=kv.data_ptr(), kv_len=_pointer(kv_len), bias=_pointer(bias), out=out.data_ptr(),
            m=m.data_ptr(), l=l.data_ptr(), lse=lse.data_ptr(), stride_b=out.stride(0), stride_n=out.stride(1), stride_h=out.stride(2),
            B=B, Nq=Nq, Nk=Nk, H=H, H_kv=kv.shape[1], head_dim=d,
            first_query=first, num_queries=Nq if bias is None else min(Nq - first, bias.shape[2] * TILE),
            bias_blocks=0 if bias is None else bias.shape[2], is_half=dtype == torch.float16, causal=causal,
            quantised_sum=recipe.normalizer == "quantised", maximum_first=maximum_first(recipe),
            log2_scale=LOG2_E * scale, gain=recipe.p_gain_log2,
        )  # fmt: skip
        call(product, "videoqat_attention", arguments, _stream(q.device))
    return ForwardResult(out, lse, m, l)


def quantize_q(product: str, q_BNHd: Tensor, recipe: Recipe, mean: Tensor | None = None) -> Tensor:
    """Q's operand: uint8 (B, H, row tiles of 16, 8 d + 128), in the order that layout.cuh describes.

    Args:
        mean: with smooth_q, fp32 (B, H, blocks of 128 tokens, d).
    """
    B, N, H, d = q_BNHd.shape
    operand = torch.empty((B, H, -(-N // TILE) * 8, 8 * d + 128), dtype=torch.uint8, device=q_BNHd.device)
    _quantize(product, "videoqat_quantize_q", q_BNHd, operand, None, recipe.scale_divisors, mean, TILE)
    return operand


def quantize_kv(product: str, k_BNHd: Tensor, v_BNHd: Tensor, kv_len: Tensor | None, recipe: Recipe, mean: Tensor | None = None) -> Tensor:
    """The operands of K and V: uint8 (B, H_kv, tiles of 128 and one more, 2, 72 d), in the order that layout.cuh describes.

    Args:
        kv_len: int32 (B,).
        mean: with smooth_k, fp32 (B, H_kv, 1, d).
    """
    B, N, H, d = k_BNHd.shape
    operand = _empty_kv(B, H, N, d, k_BNHd.device)
    _quantize(product, "videoqat_quantize_k", k_BNHd, operand, kv_len, recipe.scale_divisors, mean, 0)
    _quantize(product, "videoqat_quantize_v", v_BNHd, operand, kv_len, recipe.scale_divisors, None, 0)
    return operand


def _quantize(
    product: str,
    function: str,
    x: Tensor,
    operand: Tensor,
    lengths: Tensor | None,
    divisors: tuple[float, ...],
    mean: Tensor | None,
    mean_tokens: int,
) -> None:
    B, N, H, d = x.shape
    arguments = QuantizeArguments(
        x=x.data_ptr(), operand=operand.data_ptr(), lengths=_pointer(lengths), mean=_pointer(mean),
        stride_b=x.stride(0), stride_n=x.stride(1), stride_h=x.stride(2), B=B, N=N, H=H, head_dim=d, mean_tokens=mean_tokens,
        is_half=x.dtype == torch.float16, num_divisors=len(divisors),
    )  # fmt: skip
    arguments.inverse_divisors[: len(divisors)] = [1.0 / c for c in divisors]
    call(product, function, arguments, _stream(x.device))


def _empty_kv(B: int, H: int, N: int, d: int, device: torch.device) -> Tensor:
    """For K (tile t at [:, :, t, 0]) and V (tile t at [:, :, t + 1, 1])."""
    return torch.empty((B, H, -(-N // TILE) + 1, 2, 72 * d), dtype=torch.uint8, device=device)


def _readable(x: Tensor) -> Tensor:
    """x, or a copy, with channels side by side and every row at a multiple of 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and all(size == 1 or stride % 8 == 0 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    # (Not contiguous(), which copies nothing where an odd address is all that is wrong.)
    return x if aligned and x.stride(3) == 1 else x.clone(memory_format=torch.contiguous_format)


def _whole_tiles(x_BHNc: Tensor, tokens: int, tokens_of_row: int) -> Tensor:
    """Rows of zeros behind, up to a multiple of 128 tokens."""
    rows = -(-tokens // TILE) * TILE // tokens_of_row
    return torch.nn.functional.pad(x_BHNc, (0, 0, 0, rows - x_BHNc.shape[2]))


def _lengths(kv_len_B: Tensor | None) -> Tensor | None:
    """As kernels read them: int32, side by side (a slice or an expanded number isn't)."""
    return None if kv_len_B is None else kv_len_B.to(torch.int32).contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the current device, which need not be the tensors'. (On the CPU run tests alone, with sources compiled for it.)"""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
