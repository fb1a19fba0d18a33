"""CogVideoX's processor and pipeline seam, held against diffusers itself; its quantised gradients against an independent evaluation."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel, CogVideoXVideoToVideoPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from helpers import transformers
from helpers.pipelines import (
    assert_a_function_of_its_configuration,
    assert_from_scratch_is_a_function_of_the_seed,
    draw_video,
    edited,
    mosaic_of,
    record_calls,
)
from helpers.ranks import run_ranks
from helpers.transformers import Inputs, different, in_bf16, naive_sdpa
from torch import Tensor, nn

from videoqat.attention.backends import record_receipts
from videoqat.config import ExampleModelConfig, ParallelConfig, RuntimeConfig, SamplingConfig
from videoqat.errors import AttentionError, CheckpointError, ConfigError
from videoqat.generation.engine import Engine, check_sampling
from videoqat.models.cogvideox import FAMILY, CogVideoXProcessor
from videoqat.models.install import install, installed_recipe, observe, uninstall
from videoqat.models.spec import family_of_transformer
from videoqat.models.tiny import build_pipeline, cogvideox_transformer
from videoqat.parallel.mesh import open_mesh
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import RECIPES

outputs_and_gradients = partial(transformers.outputs_and_gradients, FAMILY)

# What sets the published models apart.
VARIANTS: dict[str, dict[str, Any]] = {
    "2b": {"use_rotary_positional_embeddings": False, "max_text_seq_length": 9},
    "5b": {},
    "1.5": {"patch_size_t": 2, "patch_bias": False},
}


def make_transformer(variant: str = "5b", seed: int = 0, **changes: Any) -> CogVideoXTransformer3DModel:
    torch.manual_seed(seed)
    sizes = {"attention_head_dim": 32, "text_embed_dim": 24, "time_embed_dim": 32}
    model = cogvideox_transformer(**sizes | VARIANTS[variant] | changes)
    for name, parameter in model.named_parameters():
        if "norm" in name and "linear" not in name:  # norms of exactly 1 and 0 would hide a norm that is left out
            nn.init.normal_(parameter, mean=1.0, std=0.3)
        if "linear" in name:  # gates and shifts that are nearly zero would hide what they gate
            nn.init.normal_(parameter, std=0.2)
    return model


def make_inputs(model: CogVideoXTransformer3DModel, dtype: torch.dtype = torch.float32, frames: int = 4) -> Inputs:
    """x (2, C, F, 6, 10), t, text (2, 9, D)."""
    generator = torch.Generator().manual_seed(1)
    x, text = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, model.config.in_channels, frames, 6, 10), (2, 9, 24)))
    return x, torch.tensor([0.0175, 0.8035]), {"text": text}


def fused(model: CogVideoXTransformer3DModel) -> CogVideoXTransformer3DModel:
    with torch.no_grad():
        model.fuse_qkv_projections()
    return model


@pytest.mark.parametrize("convert", [lambda m: m, in_bf16, fused], ids=["fp32", "bf16", "fused"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_recipe_is_bitwise_the_stock_processor(variant: str, convert: Callable) -> None:
    model = convert(make_transformer(variant))
    inputs = make_inputs(model, model.dtype)
    stock = outputs_and_gradients(model, inputs)
    assert install(model, "bf16") == []
    ours = outputs_and_gradients(model, inputs)
    assert all(type(layer.module.processor) is CogVideoXProcessor for layer in FAMILY.attention_layers(model))
    assert len(stock) > 1
    assert different(ours, stock) == []


def test_bf16_recipe_is_bitwise_the_stock_processor_under_autocast() -> None:
    model = make_transformer()
    transformers.assert_same_under_autocast(outputs_and_gradients, model, make_inputs(model), lambda model: install(model, "bf16"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_gradients_are_those_of_an_independent_evaluation(variant: str) -> None:
    """Through the whole model: diffusers' stock processors around an attention of single rows in fp64, which shares nothing with ours."""
    model = make_transformer(variant, attention_head_dim=16)
    inputs = make_inputs(model, frames=2)
    plain_errors = transformers.assert_gradients_of_an_independent_evaluation(
        lambda: outputs_and_gradients(model, inputs),
        lambda query, key, value, **_: naive_sdpa(query, key, value),
        lambda: install(model, "attn_qat", kernel="torch"),
    )
    assert min(error for name, error in plain_errors.items() if "attn1" in name and "weight" in name) > 1e-2


def on_each_rank(degree: int) -> dict[str, float]:
    """The largest error of any output and gradient, by variant and recipe, of a divided sequence against the whole one."""
    found = {}
    with open_mesh(ParallelConfig(sp=degree), torch.device("cpu")) as mesh:
        for variant in VARIANTS:
            for recipe in ("bf16", "attn_qat"):
                model = make_transformer(variant, num_attention_heads=4, attention_head_dim=16)
                inputs = make_inputs(model, frames=2)  # 30 video tokens (15 of two frames) and 9 of text
                install(model, recipe)
                found[f"{variant} {recipe}"] = transformers.error_of_division(outputs_and_gradients, model, inputs, Ulysses(mesh.sp_group))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("degree", [2, 4])
def test_divided_sequence_is_the_whole_one(degree: int) -> None:
    """Batch 2; neither 15 nor 30 video tokens nor 9 text tokens are divisible by 4 ranks, 15 and 9 not by 2."""
    for errors in run_ranks(on_each_rank, degree, degree):
        assert len(errors) == 6
        assert {key: error for key, error in errors.items() if error > 5e-6} == {}


# --- the seam to diffusers' pipeline


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny pipeline, like 5B. Copy it before changing anything in it."""
    folder = tmp_path_factory.mktemp("cogvideox") / "pipeline"
    build_pipeline(ExampleModelConfig(out=str(folder), family="cogvideox", num_layers=2, head_dim=32))
    return folder


def test_tiny_pipeline_is_a_function_of_its_configuration(tiny: Path, tmp_path: Path) -> None:
    changed = {"transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"}
    assert_a_function_of_its_configuration(tiny, tmp_path, "cogvideox", changed)


def like(tiny: Path, out: Path, variant: str, scheduler: Any = CogVideoXDDIMScheduler) -> Path:
    """A pipeline whose transformer is like the model `variant`, made by diffusers alone."""
    pipeline = CogVideoXPipeline.from_pretrained(tiny)
    transformer = make_transformer(variant, text_embed_dim=64, max_text_seq_length=26)
    CogVideoXPipeline(
        **pipeline.components | {"transformer": transformer, "scheduler": scheduler.from_config(pipeline.scheduler.config)}
    ).save_pretrained(out)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_is_what_the_pipeline_computes(variant: str, tiny: Path, tmp_path: Path) -> None:
    """Layout, discrete time, positions at a size that is not the model's own, text."""
    folder = like(tiny, tmp_path / "pipeline", variant)
    pipeline = CogVideoXPipeline.from_pretrained(folder)
    seen: list[tuple[dict[str, Any], Tensor]] = []
    record_calls(pipeline.transformer, seen)
    pipeline("a bag moves up", height=32, width=48, num_frames=9, num_inference_steps=3, guidance_scale=1.0, max_sequence_length=26)
    assert [kwargs["timestep"].item() for kwargs, _ in seen] == [999, 666, 332]
    transformer = FAMILY.load_transformer(folder, "transformer", dtype=torch.float32)
    for kwargs, expected_BFCHW in seen:
        t_B = (kwargs["timestep"] + 0.5) / 1000
        with torch.no_grad():
            ours_BCFHW = FAMILY.forward(transformer, kwargs["hidden_states"].transpose(1, 2), t_B, {"text": kwargs["encoder_hidden_states"]})
        assert torch.equal(ours_BCFHW.transpose(1, 2), expected_BFCHW)


@pytest.mark.parametrize("snr_shift_scale", [1.0, 3.0])
@pytest.mark.parametrize("scheduler", [CogVideoXDDIMScheduler, CogVideoXDPMScheduler])
def test_noise_and_target_are_the_schedulers(scheduler: Any, snr_shift_scale: float, tiny: Path, tmp_path: Path) -> None:
    name = scheduler.__name__
    folder = edited(tiny, tmp_path / "x", "scheduler/scheduler_config.json", _class_name=name, snr_shift_scale=snr_shift_scale)
    schedule, theirs = FAMILY.noise_schedule(folder), scheduler.from_pretrained(folder, subfolder="scheduler")
    k_B = torch.tensor([0, 1, 137, 500, 998, 999])
    t_B = (k_B + 0.5) / 1000
    latents, noise = (torch.randn(6, 2, 3, 4, 5, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    for ours, expected in (
        (schedule.add_noise(latents, noise, t_B), theirs.add_noise(latents.double(), noise.double(), k_B)),
        (schedule.target(latents, noise, t_B), theirs.get_velocity(latents.double(), noise.double(), k_B)),
    ):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(schedule.add_noise(latents, noise, t_B)[-1], noise[-1])  # zero signal at the end


def test_the_schedule_is_shifted_in_2b_and_not_in_5b(tiny: Path, tmp_path: Path) -> None:
    ones = torch.ones(1, 1, 1, 1, 1)
    signals = []
    for scale in (1.0, 3.0):
        folder = edited(tiny, tmp_path / str(scale), "scheduler/scheduler_config.json", snr_shift_scale=scale)
        signals.append(FAMILY.noise_schedule(folder).add_noise(ones, 0 * ones, torch.tensor([0.5])).item())
    assert signals[1] < signals[0] / 1.5


def test_prompts_are_encoded_as_the_pipeline_encodes_them(tiny: Path) -> None:
    pipeline = CogVideoXPipeline.from_pretrained(tiny)
    prompts = ["a sneaker moves left", "", "word " * 60]
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=26)
    encoders = FAMILY.load_encoders(tiny, device="cpu", dtype=torch.float32)
    conditions = FAMILY.encode_prompts(encoders, prompts, 26)
    assert torch.equal(FAMILY.batch_conditions(conditions, 26)["text"], expected)
    counts = FAMILY.count_tokens(encoders, prompts)
    assert counts[:2] == [5, 1]
    assert counts[2] > 26
    with pytest.raises(ConfigError, match=r"20 tokens is not the max_text_tokens=26"):
        FAMILY.batch_conditions([conditions[0], {"text": conditions[1]["text"][:20]}], 26)


def test_a_published_tokenizer_of_nothing_but_sentencepieces_file_is_read(tiny: Path, tmp_path: Path) -> None:
    """CogVideoX's folders have no tokenizer.json: transformers reads spiece.model, with a library that it doesn't bring along."""
    from sentencepiece import SentencePieceTrainer

    folder = tmp_path / "published"
    shutil.copytree(tiny, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"tokenizer": ["transformers", "T5Tokenizer"]}))
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 0}))
    texts = iter(["a sneaker moves left", "a bag moves up"])
    written = {"model_prefix": str(folder / "tokenizer" / "spiece"), "vocab_size": 24, "hard_vocab_limit": False, "minloglevel": 2}
    SentencePieceTrainer.train(sentence_iterator=texts, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **written)
    encoders = FAMILY.load_encoders(folder, device="cpu", dtype=torch.float32)
    ids = encoders.tokenizer("a sneaker moves left").input_ids
    assert ids[-1] == 1  # the end mark
    assert encoders.tokenizer.decode(ids[:-1]) == "a sneaker moves left"


def test_text_length_is_the_models_own(tiny: Path, tmp_path: Path) -> None:
    assert (FAMILY.text_tokens(tiny), FAMILY.text_tokens(tiny, 16)) == (26, 16)
    like_2b = edited(tiny, tmp_path / "2b", "transformer/config.json", use_rotary_positional_embeddings=False)
    assert (FAMILY.text_tokens(like_2b), FAMILY.text_tokens(like_2b, 26)) == (26, 26)
    with pytest.raises(ConfigError, match=r"sampling.max_text_tokens=16 is not legal for .*made for 26 text tokens; legal: 26"):
        check_sampling(like_2b, SamplingConfig(max_text_tokens=16))


def test_video_is_encoded_as_diffusers_encodes_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CogVideoXVideoToVideoPipeline encodes videos itself; its drawing from the posterior and its mixing with noise are left out here."""
    other = CogVideoXVideoToVideoPipeline.from_pretrained(tiny)
    other.scheduler.add_noise = lambda clean, noise, times: clean
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    video = torch.cat([draw_video(), -draw_video()])
    with torch.no_grad():
        theirs_BFCHW = other.prepare_latents(video, 2, 4, 32, 48, torch.float32, torch.device("cpu"))
    latents = FAMILY.encode_video(FAMILY.load_encoders(tiny, device="cpu", dtype=torch.float32), video)
    assert latents.shape == (2, *FAMILY.geometry(tiny).latent_shape(9, 32, 48))
    assert torch.equal(latents, theirs_BFCHW.transpose(1, 2))


@pytest.mark.parametrize("variant", ["5b", "1.5"])
def test_decoding_undoes_encoding(variant: str, tiny: Path, tmp_path: Path) -> None:
    """The pipeline decodes what `encode_video` gave, without any denoising, to the mean colour of each block of pixels and frames (`tiny_mosaic`);
    of 1.5 it drops the frame that `encode_video` filled up with."""
    pipeline = FAMILY.load_pipeline(like(tiny, tmp_path / "pipeline", variant), device="cpu", dtype=torch.float32)
    video = draw_video()
    latents = FAMILY.encode_video(pipeline, video)
    assert latents.shape[2] == {"5b": 3, "1.5": 4}[variant]
    pipeline.scheduler.step = lambda prediction, t, sample, return_dict: (sample,)
    frames = pipeline(
        "a bag", height=32, width=48, num_frames=9, num_inference_steps=1, latents=latents.transpose(1, 2), max_sequence_length=26, output_type="pt"
    ).frames
    torch.testing.assert_close(frames.transpose(1, 2) * 2 - 1, mosaic_of(video), atol=2e-3, rtol=0)


@pytest.mark.parametrize(("scheduler", "dynamic"), [(CogVideoXDDIMScheduler, False), (CogVideoXDPMScheduler, True)])
def test_engine_renders_bitwise_the_stock_videos_under_bf16(scheduler: Any, dynamic: bool, tiny: Path, tmp_path: Path) -> None:
    folder = like(tiny, tmp_path / "pipeline", "5b", scheduler)
    stock = CogVideoXPipeline.from_pretrained(folder)(
        "a coat moves down", height=32, width=48, num_frames=9, num_inference_steps=4, guidance_scale=3.0, use_dynamic_cfg=dynamic,
        generator=torch.Generator().manual_seed(3), max_sequence_length=26, output_type="np",
    ).frames[0]  # fmt: skip
    engine = Engine(folder, RuntimeConfig(device="cpu", dtype="float32"))
    sampling = SamplingConfig(num_frames=9, height=32, width=48, num_inference_steps=4, dynamic_guidance=dynamic)
    ours = engine.generate("a coat moves down", 3, sampling, "bf16")
    assert np.array_equal(ours.frames, np.rint(stock * 255).astype(np.uint8))
    assert (ours.frames.std() > 5, ours.warnings) == (True, [])
    if not dynamic:
        other = engine.generate("a coat moves down", 3, replace(sampling, dynamic_guidance=True), "bf16")
        assert not np.array_equal(other.frames, ours.frames)
        quantised = engine.generate("a coat moves down", 3, sampling, "attn_qat")
        assert not np.array_equal(quantised.frames, ours.frames)
        assert {receipt["recipe"] for receipt in quantised.receipts} == {"attn_qat"}


def test_projections_fused_later_do_not_drop_the_recipe(tiny: Path) -> None:
    """diffusers then puts its own processors into every layer."""
    engine = Engine(tiny, RuntimeConfig(device="cpu"))
    sampling = SamplingConfig(num_frames=9, height=32, width=32, num_inference_steps=2)
    before = engine.generate("a bag", 0, sampling, "attn_qat")
    with torch.no_grad():
        engine.pipeline.fuse_qkv_projections()
    assert installed_recipe(engine.transformers["transformer"]) is None
    after = engine.generate("a bag", 0, sampling, "attn_qat")
    assert [(r["recipe"], r["calls"]) for r in after.receipts] == [(r["recipe"], r["calls"]) for r in before.receipts] == [("attn_qat", 4)]
    assert np.abs(after.frames.astype(int) - before.frames).mean() < 1  # one product instead of three: other last bits
    plain = engine.generate("a bag", 0, sampling, "bf16")
    engine.pipeline.unfuse_qkv_projections()  # puts back what it found when it fused: processors of attn_qat
    assert installed_recipe(engine.transformers["transformer"]) is None
    again = engine.generate("a bag", 0, sampling, "bf16")
    assert {receipt["recipe"] for receipt in again.receipts} == {"bf16"}
    assert np.array_equal(again.frames, plain.frames)


def test_16_bits_leave_the_vae_in_float32(tiny: Path) -> None:
    engine = Engine(tiny, RuntimeConfig(device="cpu", dtype="bfloat16"))
    seen: list[torch.dtype] = []
    engine.pipeline.vae.decoder.conv_in.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    frames = engine.generate("a bag", 0, SamplingConfig(num_frames=9, height=32, width=32, num_inference_steps=2), "bf16").frames
    assert engine.transformers["transformer"].dtype == torch.bfloat16
    assert (set(seen), frames.std() > 1) == ({torch.float32}, True)


def test_a_prompt_that_is_cut_is_told(tiny: Path) -> None:
    engine = Engine(tiny, RuntimeConfig(device="cpu"))
    sampling = SamplingConfig(num_frames=1, height=16, width=16, num_inference_steps=1)
    fits, cut = ("a bag" + " a bag" * count for count in (11, 12))
    assert engine.generate(fits, 0, sampling, "bf16").warnings == []
    against = replace(sampling, negative_prompt=cut)
    assert engine.generate(fits, 0, replace(against, guidance_scale=1.0), "bf16").warnings == []  # without guidance it is not used
    told = [engine.generate(cut, 0, sampling, "bf16"), engine.generate(fits, 0, against, "bf16")]
    for result, name in zip(told, ("prompt", "negative prompt"), strict=True):
        assert result.warnings == [f"the {name} has 27 tokens, of which the model sees the first 26: {cut!r}"]


# --- what is refused, before weights are loaded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prediction_type": "epsilon"}, "prediction_type='epsilon', but CogVideoX is trained with 'v_prediction'"),
        ({"num_train_timesteps": 100}, "num_train_timesteps=100, but"),
        ({"_class_name": "DDPMScheduler"}, "is a DDPMScheduler; legal for CogVideoX: CogVideoXDDIMScheduler, CogVideoXDPMScheduler"),
    ],
)
def test_schedulers_that_models_were_not_trained_with(changes: dict[str, Any], message: str, tiny: Path, tmp_path: Path) -> None:
    folder = edited(tiny, tmp_path / "x", "scheduler/scheduler_config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        FAMILY.noise_schedule(folder)


def test_configuration_that_does_not_fit(tiny: Path, tmp_path: Path) -> None:
    other_vae = edited(tiny, tmp_path / "vae", "vae/config.json", latent_channels=16)
    with pytest.raises(CheckpointError, match="in_channels=4, out_channels=4, the VAE's latent_channels=16 must be equal"):
        FAMILY.geometry(other_vae)
    none = edited(tiny, tmp_path / "none", "model_index.json", transformer=[None, None])
    with pytest.raises(CheckpointError, match="names no transformer"):
        FAMILY.components(none)
    with pytest.raises(CheckpointError, match=r"has no 'transformer_2'; it has: transformer$"):
        FAMILY.geometry(tiny, "transformer_2")
    with pytest.raises(ConfigError, match="two_transformers=True is not legal; legal: false with family=cogvideox"):
        build_pipeline(ExampleModelConfig(out=str(tmp_path / "pair"), family="cogvideox", two_transformers=True))


def test_sampling_that_is_not_for_this_model(tiny: Path, tiny_pipeline: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampling.flow_shift=3.0 is not legal; legal: 0 for .*v-prediction\) takes no flow shift"):
        check_sampling(tiny, SamplingConfig(flow_shift=3.0))
    with pytest.raises(ConfigError, match=r"sampling.dynamic_guidance=True is not legal; legal: false for .*pipelines of wan have none"):
        check_sampling(tiny_pipeline, SamplingConfig(dynamic_guidance=True))
    with pytest.raises(ConfigError, match=r"13 frames don't fit this model; legal: 8n\+1, such as 9 or 17"):
        check_sampling(tiny, SamplingConfig(num_frames=13))


def test_masks_and_16_bit_angles_are_refused() -> None:
    model = make_transformer()
    install(model, "bf16")
    block, (x, text) = model.transformer_blocks[0], (torch.zeros(1, n, 64) for n in (4, 2))
    with pytest.raises(AttentionError, match=r"transformer_blocks.0.attn1: CogVideoX's attention takes no mask"):
        block.attn1(x, encoder_hidden_states=text, attention_mask=torch.ones(1, 6))
    with pytest.raises(AttentionError, match=r"rotary tables must be float32, got torch.bfloat16"):
        block.attn1(x, encoder_hidden_states=text, image_rotary_emb=(torch.zeros(4, 32).bfloat16(),) * 2)


# --- the family's view of a transformer


def test_all_attention_is_joint_and_quantised() -> None:
    model = make_transformer()
    assert family_of_transformer(model) is FAMILY
    layers = install(model, "attn_qat")
    assert [(x.name, x.kind, x.index) for x in layers] == [("transformer_blocks.0.attn1", "joint", 0), ("transformer_blocks.1.attn1", "joint", 1)]
    assert all(model.get_submodule(x.name) is x.module and (x.num_heads, x.head_dim) == (2, 32) for x in layers)
    assert FAMILY.blocks(model) == list(model.transformer_blocks)
    with record_receipts() as receipts, torch.no_grad():
        FAMILY.forward(model, *make_inputs(model))
    assert [(receipt.recipe, receipt.calls) for receipt in receipts] == [("attn_qat", 2)]
    assert install(model, replace(RECIPES["attn_qat"], attention_kinds=("self",))) == []
    uninstall(model)
    assert type(model.transformer_blocks[0].attn1.processor).__name__ == "CogVideoXAttnProcessor2_0"


def test_tokens_are_what_the_transformer_sees(tiny: Path) -> None:
    geometry = FAMILY.geometry(tiny)
    model = FAMILY.load_transformer(tiny, "transformer", dtype=torch.float32)
    install(model, "bf16")
    tokens: list[int] = []
    observe(model, lambda name, q, k, v: tokens.append(q.shape[1]))
    with torch.no_grad():
        text_BLD = torch.zeros(1, 4, geometry.text_dim)
        FAMILY.forward(model, torch.zeros(1, *geometry.latent_shape(9, 32, 48)), torch.tensor([0.5]), {"text": text_BLD})
    assert geometry.num_tokens(9, 32, 48) == 3 * 4 * 6
    assert tokens == [4 + 3 * 4 * 6] * 2


def test_from_scratch_is_a_function_of_the_seed(tiny: Path) -> None:
    assert_from_scratch_is_a_function_of_the_seed(FAMILY, tiny)
