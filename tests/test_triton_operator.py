"""The kernel `triton` behind the operator: autograd, torch.library's checks, compile, checkpointing, what it keeps, and what it refuses."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from videoqat.attention import attention, record_receipts, resolve
from videoqat.attention.functional import _to_json, attention_forward
from videoqat.errors import AttentionError
from videoqat.recipes import RECIPES, AttentionRecipe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 8e-3 if DEVICE == "cuda" else 2e-6  # between two kernels that each may be 4e-3 off


def make(batch=2, num_queries=40, num_keys=60, heads=2, kv_heads=1, head_dim=32):
    generator = torch.Generator().manual_seed(0)
    sizes = ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, heads))
    return [torch.randn(batch, n, h, head_dim, generator=generator).to(DEVICE, DTYPE) for n, h in sizes]


def with_gradients(function, q, k, v, grad_out):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def assert_same(got, expected, tolerance=TOLERANCE):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


def test_gradients_equal_the_torch_kernels():
    tensors = make()
    options = {"kv_len": torch.tensor([60, 33], device=DEVICE), "causal": True, "scale": 0.2}
    with record_receipts() as receipts:
        got = with_gradients(lambda *x: attention(*x, "attn_qat_search", kernel="triton", **options), *tensors)
    assert [(r.kernel, r.native, r.recipe, r.calls) for r in receipts] == [("triton", False, "attn_qat_search", 1)]
    assert_same(got, with_gradients(lambda *x: attention(*x, "attn_qat_search", kernel="torch", **options), *tensors))


def test_one_operand_without_codes():
    """V stays in bf16, so V itself is kept."""
    tensors = make()
    got = with_gradients(lambda *x: attention(*x, "qk_nvfp4", kernel="triton"), *tensors)
    assert_same(got, with_gradients(lambda *x: attention(*x, "qk_nvfp4", kernel="torch"), *tensors))


@pytest.mark.parametrize("training", [False, True])
def test_opcheck(training):
    q, k, v, _ = (x.requires_grad_(training) for x in make(num_queries=20, num_keys=25))
    kv_len = torch.tensor([25, 7], device=DEVICE)
    torch.library.opcheck(attention_forward, (q, k, v, kv_len, _to_json(RECIPES["attn_qat"]), 0.2, True, "triton", training))


def test_what_is_kept():
    """Codes instead of q, k and v: 4.5 bits a number, beside the output, which the next layer keeps anyway; without gradients nothing."""
    q, k, v, _ = make(batch=1, num_queries=64, num_keys=64, heads=1, head_dim=64)
    stored = []

    def pack(x):
        stored.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(q.requires_grad_(), k, v, "attn_qat", kernel="triton")
    assert sum(x.numel() for x in stored if x.dtype == torch.uint8) * 8 == 4.5 * 3 * q.numel()
    full_size = [x for x in stored if x.dtype != torch.uint8 and x.numel() == q.numel()]
    assert [x.data_ptr() for x in full_size] == [out.data_ptr()]
    with torch.no_grad():
        assert attention(q, k, v, "attn_qat", kernel="triton").grad_fn is None


def test_full_graph_compile():
    torch._dynamo.reset()
    tensors = make(batch=1, num_queries=20, num_keys=33)

    def layer(q, k, v):
        return attention(q * 2, k, v, "attn_qat", kernel="triton") + 1

    got = with_gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), *tensors)
    assert_same(got, with_gradients(layer, *tensors))


def test_selective_checkpointing_does_not_compute_attention_twice():
    tensors = make(batch=1, num_queries=20, num_keys=20)

    def layer(q, k, v):
        return attention(q * 2, k, v, "attn_qat", kernel="triton").sin()

    def policy(_, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.videoqat.attention_forward.default else CheckpointPolicy.PREFER_RECOMPUTE

    def wrapped(*x):
        return checkpoint(layer, *x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))

    with record_receipts() as receipts:
        got = with_gradients(wrapped, *tensors)
    assert [r.calls for r in receipts] == [1]
    assert_same(got, with_gradients(layer, *tensors))


def test_refusals():
    q, k, v, _ = make()
    with pytest.raises(AttentionError, match=r"scale=-1\.0 must be positive for kernel 'triton'"):
        attention(q, k, v, "attn_qat", kernel="triton", scale=-1.0)
    with pytest.raises(AttentionError, match=r"no backward for smooth_q and two_level_p; would work: torch"):
        attention(q.requires_grad_(), k, v, "sage3", kernel="triton")
    wide = [x.repeat(1, 1, 1, 6) for x in (q, k, v)]
    with pytest.raises(AttentionError, match="head_dim=192 is more than 128"):
        attention(*wide, "attn_qat", kernel="triton")
    with pytest.raises(AttentionError, match="serves quantised recipes"):
        attention(q, k, v, "bf16", kernel="triton")
    if DEVICE == "cpu":
        assert resolve("attn_qat", "cpu", DTYPE, 64).kernel == "torch"


@pytest.mark.gpu
def test_serves_cuda_by_default():
    assert resolve("attn_qat_search", "cuda", torch.bfloat16, 128, training=True).kernel == "triton"
    receipt = resolve("sage3", "cuda", torch.bfloat16, 128, training=True)
    assert receipt.kernel == "torch"
    assert "triton doesn't serve here: it has no backward for smooth_q and two_level_p" in receipt.reason
    assert resolve("sagebwd", "cuda", torch.bfloat16, 128, training=True).kernel == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_cuda_graph(training):
    """Captured once, replayed on other numbers."""
    q, k, v, grad_out = make(num_queries=300, num_keys=200, head_dim=64)
    recipe = AttentionRecipe("s", scale_divisors=(6.0, 4.0))

    def run():
        if training:
            return with_gradients(lambda *x: attention(*x, recipe, kernel="triton"), q, k, v, grad_out)
        with torch.no_grad():
            return [attention(q, k, v, recipe, kernel="triton")]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert_same(captured, run(), 0.0)
