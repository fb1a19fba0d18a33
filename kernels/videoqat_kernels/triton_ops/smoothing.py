"""Means that smooth_k and smooth_q subtract, and what the mean of Q adds to the logits (docs/numerics.md, section 4)."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from videoqat_kernels.triton_ops.quantize import padded_channels, padded_tokens

SMOOTH_Q_TOKENS = 128
BIAS_ELEMENTS = 2**26  # of mean_q K^T at a time: 256 MB


def mean_over_tokens(k_BNHd: Tensor, kv_len: Tensor) -> Tensor:
    """fp32 (B, H, 1, d): the mean of the real tokens of each head."""
    real = torch.arange(k_BNHd.shape[1], device=k_BNHd.device) < kv_len[:, None]
    total = torch.where(real[:, :, None, None], k_BNHd, 0).sum(dim=1, keepdim=True, dtype=torch.float32)
    return (total / kv_len.clamp(min=1)[:, None, None, None]).transpose(1, 2).contiguous()


def mean_over_blocks(q_BNHd: Tensor) -> Tensor:
    """fp32 (B, H, blocks, d): the mean of each 128 tokens of q; a short last block has its own."""
    Nq = q_BNHd.shape[1]
    blocks = padded_tokens(Nq) // SMOOTH_Q_TOKENS
    padded = torch.nn.functional.pad(q_BNHd, (0, 0, 0, 0, 0, padded_tokens(Nq) - Nq)).unflatten(1, (blocks, SMOOTH_Q_TOKENS))
    tokens = torch.full((blocks,), float(SMOOTH_Q_TOKENS), device=q_BNHd.device)
    tokens[-1:].fill_(Nq - (blocks - 1) * SMOOTH_Q_TOKENS)  # an assignment would copy from the host, which no CUDA graph can hold
    return (padded.sum(2, dtype=torch.float32) / tokens[:, None, None]).transpose(1, 2).contiguous()


def biases(mean_q: Tensor, k_BNHd: Tensor, mean_k: Tensor | None, kv_len: Tensor, log2_scale: float) -> Iterator[tuple[int, Tensor]]:
    """What mean_q adds to t, log2_scale * mean_q (K - mean_k)^T in fp32, for some blocks of 128 queries at a time: all would be Nq / 128 * Nk.

    Yields:
        the first block, and (B, H, number of blocks, padded Nk), which is overwritten by the next.
    """
    B, H, blocks, d = mean_q.shape
    Nk, H_kv = k_BNHd.shape[1:3]
    Nk_padded = padded_tokens(Nk)
    at_once = min(blocks, max(1, BIAS_ELEMENTS // (B * H * Nk_padded)))
    memory = torch.empty(B * H * at_once * Nk_padded, dtype=torch.float32, device=mean_q.device)
    for first in range(0, blocks, at_once):
        rows = min(at_once, blocks - first)
        bias = memory[: B * H * rows * Nk_padded].view(B, H, rows, Nk_padded)
        smoothing_bias_kernel[(Nk_padded // 64, triton.cdiv(rows, 16), B * H)](
            mean_q, k_BNHd, mean_k, bias, kv_len, *k_BNHd.stride()[:3], first, blocks, rows, Nk_padded, H, H_kv, log2_scale,
            D=d, DP=padded_channels(d), BLOCK_M=16, BLOCK_N=64, SUBTRACT_MEAN=mean_k is not None,
        )  # fmt: skip
        yield first, bias


@triton.jit
def smoothing_bias_kernel(
    MEAN_Q, K, MEAN_K, BIAS, KV_LEN, stride_kb, stride_kn, stride_kh, first, blocks, rows, Nk_padded, H, H_kv, log2_scale,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTRACT_MEAN: tl.constexpr,
):  # fmt: skip
    """BIAS (B, H, rows, Nk_padded) of the blocks from `first` on. Products in fp32, whatever torch's precision of matrix products is set to."""
    bh = tl.program_id(2)
    b = bh // H
    h = bh % H
    h_kv = h // (H // H_kv)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = token < tl.load(KV_LEN + b)
    from_q = MEAN_Q + (bh.to(tl.int64) * blocks + first + row)[:, None] * D
    from_k = K + b.to(tl.int64) * stride_kb + h_kv.to(tl.int64) * stride_kh + token.to(tl.int64)[:, None] * stride_kn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.static_range(0, DP, 16):
        channel = start + tl.arange(0, 16)[None, :]
        q = tl.load(from_q + channel, mask=(row[:, None] < rows) & (channel < D), other=0.0)
        inside = real[:, None] & (channel < D)
        k = tl.load(from_k + channel, mask=inside, other=0.0).to(tl.float32)
        if SUBTRACT_MEAN:
            mean = tl.load(MEAN_K + (b * H_kv + h_kv) * D + channel, mask=channel < D, other=0.0)
            k = tl.where(inside, k - mean, 0.0)
        acc = tl.dot(q, k.T, acc, input_precision="ieee")
    to = BIAS + (bh.to(tl.int64) * rows + row)[:, None] * Nk_padded + token[None, :]
    tl.store(to, acc * log2_scale, mask=row[:, None] < rows)
