"""SageBwd in Triton against the fp64 evaluation of the same formulas: through the interpreter on a CPU, the real kernels on a GPU."""

import math

import pytest
import torch
from videoqat_kernels.triton_ops.sagebwd import backward, forward, quantize_int8

from videoqat.attention import attention, record_receipts, sagebwd
from videoqat.attention.functional import _to_json, attention_forward
from videoqat.formats.int8 import quantize_int8 as oracle
from videoqat.recipes import RECIPES, AttentionRecipe

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# On a GPU the results are rounded to 16 bits. In the interpreter nothing is, but fp32's last bits may decide how one element of P or dS rounds.
TOLERANCE = (2e-3, 4e-3) if ON_GPU else (1e-3, 2e-3)
SAGEBWD = RECIPES["sagebwd"]
NOT_SMOOTH = AttentionRecipe("sagebwd_not_smooth", qk="int8", pv="int8", p_gain_log2=0, delta="output")
pytestmark = [pytest.mark.gpu] if ON_GPU else []


def make(batch, num_queries, num_keys, heads, kv_heads, head_dim, dtype=None, seed=0):
    """K is a multiple of 1/8, so that its mean is the same in whichever order it is summed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads))
    tensors = [torch.randn(batch, n, h, head_dim, generator=generator) for n, h in shapes]
    tensors[1] = ((tensors[1] + torch.randn(head_dim, generator=generator)) * 8).round() / 8
    tensors[2] *= torch.linspace(2.0, 0.5, num_keys)[:, None, None]
    return [x.to(DEVICE, dtype or (torch.bfloat16 if ON_GPU else torch.float32)) for x in tensors]


def relative_l2(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def run(q, k, v, grad_out, recipe=SAGEBWD, scale=None, kv_len=None, causal=False):
    """(out, lse, dq, dk, dv)."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    result = forward(q, k, v, kv_len, recipe, scale, causal, keep_codes=True)
    return result.out, result.lse, *backward(grad_out, v, result.out, result.m, result.l, result.codes, kv_len, scale, causal)


def truth(q, k, v, grad_out, returned, recipe=SAGEBWD, scale=None, kv_len=None, causal=False):
    """The same from the fp64 reference; D is, by its definition, of the output that was `returned` (on a GPU in 16 bits)."""
    options = {"scale": q.shape[3] ** -0.5 if scale is None else scale, "kv_len_B": kv_len, "causal": causal, "dtype": torch.float64}
    out, lse, m, l_BHN = sagebwd.forward(q, k, v, recipe, **options)
    return out, lse, *sagebwd.backward(grad_out, q, k, v, returned, m, l_BHN, recipe, **options)


def assert_close(got, expected, tolerance=TOLERANCE):
    seen = torch.isfinite(expected[1])
    assert torch.equal(torch.isfinite(got[1]), seen)
    assert relative_l2(got[1][seen], expected[1][seen]) < 2e-6
    errors = [relative_l2(a, b) for a, b in zip((got[0], *got[2:]), (expected[0], *expected[2:]), strict=True)]
    assert errors[0] <= tolerance[0], f"O: {errors[0]}"
    assert max(errors[1:]) <= tolerance[1], f"dQ, dK, dV: {errors[1:]}"
    for a, b in zip(got, expected, strict=True):
        assert not a.isnan().any()
        assert a.shape == b.shape
    if not ON_GPU:  # most rows meet no element that hangs on a last bit
        for a, b in zip((got[0], *got[2:]), (expected[0], *expected[2:]), strict=True):
            error, size = (a.double() - b).norm(dim=-1), b.norm(dim=-1)
            assert not size.any() or (error[size > 0] / size[size > 0]).median() < 1e-5


def check(tensors, recipe=SAGEBWD, tolerance=TOLERANCE, **options):
    got = run(*tensors, recipe, **options)
    assert_close(got, truth(*tensors, got[0], recipe, **options), tolerance)
    return got


@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(2, 3), (16, 16), (63, 65), (64, 64), (65, 63), (129, 127), (128, 128), (200, 64), (33, 300), (300, 130)]
)
def test_every_length(num_queries, num_keys):
    check(make(1, num_queries, num_keys, 1, 1, 16 if num_queries % 2 else 32))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128])
def test_head_dims(head_dim):
    check(make(1, 70, 90, 1, 1, head_dim), scale=0.2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys", "kv_len"), [(70, 150, [150, 40]), (150, 70, [69, 0]), (130, 130, [64, 129]), (40, 200, [1, 65])])
def test_masks(num_queries, num_keys, kv_len, causal):
    """What lies past kv_len is NaN; rows without a key give 0 and -inf, also in between rows that have some."""
    tensors = make(2, num_queries, num_keys, 1, 1, 16)
    for sample, length in enumerate(kv_len):
        tensors[1][sample, length:] = tensors[2][sample, length:] = math.nan
    got = check(tensors, kv_len=torch.tensor(kv_len, device=DEVICE), causal=causal)
    blind = torch.isinf(got[1]).transpose(1, 2)
    assert not got[0][blind].any()
    assert not got[2][blind].any()
    for sample, length in enumerate(kv_len):
        assert not got[3][sample, length:].any()
        assert not got[4][sample, length:].any()


def test_without_smoothing():
    check(make(1, 100, 140, 1, 1, 32), NOT_SMOOTH)


def test_strided_inputs_in_groups_are_not_changed_and_give_the_same_twice():
    q, k, v, grad_out = make(2, 90, 100, 6, 2, 64)
    views = [torch.cat((x, x), 3).transpose(1, 2).contiguous().transpose(1, 2)[..., 32:96] for x in (q, k, v, grad_out)]
    before = [x.clone() for x in views]
    got, again = check(views), run(*views)
    assert not views[0].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(views, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_logits_far_below_zero():
    """A running maximum that starts at 0 would destroy such rows."""
    q, k, v, grad_out = make(1, 40, 100, 1, 1, 16)
    q[..., 0], k[..., 0] = 60, -60
    k[:, ::2, :, 0] = -56
    got = run(q, k, v, grad_out, NOT_SMOOTH)
    expected = truth(q, k, v, grad_out, got[0], NOT_SMOOTH)
    assert relative_l2(got[0], expected[0]) <= 3e-3
    assert relative_l2(got[1], expected[1]) < 1e-6


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_seen(which):
    q, k, v, grad_out = make(1, 100, 130, 1, 1, 32)
    (q, k, v)[which][0, 70, 0, 5] = math.inf if which == 1 else math.nan
    out, _, dq, dk, dv = run(q, k, v, grad_out, NOT_SMOOTH)
    if which == 0:
        assert out[0, 64:].isnan().all()  # the block of 64 queries
        assert out[0, :64].isfinite().all()
    else:
        assert out.isnan().all()
    assert dq.isnan().any()
    assert dk.isnan().any()
    assert dv.isnan().any() == (which != 2)  # it doesn't depend on V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_oracles(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 200, 3, 48, generator=generator) * torch.exp2(torch.randint(-14, 12, (2, 200, 3, 1), generator=generator).float())
    x[0, :64, 0] = torch.arange(64 * 48).reshape(64, 48) % 255 / 2 - 63.5  # ties, after a product with 2
    x[0, 64:128, 1] = 0
    x[1, 70, 2, 3], x[1, 150, 0, 0] = math.nan, -math.inf
    x = x.to(DEVICE, dtype)
    lengths = torch.tensor([200, 190], dtype=torch.int32, device=DEVICE)
    codes, scales = quantize_int8(x, lengths)
    cut = x.float()
    cut[1, 190:] = 0
    padded = torch.nn.functional.pad(cut.transpose(1, 2), (0, 16, 0, 56))
    expected_codes, expected_scales = oracle(padded.unflatten(2, (-1, 64)), (3, 4))
    assert torch.equal(codes, expected_codes.flatten(2, 3))
    assert torch.equal(scales.nan_to_num(nan=-1.0), expected_scales.flatten(2).nan_to_num(nan=-1.0))
    mean = torch.randn(2, 3, 1, 48, generator=generator).to(DEVICE)
    assert torch.equal(
        quantize_int8(cut.contiguous(), lengths, mean)[0][:, :, :190], quantize_int8(cut - mean.transpose(1, 2), lengths)[0][:, :, :190]
    )


def test_behind_the_operator():
    tensors = make(2, 40, 60, 2, 1, 32)
    options = {"kv_len": torch.tensor([60, 33], device=DEVICE), "causal": True, "scale": 0.2}
    results = []
    for kernel in ("triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        with record_receipts() as receipts:
            out = attention(*leaves, "sagebwd", kernel=kernel, **options)
        assert [(r.kernel, r.recipe, r.calls) for r in receipts] == [(kernel, "sagebwd", 1)]
        results.append([out.detach(), *torch.autograd.grad(out, leaves, tensors[3])])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert relative_l2(a, b) < (8e-3 if ON_GPU else 1e-3)


@pytest.mark.parametrize("training", [False, True])
def test_opcheck(training):
    q, k, v, _ = (x.requires_grad_(training) for x in make(2, 20, 25, 2, 1, 32))
    kv_len = torch.tensor([25, 7], device=DEVICE)
    torch.library.opcheck(attention_forward, (q, k, v, kv_len, _to_json(SAGEBWD), 0.2, True, "triton", training))


def test_full_graph_compile():
    torch._dynamo.reset()
    q, k, v, grad_out = make(1, 20, 33, 2, 1, 32)

    def layer(q, k, v):
        return attention(q * 2, k, v, "sagebwd", kernel="triton") + 1

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad_out)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_is_kept():
    """Codes of q and k at a byte a number, v itself and the output; without gradients nothing."""
    q, k, v, _ = make(1, 128, 128, 1, 1, 64)
    stored = []

    def pack(x):
        stored.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(q.requires_grad_(), k, v, "sagebwd", kernel="triton")
    assert [x.numel() for x in stored if x.dtype == torch.int8] == [q.numel(), k.numel()]
    assert {x.data_ptr() for x in stored if x.dtype == v.dtype and x.numel() == v.numel()} == {v.data_ptr(), out.data_ptr()}
    with torch.no_grad():
        assert attention(q, k, v, "sagebwd", kernel="triton").grad_fn is None


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [1.0, 25.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sequences(magnitude, head_dim):
    q, k, v, grad_out = make(1, 16384, 16384, 1, 1, head_dim)
    check((q * magnitude, k, v, grad_out))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    """Of numbers that bf16 holds, because the operands of dP are rounded to it where inputs are fp32."""
    tensors = [x.to(dtype) for x in make(2, 300, 500, 4, 2, 128, dtype=torch.bfloat16)]
    check(tensors, tolerance=(1e-3, 3e-3))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 7), (127, 129), (600, 512), (333, 1000)])
def test_matrix(num_queries, num_keys, head_dim, causal):
    tensors = make(2, num_queries, num_keys, 4, 2, head_dim)
    check(tensors, causal=causal, kv_len=torch.tensor([num_keys, num_keys - 5], device=DEVICE))


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """The last head of a view whose strides reach past 2^31 elements."""
    big = torch.empty(2, 260, 66000, 64, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = (big[:, :130, -2 - i : 66000 - i : 2][:, :, :1].normal_() for i in range(3))
    assert q.stride(0) > 2**30
    grad_out = torch.randn_like(q.contiguous())
    k.copy_((k * 8).round() / 8)
    check((q, k, v, grad_out))
