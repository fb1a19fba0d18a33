"""INT8 with one fp32 scale for a block of tokens, as SageBwd has it; defined in `docs/numerics.md`, section 7."""

import torch
from torch import Tensor

INT8_TOKENS = 64  # tokens of a block; P and dS: 64 queries by 64 keys
_SMALLEST_NORMAL = 2.0**-126


def quantize_int8(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Symmetric INT8: codes int8 of x's shape, and the scales amax / 127, of which all elements along `dims` share one.

    Args:
        x: fp32 (or fp64, for a reference: then all steps are fp64).
        dims: the axes of a block, kept with size 1 in the scales.

    Returns:
        codes of -127 ... 127, rounded to nearest, ties to even; scales of x's dtype: 0 where they would be below fp32's normal numbers (2^-126),
        NaN, with codes 0, where x holds NaN or an infinity. x' = codes * scales.
    """
    amax = x.abs().amax(dims, keepdim=True)
    bad = ~amax.isfinite()
    scales = amax / torch.full_like(amax, 127.0)  # by a number, CUDA would multiply with its reciprocal
    scales = scales.masked_fill(scales < _SMALLEST_NORMAL, 0.0)
    inverse = scales.reciprocal().masked_fill(bad | (scales == 0), 0.0)
    codes = (x.masked_fill(bad, 0.0) * inverse).round_().to(torch.int8)
    return codes, scales.masked_fill(bad, torch.nan)


def fake_quantize_int8(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x' of `quantize_int8`, of x's shape and dtype."""
    codes, scales = quantize_int8(x, dims)
    return codes.to(x.dtype).mul_(scales)


def fake_quantize_int8_tokens(x: Tensor, token_dims: tuple[int, ...], other_dims: tuple[int, ...] = ()) -> Tensor:
    """x' with blocks of 64 along each of `token_dims` (whose lengths are multiples of 64) and all of `other_dims` (both not negative)."""
    blocks, dims = x, list(other_dims)
    for axis in sorted(token_dims, reverse=True):
        blocks = blocks.unflatten(axis, (-1, INT8_TOKENS))
        dims = [d + (d > axis) for d in dims] + [axis + 1]
    return fake_quantize_int8(blocks, tuple(dims)).reshape(x.shape)
