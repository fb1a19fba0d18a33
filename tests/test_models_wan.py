"""Wan's processors and pipeline seam, held against diffusers itself."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel, WanVideoToVideoPipeline
from torch import nn

from videoqat.attention.backends import record_receipts
from videoqat.attention.metrics import relative_l2
from videoqat.errors import AttentionError, CheckpointError, ConfigError
from videoqat.models.install import install, installed_recipe, observe, uninstall
from videoqat.models.spec import family_of
from videoqat.models.wan import FAMILY, WanProcessor
from videoqat.recipes import RECIPES, AttentionRecipe

TINY: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 96,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
IMAGE_TO_VIDEO = {"image_dim": 20, "added_kv_proj_dim": 64, "in_channels": 8}


def make_transformer(seed: int = 0, **changes: Any) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    model = WanTransformer3DModel(**(TINY | changes)).eval()
    for name, parameter in model.named_parameters():  # norms of exactly 1 and 0 would hide a norm that is left out
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def make_inputs(model: WanTransformer3DModel, dtype: torch.dtype, text_tokens: int = 9, image_tokens: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    inputs = {
        "hidden_states": draw(2, model.config.in_channels, 3, 8, 6),
        "timestep": torch.tensor([17.0, 803.5]),
        "encoder_hidden_states": draw(2, text_tokens, model.config.text_dim),
    }
    if image_tokens:
        inputs["encoder_hidden_states_image"] = draw(2, image_tokens, model.config.image_dim)
    return inputs


def outputs_and_gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def in_bf16(model: WanTransformer3DModel) -> WanTransformer3DModel:
    return model.to(torch.bfloat16)


def fused(model: WanTransformer3DModel) -> WanTransformer3DModel:
    model.fuse_qkv_projections()
    return model


@pytest.mark.parametrize("convert", [lambda m: m, in_bf16, fused], ids=["fp32", "bf16", "fused"])
@pytest.mark.parametrize(
    ("changes", "text_tokens", "image_tokens"),
    [({}, 9, 0), (IMAGE_TO_VIDEO, 512, 5)],
    ids=["text_to_video", "image_to_video"],
)
def test_bf16_recipe_is_bitwise_the_stock_processor(changes: dict, text_tokens: int, image_tokens: int, convert: Callable) -> None:
    model = convert(make_transformer(**changes))
    inputs = make_inputs(model, model.patch_embedding.weight.dtype, text_tokens, image_tokens)
    stock = outputs_and_gradients(model, inputs)
    assert install(model, "bf16") == []
    ours = outputs_and_gradients(model, inputs)
    assert all(type(layer.module.processor) is WanProcessor for layer in FAMILY.attention_layers(model))
    assert len(stock) == len(ours) > 1
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


def test_bf16_recipe_is_bitwise_the_stock_processor_under_autocast() -> None:
    model = make_transformer()
    inputs = make_inputs(model, torch.float32)
    truth = outputs_and_gradients(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = outputs_and_gradients(model, inputs)
        install(model, "bf16")
        ours = outputs_and_gradients(model, inputs)
    assert torch.equal(stock[0], ours[0])
    # The rotation's gradient is rounded once where autograd rounds twice.
    errors = [(relative_l2(mine, exact), relative_l2(theirs, exact)) for mine, theirs, exact in zip(ours[1:], stock[1:], truth[1:], strict=True)]
    assert all(mine < 1.3 * theirs for mine, theirs in errors)


def test_quantised_under_autocast_sees_the_numbers_that_sdpa_would_see() -> None:
    model = make_transformer()
    install(model, "attn_qat")
    seen: list[torch.dtype] = []
    observe(model, lambda name, q, k, v: seen.extend((q.dtype, k.dtype, v.dtype)))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(**make_inputs(model, torch.float32))
    assert set(seen) == {torch.bfloat16}


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = make_transformer()
    install(model, "attn_qat")
    inputs = make_inputs(model, torch.float32)
    plain = outputs_and_gradients(model, inputs)
    model.enable_gradient_checkpointing()
    again = outputs_and_gradients(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("changes", [{}, IMAGE_TO_VIDEO], ids=["text_to_video", "image_to_video"])
def test_only_self_attention_is_quantised_unless_the_recipe_says_cross(changes: dict) -> None:
    model = make_transformer(**changes)
    text_tokens, image_tokens = (512, 5) if changes else (9, 0)
    inputs = make_inputs(model, torch.float32, text_tokens, image_tokens)
    calls_per_cross = 2 if changes else 1
    both = AttentionRecipe("both", attention_kinds=("self", "cross"))
    for recipe, kinds, quantised_calls in ((RECIPES["attn_qat"], {"self"}, 3), (both, {"self", "cross"}, 3 + 3 * calls_per_cross)):
        layers = install(model, recipe)
        assert {layer.kind for layer in layers} == kinds
        with record_receipts() as receipts, torch.no_grad():
            model(**inputs)
        assert sum(r.calls for r in receipts if r.recipe == recipe.name) == quantised_calls
        assert sum(r.calls for r in receipts) == 3 + 3 * calls_per_cross


def test_quantised_attention_changes_the_output_by_a_little() -> None:
    model = make_transformer()
    inputs = make_inputs(model, torch.float32)
    with torch.no_grad():
        exact = model(**inputs, return_dict=False)[0]
        install(model, "attn_qat")
        quantised = model(**inputs, return_dict=False)[0]
    error = ((quantised - exact).norm() / exact.norm()).item()
    assert 1e-5 < error < 0.2


def test_attention_mask_is_refused() -> None:
    model = make_transformer()
    install(model, "bf16")
    with pytest.raises(AttentionError, match="no mask"):
        model.blocks[0].attn1(torch.zeros(1, 4, 64), attention_mask=torch.ones(1, 4))


def test_layers_name_the_modules_they_hold() -> None:
    model = make_transformer()
    layers = FAMILY.attention_layers(model)
    assert [(x.name, x.kind, x.index) for x in layers[:3]] == [
        ("blocks.0.attn1", "self", 0),
        ("blocks.0.attn2", "cross", 0),
        ("blocks.1.attn1", "self", 1),
    ]
    assert all(model.get_submodule(x.name) is x.module and (x.num_heads, x.head_dim) == (2, 32) for x in layers)


def test_forward_scales_time_and_equals_per_token_time() -> None:
    """WanPipeline gives the 5B model (expand_timesteps) one time for each token, all alike: that must be the function `forward` computes."""
    model = make_transformer()
    inputs = make_inputs(model, torch.float32)
    t_B = torch.tensor([0.017, 0.8035])
    with torch.no_grad():
        ours = FAMILY.forward(model, inputs["hidden_states"], t_B, {"text": inputs["encoder_hidden_states"]})
        whole = model(**inputs, return_dict=False)[0]
        per_token = model(**(inputs | {"timestep": inputs["timestep"].unsqueeze(1).expand(-1, 3 * 4 * 3)}), return_dict=False)[0]
    torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, per_token, rtol=1e-4, atol=1e-5)


def test_prompts_are_encoded_as_the_pipeline_encodes_them(tiny_pipeline: Path) -> None:
    pipeline = WanPipeline.from_pretrained(tiny_pipeline)
    prompts = ["a sneaker moves left", "  two   spaces &amp; a sign\n", "", "word " * 60]
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=40)
    encoders = FAMILY.load_encoders(tiny_pipeline, device="cpu", dtype=torch.float32)
    conditions = FAMILY.encode_prompts(encoders, prompts, 40)
    assert [len(condition["text"]) for condition in conditions[:1] + conditions[2:]] == [5, 1, 40]
    assert torch.equal(FAMILY.batch_conditions(conditions, 40)["text"], expected)


def test_text_longer_than_the_padding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"7 tokens.*max_text_tokens=4"):
        FAMILY.batch_conditions([{"text": torch.zeros(7, 3)}], 4)


def test_video_is_encoded_as_diffusers_encodes_it(tiny_pipeline: Path) -> None:
    """WanVideoToVideoPipeline encodes videos itself, mode and normalisation included; only its mixing with noise is left out here."""
    encoders = FAMILY.load_encoders(tiny_pipeline, device="cpu", dtype=torch.float32)
    video = torch.rand(2, 3, 5, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    other = WanVideoToVideoPipeline.from_pretrained(tiny_pipeline)
    other.scheduler.add_noise = lambda clean, noise, times: clean
    with torch.no_grad():
        theirs = other.prepare_latents(video, 2, 16, 32, 48, torch.float32, torch.device("cpu"))
    latents = FAMILY.encode_video(encoders, video)
    assert latents.shape == (2, *FAMILY.geometry(tiny_pipeline).latent_shape(5, 32, 48))
    torch.testing.assert_close(latents, theirs)


def test_decoding_undoes_encoding(tiny_pipeline: Path) -> None:
    """The pipeline decodes what `encode_video` gave, without any denoising, to what the VAE alone makes of the video."""
    pipeline = FAMILY.load_pipeline(tiny_pipeline, device="cpu", dtype=torch.float32)
    video = torch.rand(1, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = FAMILY.encode_video(pipeline, video)
    pipeline.scheduler.step = lambda prediction, t, sample, return_dict: (sample,)
    frames = pipeline("a bag moves up", height=32, width=32, num_frames=5, num_inference_steps=1, latents=latents, output_type="pt").frames
    with torch.no_grad():
        alone = pipeline.vae.decode(pipeline.vae.encode(video).latent_dist.mode()).sample
    torch.testing.assert_close(frames.transpose(1, 2) * 2 - 1, alone, atol=2e-3, rtol=0)


def test_pair_splits_time_where_the_pipeline_does(tiny_pipeline_pair: Path) -> None:
    assert FAMILY.components(tiny_pipeline_pair) == ("transformer", "transformer_2")
    high, low = (FAMILY.flow_time_range(tiny_pipeline_pair, name) for name in ("transformer", "transformer_2"))
    pipeline = FAMILY.load_pipeline(tiny_pipeline_pair, device="cpu", dtype=torch.float32)
    times: dict[str, list[float]] = {"transformer": [], "transformer_2": []}
    for name, seen in times.items():
        getattr(pipeline, name).register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["timestep"][0].item() / 1000), with_kwargs=True
        )
    pipeline("a bag moves up", height=16, width=16, num_frames=5, num_inference_steps=6, guidance_scale=1.0)
    assert len(times["transformer"]) + len(times["transformer_2"]) == 6
    assert times["transformer"]
    assert times["transformer_2"]
    assert all(high[0] <= t <= high[1] for t in times["transformer"])
    assert all(low[0] <= t < low[1] for t in times["transformer_2"])
    assert low[1] == high[0]
    assert (low[0], high[1]) == (0.0, 1.0)


def test_pair_generates_bitwise_the_stock_videos_under_bf16(tiny_pipeline_pair: Path) -> None:
    def generate(pipeline: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return pipeline(
            "a coat moves down", height=32, width=32, num_frames=5, num_inference_steps=4, guidance_scale=3.0, generator=generator, output_type="pt"
        ).frames

    stock = generate(WanPipeline.from_pretrained(tiny_pipeline_pair))
    pipeline = FAMILY.load_pipeline(tiny_pipeline_pair, device="cpu", dtype=torch.float32)
    for name in FAMILY.components(tiny_pipeline_pair):
        install(getattr(pipeline, name), "bf16")
    assert torch.equal(generate(pipeline), stock)


def test_from_scratch_is_a_function_of_the_seed(tiny_pipeline: Path) -> None:
    before = torch.get_rng_state()
    a, b, c = (FAMILY.load_transformer(tiny_pipeline, "transformer", dtype=torch.float32, from_scratch=True, seed=s) for s in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    states = [model.state_dict() for model in (a, b, c)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0]["blocks.0.attn1.to_q.weight"], states[2]["blocks.0.attn1.to_q.weight"])


def test_dtypes_from_scratch_are_those_of_loaded_weights(tiny_pipeline: Path) -> None:
    loaded, scratch = (
        FAMILY.load_transformer(tiny_pipeline, "transformer", dtype=torch.bfloat16, from_scratch=from_scratch) for from_scratch in (False, True)
    )
    dtypes = {name: p.dtype for name, p in loaded.named_parameters()}
    assert {name: p.dtype for name, p in scratch.named_parameters()} == dtypes
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


def test_installed_models_can_be_copied(tiny_pipeline: Path) -> None:
    model = family_of(tiny_pipeline).load_transformer(tiny_pipeline, "transformer", dtype=torch.float32)
    install(model, "attn_qat")
    twin = copy.deepcopy(model)
    uninstall(twin)
    assert installed_recipe(model) == RECIPES["attn_qat"]
    assert installed_recipe(twin) is None
    assert type(model.blocks[0].attn1.processor) is WanProcessor
    assert type(twin.blocks[0].attn1.processor) is not WanProcessor


def test_component_that_is_not_there(tiny_pipeline: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no 'transformer_2'; it has: transformer$"):
        FAMILY.geometry(tiny_pipeline, "transformer_2")


def test_tokens_are_what_the_transformer_sees(tiny_pipeline: Path) -> None:
    geometry = FAMILY.geometry(tiny_pipeline)
    model = FAMILY.load_transformer(tiny_pipeline, "transformer", dtype=torch.float32)
    install(model, "bf16")
    tokens: list[int] = []
    observe(model, lambda name, q, k, v: tokens.append(q.shape[1]) if name.endswith("attn1") else None)
    x = torch.zeros(1, *geometry.latent_shape(9, 32, 48))
    with torch.no_grad():
        FAMILY.forward(model, x, torch.tensor([0.5]), {"text": torch.zeros(1, 4, geometry.text_dim)})
    assert set(tokens) == {geometry.num_tokens(9, 32, 48)} == {math.prod(x.shape[2:])}
