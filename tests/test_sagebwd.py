"""SageBwd's formulas against a naive oracle with integer codes, and what it is worth against exact attention.

Integer sums are exact, so everything agrees to fp32's last bits, except where these decide how one element of P or dS rounds: that costs the
rows which meet this element 1/127 of it. So most rows must agree to 1e-5, and all together to 2e-3; any other definition of a block or a scale
moves every row by a percent.
"""

import math

import numpy as np
import pytest
import torch
from helpers.naive_sagebwd import NaiveSageBwd, quantise

from videoqat.attention import attention
from videoqat.attention.metrics import cosine, relative_l2
from videoqat.formats.int8 import fake_quantize_int8_tokens, quantize_int8
from videoqat.recipes import RECIPES, AttentionRecipe

SAGEBWD = RECIPES["sagebwd"]
NOT_SMOOTH = AttentionRecipe("sagebwd_not_smooth", qk="int8", pv="int8", p_gain_log2=0, delta="output")


def make(batch, num_queries, num_keys, heads, kv_heads, head_dim, seed=0):
    """Unlike heads, tokens and channels. K is a multiple of 1/64, so that its mean is the same in whichever order it is summed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads))
    q, k, v, grad_out = (torch.randn(batch, n, h, head_dim, generator=generator) for n, h in shapes)
    k = ((k + torch.randn(head_dim, generator=generator)) * 64).round() / 64
    tokens = torch.linspace(0.5, 2.0, num_queries)[:, None, None]
    return q * 1.5, k, v * torch.linspace(2.0, 0.5, num_keys)[:, None, None] + 0.3, grad_out * tokens


def assert_close(actual, expected, name):
    expected = torch.as_tensor(expected)
    error, size = (actual.detach().double() - expected).norm(dim=-1), expected.norm(dim=-1)
    seen = size > 0
    assert not (error[~seen] > 1e-6).any(), name
    if seen.any():
        assert (error[seen] / size[seen]).median() < 1e-5, name
        assert error.norm() < 2e-3 * size.norm(), name


def check(tensors, recipe=SAGEBWD, **options):
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, lse = attention(*leaves, recipe, return_lse=True, **options)
    naive = NaiveSageBwd(*tensors[:3], smooth_k=recipe.smooth_k, **options)
    expected, expected_lse = naive.forward()
    assert_close(out, expected, "O")
    np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(out, leaves, tensors[3])
    for name, actual, truth in zip(("dQ", "dK", "dV"), gradients, naive.backward(tensors[3]), strict=True):
        assert_close(actual, truth, name)
    return out, lse, gradients


@pytest.mark.parametrize(("num_queries", "num_keys"), [(2, 3), (63, 65), (64, 64), (65, 63), (40, 200), (200, 40), (129, 128), (150, 300)])
def test_lengths(num_queries, num_keys):
    check(make(1, num_queries, num_keys, 1, 1, 32, seed=num_queries))


@pytest.mark.parametrize("recipe", [SAGEBWD, NOT_SMOOTH], ids=lambda recipe: recipe.name)
def test_groups_of_heads_and_smoothing(recipe):
    check(make(2, 70, 130, 4, 2, 48), recipe, scale=0.2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys", "kv_len"), [(70, 150, [150, 40]), (150, 70, [69, 0]), (130, 130, [64, 129])])
def test_masks(num_queries, num_keys, kv_len, causal):
    """What lies past kv_len is NaN; rows without a key give 0 and -inf and no gradient."""
    tensors = make(2, num_queries, num_keys, 2, 1, 16)
    for sample, length in enumerate(kv_len):
        tensors[1][sample, length:] = tensors[2][sample, length:] = math.nan
    out, lse, (dq, dk, dv) = check(tensors, kv_len=torch.tensor(kv_len), causal=causal)
    blind = lse.isinf().transpose(1, 2)
    assert not out[blind].any()
    assert not dq[blind].any()
    for sample, length in enumerate(kv_len):
        assert not dk[sample, length:].any()
        assert not dv[sample, length:].any()


def test_long_rows_are_computed_in_several_tiles(monkeypatch):
    monkeypatch.setattr("videoqat.attention.sagebwd.TILE_ELEMENTS", 64 * 300)
    check(make(1, 200, 300, 1, 1, 16))


def test_one_key_gets_all_the_weight():
    q, k, v, grad_out = make(1, 70, 1, 1, 1, 32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, SAGEBWD)
    assert relative_l2(out.detach(), v.detach().expand_as(out)) < 0.01
    dq, dk, _ = torch.autograd.grad(out, leaves, grad_out)
    assert not dq.any()  # one key minus its mean
    assert dk.abs().max() < 0.02 * (grad_out.norm() * v.detach().norm())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_seen(which):
    tensors = make(1, 100, 130, 1, 1, 32)
    tensors[which][0, 70, 0, 3] = math.nan if which != 1 else math.inf
    out = attention(*tensors[:3], NOT_SMOOTH)
    if which == 0:
        assert out[0, 64:].isnan().all()  # the block of 64 queries
        assert out[0, :64].isfinite().all()
    else:
        assert out.isnan().all()


def test_int8_codes():
    """Ties go to the even code, scales are per block, zero blocks stay zero, and what is no number is seen."""
    x = torch.randn(3, 128, 16, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-30, 1.0, 1e30])[:, None, None]
    x[1, :64] = torch.arange(64 * 16).reshape(64, 16) % 255 / 2 - 63.5  # amax 63.5: codes are halves, times 2
    x[1, 64:, :8] = 0.0
    x[2, 64:] = 0.0
    blocks = x.unflatten(1, (2, 64))
    codes, scales = quantize_int8(blocks, (2, 3))
    assert codes.dtype == torch.int8
    for i in range(3):
        for j in range(2):
            expected, scale = quantise(blocks[i, j].numpy(), np.float32)
            assert np.array_equal(codes[i, j].numpy(), expected)
            assert scales[i, j].item() == scale
    half = torch.full((1, 64), 127.0)
    half[0, :6] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])  # scale 1
    assert quantize_int8(half, (0, 1))[0][0, :6].tolist() == [0, 2, 2, 0, -2, -2]
    assert (fake_quantize_int8_tokens(x, (1,), (2,)) == (codes * scales).reshape(x.shape)).all()
    tiny = torch.full((1, 64), 1e-37)  # its scale would be below fp32's normal numbers
    assert [y.abs().max() for y in quantize_int8(tiny, (0, 1))] == [0, 0]
    for bad in (math.nan, math.inf, -math.inf):
        x[0, 3, 5] = bad
        dequantised = fake_quantize_int8_tokens(x, (1,), (2,))
        assert dequantised[0, :64].isnan().all()
        assert dequantised[0, 64:].isfinite().all()
        assert dequantised[1:].isfinite().all()


def test_blocks_of_p_have_their_own_scales():
    """Along both axes of a tile of scores: a block with large numbers must not coarsen its neighbours."""
    p = torch.full((1, 128, 128), 1.0)
    p[0, 64:, 64:] = 1000.0
    p[0, 0, 70] = 0.3
    quantised = fake_quantize_int8_tokens(p, (1, 2))
    assert relative_l2(quantised, p) < 1e-3
    assert quantised[0, 0, 70].item() == pytest.approx(38 / 127)


def test_gradients_are_near_those_of_exact_attention():
    """In the region that the paper reports (cosine of dQ 0.9987, dK 0.9993, dV 0.9995). A sanity check: formulas are held above."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 1024, 1, 128, generator=generator) for _ in range(4))
    k += 2 * torch.randn(128, generator=generator)
    results = []
    for recipe in (SAGEBWD, RECIPES["bf16"]):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, recipe)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad_out)])
    cosines = [cosine(a, b) for a, b in zip(*results, strict=True)]
    assert cosines[0] > 0.999
    assert cosines[1] > 0.997
    assert cosines[2] > 0.998
    assert cosines[3] > 0.999
