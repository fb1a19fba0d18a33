"""How far quantised attention is from the exact one, and where its numbers get lost."""

import torch
from torch import Tensor

from videoqat.attention import reference, sagebwd
from videoqat.attention.rotation import rotated
from videoqat.formats import FORMATS, block_health
from videoqat.recipes import AttentionRecipe, get_recipe

_EXACT = AttentionRecipe("exact", qk="bf16", pv="bf16", p_gain_log2=0)


def relative_l2(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, in fp64. 0 where both are zero, inf where only b is."""
    error, size = float((a.double() - b.double()).norm()), float(b.double().norm())
    if size == 0:
        return 0.0 if error == 0 else float("inf")
    return error / size


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between a and b, both flattened, in fp64. Blind to a wrong factor: look at `relative_l2`, too."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def attention_health(
    q_BNHd: Tensor,
    k_BNHd: Tensor,
    v_BNHd: Tensor,
    recipe: AttentionRecipe | str,
    *,
    scale: float | None = None,
    kv_len: Tensor | None = None,
    max_queries: int = 256,
) -> dict[str, float]:
    """What `recipe` does to these inputs (shapes as in `attention`), measured on at most `max_queries` queries a head, evenly spread.

    Returns:
        relative_error: relative L2 error of the output against unquantised attention of the same inputs.
        q_, k_, v_, p_scale_zero_share: share of the operand's blocks that hold something and come out all zero.
        q_, k_, v_scale_saturated_share: share of its blocks whose largest magnitude is clipped. (P's can't be: its gain sees to that.)
        scale_zero_share, scale_saturated_share: the largest of these over the operands.
        p_mass_lost_share: share of the softmax weight (of P's sum) that became zero.
        All are 0 for operands that aren't quantised, or that have no blocks. INT8's scales are fp32 numbers: they neither vanish nor saturate.
    """
    with torch.no_grad(), torch.autocast(q_BNHd.device.type, enabled=False):
        return _health(q_BNHd, k_BNHd, v_BNHd, get_recipe(recipe), scale, kv_len, max_queries)


def _health(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, recipe: AttentionRecipe, scale: float | None, kv_len: Tensor | None, max_queries: int
) -> dict[str, float]:
    factor = q_BNHd.shape[3] ** -0.5 if scale is None else scale
    if recipe.qk == "int8":
        return _int8_health(q_BNHd, k_BNHd, v_BNHd, recipe, factor, kv_len, max_queries)
    exact = reference.prepare(q_BNHd, k_BNHd, v_BNHd, _EXACT, scale=factor, kv_len_B=kv_len, causal=False)
    q_BNHd, k_BNHd = rotated(q_BNHd, recipe), rotated(k_BNHd, recipe)
    plain = reference.arrange(q_BNHd, k_BNHd, v_BNHd, recipe, scale=factor, kv_len_B=kv_len, causal=False)
    quantised = reference.prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=factor, kv_len_B=kv_len, causal=False)

    num_rows = plain.q_XRd.shape[1]
    rows = slice(0, num_rows, -(-num_rows // max_queries))
    p_blocks = p_zero_blocks = p_sum = p_lost = error = size = 0.0
    for head in range(plain.q_XRd.shape[0]):  # one at a time: the weights of all heads may be gigabytes
        heads = slice(head, head + 1)
        p, _ = reference.row_weights(quantised, recipe, heads, rows, _tile(quantised, rows))
        p_quantised = reference.quantise_p(p, recipe, torch.empty_like(p))
        p_sum += float(p.sum())
        p_lost += float(p[p_quantised == 0].sum())
        if recipe.pv in FORMATS:
            blocks, blocks_quantised = (x.unflatten(1, (-1, FORMATS[recipe.pv].block_size)).amax(2) for x in (p, p_quantised))
            p_blocks += blocks.numel()
            p_zero_blocks += float(((blocks > 0) & (blocks_quantised == 0)).sum())
        out, _, _ = reference.forward_rows(quantised, recipe, heads, rows, [_tile(quantised, rows)])
        out_exact, _, _ = reference.forward_rows(exact, _EXACT, heads, rows, [_tile(exact, rows)])
        error += float((out - out_exact).double().square().sum())
        size += float(out_exact.double().square().sum())

    health = {"relative_error": (error / size) ** 0.5 if size else 0.0, "p_mass_lost_share": p_lost / p_sum if p_sum else 0.0}
    for name, x, format, axis in (
        ("q", plain.q_XRd, recipe.qk, -1),
        ("k", plain.k_XKd[:, : plain.num_keys], recipe.qk, -1),
        ("v", plain.v_XKd[:, : plain.num_keys], recipe.pv, reference.v_axis(recipe)),
    ):
        blocks, zero, saturated = block_health(x, format, axis, recipe.scale_divisors)
        health[f"{name}_scale_zero_share"] = zero / blocks if blocks else 0.0
        health[f"{name}_scale_saturated_share"] = saturated / blocks if blocks else 0.0
    health["p_scale_zero_share"] = p_zero_blocks / p_blocks if p_blocks else 0.0
    for kind in ("zero", "saturated"):
        health[f"scale_{kind}_share"] = max(value for key, value in health.items() if key.endswith(f"_scale_{kind}_share"))
    return health


def _int8_health(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, recipe: AttentionRecipe, scale: float, kv_len: Tensor | None, max_queries: int
) -> dict[str, float]:
    x = sagebwd.prepare(q_BNHd, k_BNHd, v_BNHd, recipe, scale=scale, kv_len_B=kv_len, causal=False).operands
    exact = reference.prepare(sagebwd.padded(q_BNHd), k_BNHd, v_BNHd, _EXACT, scale=scale, kv_len_B=kv_len, causal=False)
    assert x.limit_XR is not None
    num_rows = x.q_XRd.shape[1]
    rows = slice(0, num_rows, -(-num_rows // max_queries))
    p_sum = p_lost = error = size = 0.0
    for head in range(x.q_XRd.shape[0]):
        heads = slice(head, head + 1)
        out, _, _, p, p_quantised = sagebwd.forward_rows(x, heads, rows)
        out_exact, _, _ = reference.forward_rows(exact, _EXACT, heads, rows, [_tile(exact, rows)])
        out_exact.masked_fill_((x.limit_XR[heads, rows] == 0).unsqueeze(2), 0.0)  # padding: rows that see no key
        p_sum += float(p.sum())
        p_lost += float(p[p_quantised == 0].sum())
        error += float((out - out_exact).double().square().sum())
        size += float(out_exact.double().square().sum())
    health = {"relative_error": (error / size) ** 0.5 if size else 0.0, "p_mass_lost_share": p_lost / p_sum if p_sum else 0.0}
    for name in ("q_", "k_", "v_", ""):
        health[f"{name}scale_zero_share"] = health[f"{name}scale_saturated_share"] = 0.0
    return {**health, "p_scale_zero_share": 0.0}


def _tile(x: reference.Operands, rows: slice) -> Tensor:
    num_rows = len(range(*rows.indices(x.q_XRd.shape[1])))
    return torch.empty(1, x.k_XKd.shape[1], num_rows, device=x.q_XRd.device)
