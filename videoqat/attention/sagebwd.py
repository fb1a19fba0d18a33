"""SageBwd, INT8 attention for training, by its formulas (`docs/numerics.md`, section 7; arXiv 2505.11594, section 4), in fp32 or fp64.

Laid out like `reference.py`: a tile of scores is `t_XKR`, keys before rows. Queries are padded here to whole blocks of 64 for each head, so
that a block of P or dS is 64 of the keys by 64 of the rows whatever the tile; padding sees no key, so its P is 0 and shares no scale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from videoqat.attention import reference
from videoqat.attention.reference import Operands
from videoqat.formats.int8 import INT8_TOKENS, fake_quantize_int8_tokens
from videoqat.recipes import AttentionRecipe

TILE_ELEMENTS = 2**19  # scores in a tile


@dataclass(frozen=True)
class Int8Operands:
    """`operands` holds Q', K' and V'; `v_XKd` is V as it came, for dP; `num_queries` those before padding."""

    operands: Operands
    v_XKd: Tensor
    num_queries: int


def prepare(
    q_BNHd: Tensor,
    k_BNHd: Tensor,
    v_BNHd: Tensor,
    recipe: AttentionRecipe,
    *,
    scale: float,
    kv_len_B: Tensor | None,
    causal: bool,
    dtype: torch.dtype = torch.float32,
) -> Int8Operands:
    """Smoothed, padded and quantised operands of `dtype`; their codes are made from fp32 values whatever `dtype` is."""
    B, num_queries, H, _ = q_BNHd.shape
    num_keys, num_kv_heads = k_BNHd.shape[1:3]
    x = reference.arrange(padded(q_BNHd), k_BNHd, v_BNHd, recipe, scale=scale, kv_len_B=kv_len_B, causal=False)
    limit_BN = reference.key_limit(num_queries, num_keys, B, kv_len_B, causal, q_BNHd.device)
    if limit_BN is None:
        limit_BN = torch.full((B, num_queries), num_keys, device=q_BNHd.device)
    limit_BN = F.pad(limit_BN, (0, -num_queries % INT8_TOKENS))
    limit_XR = limit_BN[:, None, None].expand(B, num_kv_heads, H // num_kv_heads, -1).reshape(x.q_XRd.shape[:2])
    k = x.k_XKd
    if recipe.smooth_k:  # what isn't there must not share a scale: it is zero, not minus the mean
        length_B = torch.full((B,), num_keys, device=k.device) if kv_len_B is None else kv_len_B
        past_XK = torch.arange(k.shape[1], device=k.device) >= length_B.repeat_interleave(num_kv_heads).unsqueeze(1)
        k = k.masked_fill(past_XK.unsqueeze(2), 0.0)
    q, k, v = (fake_quantize_int8_tokens(y, (1,), (2,)).to(dtype) for y in (x.q_XRd, k, x.v_XKd))
    return Int8Operands(replace(x, q_XRd=q, k_XKd=k, v_XKd=v, limit_XR=limit_XR), x.v_XKd.to(dtype), num_queries)


def forward_rows(x: Operands, heads: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """O, m and l of some rows of some heads, and their p and p', both with exp(rowmax(S) - m) in them: (X, K, R)."""
    t_XKR = _scores(x, heads, rows)
    tiles = t_XKR.unflatten(1, (-1, INT8_TOKENS))
    tile_max = tiles.amax(2, keepdim=True)
    m_X1R = tile_max.amax(1)
    blind = m_X1R == -math.inf
    weight = tile_max.sub(m_X1R.masked_fill(blind, 0.0).unsqueeze(1)).exp2_()  # 0 for a tile without a key to see
    p = tiles.sub_(tile_max.masked_fill(tile_max == -math.inf, 0.0)).exp2_()
    p_quantised = p.mul(127.0).round_().mul_(weight / 127.0).flatten(1, 2)
    p = p.mul_(weight).flatten(1, 2)
    l_X1R = p.sum(dim=1, keepdim=True)
    out = torch.bmm(p_quantised.transpose(1, 2), x.v_XKd[heads]).mul_(_inverse(l_X1R).transpose(1, 2))
    return out, m_X1R.masked_fill(blind, 0.0).squeeze(1), l_X1R.squeeze(1), p, p_quantised


def forward(
    q_BNHd: Tensor,
    k_BNHd: Tensor,
    v_BNHd: Tensor,
    recipe: AttentionRecipe,
    *,
    scale: float,
    kv_len_B: Tensor | None,
    causal: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (B, Nq, H, d), and lse, m, l (B, H, Nq), all of `dtype`. m is the row maximum in log2 units, as it is."""
    B, num_queries, H, _ = q_BNHd.shape
    prepared = prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=scale, kv_len_B=kv_len_B, causal=causal, dtype=dtype)
    x = prepared.operands
    out = torch.empty_like(x.q_XRd)
    m_XR, l_XR = (torch.empty(out.shape[:2], dtype=dtype, device=out.device) for _ in range(2))
    for heads, rows in _tiles(x):
        out[heads, rows], m_XR[heads, rows], l_XR[heads, rows] = forward_rows(x, heads, rows)[:3]
    lse_XR = reference.natural_lse(x, recipe, m_XR, l_XR)
    lse, m_BHN, l_BHN = (y.reshape(B, H, -1)[:, :, :num_queries].contiguous() for y in (lse_XR, m_XR, l_XR))
    return reference.tokens_first(out, B, H, dtype)[:, :num_queries].contiguous(), lse, m_BHN, l_BHN


def backward(
    grad_out_BNHd: Tensor,
    q_BNHd: Tensor,
    k_BNHd: Tensor,
    v_BNHd: Tensor,
    out_BNHd: Tensor,
    m_BHN: Tensor,
    l_BHN: Tensor,
    recipe: AttentionRecipe,
    *,
    scale: float,
    kv_len_B: Tensor | None,
    causal: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of the shapes of q, k, v and of `dtype`; out, m and l as `forward` returned them."""
    B, num_queries, H, _ = q_BNHd.shape
    num_keys, num_kv_heads = k_BNHd.shape[1:3]
    prepared = prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=scale, kv_len_B=kv_len_B, causal=causal, dtype=dtype)
    x = prepared.operands
    grad_out = reference.rows_first(padded(grad_out_BNHd), num_kv_heads)
    grad_out_quantised = fake_quantize_int8_tokens(grad_out, (1,), (2,)).to(dtype)
    grad_out = grad_out.to(dtype)
    padding = (0, -num_queries % INT8_TOKENS)
    m_XR, l_XR = (F.pad(y.to(dtype), padding).reshape(x.q_XRd.shape[:2]) for y in (m_BHN, l_BHN))
    delta = (grad_out_BNHd.to(dtype) * out_BNHd.to(dtype)).sum(3).transpose(1, 2)
    delta_XR = F.pad(delta, padding).reshape(m_XR.shape)
    dq, dk, dv = torch.empty_like(x.q_XRd), torch.zeros_like(x.k_XKd), torch.zeros_like(x.v_XKd)
    for heads, rows in _tiles(x):
        t = _scores(x, heads, rows)
        p = t.sub_(m_XR[heads, None, rows]).exp2_().mul_(_inverse(l_XR[heads, None, rows]))
        dv[heads].baddbmm_(fake_quantize_int8_tokens(p, (1, 2)), grad_out_quantised[heads, rows])
        dp = torch.bmm(prepared.v_XKd[heads], grad_out[heads, rows].transpose(1, 2))
        ds = fake_quantize_int8_tokens(dp.sub_(delta_XR[heads, None, rows]).mul_(p), (1, 2))
        dk[heads].baddbmm_(ds, x.q_XRd[heads, rows], alpha=scale)
        dq[heads, rows] = torch.bmm(ds.transpose(1, 2), x.k_XKd[heads]).mul_(scale)
    dk, dv = (reference.tokens_first(y[:, :num_keys], B, num_kv_heads, dtype) for y in (dk, dv))
    return reference.tokens_first(dq, B, H, dtype)[:, :num_queries].contiguous(), dk, dv


def _scores(x: Operands, heads: slice, rows: slice) -> Tensor:
    num_rows = len(range(*rows.indices(x.q_XRd.shape[1])))
    num_heads = len(range(*heads.indices(x.q_XRd.shape[0])))
    return reference.scores(x, heads, rows, x.q_XRd.new_empty(num_heads, x.k_XKd.shape[1], num_rows))


def _inverse(l_X1R: Tensor) -> Tensor:
    """1 / l, and 0 for a row that sees no key."""
    return l_X1R.reciprocal().masked_fill_(l_X1R == 0, 0.0)


def padded(x_BNHd: Tensor) -> Tensor:
    """With zeros for tokens up to a multiple of 64."""
    return F.pad(x_BNHd, (0, 0, 0, 0, 0, -x_BNHd.shape[1] % INT8_TOKENS))


def _tiles(x: Operands) -> Iterator[tuple[slice, slice]]:
    """One head and as many whole blocks of rows as make about `TILE_ELEMENTS` scores, as (heads, rows)."""
    num_heads, num_rows = x.q_XRd.shape[:2]
    tile_rows = max(1, TILE_ELEMENTS // (x.k_XKd.shape[1] * INT8_TOKENS)) * INT8_TOKENS
    for head in range(num_heads):
        for row in range(0, num_rows, tile_rows):
            yield slice(head, head + 1), slice(row, min(row + tile_rows, num_rows))
