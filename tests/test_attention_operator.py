"""attention() as an operator: torch's own checks of it, compile, checkpointing, autocast, tiles, memory, and the kernel for plain attention."""

import math
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from videoqat.attention import attention, record_receipts, reference, torch_backend
from videoqat.attention.functional import _to_json, attention_backward, attention_forward
from videoqat.formats import fake_quantize
from videoqat.recipes import RECIPES, AttentionRecipe


def make(batch=1, num_queries=40, num_keys=None, heads=2, head_dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (num_queries, num_keys or num_queries, num_keys or num_queries, num_queries)
    return [torch.randn(batch, n, heads, head_dim, generator=generator) for n in sizes]


def with_gradients(function, q, k, v, grad_out):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["attn_qat_search", "sage3", "sagebwd"])
def test_opcheck(name, training):
    q, k, v, grad_out = (x.requires_grad_(training) for x in make(batch=2, num_queries=20, num_keys=25))
    kv_len = torch.tensor([25, 7])
    torch.library.opcheck(attention_forward, (q, k, v, kv_len, _to_json(RECIPES[name]), 0.2, True, "auto", training))
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(training) for x in (q, k, v)]
    torch.library.opcheck(attention_forward, (*strided, None, _to_json(RECIPES[name]), 0.2, False, "torch", training))
    out, _, m, l_BHN, kept = attention_forward(q, k, v, kv_len, _to_json(RECIPES[name]), 0.2, True, "auto", training)
    out = out if torch_backend.keeps(RECIPES[name])[3] else None
    with torch.no_grad():
        torch.library.opcheck(attention_backward, (grad_out, q, k, v, out, m, l_BHN, kept, kv_len, 25, 2, _to_json(RECIPES[name]), 0.2, True, "auto"))


@pytest.mark.parametrize("name", ["attn_qat_search", "bf16"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_full_graph_compile(name, dynamic):
    torch._dynamo.reset()

    def layer(q, k, v, kv_len):
        return attention(q * 2, k, v, name, kv_len=kv_len, causal=True) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    q, k, v, grad_out = make(batch=2, num_keys=48)
    kv_len = torch.tensor([48, 30])
    for num_queries in (40, 33):
        inputs = q[:, :num_queries], k, v, grad_out[:, :num_queries]
        with record_receipts() as receipts:
            out, gradients = with_gradients(lambda *x: compiled(*x, kv_len), *inputs)
        expected, truth = with_gradients(lambda *x: layer(*x, kv_len), *inputs)
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients, truth, strict=True))
        if name != "bf16":  # the operator's implementation writes it at run time
            assert [(r.kernel, r.calls) for r in receipts] == [("torch", 1)]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["attn_qat_search", "sage3", "bf16"])
def test_activation_checkpointing_changes_nothing(name, use_reentrant):
    q, k, v, grad_out = make(batch=2)

    def layer(q, k, v):
        return attention(q * 2, k, v, name)

    expected, truth = with_gradients(layer, q, k, v, grad_out)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = checkpoint(layer, *leaves, use_reentrant=use_reentrant)
    out.backward(grad_out)
    gradients = [x.grad for x in leaves]
    assert torch.equal(out.detach(), expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, truth, strict=True))


def test_autocast_does_not_reach_the_arithmetic():
    q, k, v, grad_out = make()
    expected, truth = with_gradients(lambda *x: attention(*x, "attn_qat"), q, k, v, grad_out)
    with torch.autocast("cpu", torch.bfloat16):
        out, gradients = with_gradients(lambda *x: attention(*x, "attn_qat"), q, k, v, grad_out)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, truth, strict=True))


def test_without_gradients_nothing_is_kept():
    q, k, v, _ = make()
    assert attention(q, k, v, "attn_qat").grad_fn is None
    with torch.no_grad():
        assert attention(q.requires_grad_(), k, v, "attn_qat").grad_fn is None


def test_gradient_of_one_input_alone():
    q, k, v, grad_out = make()
    _, truth = with_gradients(lambda *x: attention(*x, "attn_qat"), q, k, v, grad_out)
    for i in range(3):
        inputs = [q, k, v]
        inputs[i] = inputs[i].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(attention(*inputs, "attn_qat"), inputs[i], grad_out)
        assert torch.equal(gradient, truth[i])


def test_lse_has_no_gradient():
    q, k, v, _ = make()
    _, lse = attention(q.requires_grad_(), k, v, "attn_qat", return_lse=True)
    assert not lse.requires_grad
    assert lse.dtype == torch.float32


def test_there_is_no_second_derivative():
    q, k, v, _ = make(num_queries=16)
    out = attention(q.requires_grad_(), k, v, "attn_qat")
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(torch.autograd.grad(out.sum(), q, create_graph=True)[0].sum(), q)


@pytest.mark.parametrize("name", ["attn_qat_search", "sage3", "mxfp4"])
def test_tiles_change_no_code_of_p(name, monkeypatch):
    """P's codes are the same bits whatever rows and heads share a tile; what is summed from them differs in its last bits at most."""
    q, k, v, grad_out = make(batch=2, num_queries=150, num_keys=200, seed=1)
    real = reference.quantise_p
    results, codes = {}, {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, the product of Q and K itself rounds by the shape of a tile
    for elements in (2**11, 2**14, 2**16, 2**22):
        tiles = []

        def spy(p, recipe, out, tiles=tiles):
            tiles.append(real(p, recipe, out).clone())
            return tiles[-1]

        monkeypatch.setattr(torch_backend, "TILE_ELEMENTS", elements)
        monkeypatch.setattr(reference, "quantise_p", spy)
        results[elements] = with_gradients(lambda *x: attention(*x, name, causal=True), q, k, v, grad_out)
        codes[elements] = len(tiles), _in_one_tile(tiles, num_rows=150)
    torch.set_num_threads(threads)
    assert codes[2**11][0] > codes[2**14][0] > codes[2**16][0] > codes[2**22][0] == 2  # one in the forward, one in the backward
    for elements in (2**11, 2**14, 2**16):
        assert torch.equal(codes[elements][1], codes[2**22][1])
        for actual, truth in zip((results[elements][0], *results[elements][1]), (results[2**22][0], *results[2**22][1]), strict=True):
            torch.testing.assert_close(actual, truth, rtol=1e-5, atol=2e-6)


def _in_one_tile(tiles, num_rows):
    """Tiles (heads, keys, rows), in the order of heads and then rows, as one tensor with all rows."""
    whole, columns = [], []
    for tile in tiles:
        columns.append(tile)
        if sum(column.shape[2] for column in columns) == num_rows:
            whole.append(torch.cat(columns, dim=2))
            columns = []
    return torch.cat(whole)


@pytest.mark.parametrize("gain", [0, 11])
def test_p_is_quantised_as_the_format_says(gain):
    """The fast way for p (in place, no signs) gives fake_quantize's bits, also where scales are subnormal or 0 and where p is NaN."""
    generator = torch.Generator().manual_seed(2)
    exponent = torch.rand(2, 320, 33, generator=generator) * -30
    p = torch.exp2(exponent + gain)
    p[0, :32, 3], p[1, 64:80, 5], p[1, 5, 7] = 0.0, 1e-30, math.nan
    recipe = AttentionRecipe("x", p_gain_log2=gain)
    expected = fake_quantize(p, "nvfp4", 1)
    assert (expected == 0).any()
    assert torch.equal(reference.quantise_p(p.clone(), recipe, torch.empty_like(p)).nan_to_num(-1), expected.nan_to_num(-1))
    in_place = p.clone()
    assert torch.equal(reference.quantise_p(in_place, recipe, in_place).nan_to_num(-1), expected.nan_to_num(-1))


def test_gradient_of_v_over_16384_keys():
    """Diffuse attention over a long sequence: P after the normalisation lies below E4M3's smallest scale and would be quantised to nothing."""
    num_keys, d = 16384, 64
    q, k, v, grad_out = make(num_queries=64, num_keys=num_keys, heads=1, head_dim=d, seed=3)
    _, (_, _, dv) = with_gradients(lambda *x: attention(*x, "attn_qat"), q, k, v, grad_out)

    quantised_q, quantised_k = (fake_quantize(x[0, :, 0], "nvfp4", -1).double() for x in (q, k))
    p = torch.softmax(quantised_q @ quantised_k.T * d**-0.5, dim=-1)
    truth = p.T @ grad_out[0, :, 0].double()

    def cosine(a):
        return float(torch.nn.functional.cosine_similarity(a.double().flatten(), truth.flatten(), dim=0))

    assert cosine(dv[0, :, 0]) > 0.99
    assert 0.97 < float(dv.double().norm() / truth.norm()) < 1.03
    assert cosine(fake_quantize(p, "nvfp4", -1).T @ grad_out[0, :, 0].double()) < 0.3, "this test would not see the fault it guards against"


MEASURE = """
import resource, torch
from videoqat.attention import attention
torch.set_num_threads({threads})
q, k, v = (torch.randn(1, 8192, 2, 64, requires_grad=True) for _ in range(3))
attention(q[:, :32], k[:, :32], v[:, :32], "attn_qat_search").sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention(q, k, v, "attn_qat_search").sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_memory_at_8192_tokens():
    """8,192 tokens, 2 heads, d 64, forward and backward: one dense P is 0.54 GB, a dense backward several of them."""
    code = MEASURE.format(threads=torch.get_num_threads())
    grown = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    print(f"peak memory grew by {grown / 1e9:.2f} GB")
    assert grown < 0.3e9


# --- the kernel for recipes that quantise nothing ---


def test_plain_attention_is_bitwise_what_diffusers_computes():
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, grad_out = (x.to(dtype) for x in make(batch=2, num_queries=70, num_keys=90))
        out, gradients = with_gradients(lambda *x: attention(*x, "bf16"), q, k, v, grad_out)
        expected, truth = with_gradients(dispatch_attention_fn, q, k, v, grad_out)
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients, truth, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_kv_len", [False, True])
@pytest.mark.parametrize("num_queries", [20, 33, 40])
def test_plain_attention_and_its_lse(causal, with_kv_len, num_queries):
    """Held against the fp64 formulas (which are tested on their own), with grouped heads and NaN behind the keys."""
    q, _, _, grad_out = make(batch=3, num_queries=num_queries, heads=4)
    _, k, v, _ = make(batch=3, num_queries=33, heads=2, seed=4)
    kv_len = torch.tensor([33, 0, 9]) if with_kv_len else None
    if with_kv_len:
        for b, n in enumerate(kv_len):
            k[b, n:], v[b, n:] = math.nan, math.nan
    options = {"kv_len": kv_len, "causal": causal, "scale": 0.3}
    expected, expected_lse, m, l_BHN = reference.forward(q, k, v, RECIPES["bf16"], **options)
    truth = reference.backward(grad_out, q, k, v, m, l_BHN, RECIPES["bf16"], **options)
    for kernel in ("auto", "torch"):
        out, gradients = with_gradients(lambda *x, kernel=kernel: attention(*x, "bf16", kernel=kernel, **options), q, k, v, grad_out)
        _, lse = attention(q, k, v, "bf16", kernel=kernel, return_lse=True, **options)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
        for actual, correct in zip(gradients, truth, strict=True):
            torch.testing.assert_close(actual.double(), correct, rtol=1e-4, atol=1e-5)
        if with_kv_len:
            assert (out[1] == 0).all()
            assert (lse[1] == -math.inf).all()
