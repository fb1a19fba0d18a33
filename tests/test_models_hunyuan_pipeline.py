"""HunyuanVideo's seam to diffusers' pipeline: what is encoded, told and decoded is what the pipeline itself encodes, tells and decodes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from helpers.engines import tiny_job
from helpers.pipelines import (
    assert_a_function_of_its_configuration,
    assert_from_scratch_is_a_function_of_the_seed,
    change_weights,
    draw_video,
    edited,
    mosaic_of,
    record_calls,
)
from torch import Tensor

from videoqat.config import ExampleModelConfig, ParallelConfig, RuntimeConfig, SamplingConfig
from videoqat.errors import CheckpointError, ConfigError
from videoqat.generation.engine import Engine, check_sampling
from videoqat.models.hunyuan import FAMILY
from videoqat.models.install import install, observe
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline
from videoqat.parallel.mesh import open_mesh
from videoqat.training.engines import make_engine
from videoqat.training.objective import shift_time
from videoqat.training.samples import _takes_what_pipelines_give

SAMPLING = SamplingConfig(num_frames=9, height=32, width=48, num_inference_steps=3, guidance_scale=6.0, max_text_tokens=16)
PROMPTS = ["a sneaker moves left", "", "word " * 60]
CALL: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 3, "max_sequence_length": 16, "output_type": "np"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny pipeline. Copy it before changing anything in it."""
    folder = tmp_path_factory.mktemp("hunyuan") / "pipeline"
    build_pipeline(ExampleModelConfig(out=str(folder), family="hunyuanvideo", num_layers=2, head_dim=32))
    return folder


@pytest.fixture(scope="module")
def stock(tiny: Path) -> HunyuanVideoPipeline:
    pipeline = HunyuanVideoPipeline.from_pretrained(tiny)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    return Engine(tiny, RuntimeConfig(device="cpu", dtype="float32"))


# --- the tiny pipeline


def test_tiny_pipeline_is_a_function_of_its_configuration(tiny: Path, tmp_path: Path) -> None:
    encoders = {"text_encoder/model.safetensors", "text_encoder_2/model.safetensors"}
    changed = {"transformer/diffusion_pytorch_model.safetensors"} | encoders
    report = assert_a_function_of_its_configuration(tiny, tmp_path, "hunyuanvideo", changed)
    assert (report["components"], report["flow_shift"], report["tokens_per_clip"]) == (["transformer"], 7.0, 320)


def test_its_tokenizer_makes_of_the_template_what_the_pipeline_crops(stock: HunyuanVideoPipeline) -> None:
    before, after = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")
    assert len(stock.tokenizer(before).input_ids) == DEFAULT_PROMPT_TEMPLATE["crop_start"] == 95
    whole = stock.tokenizer(DEFAULT_PROMPT_TEMPLATE["template"].format(PROMPTS[0])).input_ids
    assert stock.tokenizer.decode(whole[95:]) == PROMPTS[0] + after
    assert len(whole) == 95 + 5
    other = "Ein Schloß, 3 Möwen & 水"
    assert stock.tokenizer.decode(stock.tokenizer(other).input_ids, skip_special_tokens=True) == other


# --- text


def test_prompts_are_encoded_as_the_pipeline_encodes_them(tiny: Path, stock: HunyuanVideoPipeline) -> None:
    with torch.no_grad():
        text_BLD, pooled_BP, mask_BL = stock.encode_prompt(PROMPTS, max_sequence_length=16)
    encoders = FAMILY.load_encoders(tiny, device="cpu", dtype=torch.float32)
    conditions = FAMILY.encode_prompts(encoders, PROMPTS, 16)
    assert [len(condition["text"]) for condition in conditions] == [5, 1, 16]
    batch = FAMILY.batch_conditions(conditions, 16)
    assert torch.equal(batch["text"], text_BLD * mask_BL.unsqueeze(2))
    assert torch.equal(batch["pooled"], pooled_BP)
    assert torch.equal(batch["text_len"], mask_BL.sum(dim=1))
    assert FAMILY.count_tokens(encoders, PROMPTS)[:2] == [5, 1]
    assert FAMILY.count_tokens(encoders, PROMPTS)[2] > 16
    assert {key: tuple(value.shape) for key, value in conditions[2].items()} == FAMILY.condition_shapes(tiny, (9, 32, 48), 16)
    with pytest.raises(ConfigError, match=r"16 tokens doesn't fit into max_text_tokens=8"):
        FAMILY.batch_conditions(conditions, 8)


def test_without_text_encoders_the_pipeline_takes_conditions(tiny: Path, stock: HunyuanVideoPipeline) -> None:
    """And makes the same video of them as of the prompts."""
    expected = stock(PROMPTS[0], negative_prompt="a bag", true_cfg_scale=2.0, generator=torch.Generator().manual_seed(0), **CALL).frames
    conditions = FAMILY.encode_prompts(stock, [PROMPTS[0], "a bag"], 16)
    bare = FAMILY.load_encoders(tiny, device="cpu", dtype=torch.float32, text_encoder=False)
    assert (bare.text_encoder, bare.text_encoder_2, bare.transformer) == (None, None, None)
    bare.transformer = stock.transformer
    arguments = FAMILY.prompt_arguments(*(FAMILY.batch_conditions([condition], 16) for condition in conditions))
    given = bare(**arguments, true_cfg_scale=2.0, generator=torch.Generator().manual_seed(0), **CALL).frames
    assert np.array_equal(given, expected)
    unguided = bare(**arguments, generator=torch.Generator().manual_seed(0), **CALL).frames
    assert not np.array_equal(unguided, expected)


def test_text_length_is_free_up_to_what_the_encoder_takes(tiny: Path, tmp_path: Path) -> None:
    assert (FAMILY.text_tokens(tiny), FAMILY.text_tokens(tiny, 16), FAMILY.text_tokens(tiny, 417)) == (256, 16, 417)
    with pytest.raises(
        ConfigError, match=r"sampling.max_text_tokens=418 is more than the text encoder of .* takes behind its template; .* up to 417"
    ):
        check_sampling(tiny, replace(SAMPLING, max_text_tokens=418))
    bare = Path(shutil.copytree(tiny, tmp_path / "x", ignore=shutil.ignore_patterns("text_encoder*", "*.safetensors")))
    assert FAMILY.text_tokens(bare, 1000) == 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_what_the_pipeline_computes(dtype: torch.dtype, tiny: Path) -> None:
    """Time, guidance, texts and their masks; the pipeline's padding is what Llama made of it, ours is zeros."""
    pipeline = FAMILY.load_pipeline(tiny, device="cpu", dtype=dtype)
    seen: list[tuple[dict[str, Any], Tensor]] = []
    record_calls(pipeline.transformer, seen)
    pipeline(PROMPTS[0], guidance_scale=1.0, **CALL)
    pipeline(PROMPTS[0], guidance_scale=6.0, **CALL)
    told = seen[3][0]["guidance"].item()
    assert told == (6000 if dtype == torch.float32 else 6016)  # as the published code has it in bfloat16
    assert not torch.equal(seen[0][1], seen[3][1])
    condition = FAMILY.batch_conditions(FAMILY.encode_prompts(pipeline, PROMPTS[:1], 16), 16)
    times = [kwargs["timestep"].item() for kwargs, _ in seen[:3]]
    # In 16 bits, so are the latents after a step, and with them the pipeline's times.
    assert times == pytest.approx([1000, 1000 * shift_time(2 / 3, 7.0), 1000 * shift_time(1 / 3, 7.0)], rel=1e-6 if dtype == torch.float32 else 4e-3)
    for kwargs, expected in seen[:3]:
        with torch.no_grad():
            ours = FAMILY.forward(pipeline.transformer, kwargs["hidden_states"], kwargs["timestep"].float() / 1000, condition)
        assert ours.dtype == dtype
        # t / 1000 * 1000 may be off by its last bit
        assert (ours - expected).float().norm() < (1e-5 if dtype == torch.float32 else 1e-2) * expected.float().norm()
        if kwargs["timestep"].item() == 1000:
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("recipe", ["bf16", "attn_qat"])
def test_two_prompts_of_different_length_give_the_videos_that_each_gives_alone(recipe: str, stock: HunyuanVideoPipeline, tiny: Path) -> None:
    pipeline = FAMILY.load_pipeline(tiny, device="cpu", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    install(pipeline.transformer, recipe)
    prompts = ["a sneaker moves left and up and down", "a bag"]

    def render(which: list[int]) -> np.ndarray:
        generators = [torch.Generator().manual_seed(i) for i in which]
        return pipeline([prompts[i] for i in which], generator=generators, guidance_scale=6.0, **CALL).frames

    together = render([0, 1])
    for i in (0, 1):
        assert np.abs(together[i] - render([i])[0]).max() < 2e-4
    assert np.abs(together[0] - together[1]).mean() > 0.05
    theirs = stock(prompts, generator=[torch.Generator().manual_seed(i) for i in (0, 1)], guidance_scale=6.0, **CALL).frames
    assert np.array_equal(together, theirs) == (recipe == "bf16")


# --- video


def test_noise_and_target_are_the_schedulers(tiny: Path) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny, subfolder="scheduler")
    schedule = FAMILY.noise_schedule(tiny)
    assert (schedule.flow_shift, FAMILY.flow_time_range(tiny, "transformer")) == (7.0, (0.0, 1.0))
    scheduler.set_timesteps(5)
    latents, noise = (torch.randn(5, 2, 3, 4, 5, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    t_B = scheduler.timesteps / 1000
    torch.testing.assert_close(schedule.add_noise(latents, noise, t_B), scheduler.scale_noise(latents, scheduler.timesteps, noise))
    # A step along the target to the next time is the noisy sample of that time.
    stepped = scheduler.step(schedule.target(latents, noise, t_B)[:1], scheduler.timesteps[0], schedule.add_noise(latents, noise, t_B)[:1])[0]
    torch.testing.assert_close(stepped, schedule.add_noise(latents[:1], noise[:1], t_B[1:2]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frames", [9, 17])
def test_decoding_undoes_encoding(frames: int, tiny: Path) -> None:
    """The pipeline decodes what `encode_video` gave, without any denoising, to the mean colour of each block of pixels and frames (`tiny_mosaic`).
    17 frames are more than this VAE takes at once."""
    pipeline = FAMILY.load_pipeline(tiny, device="cpu", dtype=torch.float32)
    video = draw_video(frames)
    latents = FAMILY.encode_video(pipeline, video)
    assert latents.shape == (1, *FAMILY.geometry(tiny).latent_shape(frames, 32, 48))
    pipeline.scheduler.step = lambda prediction, t, sample, return_dict: (sample,)
    decoded = pipeline("a bag", latents=latents, **CALL | {"num_frames": frames, "num_inference_steps": 1, "output_type": "pt"}).frames
    torch.testing.assert_close(decoded.transpose(1, 2) * 2 - 1, mosaic_of(video), atol=1e-4, rtol=0)


def test_engine_renders_bitwise_the_stock_videos_under_bf16(engine: Engine, stock: HunyuanVideoPipeline) -> None:
    def expected(**arguments: Any) -> np.ndarray:
        frames = stock("a coat moves down", guidance_scale=6.0, generator=torch.Generator().manual_seed(3), **CALL | arguments).frames[0]
        return np.rint(frames * 255).astype(np.uint8)

    ours = engine.generate("a coat moves down", 3, SAMPLING, "bf16")
    assert np.array_equal(ours.frames, expected())
    assert (ours.frames.std() > 5, ours.warnings) == (True, [])
    guided = engine.generate("a coat moves down", 3, replace(SAMPLING, true_cfg_scale=4.0, negative_prompt="a bag"), "bf16")
    assert np.array_equal(guided.frames, expected(true_cfg_scale=4.0, negative_prompt="a bag"))
    assert not np.array_equal(guided.frames, ours.frames)
    quantised = engine.generate("a coat moves down", 3, SAMPLING, "attn_qat")
    assert not np.array_equal(quantised.frames, ours.frames)
    assert {receipt["recipe"]: receipt["calls"] for receipt in quantised.receipts} == {"attn_qat": 3 * 2, "bf16": 3 * 2}


def test_16_bits_leave_the_vae_in_float32(tiny: Path) -> None:
    engine = Engine(tiny, RuntimeConfig(device="cpu", dtype="bfloat16"))
    seen: list[torch.dtype] = []
    engine.pipeline.vae.decoder.conv_in.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    frames = engine.generate("a bag", 0, replace(SAMPLING, num_inference_steps=1), "bf16").frames
    assert {engine.transformers["transformer"].dtype, engine.pipeline.text_encoder.dtype, engine.pipeline.text_encoder_2.dtype} == {torch.bfloat16}
    assert (set(seen), frames.std() > 1) == ({torch.float32}, True)


def test_a_transformer_in_training_renders_in_its_compute_dtype(tiny: Path) -> None:
    """The pipeline takes what FSDP shards for a model in float32."""
    job = tiny_job(tiny, train__compute_dtype="bfloat16")
    with open_mesh(ParallelConfig(), torch.device("cpu")) as mesh:
        training = make_engine(job, mesh)
        pipeline = FAMILY.load_encoders(tiny, device="cpu", dtype=torch.float32)
        pipeline.register_modules(transformer=training.transformer)
        assert training.transformer.dtype == torch.float32  # what the pipeline makes its tensors of
        with torch.no_grad(), _takes_what_pipelines_give(training.transformer):
            result = Engine(tiny, RuntimeConfig(device="cpu"), pipeline).generate("a bag", 0, replace(SAMPLING, true_cfg_scale=2.0), "attn_qat")
    assert result.frames.std() > 1


def test_a_prompt_that_is_cut_is_told(engine: Engine) -> None:
    short = replace(SAMPLING, num_frames=1, num_inference_steps=1)
    fits, cut = ("a bag" + " a bag" * count for count in (6, 7))
    assert engine.generate(fits, 0, short, "bf16").warnings == []
    assert engine.generate(fits, 0, replace(short, negative_prompt=cut), "bf16").warnings == []  # without true_cfg_scale it is not used
    told = [engine.generate(cut, 0, short, "bf16"), engine.generate(fits, 0, replace(short, negative_prompt=cut, true_cfg_scale=2.0), "bf16")]
    for result, name in zip(told, ("prompt", "negative prompt"), strict=True):
        assert result.warnings == [f"the {name} has 17 tokens, of which the model sees the first 16: {cut!r}"]


def test_tokens_are_what_the_transformer_sees(tiny: Path) -> None:
    geometry = FAMILY.geometry(tiny)
    model = FAMILY.load_transformer(tiny, "transformer", dtype=torch.float32)
    install(model, "bf16")
    tokens: list[tuple[str, int]] = []
    observe(model, lambda name, q, k, v: tokens.append((name.split(".")[0], q.shape[1])))
    condition = FAMILY.batch_conditions([{"text": torch.zeros(3, geometry.text_dim), "pooled": torch.zeros(32)}], 4)
    with torch.no_grad():
        FAMILY.forward(model, torch.zeros(1, *geometry.latent_shape(9, 32, 48)), torch.tensor([0.5]), condition)
    assert geometry.num_tokens(9, 32, 48) == 3 * 4 * 6
    # Observers are not shown padding.
    assert tokens == [("context_embedder", 3)] * 2 + [(name, 3 + 3 * 4 * 6) for name in ("transformer_blocks", "single_transformer_blocks")]


def test_from_scratch_is_a_function_of_the_seed(tiny: Path) -> None:
    assert_from_scratch_is_a_function_of_the_seed(FAMILY, tiny)


# --- what is refused, before weights are loaded


@pytest.mark.parametrize("other", ["HunyuanVideoImageToVideoPipeline", "HunyuanVideoFramepackPipeline", "HunyuanSkyreelsImageToVideoPipeline"])
def test_other_pipelines_are_refused(other: str, tiny: Path, tmp_path: Path) -> None:
    folder = edited(tiny, tmp_path / "x", "model_index.json", _class_name=other)
    with pytest.raises(CheckpointError, match=f"holds a {other}, which is not supported.*; supported:.* HunyuanVideoPipeline"):
        family_of(folder)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "transformer/config.json",
            {"image_condition_type": "token_replace"},
            r"is an image-to-video transformer \(image_condition_type=token_replace",
        ),
        ("transformer/config.json", {"in_channels": 9}, "in_channels=9, out_channels=4, the VAE's latent_channels=4 must be equal"),
        ("vae/config.json", {"latent_channels": 16}, "in_channels=4, out_channels=4, the VAE's latent_channels=16 must be equal"),
        ("model_index.json", {"transformer": [None, None]}, "names no transformer"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "is a DDIMScheduler; legal for HunyuanVideo: FlowMatchEuler"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 100}, "num_train_timesteps=100; legal for HunyuanVideo: 1000"),
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": True}, "use_dynamic_shifting=True; legal for HunyuanVideo: False"),
        ("scheduler/scheduler_config.json", {"shift": 0}, "flow shift is 0, which is no positive number"),
    ],
)
def test_configuration_that_does_not_fit(file: str, changes: dict[str, Any], message: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_sampling(edited(tiny, tmp_path / "x", file, **changes), SAMPLING)


def test_what_else_is_refused(tiny: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"sampling.true_cfg_scale=2.0 is not legal; legal: 1 for .*guided by the negative prompt with guidance_scale"
    ):
        check_sampling(tiny_pipeline, SamplingConfig(true_cfg_scale=2.0))
    with pytest.raises(ConfigError, match=r"sampling.true_cfg_scale=0.5 is not legal; legal: 1 "):
        SamplingConfig(true_cfg_scale=0.5).validate()
    left = edited(tiny, tmp_path / "left", "tokenizer/tokenizer_config.json", padding_side="left")
    with pytest.raises(CheckpointError, match="the tokenizer's padding_side is left; legal for HunyuanVideo: right"):
        FAMILY.load_encoders(left, device="cpu", dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"has no 'transformer_2'; it has: transformer$"):
        FAMILY.geometry(tiny, "transformer_2")
    with pytest.raises(ConfigError, match=r"sampling.dynamic_guidance=True is not legal; legal: false for .*pipelines of hunyuanvideo have none"):
        check_sampling(tiny, replace(SAMPLING, dynamic_guidance=True))
    with pytest.raises(ConfigError, match=r"11 frames don't fit this model; legal: 4n\+1, such as 9 or 13"):
        check_sampling(tiny, replace(SAMPLING, num_frames=11))
    with pytest.raises(ConfigError, match="height 40 doesn't fit this model; legal: multiples of 16, such as 32 or 48"):
        check_sampling(tiny, replace(SAMPLING, height=40))
    with pytest.raises(ConfigError, match="two_transformers=True is not legal; legal: false with family=hunyuanvideo"):
        build_pipeline(ExampleModelConfig(out=str(tmp_path / "pair"), family="hunyuanvideo", two_transformers=True))
    torn = Path(shutil.copytree(tiny, tmp_path / "torn"))
    change_weights(torn / "transformer", {"proj_out.weight": lambda weight: weight[:3].clone()})
    with pytest.raises(CheckpointError, match=r"proj_out.weight has shape"):
        FAMILY.load_pipeline(torn, device="cpu", dtype=torch.float32)
