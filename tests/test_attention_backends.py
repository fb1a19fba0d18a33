"""Which kernel serves, what the receipt says, and every way to ask for attention that can't be had."""

import threading

import pytest
import torch

from videoqat.attention import attention, record_receipts, resolve
from videoqat.attention.backends import KERNELS
from videoqat.attention.metrics import attention_health, cosine, relative_l2
from videoqat.errors import AttentionError
from videoqat.recipes import RECIPES, AttentionRecipe


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q = normal(2, 20, 4, 32)
K = normal(2, 24, 2, 32, seed=1)
V = normal(2, 24, 2, 32, seed=2)

BAD_CALLS = {
    "rank": ({"q_BNHD": Q[0]}, r"\(batch, tokens, heads, head_dim\).*q \(20, 4, 32\)"),
    "dtypes differ": ({"k_BNHD": K.bfloat16()}, "share one dtype.*k torch.bfloat16"),
    "dtype": ({"q_BNHD": Q.double(), "k_BNHD": K.double(), "v_BNHD": V.double()}, "torch.float32, torch.bfloat16, torch.float16.*torch.float64"),
    "devices": ({"v_BNHD": V.to("meta")}, "one device.*v meta"),
    "head_dim": ({"q_BNHD": Q[..., :24], "k_BNHD": K[..., :24], "v_BNHD": V[..., :24]}, "head_dim=24 is not a multiple of 16"),
    "head_dim of k": ({"k_BNHD": K[..., :16], "v_BNHD": V[..., :16]}, "head_dim=32"),
    "lengths of k and v": ({"v_BNHD": V[:, :20]}, r"k \(2, 24, 2, 32\), v \(2, 20, 2, 32\)"),
    "batch": ({"k_BNHD": K[:1], "v_BNHD": V[:1]}, "batch=2"),
    "heads": ({"q_BNHD": Q[:, :, :3]}, "3 query heads are not a multiple of 2"),
    "no queries": ({"q_BNHD": Q[:, :0]}, "at least 1"),
    "no keys": ({"k_BNHD": K[:, :0], "v_BNHD": V[:, :0]}, "at least 1"),
    "kv_len's shape": ({"kv_len": torch.tensor([3])}, r"kv_len must be \(2,\) of int32 or int64, got \(1,\)"),
    "kv_len's dtype": ({"kv_len": torch.tensor([3.0, 4.0])}, "int32 or int64, got .* torch.float32"),
    "kv_len's device": ({"kv_len": torch.zeros(2, dtype=torch.int32, device="meta")}, "kv_len must be on q's device"),
    "kv_len too long": ({"kv_len": torch.tensor([3, 25])}, r"kv_len=\[3, 25\] must be between 0 and 24"),
    "kv_len negative": ({"kv_len": torch.tensor([-1, 3])}, "between 0 and 24"),
    "kernel": ({"kernel": "flash5"}, "kernel='flash5' does not exist; legal: auto, sdpa, cuda_nvfp4, cuda_nvfp4_emulated, triton, torch"),
}


@pytest.mark.parametrize("name", ["attn_qat", "bf16"])
@pytest.mark.parametrize("fault", BAD_CALLS)
def test_bad_calls_are_refused_in_one_line(fault, name):
    change, message = BAD_CALLS[fault]
    with pytest.raises(AttentionError, match=message) as caught:
        attention(**{"q_BNHD": Q, "k_BNHD": K, "v_BNHD": V, "recipe": name, **change})
    assert "\n" not in str(caught.value)


def test_an_argument_that_does_not_exist_is_not_swallowed():
    with pytest.raises(TypeError):
        attention(Q, K, V, "attn_qat", attn_mask=None)


def test_a_kernel_that_cannot_serve_says_why_and_what_can():
    with pytest.raises(AttentionError, match="kernel='sdpa' can't serve recipe 'attn_qat' on cpu: it can't quantise; would work: torch"):
        attention(Q, K, V, "attn_qat", kernel="sdpa")


def test_no_kernel_at_all_lists_why(monkeypatch):
    monkeypatch.delitem(KERNELS, "torch")
    with pytest.raises(AttentionError, match="no kernel serves recipe 'attn_qat' on cpu: sdpa: it can't quantise"):
        resolve("attn_qat", "cpu", torch.float32, 64)


def test_resolve():
    assert resolve("bf16", "cpu", torch.float32, 64).kernel == "sdpa"
    receipt = resolve("attn_qat", torch.device("cpu"), torch.float32, 64, training=True)
    assert (receipt.kernel, receipt.native, receipt.device, receipt.recipe, receipt.calls) == ("torch", False, "cpu", "attn_qat", 0)
    assert "emulates" in receipt.reason
    assert "asked for by name" in resolve("bf16", "cpu", torch.float32, 64, kernel="torch").reason
    assert receipt.to_dict()["kernel"] == "torch"


def test_where_torch_steps_in_on_a_gpu_the_receipt_says_why(monkeypatch):
    monkeypatch.setattr("videoqat.attention.triton_backend._missing", lambda device_type: None)
    receipt = resolve("sage3", "cuda", torch.bfloat16, 64, training=True)
    assert receipt.kernel == "torch"
    assert receipt.reason.endswith("triton doesn't serve here: it has no backward for smooth_q and two_level_p")
    assert "doesn't serve" not in resolve("sage3", "cuda", torch.bfloat16, 64).reason
    assert [resolve(name, "cuda", torch.bfloat16, 64, training=True).native for name in ("attn_qat", "sagebwd")] == [False, True]
    assert "doesn't serve" not in resolve("sage3", "cpu", torch.float32, 64, training=True).reason


@pytest.mark.parametrize(("name", "head_dim", "kernel"), [("b200_mxfp8_fp8", 16, "torch"), ("b200_mxfp8_fp8", 32, "triton"), ("mxfp4", 16, "triton")])
def test_blocks_of_32_in_one_product_and_heads_of_16_are_not_for_triton(monkeypatch, name, head_dim, kernel):
    monkeypatch.setattr("videoqat.attention.triton_backend._missing", lambda device_type: None)
    assert resolve(name, "cuda", torch.bfloat16, head_dim).kernel == kernel


def test_receipts_tell_what_ran():
    attention(Q, K, V, "attn_qat")  # outside: not recorded
    with record_receipts() as receipts:
        for _ in range(3):
            attention(Q, K, V, "attn_qat")
        attention(Q, K, V, "bf16")
        attention(Q, K, V, "bf16", kernel="torch")
        with pytest.raises(AttentionError):
            attention(Q, K, V, "attn_qat", kernel="sdpa")
    attention(Q, K, V, "attn_qat")
    assert [(r.kernel, r.recipe, r.native, r.calls) for r in receipts] == [
        ("torch", "attn_qat", False, 3),
        ("sdpa", "bf16", True, 1),
        ("torch", "bf16", False, 1),
    ]


def test_receipts_from_other_threads_and_nested():
    with record_receipts() as outer:
        with record_receipts() as inner:
            threads = [threading.Thread(target=lambda: [attention(Q, K, V, "attn_qat") for _ in range(5)]) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        attention(Q, K, V, "attn_qat")
    assert [r.calls for r in inner] == [20]
    assert [r.calls for r in outer] == [21]


def test_the_receipt_comes_from_the_kernel_that_runs(monkeypatch):
    """A kernel that is put in front serves, and the receipt names it: nothing is written down before it ran."""

    class Broken:
        BY_NAME_ONLY = ()
        describe = staticmethod(lambda *_: (True, "fastest"))
        why_not = staticmethod(lambda *_: None)

        @staticmethod
        def forward(*_):
            raise RuntimeError("no such instruction")

    kernels = {"broken": Broken, **KERNELS}
    monkeypatch.setattr("videoqat.attention.backends.KERNELS", kernels)
    with record_receipts() as receipts, pytest.raises(RuntimeError, match="no such instruction"):
        attention(Q, K, V, "attn_qat")
    assert receipts == []


def test_relative_l2_and_cosine():
    a = normal(50)
    assert relative_l2(a, a) == 0.0
    assert relative_l2(0.5 * a, a) == pytest.approx(0.5)
    assert cosine(0.5 * a, a) == pytest.approx(1.0)
    assert relative_l2(torch.zeros(3), torch.zeros(3)) == 0.0
    assert relative_l2(torch.ones(3), torch.zeros(3)) == float("inf")


def test_health_is_the_error_of_what_attention_returns():
    q, k, v = normal(2, 60, 4, 32), normal(2, 70, 2, 32, seed=1), normal(2, 70, 2, 32, seed=2)
    kv_len = torch.tensor([70, 33])
    for name in ("attn_qat_search", "sage3", "sagebwd"):
        health = attention_health(q, k, v, name, kv_len=kv_len, scale=0.3)
        truth = attention(q, k, v, "bf16", kv_len=kv_len, scale=0.3)
        assert health["relative_error"] == pytest.approx(relative_l2(attention(q, k, v, name, kv_len=kv_len, scale=0.3), truth), rel=1e-4)
    assert set(health) == set(attention_health(q, k, v, "attn_qat"))
    assert 0 < health["p_mass_lost_share"] < 0.01  # SageBwd's: weights below 1/254 of the largest in a row's 64 keys
    sampled = attention_health(q, k, v, "attn_qat", max_queries=20)["relative_error"]
    assert sampled == pytest.approx(attention_health(q, k, v, "attn_qat")["relative_error"], rel=0.3)


def test_health_of_plain_attention_is_all_zero():
    assert all(value == 0.0 for value in attention_health(Q, K, V, "bf16").values())


def test_health_sees_lost_and_clipped_numbers():
    q, k, v = Q.clone(), K.clone(), V.clone()
    k[:, :, :, :16] *= 1e-6  # below 6 * 2^-10: half of K's blocks flush to zero
    v[:, :16] *= 1e6  # above 6 * 448: half of V's blocks (24 tokens: two blocks) clip
    health = attention_health(q, k, v, "attn_qat")
    assert health["k_scale_zero_share"] == pytest.approx(0.5)
    assert health["v_scale_saturated_share"] == pytest.approx(0.5)
    assert health["q_scale_zero_share"] == health["k_scale_saturated_share"] == 0.0
    assert health["scale_zero_share"] == pytest.approx(0.5)


def test_health_sees_p_starve_without_its_gain():
    q, k, v = normal(1, 64, 1, 64), normal(1, 1024, 1, 64, seed=1), normal(1, 1024, 1, 64, seed=2)
    with_gain, without = (attention_health(4 * q, k, v, name) for name in ("attn_qat", "attn_qat_paper"))
    assert without["p_scale_zero_share"] > 0.05 > with_gain["p_scale_zero_share"]
    assert 0 < with_gain["p_mass_lost_share"] < without["p_mass_lost_share"] < 1


def test_health_ignores_garbage_and_autocast():
    k, v = K.clone(), V.clone()
    k[:, 17:], v[:, 17:] = float("nan"), float("inf")
    kv_len = torch.tensor([17, 17])
    truth = attention_health(Q, K, V, "attn_qat", kv_len=kv_len)
    assert attention_health(Q, k, v, "attn_qat", kv_len=kv_len) == truth
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_health(Q, k, v, "attn_qat", kv_len=kv_len) == truth


def test_recipes_reach_the_operator_whole():
    """Every field survives the JSON that the operator takes."""
    from videoqat.attention.functional import _from_json, _to_json

    for recipe in (
        *RECIPES.values(),
        AttentionRecipe("x", qk="fp8", pv="mxfp4", p_gain_log2=5, normalizer="quantised", grad_p="quantised", keep_layers=(1,)),
    ):
        assert _from_json(_to_json(recipe)) == recipe
