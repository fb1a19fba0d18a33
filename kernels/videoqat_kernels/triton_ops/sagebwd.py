"""SageBwd on the host's side: quantise to INT8, launch the kernels of sagebwd_kernels.py. What it computes: docs/numerics.md, section 7."""

import torch
import triton
from torch import Tensor

from videoqat_kernels.triton_ops.attention import (
    LOG2_E,
    ForwardResult,
    Recipe,
    _channels_side_by_side,
    _lengths,
    _on,
    _rows,
)
from videoqat_kernels.triton_ops.quantize import padded_channels, padded_tokens
from videoqat_kernels.triton_ops.sagebwd_kernels import (
    BLOCK,
    int8_dkdv_kernel,
    int8_dq_kernel,
    int8_forward_kernel,
    int8_prepare_gradient_kernel,
    int8_quantize_kernel,
)
from videoqat_kernels.triton_ops.smoothing import mean_over_tokens

BLOCK_TOKENS = BLOCK.value
FORWARD_QUERIES = 128
MIN_CHANNELS = 32  # what an INT8 product sums at a time


def empty_codes(q_BNHd: Tensor, k_BNHd: Tensor) -> list[Tensor]:
    """Uninitialised tensors like `forward`'s codes: int8 codes (B, H, padded N, padded d) and fp32 scales (B, H, padded N / 64) of q, then of k."""
    return [*_code_buffers(q_BNHd), *_code_buffers(k_BNHd)]


def quantize_int8(x_BNHd: Tensor, lengths_B: Tensor, mean: Tensor | None = None) -> list[Tensor]:
    """[codes, scales] of x, one scale for each 64 tokens of a head, in one pass over memory.

    Args:
        x_BNHd: (B, N, H, d), channels side by side. Not changed.
        lengths_B: (B,) int32; tokens from there on count as zeros.
        mean: fp32 (B, H, 1, d), subtracted first.
    """
    B, _, H, d = x_BNHd.shape
    codes, scales = _code_buffers(x_BNHd)
    Np, Dp = codes.shape[2:]
    int8_quantize_kernel[(Np // BLOCK_TOKENS, B * H)](
        x_BNHd, codes, scales, lengths_B, mean, *x_BNHd.stride()[:3], Np, H, D=d, DP=Dp, SUBTRACT_MEAN=mean is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return [codes, scales]


def forward(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, kv_len_B: Tensor | None, recipe: Recipe, scale: float, causal: bool, keep_codes: bool
) -> ForwardResult:
    """Like `attention.forward`, for a recipe whose operands are int8. m is the row maximum in log2 units as it is (not rounded up)."""
    B, Nq, H, d = q_BNHd.shape
    Nk, H_kv = k_BNHd.shape[1:3]
    kv_len = _lengths(kv_len_B, B, Nk, q_BNHd.device)
    q_BNHd, k_BNHd, v_BNHd = (_channels_side_by_side(x) for x in (q_BNHd, k_BNHd, v_BNHd))
    with _on(q_BNHd):
        mean_k = mean_over_tokens(k_BNHd, kv_len) if recipe.smooth_k else None
        q, q_scales = quantize_int8(q_BNHd, _lengths(None, B, Nq, q_BNHd.device))
        k, k_scales = quantize_int8(k_BNHd, kv_len, mean_k)
        v, v_scales = quantize_int8(v_BNHd, kv_len)
        out = torch.empty((B, Nq, H, d), dtype=q_BNHd.dtype, device=q_BNHd.device)
        lse, m, l = (torch.empty((B, H, Nq), dtype=torch.float32, device=q_BNHd.device) for _ in range(3))
        int8_forward_kernel[(triton.cdiv(Nq, FORWARD_QUERIES), B * H)](
            _rows(q, FORWARD_QUERIES), _rows(k, BLOCK_TOKENS), _rows(v, BLOCK_TOKENS), q_scales, k_scales, v_scales, out, m, l, lse, kv_len,
            *out.stride()[:3], Nq, q.shape[2], k.shape[2], H, H_kv, LOG2_E * scale,
            D=d, DP=q.shape[3], BLOCK_M=FORWARD_QUERIES, CAUSAL=causal, num_warps=8, num_stages=2,
        )  # fmt: skip
        if mean_k is not None:  # what smoothing took from every logit of the row
            mean_of_head = mean_k.repeat_interleave(H // H_kv, dim=1).squeeze(2)
            lse += scale * torch.einsum("bnhd,bhd->bhn", q_BNHd.float(), mean_of_head)
    return ForwardResult(out, lse, m, l, [q, q_scales, k, k_scales] if keep_codes else [])


def backward(
    grad_out_BNHd: Tensor,
    v_BNHd: Tensor,
    out_BNHd: Tensor,
    m_BHN: Tensor,
    l_BHN: Tensor,
    codes: list[Tensor],
    kv_len_B: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV, contiguous, in the dtype of `grad_out`, from v as it came and what `forward` returned with `keep_codes`."""
    B, Nq, H, d = grad_out_BNHd.shape
    Nk, H_kv = v_BNHd.shape[1:3]
    device = grad_out_BNHd.device
    kv_len = _lengths(kv_len_B, B, Nk, device)
    grad_out, out, v = (_channels_side_by_side(x) for x in (grad_out_BNHd, out_BNHd, v_BNHd))
    q, q_scales, k, k_scales = codes
    Nq_padded, Nk_padded, DP = q.shape[2], k.shape[2], q.shape[3]
    with _on(grad_out):
        do, do_scales = torch.empty_like(q), torch.empty_like(q_scales)
        log2_sum, delta = (torch.empty((B, H, Nq_padded), dtype=torch.float32, device=device) for _ in range(2))
        int8_prepare_gradient_kernel[(Nq_padded // BLOCK_TOKENS, B * H)](
            grad_out, out, m_BHN, l_BHN, do, do_scales, log2_sum, delta, *grad_out.stride()[:3], *out.stride()[:3], Nq, Nq_padded, H,
            D=d, DP=DP, enable_fp_fusion=False,
        )  # fmt: skip
        dq = torch.empty((B, Nq, H, d), dtype=grad_out.dtype, device=device)
        dk, dv = (torch.empty((B, Nk, H_kv, d), dtype=grad_out.dtype, device=device) for _ in range(2))
        descriptors = [_rows(x, BLOCK_TOKENS) for x in (q, do, k)]
        strides = *grad_out.stride()[:3], *v.stride()[:3]
        int8_dq_kernel[(triton.cdiv(Nq, BLOCK_TOKENS), B * H)](
            descriptors[0], descriptors[2], q_scales, k_scales, grad_out, v, dq, log2_sum, delta, kv_len, *strides, *dq.stride()[:3],
            Nq, Nq_padded, Nk_padded, H, H_kv, LOG2_E * scale, scale, D=d, DP=DP, CAUSAL=causal, num_warps=4, num_stages=2,
        )  # fmt: skip
        int8_dkdv_kernel[(triton.cdiv(Nk, BLOCK_TOKENS), B * H_kv)](
            *descriptors, q_scales, do_scales, k_scales, grad_out, v, dk, dv, log2_sum, delta, kv_len, *strides, *dk.stride()[:3],
            Nq, Nk, Nq_padded, Nk_padded, H, H_kv, LOG2_E * scale, scale, D=d, DP=DP, CAUSAL=causal, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv


def _code_buffers(x_BNHd: Tensor) -> list[Tensor]:
    B, N, H, d = x_BNHd.shape
    Np, Dp = padded_tokens(N), max(MIN_CHANNELS, padded_channels(d))
    codes = torch.empty((B, H, Np, Dp), dtype=torch.int8, device=x_BNHd.device)
    return [codes, torch.empty((B, H, Np // BLOCK_TOKENS), dtype=torch.float32, device=x_BNHd.device)]
