"""The CUDA kernels on a GPU: codes bit by bit, attention against the fp64 evaluation of its formulas.

Where the GPU has no FP4 tensor cores, their product is emulated: everything else is the source that runs on those that have.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.edges import assert_right, difficult

from videoqat.attention import attention, record_receipts
from videoqat.attention.backends import KERNELS, resolve
from videoqat.attention.cuda_backend import has_fp4
from videoqat.attention.metrics import relative_l2
from videoqat.attention.torch_backend import encode as plain_codes
from videoqat.recipes import RECIPES, SEARCH_DIVISORS, AttentionRecipe

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[1]
ATTN_QAT = RECIPES["attn_qat"]


@pytest.fixture(scope="module")
def product() -> str:
    """native or emulated: what this GPU can run. Built here if it isn't yet."""
    from videoqat_kernels.cuda import build, library

    name = "native" if has_fp4(torch.cuda.get_device_capability()) else "emulated"
    try:
        library.load(name)
    except library.LibraryError:
        try:
            build.find_nvcc()
        except build.BuildError as error:
            pytest.skip(str(error))
        major, minor = torch.cuda.get_device_capability()
        own = f"{major}{minor}a"
        build.build(name, [own if own in build.PRODUCTS[name].architectures else "80"])
    return name


@pytest.fixture(scope="module")
def kernel(product: str) -> str:
    return {"native": "cuda_nvfp4", "emulated": "cuda_nvfp4_emulated"}[product]


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def make(batch, num_queries, num_keys, heads, kv_heads, head_dim, dtype=torch.float16, seed=0):
    """q, k, v; k off centre."""
    q, k, v = (
        normal(batch, n, h, head_dim, seed=seed + i, dtype=dtype)
        for i, (n, h) in enumerate(((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads)))
    )
    return q, k + normal(head_dim, seed=seed + 3, dtype=dtype), v


def check(kernel, q, k, v, recipe=ATTN_QAT, **options):
    """out and lse against fp64; returns how many rows the formulas leave open (helpers/edges.py)."""
    out, lse = attention(q, k, v, recipe, kernel=kernel, return_lse=True, **options)
    return assert_right(out, lse, q, k, v, recipe, **options)


# Codes


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize(
    ("tokens", "channels", "dtype", "divisors"),
    [
        (1, 64, torch.bfloat16, (6.0,)),
        (77, 128, torch.bfloat16, (6.0,)),
        (300, 64, torch.float16, SEARCH_DIVISORS),
        (1000, 128, torch.bfloat16, SEARCH_DIVISORS),
        (130, 128, torch.float16, (4.0, 6.0)),
        (90, 64, torch.bfloat16, (6.0, 8.0, 5.0)),  # with the second, some numbers lie beyond the grid
    ],
)
def test_codes_are_the_oracles(kernel, tokens, channels, dtype, divisors, along_tokens):
    """Codes and scales bit by bit, with strides, and with garbage past the end. In NaN blocks codes mean nothing."""
    x = difficult(2, tokens, 3, channels, dtype).cuda()
    view = torch.empty(2, 3, tokens, channels + 8, dtype=dtype, device="cuda")[..., :channels].transpose(1, 2).copy_(x)
    lengths = torch.tensor([tokens, tokens // 2], device="cuda")
    view[1, tokens // 2 :] = float("nan")
    codes, scales = KERNELS[kernel].encode(view, lengths, "nvfp4", along_tokens, divisors)
    expected_codes, expected_scales = plain_codes(view, lengths, "nvfp4", along_tokens, divisors)
    assert torch.equal(scales, expected_scales)
    real = expected_scales != 0x7F
    real = real.repeat_interleave(8, dim=2 if along_tokens else 3)
    assert torch.equal(codes[real], expected_codes[real])


def test_codes_of_many_numbers(kernel):
    """A million blocks of every scale; here wrong rounding of ties would show."""
    x = normal(1, 8192, 16, 128, seed=5) * torch.exp2(normal(1, 8192, 16, 1, seed=6) * 4)
    for along_tokens in (False, True):
        for divisors in ((6.0,), SEARCH_DIVISORS):
            got, expected = KERNELS[kernel].encode(x, None, "nvfp4", along_tokens, divisors), plain_codes(x, None, "nvfp4", along_tokens, divisors)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_operand_of_q_is_the_oracles(product, kernel):
    """Of Q in its own order; `encode` goes through K's."""
    from videoqat_kernels.cuda.attention import quantize_q
    from videoqat_kernels.cuda.layout import unpack_q

    for d in (64, 128):
        q = normal(2, 200, 3, d)
        codes, scales = unpack_q(quantize_q(product, q, ATTN_QAT))
        expected = plain_codes(q, None, "nvfp4", False, (6.0,))
        assert torch.equal(codes[:, :, :200], expected[0])
        assert torch.equal(scales[:, :, :200], expected[1])
        assert not codes[:, :, 200:].any()
        assert not scales[:, :, 200:].any()


# Attention


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_length(kernel, dtype, head_dim):
    """1 to 300 tokens, and as many queries as keys or not."""
    open_rows = sum(
        check(kernel, *make(1, num_queries, num_keys, 1, 1, head_dim, dtype, seed=num_queries))
        for n in range(1, 301)
        for num_queries, num_keys in ((n, n), (n, 7 * n % 300 + 1))
    )
    assert open_rows <= 0.01 * 2 * sum(range(1, 301))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(511, 512), (513, 385), (1000, 1001), (999, 4096), (4096, 4095), (4097, 1023)])
def test_lengths_around_tiles(kernel, num_queries, num_keys, head_dim):
    check(kernel, *make(1, num_queries, num_keys, 2, 1, head_dim))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "kv_len"),
    [(70, 150, [150, 40, 1]), (150, 70, [69, 0, 70]), (400, 300, [299, 129, 128]), (40, 600, [1, 65, 520]), (300, 300, [300, 300, 16])],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks(kernel, num_queries, num_keys, kv_len, causal, head_dim):
    """Three samples, heads in groups. What lies past kv_len is NaN; rows without a key give 0 and -inf."""
    q, k, v = make(3, num_queries, num_keys, 6, 2, head_dim)
    for sample, length in enumerate(kv_len):
        k[sample, length:] = float("nan")
        v[sample, length:] = float("nan")
    check(kernel, q, k, v, kv_len=torch.tensor(kv_len, device="cuda"), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", [-80.0, -20.0, 20.0, 80.0])
def test_logits_far_from_zero(kernel, level, dtype):
    """A constant offset of all logits of a row, from -80 to 80: a running maximum that starts at 0 would destroy half of these."""
    q, k, v = make(1, 200, 300, 2, 2, 64, dtype)
    q[..., :16], k[..., :16] = 4.0, level / 8.0
    check(kernel, q, k, v)


def test_sharp_and_diffuse(kernel):
    """Logits that differ by up to 80; and none at all."""
    q, k, v = make(1, 300, 700, 2, 2, 128)
    check(kernel, 20 * q, k, v)
    check(kernel, 0 * q, k, v)
    check(kernel, q, 0 * k, v)
    assert not attention(q, k, 0 * v, ATTN_QAT, kernel=kernel).any()


def test_scale(kernel):
    q, k, v = make(1, 200, 300, 2, 2, 64)
    check(kernel, q, k, v, scale=0.3)
    check(kernel, q, k, v, scale=1e-4)


RECIPES_SERVED = {
    "search": RECIPES["attn_qat_search"],
    "paper": RECIPES["attn_qat_paper"],
    "gain_4": AttentionRecipe("g4", p_gain_log2=4),
    "quantised_sum": AttentionRecipe("n", normalizer="quantised"),
    "smooth_k": AttentionRecipe("k", smooth_k=True),
    "smooth_q": AttentionRecipe("q", smooth_q=True),
    "smooth_both": AttentionRecipe("b", smooth_q=True, smooth_k=True, normalizer="quantised"),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", RECIPES_SERVED)
def test_recipes(kernel, name, head_dim):
    q, k, v = make(2, 300, 400, 4, 2, head_dim)
    q = q + torch.linspace(-2, 2, 300, device="cuda")[:, None, None].to(q.dtype)
    kv_len = torch.tensor([400, 170], device="cuda")
    for causal in (False, True):
        check(kernel, q, k, v, RECIPES_SERVED[name], kv_len=kv_len, causal=causal)


def test_every_row_of_weights_sums_to_one(kernel):
    """V = 6, which NVFP4 holds, must give 6: a sum over the wrong lanes halves it, which no cosine shows. With l as the sum of the weights before
    they are quantised, it gives 6 times what quantising adds to a row, up to some percent."""
    q, k, v = make(1, 77, 200, 1, 1, 128)
    v = torch.full_like(v, 6.0)
    out = attention(q, k, v, AttentionRecipe("n", normalizer="quantised"), kernel=kernel)
    assert (out - 6).abs().max() < 4e-3
    check(kernel, q, k, v)


@pytest.mark.parametrize("normalizer", ["exact", "quantised"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_seen(kernel, which, normalizer):
    q, k, v = make(1, 40, 100, 1, 1, 64)
    (q, k, v)[which][0, 33, 0, 5] = float("inf") if which == 1 else float("nan")
    out = attention(q, k, v, AttentionRecipe("x", normalizer=normalizer), kernel=kernel)
    if which == 0:
        assert out[0, 33].isnan().all()
        assert out[0, :33].isfinite().all()
    elif which == 1:
        assert out.isnan().all()
    else:
        assert out[..., 5].isnan().all()
        assert out[..., :5].isfinite().all()


def test_strides_and_inputs_unchanged_and_the_same_twice(kernel):
    big = normal(2, 2, 300, 7, 160, dtype=torch.float16)
    q, k, v = big[:, 0, ::2, :6, :128], big[:, 1, :200, 1:3, 8:136], big[:, 1, 100:, 2:6:2, 32:]
    before = big.clone()
    check(kernel, q, k, v)
    once, again = (attention(q, k, v, ATTN_QAT, kernel=kernel, return_lse=True) for _ in range(2))
    assert torch.equal(big, before)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    check(kernel, q.transpose(2, 3).contiguous().transpose(2, 3), k, v[..., :].clone())  # channels apart: copied
    odd = torch.empty(1, 60, 1, 65, dtype=torch.float16, device="cuda")[..., 1:].copy_(normal(1, 60, 1, 64))  # rows at odd places: copied
    check(kernel, odd, odd, odd)
    odd = torch.empty(1 + 60 * 64, dtype=torch.float16, device="cuda")[1:].view(1, 60, 1, 64)  # contiguous, and at an odd place: copied
    check(kernel, *[odd.copy_(normal(1, 60, 1, 64))] * 3)


def test_offsets_beyond_32_bits(kernel):
    big = torch.empty(2, 260, 66000, 64, dtype=torch.bfloat16, device="cuda")
    q, k, v = (big[:, :130, -2 - i : 66000 - i : 2][:, :, :1].normal_() for i in range(3))
    assert q.stride(0) > 2**30
    check(kernel, q, k, v)


@pytest.mark.parametrize(("head_dim", "recipe"), [(128, "attn_qat"), (64, "attn_qat_search")])
def test_long_sequences(kernel, head_dim, recipe):
    check(kernel, *make(1, 8192, 8192, 1, 1, head_dim), RECIPES[recipe])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["attn_qat", "attn_qat_search", "attn_qat_paper"])
def test_what_is_trained_is_what_is_served(kernel, name, head_dim):
    """The same inputs through Triton's forward."""
    for num_queries, num_keys, causal in ((1000, 1000, False), (300, 1500, True), (4096, 4096, False)):
        q, k, v = make(1, num_queries, num_keys, 4, 4, head_dim)
        out, lse = attention(q, k, v, name, kernel=kernel, causal=causal, return_lse=True)
        theirs, their_lse = attention(q, k, v, name, kernel="triton", causal=causal, return_lse=True)
        assert relative_l2(out, theirs) <= 2e-3
        seen = their_lse.isfinite()
        assert relative_l2(lse[seen], their_lse[seen]) < 1e-5


def test_from_codes_it_is_the_same(kernel):
    """Bit by bit, with V as codes and as it is."""
    q, k, v = make(2, 200, 300, 4, 2, 128)
    kv_len = torch.tensor([300, 123], device="cuda")
    recipe = RECIPES["attn_qat_search"]
    chosen = KERNELS[kernel]
    encode = [chosen.encode(x, n, "nvfp4", x is v, recipe.scale_divisors) for x, n in ((q, None), (k, kv_len), (v, kv_len))]
    codes = [x for pair in encode for x in pair]
    expected = chosen.forward(q, k, v, kv_len, recipe, 0.1, False, False)
    for got in (
        chosen.forward_coded(codes, None, kv_len, 128, q.dtype, recipe, 0.1, False),
        chosen.forward_coded(codes[:4], v, kv_len, 128, q.dtype, recipe, 0.1, False),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got[:4], expected[:4], strict=True))


# In a program


def test_the_receipt_says_what_ran(kernel):
    q, k, v = make(1, 40, 50, 1, 1, 64)
    with record_receipts() as receipts:
        attention(q, k, v, ATTN_QAT, kernel=kernel)
    assert [(r.kernel, r.native) for r in receipts] == [(kernel, kernel == "cuda_nvfp4")]
    assert ("emulated" in receipts[0].reason) == (kernel == "cuda_nvfp4_emulated")


def test_what_auto_picks(kernel):
    chosen = resolve(ATTN_QAT, "cuda", torch.bfloat16, 128)
    assert chosen.kernel == ("cuda_nvfp4" if kernel == "cuda_nvfp4" else "triton")
    assert resolve(ATTN_QAT, "cuda", torch.bfloat16, 128, training=True).kernel == "triton"


def test_streams(kernel):
    """On a stream of one's own, whose work the default stream has not seen."""
    q, k, v = make(1, 2000, 2000, 2, 2, 64)
    expected = attention(q, k, v, ATTN_QAT, kernel=kernel)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = attention(late, k, v, ATTN_QAT, kernel=kernel)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_second_gpu(kernel):
    """While the first is the current one."""
    q, k, v = make(1, 200, 300, 2, 2, 64)
    expected = attention(q, k, v, ATTN_QAT, kernel=kernel)
    out = attention(q.to("cuda:1"), k.to("cuda:1"), v.to("cuda:1"), ATTN_QAT, kernel=kernel)
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.cpu(), expected.cpu())


@pytest.mark.parametrize("name", ["attn_qat_search", "attn_qat_paper"])
def test_a_graph_replays_with_new_data(kernel, name):
    q, k, v = make(1, 300, 400, 2, 2, 128)
    kv_len = torch.tensor([400], device="cuda")
    attention(q, k, v, name, kernel=kernel, kv_len=kv_len)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, name, kernel=kernel, kv_len=kv_len)
    for seed, length in ((10, 400), (20, 77)):
        for x, new in zip((q, k, v), make(1, 300, 400, 2, 2, 128, seed=seed), strict=True):
            x.copy_(new)
        kv_len.fill_(length)
        graph.replay()
        assert torch.equal(out, attention(q, k, v, name, kernel=kernel, kv_len=kv_len))


def test_full_graph_compilation(kernel):
    q, k, v = make(1, 300, 400, 2, 2, 128)
    compiled = torch.compile(lambda *x: attention(*x, ATTN_QAT, kernel=kernel) * 2, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v), attention(q, k, v, ATTN_QAT, kernel=kernel) * 2)


def test_memory_does_not_grow_with_pairs_of_tokens(kernel):
    """Beside the output, 4.5 bits a number and three floats a row."""
    q, k, v = make(1, 16384, 16384, 2, 2, 64)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(q, k, v, ATTN_QAT, kernel=kernel)
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * 2
    assert extra < 1.3 * (3 * q.numel() * 4.5 / 8 + 3 * 4 * q.numel() / 64)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_compute_sanitizer(product, tool):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(ROOT / "tests" / "helpers" / "cuda_small.py")]
    environment = {"PYTHONPATH": str(ROOT / "kernels"), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not run on this machine")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "0 errors" in done.stdout + done.stderr or "0 hazards" in done.stdout + done.stderr
