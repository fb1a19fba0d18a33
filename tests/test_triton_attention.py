"""Attention in Triton against the fp64 evaluation of the same formulas: through the interpreter on a CPU, the real kernels on a GPU."""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder
from videoqat_kernels.triton_ops.attention import backward, coded_operands, forward

from videoqat.attention import attention, reference
from videoqat.recipes import RECIPES, AttentionRecipe

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# In the interpreter all products are fp32 and only summation order differs; on a GPU they are bf16.
TOLERANCE = (2e-3, 4e-3) if ON_GPU else (1e-6, 2e-6)
ATTN_QAT = RECIPES["attn_qat"]


def make(batch, num_queries, num_keys, heads, kv_heads, head_dim, dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads))
    tensors = [torch.randn(batch, n, h, head_dim, generator=generator) for n, h in shapes]
    tensors[1] += torch.randn(head_dim, generator=generator)
    return [x.to(DEVICE, dtype or (torch.bfloat16 if ON_GPU else torch.float32)) for x in tensors]


def relative_l2(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def run(q, k, v, grad_out, recipe=ATTN_QAT, scale=None, kv_len=None, causal=False):
    """(out, lse, dq, dk, dv) from the codes alone."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    result = forward(q, k, v, kv_len, recipe, scale, causal, keep_codes=True)
    originals = tuple(None if coded else x for x, coded in zip((q, k, v), coded_operands(recipe), strict=True))
    gradients = backward(grad_out, result.out, result.m, result.l, result.codes, originals, kv_len, k.shape[1], recipe, scale, causal)
    return result.out, result.lse, *gradients


def truth(q, k, v, grad_out, recipe=ATTN_QAT, scale=None, kv_len=None, causal=False):
    out, lse, m, l_BHN = reference.forward(q, k, v, recipe, scale=scale, kv_len=kv_len, causal=causal)
    gradients = reference.backward(grad_out, q, k, v, m, l_BHN, recipe, scale=scale, kv_len=kv_len, causal=causal)
    return out, lse, *gradients


def assert_close(got, expected, tolerance=TOLERANCE):
    seen = torch.isfinite(expected[1])
    assert torch.equal(torch.isfinite(got[1]), seen)
    assert relative_l2(got[1][seen], expected[1][seen]) < 1e-6
    errors = [relative_l2(a, b) for a, b in zip((got[0], *got[2:]), (expected[0], *expected[2:]), strict=True)]
    assert errors[0] <= tolerance[0], f"O: {errors[0]}"
    assert max(errors[1:]) <= tolerance[1], f"dQ, dK, dV: {errors[1:]}"
    for a, b in zip(got, expected, strict=True):  # a factor does not show in a cosine; here it would
        assert not a.isnan().any()
        assert a.shape == b.shape


LENGTHS = [
    (2, 2),
    (15, 17),
    (16, 16),
    (17, 15),
    (31, 65),
    (64, 64),
    (65, 33),
    (77, 77),
    (127, 129),
    (128, 128),
    (129, 127),
    (200, 63),
    (33, 600),
    (300, 257),
]


@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
def test_every_length(num_queries, num_keys):
    tensors = make(1, num_queries, num_keys, 1, 1, 16 if num_queries % 2 else 32)
    assert_close(run(*tensors), truth(*tensors))


@pytest.mark.parametrize("num_queries", [1, 40])
def test_one_key_gets_all_the_weight_and_no_gradient(num_queries):
    q, k, v, grad_out = make(1, num_queries, 1, 2, 1, 16)
    out, _, dq, dk, dv = run(q, k, v, grad_out)
    expected = truth(q, k, v, grad_out)
    assert relative_l2(out, expected[0]) <= TOLERANCE[0]
    assert relative_l2(dv, expected[4]) <= TOLERANCE[1]
    assert dq.abs().max() < 1e-2
    assert dk.abs().max() < 1e-2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128])
def test_head_dims(head_dim):
    tensors = make(1, 70, 90, 1, 1, head_dim)
    assert_close(run(*tensors, scale=0.3), truth(*tensors, scale=0.3))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "kv_len"), [(70, 150, [150, 40]), (150, 70, [69, 0]), (130, 130, [130, 129]), (40, 200, [1, 65])]
)
def test_masks(num_queries, num_keys, kv_len, causal):
    """What lies past kv_len is NaN; rows without a key give 0 and -inf, also in between rows that have some."""
    q, k, v, grad_out = make(2, num_queries, num_keys, 1, 1, 16)
    for sample, length in enumerate(kv_len):
        k[sample, length:] = float("nan")
        v[sample, length:] = float("nan")
    options = {"kv_len": torch.tensor(kv_len, device=DEVICE), "causal": causal}
    got = run(q, k, v, grad_out, **options)
    assert_close(got, truth(q, k, v, grad_out, **options))
    blind = torch.isinf(got[1]).transpose(1, 2)
    assert not got[0][blind].any()
    assert not got[2][blind].any()
    for sample, length in enumerate(kv_len):
        assert not got[3][sample, length:].any()
        assert not got[4][sample, length:].any()


@pytest.mark.parametrize("recipe", [ATTN_QAT, RECIPES["sagebwd"]], ids=lambda recipe: recipe.name)
def test_key_lengths_of_any_strides(recipe):
    q, k, v, grad_out = make(3, 20, 60, 1, 1, 32)
    lengths = torch.tensor([50, 7, 20, 7, 33, 7], dtype=torch.int32, device=DEVICE)
    for kv_len in (lengths[::2], lengths[:1].expand(3)):
        results = []
        for given in (kv_len, kv_len.contiguous()):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = attention(*leaves, recipe, kv_len=given, kernel="triton")
            results.append((out, *torch.autograd.grad(out, leaves, grad_out)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


VARIANTS = {
    **{name: recipe for name, recipe in RECIPES.items() if recipe.is_quantised and recipe.qk != "int8"},
    "quantised_sum": AttentionRecipe("n", normalizer="quantised"),
    "quantised_gradient": AttentionRecipe("g", normalizer="quantised", grad_p="quantised"),
    "quantised_sum_of_two_levels": AttentionRecipe("s", p_gain_log2=0, two_level_p=True, normalizer="quantised"),
    "smooth_k": AttentionRecipe("k", smooth_k=True),
    "smooth_q_without_gain": AttentionRecipe("q", smooth_q=True, p_gain_log2=0),
    "mxfp8": AttentionRecipe("m8", qk="mxfp8", pv="mxfp8"),
    "mxfp4_quantised_gradient": AttentionRecipe("m4", qk="mxfp4", pv="mxfp4", normalizer="quantised", grad_p="quantised"),
    "fp8_quantised_gradient": AttentionRecipe("f8", pv="fp8", p_gain_log2=8, normalizer="quantised", grad_p="quantised"),
    "v_head_dim": AttentionRecipe("v", v_blocks="head_dim", scale_divisors=(6.0, 4.0)),
    "mxfp4_v_head_dim": AttentionRecipe("v4", qk="mxfp4", pv="mxfp4", v_blocks="head_dim"),
    "plain_fp8": AttentionRecipe("f", qk="fp8", pv="fp8", p_gain_log2=3),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_recipes(name):
    recipe = VARIANTS[name]
    # P or V left in bf16 is rounded by 2^-9 more than the definition, which is about numbers that bf16 holds exactly.
    tolerance = (3e-3, 4e-3) if ON_GPU and recipe.pv == "bf16" else TOLERANCE
    q, k, v, grad_out = make(1, 140, 200, 1, 1, 32)
    options = {"kv_len": torch.tensor([170], device=DEVICE), "causal": True}
    if recipe.smooth_q or recipe.two_level_p:
        result = forward(q, k, v, options["kv_len"], recipe, 0.2, True, keep_codes=False)
        out, lse, _, _ = reference.forward(q, k, v, recipe, scale=0.2, **options)
        assert relative_l2(result.out, out) <= tolerance[0]
        assert relative_l2(result.lse[lse.isfinite()], lse[lse.isfinite()]) < 1e-6
        assert result.codes == []
    else:
        assert_close(run(q, k, v, grad_out, recipe, **options), truth(q, k, v, grad_out, recipe, **options), tolerance)


def test_smooth_q_adds_its_means_for_some_queries_at_a_time(monkeypatch):
    """In parts of one block of 128 queries and of two, where the last part has 44 queries, in groups of heads, with keys that aren't there."""
    q, k, v, _ = make(2, 300, 140, 2, 1, 48)
    q = q + torch.linspace(-2, 2, 300, device=DEVICE)[:, None, None].to(q.dtype)
    kv_len = torch.tensor([140, 77], device=DEVICE)
    k[1, 77:] = float("nan")
    recipe = AttentionRecipe("q", smooth_q=True, smooth_k=True)
    expected, expected_lse, _, _ = reference.forward(q, k, v, recipe, scale=0.2, kv_len=kv_len)
    results = []
    for blocks in (1, 2):
        monkeypatch.setattr("videoqat_kernels.triton_ops.smoothing.BIAS_ELEMENTS", blocks * 2 * 2 * 256)
        result = forward(q, k.transpose(1, 2).contiguous().transpose(1, 2), v, kv_len, recipe, 0.2, False, keep_codes=False)
        assert relative_l2(result.out, expected) <= TOLERANCE[0]
        assert relative_l2(result.lse, expected_lse) < 1e-6
        results.append(result.out)
    assert all(torch.equal(x, results[0]) for x in results)


@pytest.mark.gpu
def test_smooth_q_of_long_sequences_needs_little_memory():
    """65,536 tokens of 16 heads: mean_q K^T whole would be 134 MB for a head, 2.1 GB."""
    q, k, v, _ = make(1, 65536, 65536, 16, 16, 64)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = forward(q, k, v, None, RECIPES["sage3"], 0.125, False, keep_codes=False)
    assert torch.cuda.max_memory_allocated() - before < 1.9e9
    rows = slice(-256, None)
    expected, _, _, _ = reference.forward(q[:, rows, -1:], k[:, :, -1:], v[:, :, -1:], RECIPES["sage3"], scale=0.125)
    assert relative_l2(result.out[:, rows, -1:], expected) <= TOLERANCE[0]


def test_strided_inputs_in_groups_are_not_changed_and_give_the_same_twice():
    q, k, v, grad_out = (
        torch.randn(2, 2, n, h, 64, device=DEVICE).to(torch.bfloat16 if ON_GPU else torch.float32) for n, h in ((90, 6), (100, 2), (100, 2), (90, 6))
    )
    views = q[:, 0, ::2], k[:, 1, :, :, :32], v[:, 1, :, :, 32:], grad_out[:, 1, 1::2]
    views = views[0][..., :32], views[1], views[2], views[3].transpose(2, 3).contiguous().transpose(2, 3)[..., :32]
    before = [x.clone() for x in views]
    got, again = run(*views), run(*views)
    assert all(torch.equal(a, b) for a, b in zip(views, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    assert_close(got, truth(*views))


def test_every_row_of_weights_sums_to_one():
    """With P' in the sum, too, V = 6 (which NVFP4 holds) must give exactly 6: a sum over the wrong threads halves it, which no cosine shows."""
    q, k, v, _ = make(1, 77, 200, 1, 1, 32)
    result = forward(q, k, torch.full_like(v, 6.0), None, AttentionRecipe("n", normalizer="quantised"), 0.5, False, keep_codes=False)
    assert (result.out - 6).abs().max() < 1e-5


def test_logits_far_below_zero():
    """A running maximum that starts at 0 would destroy such rows."""
    q, k, v, grad_out = make(1, 40, 100, 1, 1, 16)
    q[..., 0], k[..., 0] = 60, -60
    got, expected = run(q, k, v, grad_out), truth(q, k, v, grad_out)
    assert relative_l2(got[0], expected[0]) <= max(TOLERANCE[0], 2e-4)  # logits near -900 have 5e-5 of rounding in fp32, whoever computes them
    assert relative_l2(got[4], expected[4]) <= max(TOLERANCE[1], 2e-4)
    assert relative_l2(got[1], expected[1]) < 1e-6


@pytest.mark.parametrize("gap", [80, 90, 100])
def test_two_level_p_of_keys_that_hardly_count(gap):
    q, k, v, _ = make(1, 20, 256, 1, 1, 16)
    q[..., 0], k[:, :128, :, 0], k[:, 128:, :, 0] = 6, 6, -6
    out = forward(q, k, v, None, VARIANTS["sage3"], gap / 72, False, keep_codes=False).out
    assert relative_l2(out, reference.forward(q, k, v, VARIANTS["sage3"], scale=gap / 72)[0]) <= max(TOLERANCE[0], 1e-4)


@pytest.mark.parametrize("name", ["attn_qat", "quantised_sum", "quantised_sum_of_two_levels", "mxfp4_quantised_gradient", "fp8_quantised_gradient"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_seen(which, name, monkeypatch):
    if not ON_GPU:  # numpy's minimum and maximum of a number and NaN are NaN; a GPU's are the number
        for operation, of_gpu in (("create_minnumf", np.fmin), ("create_maxnumf", np.fmax)):
            monkeypatch.setattr(InterpreterBuilder, operation, lambda self, x, y, of_gpu=of_gpu: self.binary_op(x, y, of_gpu))
    q, k, v, _ = make(1, 40, 100, 1, 1, 32)
    (q, k, v)[which][0, 33, 0, 5] = float("inf") if which == 1 else float("nan")
    out = forward(q, k, v, None, VARIANTS[name], 0.2, False, keep_codes=False).out
    if which == 0:
        assert out[0, 33].isnan().all()
        assert out[0, :33].isfinite().all()
    else:
        assert out.isnan().any(dim=3).all()


def test_saved_bytes():
    """4.5 bits for each number of q, k and v; nothing without a backward."""
    q, k, v, _ = make(1, 128, 128, 2, 2, 64)
    result = forward(q, k, v, None, ATTN_QAT, 0.1, False, keep_codes=True)
    assert sum(x.numel() * x.element_size() for x in result.codes) * 8 == 4.5 * 3 * q.numel()
    assert forward(q, k, v, None, ATTN_QAT, 0.1, False, keep_codes=False).codes == []


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [1.0, 25.0])
@pytest.mark.parametrize(("head_dim", "recipe"), [(128, "attn_qat"), (64, "attn_qat_search")])
def test_long_sequences(magnitude, head_dim, recipe):
    """Diffuse attention over 16,384 keys, where scales of a normalised P would fall below E4M3's smallest number; and logits around 50."""
    q, k, v, grad_out = make(1, 16384, 16384, 1, 1, head_dim)
    q = q * magnitude
    assert_close(run(q, k, v, grad_out, RECIPES[recipe]), truth(q, k, v, grad_out, RECIPES[recipe]))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_blocks_of_v_along_head_dim(head_dim):
    tensors = make(2, 300, 500, 4, 2, head_dim)
    options = {"kv_len": torch.tensor([500, 77], device=DEVICE), "causal": True}
    assert_close(run(*tensors, VARIANTS["v_head_dim"], **options), truth(*tensors, VARIANTS["v_head_dim"], **options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    tensors = make(2, 300, 500, 4, 2, 128, dtype=dtype)
    assert_close(run(*tensors), truth(*tensors))


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """The last head of a view whose strides reach past 2^31 elements."""
    big = torch.empty(2, 260, 66000, 64, dtype=torch.bfloat16, device=DEVICE)
    views = [big[:, :130, -2 - i : 66000 - i : 2][:, :, :1].normal_() for i in range(3)]
    assert views[0].stride(0) > 2**30
    q, k, v = views
    grad_out = torch.randn_like(q.contiguous())
    assert_close(run(q, k, v, grad_out), truth(q, k, v, grad_out))
