"""The CUDA kernels' own source, run on the CPU: threads as fibers (helpers/host_cuda), codes bit by bit, attention against fp64.

What this can't show is what the GPU's own instructions do (ptx.cuh and the conversions); test_cuda_attention.py does, on a GPU.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.edges import assert_right, difficult, reference_and_open_rows
from videoqat_kernels.cuda import attention, build, layout, library

from videoqat.attention import bench, reference
from videoqat.attention.bench_table import render, text_table
from videoqat.attention.metrics import relative_l2
from videoqat.attention.torch_backend import encode as plain_codes
from videoqat.config import BenchAttentionConfig, GenerateConfig, RuntimeConfig, SamplingConfig
from videoqat.generation.single import generate, plan
from videoqat.recipes import RECIPES, SEARCH_DIVISORS, AttentionRecipe

HOST = Path(__file__).parent / "helpers" / "host_cuda"
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ for C++20")
ATTN_QAT = RECIPES["attn_qat"]


@pytest.fixture(scope="module", autouse=True)
def host_library(tmp_path_factory):
    """The library `host`, in the place of native and emulated."""
    out = tmp_path_factory.mktemp("host") / "libvideoqat_host.so"
    defines = ["-DVIDEOQAT_PRODUCT=Emulated", f"-DVIDEOQAT_SOURCES={build.source_digest()}"]
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-include", "cuda_runtime.h", f"-I{HOST}", f"-I{build.FOLDER}"]
    sources = [str(build.FOLDER / source) for source in build.SOURCES]
    done = subprocess.run([COMPILER, *options, *defines, "-x", "c++", *sources, "-o", out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library_path", lambda product: out)
        library.load.cache_clear()
        yield
    library.load.cache_clear()


def normal(*shape, seed=0, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(batch, num_queries, num_keys, heads, kv_heads, head_dim, dtype=torch.float16):
    q, k, v = (
        normal(batch, num_queries, heads, head_dim),
        normal(batch, num_keys, kv_heads, head_dim, seed=1),
        normal(batch, num_keys, kv_heads, head_dim, seed=2),
    )
    return q.to(dtype), (k + normal(head_dim, seed=3)).to(dtype), v.to(dtype)


def check(q, k, v, recipe=ATTN_QAT, scale=0.2, kv_len=None, causal=False):
    got = attention.forward("host", q, k, v, kv_len, recipe, scale, causal)
    options = {"scale": scale, "kv_len": kv_len, "causal": causal}
    assert_right(got.out, got.lse, q, k, v, recipe, lse_tolerance=1e-6, **options)
    _, _, m, l_BHN = reference.forward(q, k, v, recipe, **options)
    assert torch.equal(got.m.double(), m)
    assert relative_l2(got.l, l_BHN) < 1e-5


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize(
    ("tokens", "channels", "dtype", "divisors"),
    [
        (1, 64, torch.bfloat16, (6.0,)),
        (77, 128, torch.bfloat16, SEARCH_DIVISORS),
        (150, 64, torch.float16, (4.0, 6.0)),
        (40, 128, torch.float16, (6.0,)),
        (90, 64, torch.bfloat16, (6.0, 8.0, 5.0)),  # with the second, some numbers lie beyond the grid
    ],
)
def test_codes_are_the_oracles(tokens, channels, dtype, divisors, along_tokens):
    """With strides, and with garbage past the end. In NaN blocks codes mean nothing."""
    view = torch.empty(2, 2, tokens, channels + 8, dtype=dtype)[..., :channels].transpose(1, 2).copy_(difficult(2, tokens, 2, channels, dtype))
    lengths = torch.tensor([tokens, tokens // 2])
    view[1, tokens // 2 :] = float("nan")
    codes, scales = attention.encode("host", view, lengths, along_tokens, divisors)
    expected_codes, expected_scales = plain_codes(view, lengths, "nvfp4", along_tokens, divisors)
    assert torch.equal(scales, expected_scales)
    real = (expected_scales != 0x7F).repeat_interleave(8, dim=2 if along_tokens else 3)
    assert torch.equal(codes[real], expected_codes[real])


def test_what_the_kernels_can_not_read_is_copied():
    """They read 16 bytes at a time: of a tensor at an odd address, even if it is contiguous, the GPU would refuse the first read."""
    x = normal(2, 9, 3, 72)
    odd = torch.empty(1 + 2 * 9 * 3 * 64, dtype=torch.float16)[1:].view(2, 9, 3, 64).copy_(x[..., :64])
    assert odd.is_contiguous()
    for unreadable in (odd, x[..., 1:65], x[..., ::2]):
        readable = attention._readable(unreadable)
        assert torch.equal(readable, unreadable)
        assert readable.data_ptr() % 16 == 0
        assert readable.is_contiguous()
    assert attention._readable(x[..., 8:]).data_ptr() == x[..., 8:].data_ptr()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_operand_of_q_is_the_oracles(head_dim):
    q = normal(1, 70, 2, head_dim)
    codes, scales = layout.unpack_q(attention.quantize_q("host", q, ATTN_QAT))
    expected = plain_codes(q, None, "nvfp4", False, (6.0,))
    assert torch.equal(codes[:, :, :70], expected[0])
    assert torch.equal(scales[:, :, :70], expected[1])
    assert not codes[:, :, 70:].any()


def test_a_row_that_is_open_is_found_and_an_error_is_not_taken_for_one():
    """In this call one weight of one row lies so near the middle of two codes that an H200 took the other one: 2 % of the whole."""
    q, k, v = (normal(1, n, 1, 128, seed=7 + i) for i, n in enumerate((7, 50, 50)))
    k += normal(128, seed=10)
    out, lse, is_open = reference_and_open_rows(q, k, v, ATTN_QAT, 5e-4)
    assert is_open.sum() == 1
    out[:, is_open[0, 0]] *= 1.05
    assert assert_right(out.half(), lse.float(), q, k, v, ATTN_QAT) == 1
    with pytest.raises(AssertionError, match="relative L2"):
        assert_right((out * 1.003).half(), lse.float(), q, k, v, ATTN_QAT)


LENGTHS = [(1, 1), (5, 9), (16, 16), (17, 33), (100, 77), (130, 129), (64, 300)]


@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
def test_lengths(num_queries, num_keys):
    check(*make(1, num_queries, num_keys, 1, 1, 128 if num_queries % 2 else 64))


@pytest.mark.parametrize("causal", [False, True])
def test_masks(causal):
    """Groups of heads; what lies past kv_len is NaN; rows without a key in between. More blocks than processors, more tiles than slots."""
    q, k, v = make(3, 140, 150, 2, 1, 64)
    kv_len = [150, 0, 65]
    for sample, length in enumerate(kv_len):
        k[sample, length:] = float("nan")
        v[sample, length:] = float("nan")
    check(q, k, v, kv_len=torch.tensor(kv_len), causal=causal)
    with_others_between = torch.tensor([kv_len, [7, 7, 7]], dtype=torch.int32).T.contiguous()[:, 0]
    check(q, k, v, kv_len=with_others_between, causal=causal)


@pytest.mark.parametrize("copy_engine", [True, False])
def test_many_tiles(copy_engine):
    """More than the ring has slots, and a maximum that rises. One thread asks for copies or, as before sm_90, every thread copies its share."""
    library.load("host").host_copy_engine(copy_engine)
    q, k, v = make(1, 20, 1300, 1, 1, 64, torch.bfloat16)
    try:
        check(q, k * torch.linspace(0.1, 3, 1300)[:, None, None].bfloat16(), v)
    finally:
        library.load("host").host_copy_engine(True)


@pytest.mark.parametrize("level", [-80.0, 80.0])
def test_logits_far_from_zero(level):
    q, k, v = make(1, 40, 100, 1, 1, 64)
    q[..., :16], k[..., :16] = 4.0, level / 8.0
    check(q, k, v, scale=0.125)


RECIPES_SERVED = {
    "search": RECIPES["attn_qat_search"],
    "paper": RECIPES["attn_qat_paper"],
    "quantised_sum": AttentionRecipe("n", normalizer="quantised"),
    "smooth": AttentionRecipe("b", smooth_q=True, smooth_k=True),
}


@pytest.mark.parametrize("name", RECIPES_SERVED)
def test_recipes(name):
    q, k, v = make(1, 150, 200, 2, 1, 64)
    q = q + torch.linspace(-2, 2, 150)[:, None, None].to(q.dtype)
    check(q, k, v, RECIPES_SERVED[name], kv_len=torch.tensor([170]), causal=True)


@pytest.mark.parametrize("normalizer", ["exact", "quantised"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_seen(which, normalizer):
    q, k, v = make(1, 20, 50, 1, 1, 64)
    (q, k, v)[which][0, 13, 0, 5] = float("inf") if which == 1 else float("nan")
    out = attention.forward("host", q, k, v, None, AttentionRecipe("x", normalizer=normalizer), 0.1, False).out
    seen = [out[0, 13], out, out[..., 5]][which]
    assert seen.isnan().all()
    assert out.isnan().sum() == seen.numel()


def test_from_codes_it_is_the_same():
    q, k, v = make(1, 40, 60, 2, 1, 128)
    kv_len = torch.tensor([50])
    pairs = [attention.encode("host", x, n, x is v, (6.0,)) for x, n in ((q, None), (k, kv_len), (v, kv_len))]
    codes = [x for pair in pairs for x in pair]
    expected = attention.forward("host", q, k, v, kv_len, ATTN_QAT, 0.1, False)
    for got in (
        attention.forward_coded("host", codes, None, kv_len, 128, q.dtype, ATTN_QAT, 0.1),
        attention.forward_coded("host", codes[:4], v, kv_len, 128, q.dtype, ATTN_QAT, 0.1),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_failed_launch_is_told():
    with pytest.raises(library.LibraryError, match=r"videoqat_quantize_q \(host\): invalid"):
        attention.quantize_q("host", normal(1, 5, 1, 80), ATTN_QAT)


# In a program


@pytest.fixture
def serving(monkeypatch):
    """On the CPU, `cuda_nvfp4` serves as it does on a GPU of compute capability 12.0 (test_cuda_build.py: which GPUs do)."""
    monkeypatch.setattr("videoqat.attention.cuda_backend._missing", lambda product, device_type: None)


def test_generate_picks_it_by_itself_and_says_so(serving, tiny_pipeline, tmp_path):
    def config(name, kernel="auto"):
        return GenerateConfig(
            model=str(tiny_pipeline),
            prompt="a sneaker moves left",
            recipe="attn_qat_search",
            out=str(tmp_path / f"{name}.mp4"),
            sampling=SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16),
            runtime=RuntimeConfig(device="cpu", dtype="bfloat16", kernel=kernel),
        )

    assert plan(config("planned"))["receipt"]["kernel"] == "cuda_nvfp4"
    generate(config("own"))
    record = json.loads((tmp_path / "own.json").read_text())
    receipt, plain = sorted(record["receipts"], key=lambda receipt: receipt["kernel"])
    assert receipt == {
        "kernel": "cuda_nvfp4",
        "native": True,
        "reason": "CUDA: NVFP4 products on the GPU's FP4 tensor cores",
        "device": "cpu",
        "recipe": "attn_qat_search",
        "calls": 2 * 2 * 2,  # layers, steps, with and without the prompt
    }
    assert (plain["kernel"], plain["recipe"]) == ("sdpa", "bf16")  # attention to the text
    generate(config("emulated", "cuda_nvfp4_emulated"))
    emulated = json.loads((tmp_path / "emulated.json").read_text())
    assert emulated["video_sha256"] == record["video_sha256"]
    (receipt,) = (receipt for receipt in emulated["receipts"] if receipt["kernel"] != "sdpa")
    assert (receipt["kernel"], receipt["native"]) == ("cuda_nvfp4_emulated", False)
    assert "asked for by name" in receipt["reason"]
    assert "emulated" in receipt["reason"]


def test_the_benchmark_times_it_and_its_quantisers(serving, monkeypatch):
    monkeypatch.setattr(bench, "PREPASS_CALLS", 1)
    runtime = RuntimeConfig(device="cpu", dtype="bfloat16", kernel="cuda_nvfp4_emulated")
    config = BenchAttentionConfig(
        recipes=["attn_qat", "attn_qat_paper"], num_tokens=20, num_keys=40, num_heads=1, head_dim=64, repeats=1, backward=True, runtime=runtime
    )
    config.validate()
    run = bench.bench_attention(config)
    (result,) = run["results"]
    assert "serves inference only" in result["unavailable"]["attn_qat, backward"]
    for one, products in zip(result["contenders"], (2, 3), strict=False):
        assert one["receipts"][0]["kernel"] == "cuda_nvfp4_emulated"
        assert one["executed_flop"] == {"inference": products * 2 * 20 * 40 * 64}
        moved = 2 * 64 * (20 + 40 + 40) + 8 * (8 * 64 + 128) + 2 * 2 * 72 * 64  # q, k, v, and operands of whole tiles
        assert one["prepass_gb_per_s"] == pytest.approx(moved / one["prepass_milliseconds"]["inference"] / 1e6)
        assert one["copy_gb_per_s"] > 0
    share = one["prepass_gb_per_s"] / one["copy_gb_per_s"]
    assert f"attn_qat_paper: quantising takes {one['prepass_milliseconds']['inference']:.3f} ms, " in text_table(result)
    assert f" GB/s, {share:.0%} of a copy's" in text_table(result)
    assert f" GB/s, {share:.0%} of a copy's) |" in render("{{ rates }}", [run])
