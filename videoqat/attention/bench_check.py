"""Whether what is timed is right: outputs and gradients of full size against the fp64 reference, on a part that can be afforded."""

import torch
from torch import Tensor

from videoqat.attention import reference, sagebwd
from videoqat.attention.rotation import rotated
from videoqat.recipes import AttentionRecipe

LAST_QUERIES = reference.SMOOTH_Q_TOKENS  # whole blocks of it, so that smooth_q's means are the same
TILE_ELEMENTS = 2**26


@torch.no_grad()
def relative_errors(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, grad_out_BNHd: Tensor, outputs: tuple[Tensor, ...], recipe: AttentionRecipe
) -> dict[str, float]:
    """Relative L2 errors of `outputs`, which are (out,) or (out, dq, dk, dv), of attention without mask, with as many key heads as query heads.

    Returns:
        out: over the last 128 queries (or fewer) of every head of every sample; dq, dk, dv: over every token of the last head of the last
        sample. (A query's output needs all keys, and a key's gradient all queries, so those are the cheapest parts that can't miss one.)
    """
    B, num_queries, H, _ = q_BNHd.shape
    start = (num_queries - 1) // LAST_QUERIES * LAST_QUERIES
    error = size = 0.0
    for b in range(B):
        for h in range(H):
            q, k, v, got = (x[b : b + 1, :, h : h + 1] for x in (q_BNHd, k_BNHd, v_BNHd, outputs[0]))
            truth = _forward(q[:, start:], k, v, recipe)[0]
            error += float((got[:, start:].double() - truth).square().sum())
            size += float(truth.square().sum())
    errors = {"out": (error / size) ** 0.5}
    if len(outputs) > 1:
        q, k, v, grad_out = (x[B - 1 :, :, H - 1 :] for x in (q_BNHd, k_BNHd, v_BNHd, grad_out_BNHd))
        for name, got, truth in zip(("dq", "dk", "dv"), outputs[1:], _gradients(q, k, v, grad_out, recipe), strict=True):
            difference = got[B - 1 :, :, H - 1 :].double() - truth
            errors[name] = float(difference.norm() / truth.norm())
    return errors


def _forward(q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, recipe: AttentionRecipe) -> tuple[Tensor, ...]:
    """out, lse, m, l in fp64."""
    if recipe.qk == "int8":
        return sagebwd.forward(q_BNHd, k_BNHd, v_BNHd, recipe, scale=q_BNHd.shape[3] ** -0.5, kv_len_B=None, causal=False, dtype=torch.float64)
    return reference.forward(q_BNHd, k_BNHd, v_BNHd, recipe)


def _gradients(q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, grad_out_BNHd: Tensor, recipe: AttentionRecipe) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in fp64 of one head, some rows at a time."""
    if recipe.qk == "int8":
        saved = _forward(q_BNHd, k_BNHd, v_BNHd, recipe)
        options = {"scale": q_BNHd.shape[3] ** -0.5, "kv_len_B": None, "causal": False, "dtype": torch.float64}
        return sagebwd.backward(grad_out_BNHd, q_BNHd, k_BNHd, v_BNHd, saved[0], saved[2], saved[3], recipe, **options)
    num_queries, num_keys, d = q_BNHd.shape[1], k_BNHd.shape[1], q_BNHd.shape[3]
    q_BNHd, k_BNHd = rotated(q_BNHd, recipe), rotated(k_BNHd, recipe)
    x = reference.prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=d**-0.5, kv_len_B=None, causal=False, dtype=torch.float64)
    grad_out = reference.rows_first(grad_out_BNHd, 1).double()
    dq, dk, dv = torch.empty_like(x.q_XRd), torch.zeros_like(x.k_XKd), torch.zeros_like(x.v_XKd)
    every = slice(None)
    step = max(1, min(num_queries, TILE_ELEMENTS // x.k_XKd.shape[1]))
    memory = [torch.empty(x.k_XKd.shape[1] * step, dtype=torch.float64, device=dq.device) for _ in range(reference.BACKWARD_BUFFERS)]
    for first in range(0, num_queries, step):
        rows = slice(first, min(first + step, num_queries))
        shape = (1, x.k_XKd.shape[1], rows.stop - first)
        buffers = [buffer[: shape[1] * shape[2]].view(shape) for buffer in memory]
        _, m_XR, l_XR = reference.forward_rows(x, recipe, every, rows, buffers)
        dq[:, rows] = reference.backward_rows(x, recipe, every, rows, grad_out[:, rows], m_XR, l_XR, dk, dv, buffers)
    dq, dk, dv = (reference.tokens_first(y, 1, 1, torch.float64) for y in (dq, dk[:, :num_keys], dv[:, :num_keys]))
    return rotated(dq, recipe), rotated(dk, recipe), dv
