"""Attention from codes: q, k and v quantised in one place (`encode`) and multiplied in another (`attention_forward_coded`).

What sequence parallelism sends from rank to rank is then 4.5 bits a number instead of 16. Blocks of q and k run along head_dim, those of v along
tokens: tokens may be cut anywhere for q and k, and between two blocks for v, without changing a code. The numbers are those of `attention`.
(With `v_blocks: head_dim`, v is as q and k are.)

Codes have one layout for all kernels, heads before tokens, so that heads can be parted without moving bytes: for q and k, codes
(B, H, N, d / 2) and scales (B, H, N, ceil(d / block)); for v, codes (B, H, ceil(N / block) * block / 2, d) and scales (B, H, ceil(N / block), d),
uint8, two 4-bit codes a byte, the first in the low nibble (MXFP8: a byte for each).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from videoqat.attention import backends
from videoqat.attention.functional import _check_kv_len_values, _from_json, _kernel
from videoqat.attention.rotation import rotated
from videoqat.errors import AttentionError
from videoqat.formats import FORMATS
from videoqat.recipes import AttentionRecipe

BLOCK_TOKENS = max(format.block_size for format in FORMATS.values())  # where v may be cut, whatever its format


def packed_obstacle(recipe: AttentionRecipe) -> str | None:
    """Why codes can't stand for q and k of this recipe; None if they can."""
    if recipe.smooth_q or recipe.smooth_k:
        return "it smooths over tokens before it quantises, which takes the whole sequence"
    if twice := [operand for operand in recipe.twice if operand != "p"]:
        return f"twice={','.join(twice)} is two terms, and codes are of one"
    if recipe.qk not in FORMATS:
        return f"qk={recipe.qk} has no codes; {', '.join(FORMATS)} have"
    return None


def layout(recipe: AttentionRecipe, is_v: bool) -> tuple[str, bool]:
    """Format of v, or of q and k; and whether its blocks run along tokens."""
    return (recipe.pv, recipe.v_blocks == "tokens") if is_v else (recipe.qk, False)


def code_shapes(shape: Sequence[int], format: str, along_tokens: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of codes and scales of x of `shape` (B, N, H, d)."""
    batch, tokens, heads, channels = shape
    spec = FORMATS[format]
    per_byte = 2 if spec.element == "e2m1" else 1
    blocks = -(-(tokens if along_tokens else channels) // spec.block_size)
    width = blocks * spec.block_size // per_byte
    if along_tokens:
        return (batch, heads, width, channels), (batch, heads, blocks, channels)
    return (batch, heads, tokens, width), (batch, heads, tokens, blocks)


@torch.library.custom_op("videoqat::encode", mutates_args=())
def encode(x: Tensor, lengths: Tensor | None, is_v: bool, recipe: str, kernel: str, training: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of x (B, N, H, d): of v in the recipe's pv (`is_v`), of q or k in its qk (rotated, with `rotate_qk`).

    Args:
        lengths: (B,) integers; tokens from there on count as zeros. None: all are real.
        recipe: as JSON.
        kernel, training: as for `attention`, which decides the kernel.
    """
    parsed = _from_json(recipe)
    module = _kernel(recipe, x, kernel, training)
    if not hasattr(module, "forward_coded"):
        able = ", ".join(name for name, other in backends.KERNELS.items() if hasattr(other, "forward_coded"))
        chosen = backends.resolve(parsed, x.device, x.dtype, x.shape[3], kernel, training).kernel
        raise AttentionError(f"kernel {chosen!r} can't start from codes; legal with a packed wire: {able}")
    codes, scales = module.encode(x if is_v else rotated(x, parsed), lengths, *layout(parsed, is_v), parsed.scale_divisors)
    return codes, scales


@encode.register_fake
def _encode_fake(x: Tensor, lengths: Tensor | None, is_v: bool, recipe: str, kernel: str, training: bool) -> tuple[Tensor, Tensor]:
    codes, scales = code_shapes(x.shape, *layout(_from_json(recipe), is_v))
    return x.new_empty(codes, dtype=torch.uint8), x.new_empty(scales, dtype=torch.uint8)


@torch.library.custom_op("videoqat::attention_forward_coded", mutates_args=())
def attention_forward_coded(
    codes: list[Tensor],
    v: Tensor | None,
    kv_len: Tensor | None,
    head_dim: int,
    dtype: torch.dtype,
    recipe: str,
    scale: float,
    kernel: str,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """`attention_forward` from codes. Not differentiable by itself: who made the codes knows where the gradients go.

    Args:
        codes: codes and scales of q, of k, and where v is None of v. Tokens behind `kv_len` must be zeros there.
        v: (B, Nk, H_kv, d), where its codes were not to be had; quantised here.
        kv_len: as for `attention`.
        head_dim: d.
        dtype: that q, k and v had, and out will.

    Returns:
        out, lse, m, l as from `attention_forward`, and in training the codes of v if they were made here and the kernel wants them.
        `attention_backward` takes [*codes, *those] as `kept`, and v and out where the kernel `keeps` them.
    """
    if kv_len is not None:
        _check_kv_len_values(kv_len, codes[2].shape[2])
    parsed = _from_json(recipe)
    receipt = backends.resolve(parsed, codes[0].device, dtype, head_dim, kernel, training)
    module = backends.KERNELS[receipt.kernel]
    with torch.autocast(codes[0].device.type, enabled=False):
        result = module.forward_coded(codes, v, kv_len, head_dim, dtype, parsed, scale, training)
    backends.record(replace(receipt, reason=f"{receipt.reason}; q, k{' and v' if v is None else ''} came as codes"))
    return result


@attention_forward_coded.register_fake
def _attention_forward_coded_fake(
    codes: list[Tensor],
    v: Tensor | None,
    kv_len: Tensor | None,
    head_dim: int,
    dtype: torch.dtype,
    recipe: str,
    scale: float,
    kernel: str,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    B, H, num_queries = codes[0].shape[:3]
    parsed = _from_json(recipe)
    lse, m_BHN, l_BHN = (codes[0].new_empty((B, H, num_queries), dtype=torch.float32) for _ in range(3))
    kept: list[Tensor] = []
    if training and v is not None and not _kernel(recipe, v, kernel, training).keeps(parsed)[2]:
        kept = [codes[0].new_empty(shape) for shape in code_shapes(v.shape, *layout(parsed, is_v=True))]
    return codes[0].new_empty((B, num_queries, H, head_dim), dtype=dtype), lse, m_BHN, l_BHN, kept
