"""V in blocks along head_dim, as the reference implementation of the paper trains: what it is, and where it isn't served."""

import json

import pytest
import torch
from test_attention_numerics import check, make
from videoqat_kernels.triton_ops.attention import empty_codes, quantise_operands

from videoqat.attention import attention, resolve
from videoqat.attention.cuda_backend import EMULATED, NATIVE
from videoqat.attention.metrics import attention_health
from videoqat.errors import AttentionError
from videoqat.evaluation.attention_report import ASPECTS
from videoqat.evaluation.probe import with_formats
from videoqat.generation.engine import choose_recipe
from videoqat.recipes import RECIPES, SEARCH_DIVISORS, AttentionRecipe, get_recipe

SHIPPED = get_recipe("recipe/attn_qat_v_head_dim")
SEARCHED = AttentionRecipe("searched", v_blocks="head_dim", scale_divisors=SEARCH_DIVISORS)


def test_the_shipped_recipe_is_attn_qat_with_other_blocks_of_v():
    assert {k: v for k, v in SHIPPED.to_dict().items() if k not in ("name", "v_blocks")} == {
        k: v for k, v in RECIPES["attn_qat"].to_dict().items() if k != "name"
    }
    assert SHIPPED.v_blocks == "head_dim"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 65, 130])
def test_lengths(length):
    check(*make(num_queries=length, heads=1, seed=length), SHIPPED)


@pytest.mark.parametrize("causal", [False, True])
def test_groups_masks_and_strides(causal):
    q, k, v, grad_out = make(batch=2, num_queries=21, num_keys=45, heads=4, kv_heads=2, seed=1)
    fused = torch.stack((k, v), dim=2)
    check(q, *fused.unbind(dim=2), grad_out, SEARCHED, kv_len=torch.tensor([45, 18]), causal=causal)


@pytest.mark.parametrize(("pv", "head_dim"), [("nvfp4", 80), ("mxfp4", 16), ("mxfp8", 48)])
def test_head_dims_that_leave_a_short_block(pv, head_dim):
    check(*make(num_queries=20, head_dim=head_dim, seed=2), AttentionRecipe("x", pv=pv, v_blocks="head_dim"))


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("v_blocks", ["tokens", "head_dim"])
def test_which_way_blocks_run(v_blocks, kernel):
    """Numbers of the grid, times a factor for each token (or for each channel): blocks along head_dim (or along tokens) hold them exactly.

    All weights are equal and l is their sum after quantising, so that O is the mean of V', and of V if that is V.
    """
    generator = torch.Generator().manual_seed(0)
    grid = torch.tensor([0.5, 1, 1.5, 2, 3, 4, -6, -2])[torch.randint(8, (1, 48, 1, 32), generator=generator)]
    grid[:, ::16], grid[..., ::16] = 6, 6  # the largest of its block, along either axis
    factors = torch.exp2(torch.randint(-4, 5, (48,), generator=generator).float())
    recipe = AttentionRecipe("x", v_blocks=v_blocks, normalizer="quantised")
    by_token, by_channel = grid * factors.view(1, 48, 1, 1), grid * factors[:32]
    held, lost = (by_token, by_channel) if v_blocks == "head_dim" else (by_channel, by_token)
    for v, error in ((held, None), (lost, 1e-3)):
        out = attention(torch.zeros(1, 20, 1, 32), torch.ones(1, 48, 1, 32), v, recipe, kernel=kernel)
        mean = v.mean(dim=1, keepdim=True).expand_as(out)
        difference = float((out - mean).norm() / mean.norm())
        assert difference < 1e-6 if error is None else difference > error


def test_fp4_tensor_cores_refuse_it(monkeypatch):
    monkeypatch.setattr("videoqat.attention.cuda_backend._missing", lambda product, device_type: None)
    says = "FP4 products take V in blocks along tokens alone, not v_blocks=head_dim"
    for kernel in (NATIVE, EMULATED):
        assert kernel.why_not(RECIPES["attn_qat"], "cuda", torch.bfloat16, 64, False) is None
        assert says in (kernel.why_not(SHIPPED, "cuda", torch.bfloat16, 64, False) or "")
    q, k, v, _ = make(num_queries=4, head_dim=64)
    for kernel in ("cuda_nvfp4", "cuda_nvfp4_emulated"):
        with pytest.raises(AttentionError, match=f"kernel='{kernel}' can't serve recipe 'attn_qat_v_head_dim' on cpu: its {says}; would work: torch"):
            attention(q, k, v, SHIPPED, kernel=kernel)


@pytest.mark.parametrize("training", [False, True])
def test_triton_trains_and_serves_it(monkeypatch, training):
    monkeypatch.setattr("videoqat.attention.triton_backend._missing", lambda device_type: None)
    assert resolve(SHIPPED, "cuda", torch.bfloat16, 128, training=training).kernel == "triton"


def test_triton_keeps_codes_of_the_shapes_that_it_tells_the_compiler():
    q, k, v, _ = make(num_queries=20, heads=1, seed=4)
    codes = quantise_operands(q, k, v, None, SHIPPED, 0.2, keep_codes=True).codes
    told = empty_codes(q, k, SHIPPED)
    assert [(x.shape, x.dtype) for x in codes] == [(x.shape, x.dtype) for x in told]
    assert sum(x.numel() for x in codes) * 8 == 4.5 * 3 * q.numel()


def test_health_looks_at_blocks_along_head_dim():
    q, k, v, _ = make(num_queries=24, num_keys=24, heads=1, seed=3)
    v[:, :6] *= 1e6  # above 6 * 448: all blocks of 6 tokens of 24
    health = attention_health(q, k, v, SHIPPED)
    assert health["v_scale_saturated_share"] == pytest.approx(0.25)
    truth = attention(q, k, v, "bf16")
    error = float((attention(q, k, v, SHIPPED) - truth).norm() / truth.norm())
    assert health["relative_error"] == pytest.approx(error, rel=1e-4)


def test_reports_tell_it_and_formats_without_blocks_leave_it_behind():
    about = [ASPECTS["format of Q, K / P, V"](recipe.to_dict()) for recipe in (RECIPES["attn_qat"], SHIPPED, SEARCHED)]
    assert about == ["NVFP4", "NVFP4, V along head_dim", "NVFP4, searched, V along head_dim"]
    assert with_formats(SHIPPED, "x", "nvfp4", "bf16").v_blocks == "tokens"
    assert with_formats(SHIPPED, "x", "nvfp4", "mxfp8").v_blocks == "head_dim"


def test_a_checkpoint_trained_so_and_served_along_tokens_is_warned_of(tmp_path):
    (tmp_path / "videoqat.json").write_text(json.dumps({"recipe": SHIPPED.to_dict()}))
    assert choose_recipe(tmp_path, "checkpoint") == (SHIPPED, [])
    chosen, warnings = choose_recipe(tmp_path, "attn_qat")
    assert chosen == RECIPES["attn_qat"]
    assert "was trained for recipe attn_qat_v_head_dim and runs here with recipe attn_qat" in warnings[0]
    same_name = tmp_path / "same.yaml"
    same_name.write_text("base: attn_qat\nname: attn_qat_v_head_dim\n")
    assert "(the same name, but other settings)" in choose_recipe(tmp_path, str(same_name))[1][0]
