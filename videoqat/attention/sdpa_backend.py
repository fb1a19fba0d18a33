"""The kernel `sdpa`: attention that nothing quantises, by `torch.nn.functional.scaled_dot_product_attention`.

Without a mask the call is the one that diffusers' stock processors make, argument by argument, so that its results are bitwise those of an
untouched pipeline. Autograd is torch's own.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from videoqat.attention import reference
from videoqat.recipes import AttentionRecipe

BY_NAME_ONLY = ()


def describe(recipe: AttentionRecipe, device_type: str) -> tuple[bool, str]:
    """Whether its arithmetic is native, and why one would choose it."""
    return True, "the recipe quantises nothing: plain scaled_dot_product_attention"


def why_not(recipe: AttentionRecipe, device: str, dtype: torch.dtype, head_dim: int, training: bool) -> str | None:
    """Serves recipes that quantise nothing."""
    return "it can't quantise" if recipe.is_quantised else None


def forward(q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, kv_len_B: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    """out (B, Nq, H, d), differentiable."""
    num_queries, num_keys = q_BNHd.shape[1], k_BNHd.shape[1]
    mask = empty_BN = None
    # A row that may see nothing sees everything and is zeroed afterwards: not every SDPA kernel has a result or a gradient for such rows.
    # As branches: with dynamic shapes, torch.compile needs them decided, and SDPA takes no symbolic bool.
    enable_gqa = True if q_BNHd.shape[2] != k_BNHd.shape[2] else False  # noqa: SIM210
    is_causal = True if causal and kv_len_B is None and num_queries == num_keys else False  # noqa: SIM210  torch aligns causal masks to the top left
    if kv_len_B is not None:
        past_BK11 = (torch.arange(num_keys, device=q_BNHd.device) >= kv_len_B.unsqueeze(1))[:, :, None, None]
        k_BNHd, v_BNHd = (x.masked_fill(past_BK11, 0.0) for x in (k_BNHd, v_BNHd))  # garbage there may be NaN, and 0 * NaN is NaN
        if not causal:  # all queries see the same keys: a mask of one row, as diffusers' own processors make it
            empty_BN = (kv_len_B == 0).unsqueeze(1)
            mask = ((torch.arange(num_keys, device=q_BNHd.device) < kv_len_B.unsqueeze(1)) | empty_BN)[:, None, None]
    if causal and not is_causal:
        limit_BN = reference.key_limit(num_queries, num_keys, q_BNHd.shape[0], kv_len_B, causal, q_BNHd.device)
        assert limit_BN is not None
        empty_BN = limit_BN == 0
        mask = ((torch.arange(num_keys, device=q_BNHd.device) < limit_BN.unsqueeze(2)) | empty_BN.unsqueeze(2)).unsqueeze(1)
    query, key, value = (x.permute(0, 2, 1, 3) for x in (q_BNHd, k_BNHd, v_BNHd))
    out = F.scaled_dot_product_attention(
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    out = out.permute(0, 2, 1, 3)
    return out if empty_BN is None else out.masked_fill(empty_BN[:, :, None, None], 0.0)


def log_sum_exp(q_BNHd: Tensor, k_BNHd: Tensor, kv_len_B: Tensor | None, scale: float | None, causal: bool) -> Tensor:
    """lse (B, H, Nq) fp32, which SDPA computes and keeps to itself: a second Q K^T, head by head. Not differentiable."""
    B, num_queries, H, d = q_BNHd.shape
    num_keys, num_kv_heads = k_BNHd.shape[1:3]
    limit_BN = reference.key_limit(num_queries, num_keys, B, kv_len_B, causal, q_BNHd.device)
    lse = torch.empty(B, H, num_queries, device=q_BNHd.device)
    with torch.no_grad(), torch.autocast(lse.device.type, enabled=False):
        for head in range(H):
            q, k = q_BNHd[:, :, head].float(), k_BNHd[:, :, head * num_kv_heads // H].float()
            logits = q @ k.transpose(1, 2) * (d**-0.5 if scale is None else scale)
            if limit_BN is not None:
                logits = logits.masked_fill(torch.arange(num_keys, device=q.device) >= limit_BN.unsqueeze(2), -math.inf)
            lse[:, head] = logits.logsumexp(-1)
    return lse
