"""The forward pass, for inference and training alike: O, and the two numbers a row that the backward needs, m and l.

    t = log2_scale * Q' K'^T          m = ceil(running maximum of t), an integer
    p = 2^(t - m + g)                 l = sum of p
    O = (sum of p' V') / l

One program takes BLOCK_M queries of one head through all keys. The operands come quantised (quantize.py); what is quantised here is P,
without moving data between threads (probabilities.py). Two identities save work and change no bit of the codes: the maximum over a block of
p is the p of the maximum logit, so the same block maxima serve m and the scales; and with m an integer, what was summed before m rose is
rescaled by an exact power of two. (Exact in the codes, too, as long as a scale doesn't leave E4M3's normal numbers: with the gain g of 11,
only weights below 2^-14 of the largest can. Without a gain it is a third of what matters, so there the maximum is found first, in a pass
of its own: MAXIMUM_FIRST.) The backward finds D by itself (attn_backward.py), so there is no O_hp here.
"""

import triton
import triton.language as tl

from videoqat_kernels.triton_ops.probabilities import block_max, by_thread, p_codes, p_operand, p_scale, p_without_blocks, token_of_column
from videoqat_kernels.triton_ops.rounding import operand

# Below every logit: the running maximum before the first key, and that of a row without keys. Finite, so that no inf - inf arises.
NO_MAXIMUM = tl.constexpr(-1.0e30)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _over_keys(
    acc, row_sum, row_max, q, desc_k, desc_v, BIAS, kv_row, start, stop, limit, log2_scale, gain,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr, P_FORMAT: tl.constexpr,
    QUANTISED_SUM: tl.constexpr, TWO_LEVEL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = P_FORMAT == "nvfp4" or P_FORMAT == "mxfp4" or P_FORMAT == "mxfp8"
    for n0 in range(start, stop, BLOCK_N):
        k = operand(desc_k.load([kv_row + n0, 0]))
        t = tl.dot(q, k.T)
        if HAS_BIAS:
            t = tl.fma(t, log2_scale, tl.load(BIAS + n0 + token_of_column(tl.arange(0, BLOCK_N), GROUP))[None, :])
            log2_scale_now = 1.0
        else:
            log2_scale_now = log2_scale
        if MASKED:
            token = n0 + token_of_column(tl.arange(0, BLOCK_N), GROUP)
            t = tl.where(token[None, :] < limit[:, None], t, float("-inf"))
        largest = block_max(by_thread(t, GROUP))
        new_max = tl.maximum(row_max, tl.ceil(tl.max(tl.max(largest, 2), 1) * log2_scale_now))
        shift = gain - new_max
        p = tl.exp2(tl.fma(t, log2_scale_now, shift[:, None]))
        p5 = by_thread(p, GROUP)
        alpha = tl.exp2(row_max - new_max)
        # Each of the four threads of a row keeps its own part of l; they meet after the loop.
        row_sum = row_sum * alpha[:, None]
        acc = acc * alpha[:, None]
        row_max = new_max
        plain_sum = tl.sum(tl.sum(tl.sum(p5, 4), 2), 1)
        if not QUANTISED_SUM:
            row_sum += plain_sum
        if BLOCKS:
            amax = tl.exp2(tl.fma(largest, log2_scale_now, shift[:, None, None]))
            if TWO_LEVEL:
                # One tile is one 128 keys of two_level_p.
                row_scale = tl.max(tl.max(amax, 2), 1) * 0.000372023809523809524
                row_scale = tl.where(row_scale < SMALLEST_NORMAL, 0.0, row_scale)  # its reciprocal would be infinite
                inverse = tl.where(row_scale == 0, 0.0, tl.div_rn(tl.full(row_scale.shape, 1.0, tl.float32), row_scale))
                amax = amax * inverse[:, None, None]
                scaled = p5 * inverse[:, None, None, None, None]
            else:
                scaled = p5
            scale, r = p_scale(amax, P_FORMAT)
            codes = p_codes(scaled * r[:, :, None, :, None], P_FORMAT)
            if QUANTISED_SUM:
                in_block = tl.sum(tl.sum(tl.minimum(codes, 448.0 if P_FORMAT == "mxfp8" else 6.0), 4), 2)
                quantised_sum = tl.sum(in_block * scale, 1)
                if TWO_LEVEL:
                    quantised_sum = quantised_sum * row_scale[:, None]
            p_quantised = tl.reshape(p_operand(codes, scale[:, :, None, :, None], P_FORMAT), [BLOCK_M, BLOCK_N])
        else:
            p_quantised = p_without_blocks(p, P_FORMAT)
            if QUANTISED_SUM:
                quantised_sum = tl.sum(tl.sum(tl.sum(by_thread(p_quantised.to(tl.float32), GROUP), 4), 2), 1)
        if QUANTISED_SUM:  # a GPU's minimum drops NaN where codes saturate: it shows in the sum of the unquantised weights only
            row_sum += tl.where(plain_sum == plain_sum, quantised_sum, plain_sum)  # noqa: PLR0124
        v = operand(desc_v.load([kv_row + n0, 0]))
        if TWO_LEVEL:
            acc += row_scale[:, None] * tl.dot(p_quantised, v)
        else:
            acc = tl.dot(p_quantised, v, acc)
    return acc, row_sum, row_max


@triton.jit
def _maximum_over_keys(
    row_max, q, desc_k, BIAS, kv_row, start, stop, limit, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    for n0 in range(start, stop, BLOCK_N):
        t = tl.dot(q, operand(desc_k.load([kv_row + n0, 0])).T) * log2_scale
        if HAS_BIAS:
            t += tl.load(BIAS + n0 + token_of_column(tl.arange(0, BLOCK_N), GROUP))[None, :]
        if MASKED:
            token = n0 + token_of_column(tl.arange(0, BLOCK_N), GROUP)
            t = tl.where(token[None, :] < limit[:, None], t, float("-inf"))
        row_max = tl.maximum(row_max, tl.ceil(tl.max(t, 1)))
    return row_max


@triton.jit
def attn_forward_kernel(
    desc_q, desc_k, desc_v, BIAS, O, M, L, LSE, KV_LEN,
    stride_ob, stride_on, stride_oh, first, Nq, Nk, Nq_padded, Nk_padded, H, H_kv, bias_rows, log2_scale, gain,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    P_FORMAT: tl.constexpr, QUANTISED_SUM: tl.constexpr, TWO_LEVEL: tl.constexpr, HAS_BIAS: tl.constexpr, MAXIMUM_FIRST: tl.constexpr,
):  # fmt: skip
    """O, m, l and lse of BLOCK_M queries of one head, counted from query `first`, a multiple of 128.

    BIAS (B, H, bias_rows, Nk_padded): smooth_q's part of t for each 128 queries from there on.
    """
    m0 = first + tl.program_id(0) * BLOCK_M
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    kv_row = (b * H_kv + h // (H // H_kv)) * Nk_padded
    kv_len = tl.load(KV_LEN + b)
    rows = m0 + tl.arange(0, BLOCK_M)
    if CAUSAL:
        limit = tl.minimum(kv_len, rows + 1 + kv_len - Nq)
        stop = tl.minimum(kv_len, m0 + BLOCK_M + kv_len - Nq)
        unmasked = tl.maximum(tl.minimum(kv_len, m0 + 1 + kv_len - Nq), 0) // BLOCK_N * BLOCK_N
    else:
        limit = tl.zeros([BLOCK_M], tl.int32) + kv_len
        stop = kv_len
        unmasked = kv_len // BLOCK_N * BLOCK_N
    q = operand(desc_q.load([bh * Nq_padded + m0, 0]))
    if HAS_BIAS:
        BIAS += (bh.to(tl.int64) * bias_rows + (m0 - first) // 128) * Nk_padded
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    row_sum = tl.zeros([BLOCK_M, 4], tl.float32)
    row_max = tl.full([BLOCK_M], NO_MAXIMUM, tl.float32)
    if MAXIMUM_FIRST:
        row_max = _maximum_over_keys(
            row_max, q, desc_k, BIAS, kv_row, 0, unmasked, limit, log2_scale, BLOCK_M, BLOCK_N, GROUP, False, HAS_BIAS)  # fmt: skip
        row_max = _maximum_over_keys(
            row_max, q, desc_k, BIAS, kv_row, unmasked, stop, limit, log2_scale, BLOCK_M, BLOCK_N, GROUP, True, HAS_BIAS)  # fmt: skip
    acc, row_sum, row_max = _over_keys(
        acc, row_sum, row_max, q, desc_k, desc_v, BIAS, kv_row, 0, unmasked, limit, log2_scale, gain,
        BLOCK_M, BLOCK_N, GROUP, False, P_FORMAT, QUANTISED_SUM, TWO_LEVEL, HAS_BIAS)  # fmt: skip
    acc, row_sum, row_max = _over_keys(
        acc, row_sum, row_max, q, desc_k, desc_v, BIAS, kv_row, unmasked, stop, limit, log2_scale, gain,
        BLOCK_M, BLOCK_N, GROUP, True, P_FORMAT, QUANTISED_SUM, TWO_LEVEL, HAS_BIAS)  # fmt: skip

    l = tl.sum(row_sum, 1)
    inverse_l = tl.where(l == 0, 0.0, 1.0 / l)
    columns = tl.arange(0, DP)
    inside = (rows[:, None] < Nq) & (columns[None, :] < D)
    out = O + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + rows.to(tl.int64)[:, None] * stride_on + columns[None, :]
    tl.store(out, (acc * inverse_l[:, None]).to(O.dtype.element_ty), mask=inside)
    row = bh.to(tl.int64) * Nq + rows
    real = rows < Nq
    tl.store(M + row, tl.where(l == 0, 0.0, row_max), mask=real)
    tl.store(L + row, l, mask=real)
    tl.store(LSE + row, tl.where(l == 0, float("-inf"), (row_max - gain + tl.log2(l)) * 0.6931471805599453), mask=real)
