"""The backward pass: two deterministic kernels, dQ and then dK with dV, each recomputing the scores from the saved codes.

Everything that multiplies a whole row is applied once to dO instead of to each score: with c = 1/l, the preparation stores dO_c = c dO and
D_c = c D, and then with the unnormalised p = 2^(t - m + g) of the forward

    dV = P'^T dO_c        dS = p * (dO_c V'^T - D_c)        dQ = scale * dS K'        dK = scale * dS^T Q'

D = rowsum(P * dP) of the *unquantised* P isn't known beforehand. dQ's kernel starts from any D0 near it, D0 = rowsum(dO * O) (off by what
quantising P does to O), and along the way sums D itself and B = P K', for

    dQ = scale * (sum of P * (dP - D0) K' - (D - D0) B)

One more product there instead of one more in the forward, and nothing more to save. Because D0 is near, nothing cancels.
"""

import triton
import triton.language as tl

from videoqat_kernels.triton_ops.probabilities import block_max, by_thread, p_codes, p_operand, p_scale, p_without_blocks, token_of_column
from videoqat_kernels.triton_ops.rounding import operand


@triton.jit
def prepare_gradient_kernel(
    DO, O, M, L, DO_C, SHIFT, C, D_C, stride_db, stride_dn, stride_dh, stride_ob, stride_on, stride_oh, Nq, Nq_padded, H, gain,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dO_c (B, H, Nq_padded, DP), and for each row c, g - m (-inf for a row without keys, and in the padding: p becomes 0) and c D0."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, DP)[None, :]
    real = rows < Nq
    inside = real[:, None] & (columns < D)
    row = rows.to(tl.int64)[:, None]
    do = tl.load(DO + b * stride_db + h * stride_dh + row * stride_dn + columns, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(O + b * stride_ob + h * stride_oh + row * stride_on + columns, mask=inside, other=0.0).to(tl.float32)
    at = bh.to(tl.int64) * Nq + rows
    m = tl.load(M + at, mask=real, other=0.0)
    l = tl.load(L + at, mask=real, other=0.0)
    c = tl.where(l == 0, 0.0, 1.0 / l)
    do_c = (do * c[:, None]).to(DO_C.dtype.element_ty)
    to = bh.to(tl.int64) * Nq_padded + rows
    tl.store(DO_C + to[:, None] * DP + columns, do_c)
    tl.store(SHIFT + to, tl.where(l == 0, float("-inf"), gain - m))
    tl.store(C + to, c)
    # From the rounded dO_c, so that D_c belongs to the dO_c that the kernels multiply.
    tl.store(D_C + to, tl.sum(o * do_c.to(tl.float32), 1))


@triton.jit
def _quantised_p(p, GROUP: tl.constexpr, P_FORMAT: tl.constexpr):
    """p' as a matrix operand, in blocks along the (permuted) columns."""
    if P_FORMAT == "nvfp4" or P_FORMAT == "mxfp4" or P_FORMAT == "mxfp8":
        p5 = by_thread(p, GROUP)
        scale, r = p_scale(block_max(p5), P_FORMAT)
        codes = p_codes(p5 * r[:, :, None, :, None], P_FORMAT)
        return tl.reshape(p_operand(codes, scale[:, :, None, :, None], P_FORMAT), p.shape)
    else:
        return p_without_blocks(p, P_FORMAT)


@triton.jit
def _dq_over_keys(
    acc, acc_b, row_d, q, do_c, desc_k, desc_v, kv_row, start, stop, limit, shift, d_c, log2_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr, FIND_D: tl.constexpr, P_IN_DS: tl.constexpr,
):  # fmt: skip
    for n0 in range(start, stop, BLOCK_N):
        k = operand(desc_k.load([kv_row + n0, 0]))
        t = tl.dot(q, k.T)
        v = operand(desc_v.load([kv_row + n0, 0]))
        dp = tl.dot(do_c, v.T)
        p = tl.exp2(tl.fma(t, log2_scale, shift[:, None]))
        if MASKED:
            token = n0 + token_of_column(tl.arange(0, BLOCK_N), GROUP)
            p = tl.where(token[None, :] < limit[:, None], p, 0.0)
        if P_IN_DS != "exact":
            p = _quantised_p(p, GROUP, P_IN_DS).to(tl.float32)
        if FIND_D:  # first, so that the tensor cores have work while ds is made
            acc_b = tl.dot(operand(p), k, acc_b)
            row_d += tl.sum(tl.sum(tl.reshape(p * dp, [BLOCK_M, BLOCK_N // 8, 4, 2]), 3), 1)
        ds = p * (dp - d_c[:, None])
        acc = tl.dot(operand(ds), k, acc)
    return acc, acc_b, row_d


@triton.jit
def attn_backward_dq_kernel(
    desc_q, desc_do, desc_k, desc_v, DQ, SHIFT, C, D_C, KV_LEN,
    stride_qb, stride_qn, stride_qh, Nq, Nq_padded, Nk_padded, H, H_kv, log2_scale, softmax_scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    FIND_D: tl.constexpr, P_IN_DS: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M queries; with FIND_D also brings D_C from c D0 to c D, which the other kernel needs."""
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
        unmasked = tl.maximum(tl.minimum(kv_len, m0 + 1 + kv_len - Nq), 0) // BLOCK_N * BLOCK_N
    else:
        limit = tl.zeros([BLOCK_M], tl.int32) + kv_len
        stop = kv_len
        unmasked = kv_len // BLOCK_N * BLOCK_N
    q = operand(desc_q.load([bh * Nq_padded + m0, 0]))
    do_c = operand(desc_do.load([bh * Nq_padded + m0, 0]))
    at = bh.to(tl.int64) * Nq_padded + rows
    shift = tl.load(SHIFT + at)
    d_c = tl.load(D_C + at)
    acc = tl.zeros([BLOCK_M, DP], tl.float32)
    acc_b = tl.zeros([BLOCK_M, DP], tl.float32)
    row_d = tl.zeros([BLOCK_M, 4], tl.float32)
    acc, acc_b, row_d = _dq_over_keys(
        acc, acc_b, row_d, q, do_c, desc_k, desc_v, kv_row, 0, unmasked, limit, shift, d_c, log2_scale,
        BLOCK_M, BLOCK_N, GROUP, False, FIND_D, P_IN_DS)  # fmt: skip
    acc, acc_b, row_d = _dq_over_keys(
        acc, acc_b, row_d, q, do_c, desc_k, desc_v, kv_row, unmasked, stop, limit, shift, d_c, log2_scale,
        BLOCK_M, BLOCK_N, GROUP, True, FIND_D, P_IN_DS)  # fmt: skip
    if FIND_D:
        exact_d_c = tl.sum(row_d, 1) * tl.load(C + at)
        tl.store(D_C + at, exact_d_c)
        acc = acc - acc_b * (exact_d_c - d_c)[:, None]
    columns = tl.arange(0, DP)[None, :]
    to = DQ + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + rows.to(tl.int64)[:, None] * stride_qn + columns
    tl.store(to, (acc * softmax_scale).to(DQ.dtype.element_ty), mask=(rows[:, None] < Nq) & (columns < D))


@triton.jit
def _dkdv_over_queries(
    dk, dv, k, v, desc_q, desc_do, SHIFT, D_C, q_row, start, stop, tokens, kv_len, diagonal, log2_scale,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, P_IN_DV: tl.constexpr, P_IN_DS: tl.constexpr,
):  # fmt: skip
    for m0 in range(start, stop, BLOCK_M):
        rows = m0 + tl.arange(0, BLOCK_M)
        q = operand(desc_q.load([q_row + m0, 0]))
        do_c = operand(desc_do.load([q_row + m0, 0]))
        at = q_row.to(tl.int64) + rows
        shift = tl.load(SHIFT + at)
        d_c = tl.load(D_C + at)
        t = tl.dot(q, k.T)
        dp = tl.dot(do_c, v.T)
        p = tl.exp2(tl.fma(t, log2_scale, shift[:, None]))
        if MASKED:
            seen = tokens[None, :] < kv_len
            if CAUSAL:
                seen = seen & (tokens[None, :] <= rows[:, None] + diagonal)
            p = tl.where(seen, p, 0.0)
        if P_IN_DV == "exact":
            p_dv = operand(p)
        else:
            p_dv = _quantised_p(p, GROUP, P_IN_DV)
        if P_IN_DS != "exact":
            p = _quantised_p(p, GROUP, P_IN_DS).to(tl.float32)
        dv = tl.dot(p_dv.T, do_c, dv)
        ds = p * (dp - d_c[:, None])
        dk = tl.dot(operand(ds).T, q, dk)
    return dk, dv


@triton.jit
def attn_backward_dkdv_kernel(
    desc_q, desc_do, desc_k, desc_v, DK, DV, SHIFT, D_C, KV_LEN,
    stride_kb, stride_kn, stride_kh, Nq, Nk, Nq_padded, Nk_padded, H, H_kv, log2_scale, softmax_scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    P_IN_DV: tl.constexpr, P_IN_DS: tl.constexpr,
):  # fmt: skip
    """dK and dV (of equal strides) of BLOCK_N keys: all queries of all heads that share them, in order, so no atomics."""
    n0 = tl.program_id(0) * BLOCK_N
    bh = tl.program_id(1)
    b = bh // H_kv
    h = bh % H_kv
    group = H // H_kv
    kv_len = tl.load(KV_LEN + b)
    k = operand(desc_k.load([bh * Nk_padded + n0, 0]))
    v = operand(desc_v.load([bh * Nk_padded + n0, 0]))
    tokens = n0 + token_of_column(tl.arange(0, BLOCK_N), GROUP)
    dk = tl.zeros([BLOCK_N, DP], tl.float32)
    dv = tl.zeros([BLOCK_N, DP], tl.float32)
    diagonal = kv_len - Nq  # query i sees keys up to i + diagonal
    start = 0
    masked_until = 0
    if CAUSAL:
        start = tl.minimum(tl.maximum(n0 - diagonal, 0), Nq) // BLOCK_M * BLOCK_M
        masked_until = tl.maximum(n0 + BLOCK_N - 1 - diagonal, start)
    if n0 + BLOCK_N > kv_len:
        masked_until = Nq
    masked_until = tl.cdiv(tl.minimum(masked_until, Nq), BLOCK_M) * BLOCK_M
    if n0 >= kv_len:
        start = masked_until
    for i in range(group):
        q_row = (b * H + h * group + i) * Nq_padded
        dk, dv = _dkdv_over_queries(
            dk, dv, k, v, desc_q, desc_do, SHIFT, D_C, q_row, start, masked_until, tokens, kv_len, diagonal, log2_scale,
            BLOCK_M, GROUP, True, CAUSAL, P_IN_DV, P_IN_DS)  # fmt: skip
        dk, dv = _dkdv_over_queries(
            dk, dv, k, v, desc_q, desc_do, SHIFT, D_C, q_row, masked_until, Nq, tokens, kv_len, diagonal, log2_scale,
            BLOCK_M, GROUP, False, CAUSAL, P_IN_DV, P_IN_DS)  # fmt: skip
    columns = tl.arange(0, DP)[None, :]
    inside = (tokens[:, None] < Nk) & (columns < D)
    to = b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh + tokens.to(tl.int64)[:, None] * stride_kn + columns
    tl.store(DK + to, (dk * softmax_scale).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + to, dv.to(DV.dtype.element_ty), mask=inside)
