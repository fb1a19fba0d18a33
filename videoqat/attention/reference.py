"""Quantised attention by its formulas (`docs/numerics.md`, sections 2 to 4), forward and backward, in fp32 or fp64.

`forward` and `backward` are dense: all rows at once, any dtype, meant to be right and readable. The torch back end runs the very same row
formulas (`prepare`, `forward_rows`, `backward_rows`) a tile at a time, so there is one set of formulas.

Shapes: B batch, N query tokens, H query heads, d head_dim. Grouped-query attention is flattened away: X = B * H_kv heads of keys, each with
R = (H / H_kv) * N query rows, and K keys, padded with zeros to whole quantisation blocks. A tile of scores is kept as `t_XKR`, keys before
rows: the blocks of P, its row maxima and its row sums then all run down the columns, where one vector instruction serves many rows.

The forward, for one row (t in log2 units):

    t = log2(e) * scale * Q' K'^T      m = ceil(max t)      p = 2^(t - m + g)      p' = NVFP4(p)      l = sum p      O = p' V' / l

and the backward, straight through the quantisers of Q, K and V:

    P = p / l    P' = p' / l    dV = P'^T dO    dP = dO V'^T    dS = P * (dP - D)    dQ = scale * dS K'    dK = scale * dS^T Q'

D is rowsum(dO * O_hp) with O_hp = P V'. A row of P is whole here, and rowsum(dO * (P V')) = rowsum(P * dP): so neither O_hp nor O has to be
computed or kept; the same sum with P' gives rowsum(dO * O), which two of the variants want.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from videoqat.attention.rotation import rotated
from videoqat.formats import FORMATS, fake_quantize
from videoqat.formats.int8 import INT8_TOKENS
from videoqat.formats.rounding import round_e2m1_, round_e4m3_
from videoqat.recipes import AttentionRecipe

SMOOTH_Q_TOKENS = 128
TWO_LEVEL_KEYS = 128
_RECIPROCAL_6 = torch.tensor(1.0 / 6.0, dtype=torch.float32).item()  # fp32(1/6): as a Python float, it reaches an fp32 kernel unchanged
_RECIPROCAL_2688 = torch.tensor(1.0 / (448.0 * 6.0), dtype=torch.float32).item()
_SMALLEST_E4M3 = 2.0**-9
_SMALLEST_NORMAL = 2.0**-126
FORWARD_BUFFERS = 1
BACKWARD_BUFFERS = 3


@dataclass(frozen=True)
class Operands:
    """What the row formulas need, made once a call from the caller's tensors (which stay as they are).

    Attributes:
        q_XRd: Q', quantised (after smoothing).
        mean_q_XRd: with smooth_q, what was subtracted from each row of Q; else None.
        k_XKd: K', quantised (after smoothing).
        k_plain_XKd: with smooth_q, the K that mean_q meets: not quantised, smoothed with smooth_k; else None.
        v_XKd: V', quantised along keys (or channels: `v_blocks`).
        limit_XR: how many keys a row sees: it sees keys 0 .. limit - 1. None: all of them.
        lse_offset_XR: with smooth_k, scale * q . mean_k: what smoothing took from every logit of the row; else None.
        num_keys: keys before padding.
        scale: factor on the logits.
    """

    q_XRd: Tensor
    mean_q_XRd: Tensor | None
    k_XKd: Tensor
    k_plain_XKd: Tensor | None
    v_XKd: Tensor
    limit_XR: Tensor | None
    lse_offset_XR: Tensor | None
    num_keys: int
    scale: float


def rows_first(x_BNHd: Tensor, num_kv_heads: int) -> Tensor:
    """(B, N, H, d) of any strides -> fp32 (B * H_kv, H / H_kv * N, d)."""
    B, N, H, d = x_BNHd.shape
    grouped = x_BNHd.reshape(B, N, num_kv_heads, H // num_kv_heads, d).permute(0, 2, 3, 1, 4)
    return grouped.to(torch.float32).reshape(B * num_kv_heads, H // num_kv_heads * N, d)


def tokens_first(x_XRd: Tensor, batch: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `rows_first`: contiguous (B, N, H, d) of `dtype`."""
    return x_XRd.reshape(batch, num_heads, -1, x_XRd.shape[-1]).transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).contiguous()


def key_limit(num_queries: int, num_keys: int, batch: int, kv_len_B: Tensor | None, causal: bool, device: torch.device) -> Tensor | None:
    """How many keys each query sees, (B, Nq) int64; None if all see all. Causal is aligned to the bottom right: the last query sees all."""
    if kv_len_B is None and not causal:
        return None
    limit_B1 = torch.full((batch, 1), num_keys, device=device) if kv_len_B is None else kv_len_B.to(torch.int64).unsqueeze(1)
    if not causal:
        return limit_B1.expand(batch, num_queries)
    last_query = torch.arange(num_queries, device=device) - (num_queries - 1)
    return (limit_B1 + last_query).clamp_(min=0)


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
) -> Operands:
    """Smoothed and quantised operands of `dtype`, quantised from fp32 values whatever `dtype` is: their codes never depend on it.

    q and k come as kernels get them: with `rotate_qk`, they have been rotated.
    """
    x = arrange(q_BNHd, k_BNHd, v_BNHd, recipe, scale=scale, kv_len_B=kv_len_B, causal=causal)
    return replace(
        x,
        q_XRd=_quantised(x.q_XRd, recipe.qk, -1, recipe.scale_divisors, "q" in recipe.twice).to(dtype),
        mean_q_XRd=None if x.mean_q_XRd is None else x.mean_q_XRd.to(dtype),
        k_XKd=_quantised(x.k_XKd, recipe.qk, -1, recipe.scale_divisors, "k" in recipe.twice).to(dtype),
        k_plain_XKd=None if x.k_plain_XKd is None else x.k_plain_XKd.to(dtype),
        v_XKd=quantise_v(x.v_XKd, recipe).to(dtype),
    )


def v_axis(recipe: AttentionRecipe) -> int:
    """The axis of v_XKd along which its blocks run."""
    return 1 if recipe.v_blocks == "tokens" else 2


def quantise_v(v_XKd: Tensor, recipe: AttentionRecipe) -> Tensor:
    """V' of V, which is zero behind its last key."""
    return _quantised(v_XKd, recipe.pv, v_axis(recipe), recipe.scale_divisors, "v" in recipe.twice)


def _quantised(x: Tensor, format: str, axis: int, divisors: tuple[float, ...], twice: bool) -> Tensor:
    """x' of fp32 x: one term or two. Two add up exactly: less than 24 bits lie between 2 * 448 * 6 and half of the smallest scale, 2^-10."""
    first = fake_quantize(x, format, axis, divisors)
    return first + fake_quantize(x - first, format, axis, divisors) if twice else first


def arrange(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, recipe: AttentionRecipe, *, scale: float, kv_len_B: Tensor | None, causal: bool
) -> Operands:
    """Operands in fp32, smoothed as `recipe` says, not quantised yet."""
    B, num_queries, H, d = q_BNHd.shape
    num_keys, num_kv_heads = k_BNHd.shape[1:3]
    if kv_len_B is not None:  # what lies past the end may be garbage, even NaN: it must not reach a block of V, nor 0 * NaN a product
        past_BK11 = (torch.arange(num_keys, device=q_BNHd.device) >= kv_len_B.unsqueeze(1))[:, :, None, None]
        k_BNHd, v_BNHd = (x.masked_fill(past_BK11, 0.0) for x in (k_BNHd, v_BNHd))
    q, k, v = (rows_first(x, num_kv_heads) for x in (q_BNHd, k_BNHd, v_BNHd))
    padding = -num_keys % _key_block(recipe)
    if padding:
        k, v = (F.pad(x, (0, 0, 0, padding)) for x in (k, v))

    lse_offset = mean_q = k_plain = None
    if recipe.smooth_k:
        # As a tensor: dividing by a number, CUDA would multiply with its reciprocal.
        tokens = (
            torch.full((1, 1, 1), num_keys, device=k.device)
            if kv_len_B is None
            else kv_len_B.clamp(min=1).repeat_interleave(num_kv_heads).view(-1, 1, 1)
        )
        mean_k_X1d = k.sum(dim=1, keepdim=True) / tokens
        lse_offset = scale * (q @ mean_k_X1d.transpose(1, 2)).squeeze(2)
        k = k - mean_k_X1d
    if recipe.smooth_q:
        mean_q = _block_means(q.reshape(-1, num_queries, d)).view_as(q)
        q, k_plain = q - mean_q, k
    limit_BN = key_limit(num_queries, num_keys, B, kv_len_B, causal, q.device)
    if limit_BN is not None:
        limit_BN = limit_BN[:, None, None].expand(B, num_kv_heads, H // num_kv_heads, -1).reshape(B * num_kv_heads, -1)
    return Operands(q, mean_q, k, k_plain, v, limit_BN, lse_offset, num_keys, scale)


def _key_block(recipe: AttentionRecipe) -> int:
    """P and V are padded to a multiple of this many keys."""
    if recipe.two_level_p:
        return TWO_LEVEL_KEYS
    if recipe.pv == "int8":
        return INT8_TOKENS
    return FORMATS[recipe.pv].block_size if recipe.pv in FORMATS else 1


def _block_means(q_YNd: Tensor) -> Tensor:
    """The mean of each row's block of 128 tokens, for every row."""
    means = [block.mean(dim=1, keepdim=True).expand_as(block) for block in q_YNd.split(SMOOTH_Q_TOKENS, dim=1)]
    return torch.cat(means, dim=1)


def scores(x: Operands, heads: slice, rows: slice, out_XKR: Tensor) -> Tensor:
    """t_XKR: logits in log2 units, -inf where a row may not look."""
    factor = math.log2(math.e) * x.scale
    t = torch.baddbmm(out_XKR, x.k_XKd[heads], x.q_XRd[heads, rows].transpose(1, 2), beta=0, alpha=factor, out=out_XKR)
    if x.mean_q_XRd is not None and x.k_plain_XKd is not None:
        t.baddbmm_(x.k_plain_XKd[heads], x.mean_q_XRd[heads, rows].transpose(1, 2), alpha=factor)
    if x.limit_XR is not None:
        key_K1 = torch.arange(t.shape[1], device=t.device).unsqueeze(1)
        t.masked_fill_(key_K1 >= x.limit_XR[heads, None, rows], -math.inf)
    else:
        t[:, x.num_keys :].fill_(-math.inf)
    return t


def _inverse(l_X1R: Tensor) -> Tensor:
    """1 / l, and 0 for a row that sees no key (l = 0: nothing else makes it 0, since the largest p of a row is above 2^(g-1))."""
    return l_X1R.reciprocal().masked_fill_(l_X1R == 0, 0.0)


def quantise_p(p_XKR: Tensor, recipe: AttentionRecipe, out_XKR: Tensor) -> Tensor:
    """p' of p >= 0, in blocks along keys, from p's fp32 value. Written to `out_XKR` (may be p itself) where that saves a copy; use the result."""
    twice = "p" in recipe.twice
    if recipe.two_level_p:
        tiles = p_XKR.unflatten(1, (-1, TWO_LEVEL_KEYS))
        row_scale = tiles.float().amax(2, keepdim=True) * _RECIPROCAL_2688
        row_scale.masked_fill_(row_scale < _SMALLEST_NORMAL, 0.0)  # its reciprocal would be infinite
        scaled = (tiles.float() * row_scale.reciprocal().masked_fill_(row_scale == 0, 0.0)).flatten(1, 2)
        quantised = _quantised(scaled, recipe.pv, 1, (6.0,), twice).to(p_XKR.dtype)
        return quantised.unflatten(1, (-1, TWO_LEVEL_KEYS)).mul_(row_scale).flatten(1, 2)
    if twice:
        return _quantised(p_XKR.float(), recipe.pv, 1, (6.0,), twice).to(p_XKR.dtype)
    if recipe.pv != "nvfp4" or p_XKR.dtype != torch.float32:
        return fake_quantize(p_XKR, recipe.pv, 1)
    # The same as fake_quantize, without its passes for signs and for infinities (p has neither) and without new memory for every step.
    blocks, out = (x.unflatten(1, (-1, FORMATS["nvfp4"].block_size)) for x in (p_XKR, out_XKR))
    scales = round_e4m3_(blocks.amax(2, keepdim=True).mul_(_RECIPROCAL_6))
    torch.mul(blocks, scales.clamp(min=_SMALLEST_E4M3).reciprocal_(), out=out)  # where s = 0 any finite r will do: c * s is 0
    round_e2m1_(out_XKR)
    out.mul_(scales)
    return out_XKR


def row_weights(x: Operands, recipe: AttentionRecipe, heads: slice, rows: slice, out_XKR: Tensor) -> tuple[Tensor, Tensor]:
    """p = 2^(t - m + g), not quantised, written to `out_XKR`; and m_X1R."""
    t = scores(x, heads, rows, out_XKR)
    m_X1R = t.amax(dim=1, keepdim=True).ceil_()
    if x.limit_XR is not None:
        m_X1R.masked_fill_(x.limit_XR[heads, None, rows] == 0, 0.0)  # -inf - -inf would be NaN; only here: a NaN of the data stays one
    return t.sub_(m_X1R - recipe.p_gain_log2).exp2_(), m_X1R


def forward_rows(x: Operands, recipe: AttentionRecipe, heads: slice, rows: slice, buffers: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """O, m and l of some rows of some heads. `buffers`: `FORWARD_BUFFERS` of shape (X, K, R) to be overwritten."""
    p, m_X1R = row_weights(x, recipe, heads, rows, buffers[0])
    l_X1R = p.sum(dim=1, keepdim=True)
    p = quantise_p(p, recipe, p)
    if recipe.normalizer == "quantised":
        l_X1R = p.sum(dim=1, keepdim=True)
    out = torch.bmm(p.transpose(1, 2), x.v_XKd[heads]).mul_(_inverse(l_X1R).transpose(1, 2))
    return out, m_X1R.squeeze(1), l_X1R.squeeze(1)


def backward_rows(
    x: Operands,
    recipe: AttentionRecipe,
    heads: slice,
    rows: slice,
    grad_out_XRd: Tensor,
    m_XR: Tensor,
    l_XR: Tensor,
    dk_XKd: Tensor,
    dv_XKd: Tensor,
    buffers: list[Tensor],
) -> Tensor:
    """dQ of some rows of some heads; their part of dK and dV is added to `dk_XKd` and `dv_XKd` (of those heads).

    p stays unnormalised wherever it is wide: 1/l and scale are applied to the narrow operands of the products instead.
    `buffers`: `BACKWARD_BUFFERS` of shape (X, K, R) to be overwritten.
    """
    inverse_l = _inverse(l_XR.unsqueeze(1))
    p = scores(x, heads, rows, buffers[0]).sub_(m_XR.unsqueeze(1) - recipe.p_gain_log2).exp2_()
    quantised_in_dv, quantised_in_ds, quantised_in_delta = _uses_of_p(recipe)
    p_quantised = quantise_p(p, recipe, buffers[1]) if quantised_in_dv or quantised_in_ds or quantised_in_delta else p
    p_dv = p_quantised if quantised_in_dv else p
    p_ds = p_quantised if quantised_in_ds else p
    dv_XKd.baddbmm_(p_dv, grad_out_XRd * inverse_l.transpose(1, 2))

    dp = torch.bmm(x.v_XKd[heads], grad_out_XRd.transpose(1, 2), out=buffers[2])
    if quantised_in_delta == quantised_in_ds:
        ds = dp.mul_(p_ds)
        delta = ds.sum(dim=1, keepdim=True).mul_(inverse_l)
    else:
        delta = (p_quantised if quantised_in_delta else p).mul(dp).sum(dim=1, keepdim=True).mul_(inverse_l)
        ds = dp.mul_(p_ds)
    ds.addcmul_(p_ds, delta, value=-1.0)  # l * dS = p * dP - p * D

    factor_XR1 = (inverse_l * x.scale).transpose(1, 2)
    q = x.q_XRd[heads, rows]
    if x.mean_q_XRd is not None:
        q = q + x.mean_q_XRd[heads, rows]
    dk_XKd.baddbmm_(ds, q * factor_XR1)
    return torch.bmm(ds.transpose(1, 2), x.k_XKd[heads]).mul_(factor_XR1)


def _uses_of_p(recipe: AttentionRecipe) -> tuple[bool, bool, bool]:
    """Whether P' (and not P) stands in dV, in dS, and in D."""
    in_ds = recipe.grad_p == "quantised"
    return recipe.dv_p == "quantised", in_ds, in_ds or recipe.delta == "output"


def natural_lse(x: Operands, recipe: AttentionRecipe, m_XR: Tensor, l_XR: Tensor) -> Tensor:
    """Natural logarithm of the sum of exp(logits), of the logits without smoothing: ln 2 * (m - g + log2 l); -inf for a row without keys."""
    lse = (m_XR - recipe.p_gain_log2 + l_XR.log2()) * math.log(2.0)
    return lse if x.lse_offset_XR is None else lse + x.lse_offset_XR


def forward(
    q_BNHd: Tensor,
    k_BNHd: Tensor,
    v_BNHd: Tensor,
    recipe: AttentionRecipe,
    *,
    scale: float | None = None,
    kv_len: Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense forward in `dtype`. Arguments as in `videoqat.attention.attention`.

    Returns:
        out (B, Nq, H, d), and lse, m, l (B, H, Nq), all of `dtype`.
    """
    B, num_queries, H, d = q_BNHd.shape
    q_BNHd, k_BNHd = rotated(q_BNHd, recipe), rotated(k_BNHd, recipe)
    x = prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=d**-0.5 if scale is None else scale, kv_len_B=kv_len, causal=causal, dtype=dtype)
    every = slice(None)
    out, m_XR, l_XR = forward_rows(x, recipe, every, every, _dense_buffers(x, FORWARD_BUFFERS))
    lse = natural_lse(x, recipe, m_XR, l_XR)
    lse, m_BHN, l_BHN = (y.reshape(B, H, num_queries) for y in (lse, m_XR, l_XR))
    return tokens_first(out, B, H, dtype), lse, m_BHN, l_BHN


def backward(
    grad_out_BNHd: Tensor,
    q_BNHd: Tensor,
    k_BNHd: Tensor,
    v_BNHd: Tensor,
    m_BHN: Tensor,
    l_BHN: Tensor,
    recipe: AttentionRecipe,
    *,
    scale: float | None = None,
    kv_len: Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense backward in `dtype`: dQ, dK, dV of the shapes of q, k, v. `m_BHN` and `l_BHN` as `forward` returned them."""
    B, _, H, d = q_BNHd.shape
    num_keys, num_kv_heads = k_BNHd.shape[1:3]
    q_BNHd, k_BNHd = rotated(q_BNHd, recipe), rotated(k_BNHd, recipe)
    x = prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=d**-0.5 if scale is None else scale, kv_len_B=kv_len, causal=causal, dtype=dtype)
    grad_out = rows_first(grad_out_BNHd, num_kv_heads).to(dtype)
    m_XR, l_XR = (y.to(dtype).reshape(x.q_XRd.shape[:2]) for y in (m_BHN, l_BHN))
    dk, dv = torch.zeros_like(x.k_XKd), torch.zeros_like(x.v_XKd)
    every = slice(None)
    dq = backward_rows(x, recipe, every, every, grad_out, m_XR, l_XR, dk, dv, _dense_buffers(x, BACKWARD_BUFFERS))
    dk, dv = (tokens_first(y[:, :num_keys], B, num_kv_heads, dtype) for y in (dk, dv))
    return rotated(tokens_first(dq, B, H, dtype), recipe), rotated(dk, recipe), dv


def _dense_buffers(x: Operands, count: int) -> list[Tensor]:
    shape = (x.q_XRd.shape[0], x.k_XKd.shape[1], x.q_XRd.shape[1])
    return [torch.empty(shape, dtype=x.q_XRd.dtype, device=x.q_XRd.device) for _ in range(count)]
