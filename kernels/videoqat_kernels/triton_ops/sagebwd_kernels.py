"""SageBwd's kernels: INT8 attention, forward and backward (docs/numerics.md, section 7; after arXiv 2505.11594).

Six of the seven products are INT8 with int32 accumulators, which is exact; dP = dO V^T is 16 bits. A block of P or dS that shares a scale in
the backward is 64 queries by 64 keys: exactly the tile of a step there, so that its largest magnitude is one reduction and its scale one
number. In the forward P has a scale for each row of a tile of 64 keys, taken from the row's largest score in it, which doesn't depend on the
running maximum: codes don't know in which order tiles were visited, nor how many queries a program takes.
"""

import triton
import triton.language as tl

from videoqat_kernels.triton_ops.rounding import INTERPRET

BLOCK = tl.constexpr(64)
# Below every logit: the running maximum before the first key, and that of a row without keys. Finite, so that no inf - inf arises.
NO_MAXIMUM = tl.constexpr(-1.0e30)
UNSEEN = tl.constexpr(-(2**30))  # below every integer score: those are at most 128 * 127^2
LOG2_127 = tl.constexpr(6.988684686772166)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _block_scale(x):
    """Scale and its reciprocal for the whole tile x, fp32. NaN or an infinity in it gives the scale NaN."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # as integers, where NaN is the largest of all
    bad = largest >= 0x7F800000
    amax = tl.where(bad, 0, largest).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, 127.0)
    zero = scale < SMALLEST_NORMAL
    r = tl.where(zero, 0.0, tl.div_rn(1.0, tl.where(zero, 1.0, scale)))
    return tl.where(bad, float("nan"), tl.where(zero, 0.0, scale)), r


@triton.jit
def _codes(y):
    """fp32 of magnitude up to 127 to the nearest int8, ties to even: after adding 1.5 * 2^23, it stands in the number's lowest byte."""
    return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _sixteen_bits(x):
    """What tl.dot multiplies for dP: fp16 and bf16 as they are, fp32 as bf16; fp32 in the interpreter."""
    if INTERPRET:
        return x.to(tl.float32)
    elif x.dtype == tl.float32:  # (else, not a second return: Triton compiles what comes after one)
        return x.to(tl.bfloat16)
    else:
        return x


@triton.jit
def int8_quantize_kernel(
    X, CODES, SCALES, LENGTHS, MEAN, stride_b, stride_n, stride_h, NP, H,
    D: tl.constexpr, DP: tl.constexpr, SUBTRACT_MEAN: tl.constexpr,
):  # fmt: skip
    """Codes (B, H, NP, DP) and scales (B, H, NP / 64) of x (B, N, H, D) of any strides, minus MEAN (B, H, D); zeros from LENGTHS[b] on."""
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, DP)[None, :]
    real = (tokens < tl.load(LENGTHS + b)) & (columns < D)
    source = X + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + tokens.to(tl.int64) * stride_n + columns
    x = tl.load(source, mask=real, other=0.0).to(tl.float32)
    if SUBTRACT_MEAN:
        x = tl.where(real, x - tl.load(MEAN + bh.to(tl.int64) * D + columns, mask=columns < D, other=0.0), 0.0)
    scale, r = _block_scale(x)
    # r = 0: a block of zeros, or one that holds a NaN, which would leave arbitrary codes.
    tl.store(CODES + (bh.to(tl.int64) * NP + tokens) * DP + columns, _codes(tl.where(r == 0, 0.0, x * r)))
    tl.store(SCALES + bh.to(tl.int64) * (NP // BLOCK) + tl.program_id(0), scale)


@triton.jit
def _forward_over_keys(acc, row_sum, row_max, q, row_factor, desc_k, desc_v, K_SCALES, V_SCALES, kv_row, start, stop, limit, MASKED: tl.constexpr):
    for n0 in range(start, stop, BLOCK):
        block = (kv_row + n0) // BLOCK
        k = desc_k.load([kv_row + n0, 0])
        factor = row_factor * tl.load(K_SCALES + block)
        s = tl.dot(q, k.T)
        if MASKED:
            seen = (n0 + tl.arange(0, BLOCK))[None, :] < limit[:, None]
            s = tl.where(seen, s, UNSEEN)
        largest = tl.max(s, 1)
        tile_max = tl.where(largest == UNSEEN, NO_MAXIMUM, largest.to(tl.float32) * factor)
        shift = LOG2_127 - tile_max
        p = tl.exp2(tl.fma(s.to(tl.float32), tl.broadcast_to(factor[:, None], s.shape), shift[:, None]))
        if MASKED:
            p = tl.where(seen, p, 0.0)
        new_max = tl.maximum(row_max, tile_max)
        alpha = tl.exp2(row_max - new_max)
        weight = tl.exp2(tile_max - new_max) * 0.007874015748031496  # 1/127: p is 127 times too large
        row_max = new_max
        row_sum = row_sum * alpha + tl.sum(p, 1) * weight
        v = desc_v.load([kv_row + n0, 0])
        product = tl.dot(_codes(p), v).to(tl.float32)
        acc = acc * alpha[:, None] + product * (weight * tl.load(V_SCALES + block))[:, None]
    return acc, row_sum, row_max


@triton.jit
def int8_forward_kernel(
    desc_q, desc_k, desc_v, Q_SCALES, K_SCALES, V_SCALES, O, M, L, LSE, KV_LEN,
    stride_ob, stride_on, stride_oh, Nq, Nq_padded, Nk_padded, H, H_kv, log2_scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """O, and m (log2 units), l and lse (natural) of BLOCK_M queries of one head."""
    m0 = tl.program_id(0) * BLOCK_M
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    kv_row = (b * H_kv + h // (H // H_kv)) * Nk_padded
    kv_len = tl.load(KV_LEN + b)
    rows = m0 + tl.arange(0, BLOCK_M)
    if CAUSAL:
        limit = tl.minimum(kv_len, rows + 1 + kv_len - Nq)
        stop = tl.minimum(kv_len, m0 + BLOCK_M + kv_len - Nq)
        unmasked = tl.maximum(tl.minimum(kv_len, m0 + 1 + kv_len - Nq), 0) // BLOCK * BLOCK
    else:
        limit = tl.zeros([BLOCK_M], tl.int32) + kv_len
        stop = kv_len
        unmasked = kv_len // BLOCK * BLOCK
    q = desc_q.load([bh * Nq_padded + m0, 0])
    row_factor = tl.load(Q_SCALES + (bh * Nq_padded + rows) // BLOCK) * log2_scale
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], NO_MAXIMUM, tl.float32)
    acc, row_sum, row_max = _forward_over_keys(
        acc, row_sum, row_max, q, row_factor, desc_k, desc_v, K_SCALES, V_SCALES, kv_row, 0, unmasked, limit, False)  # fmt: skip
    acc, row_sum, row_max = _forward_over_keys(
        acc, row_sum, row_max, q, row_factor, desc_k, desc_v, K_SCALES, V_SCALES, kv_row, unmasked, stop, limit, True)  # fmt: skip

    inverse_l = tl.where(row_sum == 0, 0.0, 1.0 / row_sum)
    columns = tl.arange(0, DP)
    inside = (rows[:, None] < Nq) & (columns[None, :] < D)
    out = O + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + rows.to(tl.int64)[:, None] * stride_on + columns[None, :]
    tl.store(out, (acc * inverse_l[:, None]).to(O.dtype.element_ty), mask=inside)
    row = bh.to(tl.int64) * Nq + rows
    real = rows < Nq
    tl.store(M + row, tl.where(row_sum == 0, 0.0, row_max), mask=real)
    tl.store(L + row, row_sum, mask=real)
    tl.store(LSE + row, tl.where(row_sum == 0, float("-inf"), (row_max + tl.log2(row_sum)) * 0.6931471805599453), mask=real)


@triton.jit
def int8_prepare_gradient_kernel(
    DO, O, M, L, DO_CODES, DO_SCALES, LOG2_SUM, DELTA, stride_db, stride_dn, stride_dh, stride_ob, stride_on, stride_oh, Nq, Nq_padded, H,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Codes and scales of dO, D = rowsum(dO * O), and m + log2 l (huge for a row without keys, and in the padding: P becomes 0)."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, DP)[None, :]
    real = rows < Nq
    inside = real[:, None] & (columns < D)
    row = rows.to(tl.int64)[:, None]
    do = tl.load(DO + b * stride_db + h * stride_dh + row * stride_dn + columns, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(O + b * stride_ob + h * stride_oh + row * stride_on + columns, mask=inside, other=0.0).to(tl.float32)
    at = bh.to(tl.int64) * Nq + rows
    m = tl.load(M + at, mask=real, other=0.0)
    l = tl.load(L + at, mask=real, other=0.0)
    to = bh.to(tl.int64) * Nq_padded + rows
    tl.store(LOG2_SUM + to, tl.where(l == 0, -NO_MAXIMUM, m + tl.log2(tl.where(l == 0, 1.0, l))))
    tl.store(DELTA + to, tl.sum(do * o, 1))
    scale, r = _block_scale(do)
    tl.store(DO_CODES + to[:, None] * DP + columns, _codes(tl.where(r == 0, 0.0, do * r)))
    tl.store(DO_SCALES + bh.to(tl.int64) * (Nq_padded // BLOCK) + tl.program_id(0), scale)


@triton.jit
def _dq_over_keys(
    acc, q, do, log2_sum, delta, factor, desc_k, K_SCALES, V, stride_vn, kv_row, start, stop, limit, kv_len,
    D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, DP)[None, :]
    for n0 in range(start, stop, BLOCK):
        tokens = n0 + tl.arange(0, BLOCK)
        k = desc_k.load([kv_row + n0, 0])
        k_scale = tl.load(K_SCALES + (kv_row + n0) // BLOCK)
        s = tl.dot(q, k.T).to(tl.float32)
        v = tl.load(V + tokens.to(tl.int64)[:, None] * stride_vn + columns, mask=(tokens[:, None] < kv_len) & (columns < D), other=0.0)
        dp = tl.dot(do, _sixteen_bits(v).T)
        p = tl.exp2(s * (factor * k_scale) - log2_sum[:, None])
        if MASKED:
            p = tl.where(tokens[None, :] < limit[:, None], p, 0.0)
        ds = p * (dp - delta[:, None])
        scale, r = _block_scale(ds)
        acc += tl.dot(_codes(ds * r), k).to(tl.float32) * (scale * k_scale)
    return acc


@triton.jit
def int8_dq_kernel(
    desc_q, desc_k, Q_SCALES, K_SCALES, DO, V, DQ, LOG2_SUM, DELTA, KV_LEN,
    stride_db, stride_dn, stride_dh, stride_vb, stride_vn, stride_vh, stride_qb, stride_qn, stride_qh,
    Nq, Nq_padded, Nk_padded, H, H_kv, log2_scale, softmax_scale,
    D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ of 64 queries."""
    m0 = tl.program_id(0) * BLOCK
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    h_kv = h // (H // H_kv)
    kv_row = (b * H_kv + h_kv) * Nk_padded
    kv_len = tl.load(KV_LEN + b)
    rows = m0 + tl.arange(0, BLOCK)
    if CAUSAL:
        limit = tl.minimum(kv_len, rows + 1 + kv_len - Nq)
        stop = tl.minimum(kv_len, m0 + BLOCK + kv_len - Nq)
        unmasked = tl.maximum(tl.minimum(kv_len, m0 + 1 + kv_len - Nq), 0) // BLOCK * BLOCK
    else:
        limit = tl.zeros([BLOCK], tl.int32) + kv_len
        stop = kv_len
        unmasked = kv_len // BLOCK * BLOCK
    columns = tl.arange(0, DP)[None, :]
    inside = (rows[:, None] < Nq) & (columns < D)
    row = rows.to(tl.int64)[:, None]
    q = desc_q.load([bh * Nq_padded + m0, 0])
    factor = tl.load(Q_SCALES + (bh * Nq_padded + m0) // BLOCK) * log2_scale
    from_do = DO + b.to(tl.int64) * stride_db + h.to(tl.int64) * stride_dh + row * stride_dn + columns
    do = _sixteen_bits(tl.load(from_do, mask=inside, other=0.0))
    at = bh.to(tl.int64) * Nq_padded + rows
    log2_sum = tl.load(LOG2_SUM + at)
    delta = tl.load(DELTA + at)
    V += b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh
    acc = tl.zeros([BLOCK, DP], tl.float32)
    acc = _dq_over_keys(
        acc, q, do, log2_sum, delta, factor, desc_k, K_SCALES, V, stride_vn, kv_row, 0, unmasked, limit, kv_len, D, DP, False)  # fmt: skip
    acc = _dq_over_keys(
        acc, q, do, log2_sum, delta, factor, desc_k, K_SCALES, V, stride_vn, kv_row, unmasked, stop, limit, kv_len, D, DP, True)  # fmt: skip
    to = DQ + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + row * stride_qn + columns
    tl.store(to, (acc * softmax_scale).to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _dkdv_over_queries(
    dk, dv, k, v, factor, desc_q, desc_do, Q_SCALES, DO_SCALES, DO, stride_dn, LOG2_SUM, DELTA, q_row, start, stop, tokens, kv_len, diagonal, Nq,
    D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, DP)[None, :]
    for m0 in range(start, stop, BLOCK):
        rows = m0 + tl.arange(0, BLOCK)
        block = (q_row + m0) // BLOCK
        q = desc_q.load([q_row + m0, 0])
        q_scale = tl.load(Q_SCALES + block)
        at = q_row.to(tl.int64) + rows
        log2_sum = tl.load(LOG2_SUM + at)
        delta = tl.load(DELTA + at)
        s = tl.dot(q, k.T).to(tl.float32)
        do = tl.load(DO + rows.to(tl.int64)[:, None] * stride_dn + columns, mask=(rows[:, None] < Nq) & (columns < D), other=0.0)
        dp = tl.dot(_sixteen_bits(do), v.T)
        p = tl.exp2(s * (factor * q_scale) - log2_sum[:, None])
        if MASKED:
            seen = tokens[None, :] < kv_len
            if CAUSAL:
                seen = seen & (tokens[None, :] <= rows[:, None] + diagonal)
            p = tl.where(seen, p, 0.0)
        scale, r = _block_scale(p)
        dv += tl.dot(_codes(p * r).T, desc_do.load([q_row + m0, 0])).to(tl.float32) * (scale * tl.load(DO_SCALES + block))
        ds = p * (dp - delta[:, None])
        scale, r = _block_scale(ds)
        dk += tl.dot(_codes(ds * r).T, q).to(tl.float32) * (scale * q_scale)
    return dk, dv


@triton.jit
def int8_dkdv_kernel(
    desc_q, desc_do, desc_k, Q_SCALES, DO_SCALES, K_SCALES, DO, V, DK, DV, LOG2_SUM, DELTA, KV_LEN,
    stride_db, stride_dn, stride_dh, stride_vb, stride_vn, stride_vh, stride_kb, stride_kn, stride_kh,
    Nq, Nk, Nq_padded, Nk_padded, H, H_kv, log2_scale, softmax_scale,
    D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dK and dV (of equal strides) of 64 keys: all queries of all heads that share them, in order, so no atomics."""
    n0 = tl.program_id(0) * BLOCK
    bh = tl.program_id(1)
    b = bh // H_kv
    h = bh % H_kv
    group = H // H_kv
    kv_len = tl.load(KV_LEN + b)
    tokens = n0 + tl.arange(0, BLOCK)
    token = tokens.to(tl.int64)[:, None]
    columns = tl.arange(0, DP)[None, :]
    k = desc_k.load([bh * Nk_padded + n0, 0])
    factor = tl.load(K_SCALES + (bh * Nk_padded + n0) // BLOCK) * log2_scale
    from_v = V + b.to(tl.int64) * stride_vb + h.to(tl.int64) * stride_vh + token * stride_vn + columns
    v = _sixteen_bits(tl.load(from_v, mask=(tokens[:, None] < kv_len) & (columns < D), other=0.0))
    dk = tl.zeros([BLOCK, DP], tl.float32)
    dv = tl.zeros([BLOCK, DP], tl.float32)
    diagonal = kv_len - Nq  # query i sees keys up to i + diagonal
    start = 0
    masked_until = 0
    if CAUSAL:
        start = tl.minimum(tl.maximum(n0 - diagonal, 0), Nq) // BLOCK * BLOCK
        masked_until = tl.maximum(n0 + BLOCK - 1 - diagonal, start)
    if n0 + BLOCK > kv_len:
        masked_until = Nq
    masked_until = tl.cdiv(tl.minimum(masked_until, Nq), BLOCK) * BLOCK
    if n0 >= kv_len:
        start = masked_until
    for i in range(group):
        head = h * group + i
        q_row = (b * H + head) * Nq_padded
        do_of_head = DO + b.to(tl.int64) * stride_db + head.to(tl.int64) * stride_dh
        dk, dv = _dkdv_over_queries(
            dk, dv, k, v, factor, desc_q, desc_do, Q_SCALES, DO_SCALES, do_of_head, stride_dn, LOG2_SUM, DELTA, q_row, start, masked_until,
            tokens, kv_len, diagonal, Nq, D, DP, True, CAUSAL)  # fmt: skip
        dk, dv = _dkdv_over_queries(
            dk, dv, k, v, factor, desc_q, desc_do, Q_SCALES, DO_SCALES, do_of_head, stride_dn, LOG2_SUM, DELTA, q_row, masked_until, Nq,
            tokens, kv_len, diagonal, Nq, D, DP, False, CAUSAL)  # fmt: skip
    inside = (tokens[:, None] < Nk) & (columns < D)
    to = b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh + token * stride_kn + columns
    tl.store(DK + to, (dk * softmax_scale).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + to, dv.to(DV.dtype.element_ty), mask=inside)
