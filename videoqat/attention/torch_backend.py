"""The kernel `torch`: the row formulas of `reference.py`, a tile at a time. Emulated arithmetic, right on any device, and what runs on CPU.

A tile is some query rows against all keys: no running maximum, P whole in the backward, and every buffer of the size (heads, keys, rows)
is allocated once a call and overwritten in place. `TILE_ELEMENTS` keeps those buffers in a core's cache; short sequences put several heads
into one tile, so that Python's overhead doesn't count.

Kept for the backward: q, k, v as they came, or the codes that came for them, and m, l (two floats a row). K', V' and Q' are made again: a few
passes over N * d numbers beside dozens over N * N, and an own copy would be more memory than the inputs that autograd holds by reference. O_hp is
not needed (see `reference.py`). SageBwd (`sagebwd.py`) keeps out, too, for its D.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from videoqat.attention import reference, sagebwd
from videoqat.formats import FORMATS, Quantized, quantize, unpack_e2m1
from videoqat.recipes import AttentionRecipe

BY_NAME_ONLY = ()
TILE_ELEMENTS = 2**19
MIN_TILE_ROWS = 16


def describe(recipe: AttentionRecipe, device_type: str) -> tuple[bool, str]:
    """Whether its arithmetic is native, and why one would choose it."""
    return False, "emulates the quantised arithmetic in fp32 with torch operations, on any device"


def why_not(recipe: AttentionRecipe, device: str, dtype: torch.dtype, head_dim: int, training: bool) -> str | None:
    """Serves everything that `attention` accepts."""
    return None


def keeps(recipe: AttentionRecipe) -> tuple[bool, bool, bool, bool]:
    """Which of q, k, v and out the backward needs besides `kept`."""
    return True, True, True, recipe.qk == "int8"


def empty_kept(q_BNHd: Tensor, k_BNHd: Tensor, recipe: AttentionRecipe) -> list[Tensor]:
    """Tensors like `forward`'s kept ones: none."""
    return []


def forward(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, kv_len_B: Tensor | None, recipe: AttentionRecipe, scale: float, causal: bool, training: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """out (B, Nq, H, d) in q's dtype; lse, m and l (B, H, Nq) fp32; what else the backward needs: nothing."""
    if recipe.qk == "int8":
        out, lse, m, l_BHN = sagebwd.forward(q_BNHd, k_BNHd, v_BNHd, recipe, scale=scale, kv_len_B=kv_len_B, causal=causal)
        return out.to(q_BNHd.dtype), lse, m, l_BHN, []
    x = reference.prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=scale, kv_len_B=kv_len_B, causal=causal)
    return *_attend(x, recipe, q_BNHd.shape, q_BNHd.dtype), []


def encode(x_BNHd: Tensor, lengths_B: Tensor | None, format: str, along_tokens: bool, divisors: tuple[float, ...]) -> list[Tensor]:
    """Codes and scales of x, in the layout of `coded.py`."""
    if lengths_B is not None:
        past_BN11 = (torch.arange(x_BNHd.shape[1], device=x_BNHd.device) >= lengths_B.unsqueeze(1))[:, :, None, None]
        x_BNHd = x_BNHd.masked_fill(past_BN11, 0.0)
    packed = quantize(x_BNHd.transpose(1, 2), format, 2 if along_tokens else 3, divisors).packed()
    return [(x.transpose(2, 3) if along_tokens else x).contiguous() for x in packed]


def forward_coded(
    codes: list[Tensor],
    v_BNHd: Tensor | None,
    kv_len_B: Tensor | None,
    head_dim: int,
    dtype: torch.dtype,
    recipe: AttentionRecipe,
    scale: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """`forward` from codes of q and k, and of v or v itself."""
    B, H, num_queries = codes[0].shape[:3]
    x = _decoded(codes, v_BNHd, recipe, codes[2].shape[2], head_dim, scale, kv_len_B)
    return *_attend(x, recipe, (B, num_queries, H, head_dim), dtype), []


def _decoded(
    codes: list[Tensor], v_BNHd: Tensor | None, recipe: AttentionRecipe, num_keys: int, head_dim: int, scale: float, kv_len_B: Tensor | None
) -> reference.Operands:
    """What `reference.prepare` makes of q, k and v, from their codes; v itself is quantised where it is given."""

    q, k = (_values(codes[i], codes[i + 1], recipe.qk, 3, head_dim).transpose(1, 2) for i in (0, 2))
    if v_BNHd is None:
        if recipe.v_blocks == "tokens":
            v = _values(codes[4].transpose(2, 3), codes[5].transpose(2, 3), recipe.pv, 2, num_keys).transpose(1, 2)
        else:
            v = _values(codes[4], codes[5], recipe.pv, 3, head_dim).transpose(1, 2)
        return reference.arrange(q, k, v, recipe, scale=scale, kv_len_B=kv_len_B, causal=False)
    x = reference.arrange(q, k, v_BNHd, recipe, scale=scale, kv_len_B=kv_len_B, causal=False)
    return replace(x, v_XKd=reference.quantise_v(x.v_XKd, recipe))


def _values(packed: Tensor, scales: Tensor, format: str, axis: int, length: int) -> Tensor:
    """fp32 (B, H, N, d), from codes and scales whose blocks run along the last axis, to be moved to `axis`."""
    spec = FORMATS[format]
    codes = unpack_e2m1(packed, 2 * packed.shape[3]) if spec.element == "e2m1" else packed
    return Quantized(codes.contiguous(), scales.contiguous(), format, axis, length).dequantize()


def _attend(
    x: reference.Operands, recipe: AttentionRecipe, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out of `shape` (B, Nq, H, d) and `dtype`; lse, m and l (B, H, Nq) fp32."""
    B, num_queries, H, _ = shape
    out = torch.empty_like(x.q_XRd)
    m_XR, l_XR = (torch.empty(out.shape[:2], device=out.device) for _ in range(2))
    for heads, rows, buffers in _tiles(x, reference.FORWARD_BUFFERS):
        out[heads, rows], m_XR[heads, rows], l_XR[heads, rows] = reference.forward_rows(x, recipe, heads, rows, buffers)
    lse = reference.natural_lse(x, recipe, m_XR, l_XR)
    lse, m_BHN, l_BHN = (y.view(B, H, num_queries) for y in (lse, m_XR, l_XR))
    return reference.tokens_first(out, B, H, dtype), lse, m_BHN, l_BHN


def backward(
    grad_out_BNHd: Tensor,
    q_BNHd: Tensor | None,
    k_BNHd: Tensor | None,
    v_BNHd: Tensor | None,
    out_BNHd: Tensor | None,
    m_BHN: Tensor,
    l_BHN: Tensor,
    kept: list[Tensor],
    kv_len_B: Tensor | None,
    num_keys: int,
    recipe: AttentionRecipe,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the dtype and shape of q, k, v."""
    B, _, H, d = grad_out_BNHd.shape
    if kept:
        x, num_kv_heads = _decoded(kept, v_BNHd, recipe, num_keys, d, scale, kv_len_B), kept[2].shape[1]
    else:
        assert q_BNHd is not None
        assert k_BNHd is not None
        assert v_BNHd is not None
        if recipe.qk == "int8":
            assert out_BNHd is not None
            saved = (q_BNHd, k_BNHd, v_BNHd, out_BNHd, m_BHN, l_BHN)
            gradients = sagebwd.backward(grad_out_BNHd, *saved, recipe, scale=scale, kv_len_B=kv_len_B, causal=causal)
            dq, dk, dv = (x.to(q_BNHd.dtype) for x in gradients)
            return dq, dk, dv
        num_kv_heads = k_BNHd.shape[2]
        x = reference.prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=scale, kv_len_B=kv_len_B, causal=causal)
    grad_out = reference.rows_first(grad_out_BNHd, num_kv_heads)
    m_XR, l_XR = (y.reshape(x.q_XRd.shape[:2]) for y in (m_BHN, l_BHN))
    dq, dk, dv = torch.empty_like(x.q_XRd), torch.zeros_like(x.k_XKd), torch.zeros_like(x.v_XKd)
    for heads, rows, buffers in _tiles(x, reference.BACKWARD_BUFFERS):
        dq[heads, rows] = reference.backward_rows(
            x, recipe, heads, rows, grad_out[heads, rows], m_XR[heads, rows], l_XR[heads, rows], dk[heads], dv[heads], buffers
        )
    dk_BNHd, dv_BNHd = (reference.tokens_first(y[:, :num_keys], B, num_kv_heads, grad_out_BNHd.dtype) for y in (dk, dv))
    return reference.tokens_first(dq, B, H, grad_out_BNHd.dtype), dk_BNHd, dv_BNHd


def _tiles(x: reference.Operands, num_buffers: int) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Tiles of about `TILE_ELEMENTS` scores as (heads, rows, buffers of the tile's shape)."""
    num_heads, num_rows = x.q_XRd.shape[:2]
    num_keys = x.k_XKd.shape[1]
    tile_rows = min(num_rows, max(MIN_TILE_ROWS, TILE_ELEMENTS // num_keys))
    tile_heads = min(num_heads, max(1, TILE_ELEMENTS // (num_keys * tile_rows)))
    tile_heads = math.ceil(num_heads / math.ceil(num_heads / tile_heads))  # as many tiles, of even size
    memory = torch.empty(num_buffers, tile_heads * num_keys * tile_rows, device=x.q_XRd.device)
    for head in range(0, num_heads, tile_heads):
        heads = slice(head, min(head + tile_heads, num_heads))
        for row in range(0, num_rows, tile_rows):
            rows = slice(row, min(row + tile_rows, num_rows))
            shape = (heads.stop - head, num_keys, rows.stop - row)
            size = shape[0] * shape[1] * shape[2]
            yield heads, rows, [buffer[:size].view(shape) for buffer in memory]
