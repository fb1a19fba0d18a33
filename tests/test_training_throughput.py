"""FLOPs of a sample, held against sums by hand and against what a real forward does; the hardware's peak by its name."""

import re
from pathlib import Path

import pytest
import torch
from helpers.pipelines import weightless_wan
from torch.utils.flop_counter import FlopCounterMode

from videoqat.config import ExampleModelConfig
from videoqat.models.published import published
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline
from videoqat.recipes import get_recipe
from videoqat.training.throughput import forward_cost, peak_flops


@pytest.mark.parametrize("size", ["1.3b", "14b"])
def test_a_published_model_by_hand(size: str, tmp_path: Path) -> None:
    folder = weightless_wan(tmp_path / "wan", size)
    config = published()[f"wan2.1-t2v-{size}"].transformer
    cost = forward_cost(str(folder), "transformer", "81x480x832", 512)
    tokens, text, layers, ffn = 21 * 30 * 52, 512, config["num_layers"], config["ffn_dim"]
    width = 128 * config["num_attention_heads"]
    # Per block: q, k, v, o of self-attention; q, o of cross-attention; two of the feed-forward; for each text token, k and v.
    block = 2 * tokens * (6 * width * width + 2 * width * ffn) + 2 * text * 2 * width * width
    latents = 16 * 4  # numbers of a token's latents: 16 channels, patches of 1x2x2
    ends = 2 * 2 * tokens * latents * width + 2 * text * (4096 * width + width * width) + 2 * (256 * width + width * width + width * 6 * width)
    assert cost.linear_flops == layers * block + ends
    assert cost.attention_flops == layers * (4 * tokens * tokens * width + 4 * tokens * text * width)
    assert cost.training_flops == 3 * cost.linear_flops + 3.5 * cost.attention_flops
    assert cost.parameters == {"1.3b": 1_418_996_800, "14b": 14_288_491_584}[size]
    assert len(cost.blocks) == layers
    page = (Path(__file__).resolve().parent.parent / "docs" / "parallelism.md").read_text()
    joined = {"1.3b": "linear {:.1f}, attention {:.1f}, a training sample {:,.1f} TFLOP", "14b": "{:.1f}, {:.1f} and {:,.1f}"}[size]
    assert joined.format(*(flops / 1e12 for flops in (cost.linear_flops, cost.attention_flops, cost.training_flops))) in page
    (told,) = re.findall(rf"(\d+) \({size.upper()}\)[^|]* bytes for each token, unit of width and block", page)
    assert cost.blocks[0].kept_bytes / (tokens * width) == pytest.approx(
        int(told), rel=0.02
    )  # torch keeps a little more or less from version to version


@pytest.mark.parametrize("family", ["wan", "cogvideox", "hunyuanvideo"])
def test_fake_tensors_count_what_real_ones_do(family: str, tmp_path: Path) -> None:
    folder = tmp_path / family
    build_pipeline(ExampleModelConfig(out=str(folder), family=family, num_layers=2))
    model, geometry = family_of(folder), family_of(folder).geometry(folder)
    text_tokens = model.text_tokens(folder)
    bucket = "9x64x64"
    recipes = {name: get_recipe(name) for name in ("bf16", "attn_qat")}
    counted = {name: forward_cost(str(folder), "transformer", bucket, text_tokens, recipe, "float32") for name, recipe in recipes.items()}
    transformer = model.load_transformer(folder, "transformer", dtype=torch.float32)
    x_BCFHW = torch.randn(1, *geometry.latent_shape(9, 64, 64))
    shapes = model.condition_shapes(folder, (9, 64, 64), text_tokens)
    condition = model.batch_conditions([{part: torch.randn(shape) for part, shape in shapes.items()}], text_tokens)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model.forward(transformer, x_BCFHW, torch.rand(1), condition)  # all of it as matrix products
    for recipe, cost in counted.items():
        assert cost.attention_flops > 0.01 * cost.linear_flops
        assert cost.linear_flops + cost.attention_flops == counter.get_total_flops(), recipe
    quantised = [call for part in counted["attn_qat"].blocks for call in part.attention if call.quantised]
    tokens = geometry.num_tokens(9, 64, 64) + (0 if family == "wan" else text_tokens)
    assert [call.q_BNHD for call in quantised] == [(1, tokens, geometry.num_heads, geometry.head_dim)] * 2
    assert not any(call.quantised for part in counted["bf16"].blocks for call in part.attention)


def test_frozen_weights_need_no_gradient(tiny_pipeline: Path) -> None:
    whole = forward_cost(str(tiny_pipeline), "transformer", "5x32x32", 16)
    part = forward_cost(str(tiny_pipeline), "transformer", "5x32x32", 16, trainable=("*.attn1.*",))
    assert 0 < part.trained < whole.trained == whole.parameters
    share = part.trained / part.parameters
    assert part.training_flops == pytest.approx((2 + share) * whole.linear_flops + 3.5 * whole.attention_flops)


PEAKS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA H20": None,  # neither an H200
    "NVIDIA L40": None,  # nor an L40S
    "NVIDIA A10": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_known_by_the_whole_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == PEAKS[name]
    assert peak_flops(torch.device("cpu")) is None
