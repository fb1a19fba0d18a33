"""attention() against the naive, row by row oracle: every recipe, every length around a block, heads, strides, masks, scales.

Tolerances. fp32 against fp64 of the same formulas is 1e-6 or better as long as all codes agree; bounds here are 1e-5. The codes of Q, K and V
do agree bit by bit. p's last bits may differ, and where they decide how an element rounds, one code differs by a step: the oracle knows those
rows ("unsure"), which are rare. They are held to 0.3 in O, and get no gradient from above, so that dK and dV, which sum over rows, can be held
to the tight bound, too.
"""

import dataclasses
import math

import pytest
import torch
from helpers.naive_attention import NaiveAttention, straight_through_autograd

from videoqat.attention import attention
from videoqat.recipes import FORWARD_FIELDS, RECIPES, AttentionRecipe

VARIANTS = {
    **{name: recipe for name, recipe in RECIPES.items() if recipe.is_quantised and recipe.qk != "int8"},
    "mxfp8": AttentionRecipe("mxfp8", qk="mxfp8", pv="mxfp8"),
    "mxfp4_fp8": AttentionRecipe("mxfp4_fp8", qk="fp8", pv="mxfp4", p_gain_log2=3),
    "smooth_q": AttentionRecipe("smooth_q", smooth_q=True),
    "smooth_k": AttentionRecipe("smooth_k", smooth_k=True),
    "two_level_p": AttentionRecipe("two_level_p", two_level_p=True, p_gain_log2=0),
    "normalizer": AttentionRecipe("normalizer", normalizer="quantised"),
    "normalizer_output": AttentionRecipe("normalizer_output", normalizer="quantised", delta="output"),
    "grad_p": AttentionRecipe("grad_p", normalizer="quantised", grad_p="quantised"),
    "grad_p_exact_dv": AttentionRecipe("grad_p_exact_dv", normalizer="quantised", grad_p="quantised", dv_p="exact"),
    "v_head_dim": AttentionRecipe("v_head_dim", v_blocks="head_dim", scale_divisors=(6, 4)),
    "mxfp4_v_head_dim": AttentionRecipe("mxfp4_v_head_dim", qk="bf16", pv="mxfp4", v_blocks="head_dim", normalizer="quantised"),
    "rotated": AttentionRecipe("rotated", rotate_qk=True, smooth_q=True, smooth_k=True, scale_divisors=(6, 4)),
    "twice": AttentionRecipe("twice", twice=("q", "k", "v", "p"), scale_divisors=(6, 4)),
    "everything": AttentionRecipe(
        "everything", p_gain_log2=0, scale_divisors=(6, 4), smooth_q=True, smooth_k=True, two_level_p=True, normalizer="quantised", delta="output"
    ),
}


def make(batch=1, num_queries=40, num_keys=None, heads=2, kv_heads=None, head_dim=32, seed=0, offset=0.3):
    """Q, K, V with channel offsets (so that smoothing and the normaliser matter) and dO."""
    generator = torch.Generator().manual_seed(seed)
    num_keys, kv_heads = num_keys or num_queries, kv_heads or heads

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, grad_out = normal(batch, num_queries, heads, head_dim), normal(batch, num_queries, heads, head_dim)
    k, v = (normal(batch, num_keys, kv_heads, head_dim) + offset * normal(head_dim) for _ in range(2))
    return q * 1.5, k, v + offset, grad_out


def relative(actual, expected):
    return float((actual.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))


def check(q, k, v, grad_out, recipe, tolerance=1e-5, **options):
    """Forward, lse and backward of attention() against the oracle."""
    naive = NaiveAttention(q, k, v, recipe, **options)
    expected, expected_lse, unsure = naive.forward()
    assert unsure.float().mean() <= 0.25, "too many rows hang on a last bit: this compares nothing"
    grad_out = grad_out.masked_fill(unsure.unsqueeze(-1), 0.0)
    before = [x.clone() for x in (q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, recipe, return_lse=True, **options)
    gradients = torch.autograd.grad(out, leaves, grad_out)

    for actual, original in zip(leaves, before, strict=True):
        assert torch.equal(actual.nan_to_num(), original.nan_to_num()), "the caller's tensor was changed"
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    error = (out.double() - expected).norm(dim=-1)
    bound = torch.where(unsure, 0.3, tolerance) * expected.norm(dim=-1)
    assert (error <= bound + 1e-30).all(), f"O is off by {float((error / expected.norm(dim=-1)).nan_to_num().max()):.1e} in some row"
    sure = ~unsure.transpose(1, 2) if recipe.normalizer == "quantised" else torch.ones_like(lse, dtype=torch.bool)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    seen = sure & lse.isfinite()
    assert ((lse.double() - expected_lse).abs() <= tolerance * (1 + expected_lse.abs()))[seen].all()
    for name, actual, truth in zip(("dQ", "dK", "dV"), gradients, naive.backward(grad_out), strict=True):
        assert actual.isfinite().all(), name
        # Where a gradient is a difference of nearly equal numbers (with one key, 0), what counts is the size of those numbers.
        floor = 0.1 * grad_out.norm()
        assert (actual.double() - truth).norm() <= tolerance * (truth.norm() + floor), f"{name} is off by {relative(actual, truth):.1e}"
    return out, lse, gradients


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name):
    q, k, v, grad_out = make(batch=2, num_queries=37, num_keys=50, heads=4, kv_heads=2, seed=1)
    check(q, k, v, grad_out, VARIANTS[name])
    check(q, k, v, grad_out, VARIANTS[name], kv_len=torch.tensor([50, 19]), causal=True, scale=0.25)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_over_more_than_one_tile_of_128(name):
    q, k, v, grad_out = make(num_queries=140, num_keys=270, heads=1, seed=2)
    check(q, k, v, grad_out, VARIANTS[name])


@pytest.mark.parametrize("length", [*range(1, 41), 63, 64, 65, 127, 128, 129, 130, 255, 256, 257])
def test_lengths(length):
    check(*make(num_queries=length, heads=1, seed=length), RECIPES["attn_qat"])


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 77), (3, 16), (77, 1), (50, 7), (7, 50), (20, 129), (129, 20)])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_of_different_number(num_queries, num_keys, causal):
    for name in ("attn_qat_search", "sage3"):
        check(*make(num_queries=num_queries, num_keys=num_keys, seed=3), RECIPES[name], causal=causal)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_head_dims(head_dim):
    for name in ("attn_qat_search", "mxfp4"):
        check(*make(num_queries=35, head_dim=head_dim, seed=head_dim), RECIPES[name])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (6, 3), (3, 3)])
def test_grouped_heads(heads, kv_heads):
    check(*make(batch=2, num_queries=20, num_keys=33, heads=heads, kv_heads=kv_heads, seed=4), RECIPES["attn_qat"], causal=True)


@pytest.mark.parametrize("name", ["attn_qat", "attn_qat_search", "sage3", "mxfp4", "normalizer", "b200_nvfp4_fp8", "v_head_dim", "rotated"])
@pytest.mark.parametrize("causal", [False, True])
def test_key_lengths_with_garbage_behind_them(name, causal):
    q, k, v, grad_out = make(batch=4, num_queries=21, num_keys=45, seed=5)
    kv_len = torch.tensor([45, 17, 0, 1], dtype=torch.int32)
    for b, n in enumerate(kv_len):
        k[b, n:], v[b, n:] = math.nan, math.inf
    out, lse, gradients = check(q, k, v, grad_out, VARIANTS[name], kv_len=kv_len, causal=causal)
    assert (out[2] == 0).all()
    assert (lse[2] == -math.inf).all()
    assert all((gradient[2] == 0).all() for gradient in gradients)
    for b, n in enumerate(kv_len):
        assert (gradients[1][b, n:] == 0).all()
        assert (gradients[2][b, n:] == 0).all()
    if causal:  # bottom right: with 17 keys and 21 queries, the first four see nothing and the fifth one key
        assert (out[1, :4] == 0).all()
        assert (out[1, 4:].abs().sum(-1) > 0).all()


def test_causal_sees_up_to_and_with_the_diagonal():
    q, k, v, _ = make(num_queries=8, num_keys=12, heads=1, seed=6)
    out = attention(q, k, v, "qk_nvfp4", causal=True)  # with V quantised, keys that aren't seen still share a block with some that are
    for i in range(8):
        alone = attention(q[:, i : i + 1], k[:, : i + 5], v[:, : i + 5], "qk_nvfp4")
        torch.testing.assert_close(out[:, i : i + 1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["heads_first", "strided", "interleaved", "expanded"])
def test_any_strides(layout):
    q, k, v, grad_out = make(batch=2, num_queries=18, num_keys=33, seed=7)
    if layout == "heads_first":
        q, k, v, grad_out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad_out))
    elif layout == "strided":
        wide = [torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan) for x in (q, k, v, grad_out)]
        for w, x in zip(wide, (q, k, v, grad_out), strict=True):
            w[..., ::2] = x
        q, k, v, grad_out = (w[..., ::2] for w in wide)
    elif layout == "interleaved":  # as a fused projection gives k and v
        fused = torch.stack((k, v), dim=2)
        k, v = fused.unbind(dim=2)
    else:
        q, k, v = (x[:1].expand(2, -1, -1, -1) for x in (q, k, v))
    assert layout == "expanded" or not (q.is_contiguous() and k.is_contiguous())
    for name in ("attn_qat_search", "sage3"):
        check(q, k, v, grad_out, RECIPES[name])


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_custom_scale(scale):
    check(*make(num_queries=30, seed=8), RECIPES["attn_qat"], scale=scale)


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_80(sign):
    """All logits near +80, or near -80 (a running maximum that starts at 0 destroys those rows), with real differences between them."""
    q, k, v, grad_out = make(num_queries=24, num_keys=40, heads=1, seed=9)
    direction = torch.zeros(32)
    direction[::2] = 3.0
    q, k = direction + 0.1 * q, sign * direction + 0.1 * k
    scale = 80.0 / float(direction @ direction)
    for name in ("attn_qat", "sage3", "pv_nvfp4"):
        _, lse, _ = check(q, k, v, grad_out, RECIPES[name], scale=scale, tolerance=1e-4)
        assert 60 < float(lse.mean()) * sign < 100


def test_logits_from_minus_80_to_80():
    q, k, v, grad_out = make(num_queries=24, num_keys=40, heads=1, seed=10)
    logits = torch.einsum("bihd,bjhd->bhij", q, k)
    check(q, k, v, grad_out, RECIPES["attn_qat"], scale=80.0 / float(logits.abs().max()), tolerance=1e-4)


@pytest.mark.parametrize("gap", [80, 90, 100])
def test_two_level_p_of_keys_that_hardly_count(gap):
    """A tile of keys so far below the row's largest logit that p's first scale is a subnormal number, whose reciprocal is infinite."""
    q, k, v, grad_out = make(num_queries=20, num_keys=256, heads=1, seed=17)
    q[..., 0], k[:, :128, :, 0], k[:, 128:, :, 0] = 6.0, 6.0, -6.0
    for name in ("two_level_p", "sage3"):
        check(q, k, v, grad_out, VARIANTS[name], scale=gap / 72, tolerance=1e-4)


def test_zero_rows():
    q, k, v, grad_out = make(num_queries=24, num_keys=40, seed=11)
    q[:, 3], k[:, 5:9], v[:, 16:32] = 0.0, 0.0, 0.0
    for name in ("attn_qat_search", "sage3", "mxfp8"):
        check(q, k, v, grad_out, VARIANTS[name])
    check(torch.zeros_like(q), torch.zeros_like(k), v, grad_out, RECIPES["attn_qat_search"])


def test_constant_offsets():
    q, k, v, grad_out = make(num_queries=24, num_keys=40, seed=12)
    for name in ("attn_qat", "smooth_k", "normalizer"):
        check(q, k + 4.0, v + 4.0, grad_out, VARIANTS[name], tolerance=5e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_constant_v_gives_that_constant(name):
    """1.5 is exact in every format (1 is not: E4M3 has no 1/6), so V' = V: with a quantised normaliser O is 1.5, otherwise 1.5 times the
    mean of p'/p, near 1: not 0.5 (a row sum over half of the lanes is invisible to cosine)."""
    q, k, v, _ = make(num_queries=20, num_keys=77, seed=13)
    recipe = VARIANTS[name]
    share = attention(q, k, torch.full_like(v, 1.5), recipe) / 1.5
    if recipe.normalizer == "quantised" or recipe.pv == "bf16":
        assert (share - 1).abs().max() < 1e-6
    else:
        # Small weights beside large ones round to 0, which costs some 3 %.
        # MXFP4 cuts magnitudes between 6 and 8 times its scale down to 6: up to a quarter of the heaviest weight, and always downwards.
        assert (share - 1).abs().max() < (0.25 if recipe.pv == "mxfp4" else 0.15)
        assert (share.mean() - 1).abs() < (0.1 if recipe.pv == "mxfp4" else 0.05)


def test_batch_elements_are_independent():
    q, k, v, grad_out = make(batch=3, num_queries=20, num_keys=40, seed=14)
    kv_len = torch.tensor([40, 23, 31])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    together = attention(*leaves, "attn_qat_search", kv_len=kv_len)
    gradients = torch.autograd.grad(together, leaves, grad_out)
    for b in range(3):
        one = [x[b : b + 1] for x in leaves]
        alone = attention(*one, "attn_qat_search", kv_len=kv_len[b : b + 1])
        torch.testing.assert_close(together[b : b + 1], alone, rtol=0, atol=1e-6)
        for all_of_them, single in zip(gradients, torch.autograd.grad(alone, leaves, grad_out[b : b + 1]), strict=True):
            torch.testing.assert_close(all_of_them[b], single[b], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["attn_qat", "attn_qat_search", "attn_qat_paper", "qk_nvfp4", "pv_nvfp4", "mxfp4", "b200_mxfp8_fp8", "v_head_dim"])
def test_backward_is_autograd_through_straight_through_quantisers(name):
    q, k, v, grad_out = make(batch=2, num_queries=30, num_keys=45, heads=4, kv_heads=2, seed=15)
    _, _, unsure = NaiveAttention(q, k, v, VARIANTS[name]).forward()
    grad_out = grad_out.masked_fill(unsure.unsqueeze(-1), 0.0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(attention(*leaves, VARIANTS[name]), leaves, grad_out)
    for actual, truth in zip(gradients, straight_through_autograd(q, k, v, grad_out, VARIANTS[name]), strict=True):
        assert relative(actual, truth) < 1e-5


NEIGHBOURS = [
    ("attn_qat", {"p_gain_log2": 0}, "ov", 1e-4),
    ("attn_qat", {"scale_divisors": (6.0, 4.0)}, "oqkv", 1e-3),
    ("attn_qat_search", {"scale_divisors": (6.0, 6.5, 5.6)}, "oqkv", 1e-3),
    ("attn_qat", {"normalizer": "quantised"}, "oqkv", 1e-3),
    ("normalizer", {"grad_p": "quantised"}, "qk", 1e-3),
    ("attn_qat", {"smooth_q": True}, "oqkv", 1e-3),
    ("attn_qat", {"smooth_k": True}, "oqkv", 1e-3),
    ("attn_qat_paper", {"two_level_p": True}, "ov", 1e-4),
    ("attn_qat", {"delta": "output"}, "qk", 1e-3),
    ("attn_qat", {"dv_p": "exact"}, "v", 1e-3),
    ("attn_qat", {"rotate_qk": True}, "oqkv", 1e-3),
    ("attn_qat", {"twice": ("q",)}, "oqkv", 1e-3),
    ("attn_qat", {"twice": ("k",)}, "oqkv", 1e-3),
    ("attn_qat", {"twice": ("v",)}, "oqk", 1e-3),
    ("attn_qat", {"twice": ("p",)}, "ov", 1e-3),
    ("attn_qat", {"v_blocks": "head_dim"}, "oqk", 1e-3),
    *[("attn_qat", {"qk": qk}, "oqkv", 1e-3) for qk in ("bf16", "mxfp4", "mxfp8", "fp8")],
    *[("attn_qat", {"pv": pv, "p_gain_log2": 8}, "oqkv", 1e-3) for pv in ("bf16", "mxfp4", "mxfp8", "fp8")],
]


@pytest.mark.parametrize(("base", "change", "differs", "least"), NEIGHBOURS)
def test_every_field_of_the_recipe_changes_what_it_should_and_nothing_else(base, change, differs, least):
    q, k, v, grad_out = make(num_queries=40, num_keys=60, seed=16, offset=0.5)
    results = []
    for recipe in (VARIANTS[base], dataclasses.replace(VARIANTS[base], name="changed", **change)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, recipe)
        results.append({"o": out.detach(), **dict(zip("qkv", torch.autograd.grad(out, leaves, grad_out), strict=True))})
    for key in "oqkv":
        difference = relative(results[1][key], results[0][key].double())
        if key in differs:
            assert difference > least, f"{key} differs by {difference:.1e} only"
        else:
            assert difference < 1e-6, f"{key} differs by {difference:.1e}"


def test_forward_fields_are_those_that_change_the_output():
    """What was measured with one value of them says nothing about another (`keep_layers: auto`)."""
    assert {field for _, change, differs, _ in NEIGHBOURS for field in change if "o" in differs} == set(FORWARD_FIELDS) - {"attention_kinds"}


@pytest.mark.parametrize("name", ["attn_qat_search", "sage3", "b200_nvfp4_fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs(name, dtype):
    """The arithmetic stays fp32: what differs from the oracle on the same 16-bit inputs is the last rounding of the results."""
    q, k, v, grad_out = (x.to(dtype) for x in make(num_queries=33, num_keys=50, seed=17))
    naive = NaiveAttention(q, k, v, RECIPES[name])
    expected, _, unsure = naive.forward()
    grad_out = grad_out.masked_fill(unsure.unsqueeze(-1), 0.0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, RECIPES[name])
    assert out.dtype == dtype
    assert relative(out, expected) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
    for leaf, truth in zip(torch.autograd.grad(out, leaves, grad_out), naive.backward(grad_out), strict=True):
        assert leaf.dtype == dtype
        assert relative(leaf, truth) < (1e-2 if dtype == torch.bfloat16 else 1.5e-3)


def test_nan_is_seen():
    q, k, v, _ = make(num_queries=20, num_keys=40, heads=1, seed=18)
    for damaged in range(3):
        inputs = [x.clone() for x in (q, k, v)]
        inputs[damaged][0, 7, 0, 3] = math.nan
        out = attention(*inputs, "attn_qat_search")
        assert out[0, 7].isnan().any()
    q[0, 7, 0, 3] = math.inf
    assert attention(q, k, v, "attn_qat_search")[0, 7].isnan().all()
