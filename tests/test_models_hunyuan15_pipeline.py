"""HunyuanVideo 1.5's seam to diffusers' pipelines: what is encoded, told and decoded is what they themselves encode, tell and decode."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from helpers.pipelines import (
    assert_a_function_of_its_configuration,
    assert_from_scratch_is_a_function_of_the_seed,
    change_weights,
    draw_video,
    edited,
    mosaic_of,
    record_calls,
)
from PIL import Image
from torch import Tensor

from videoqat.config import ExampleModelConfig, RuntimeConfig, SamplingConfig
from videoqat.errors import CheckpointError, ConfigError
from videoqat.generation.engine import Engine, check_sampling
from videoqat.models.hunyuan15 import FAMILY
from videoqat.models.install import install, observe
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline
from videoqat.models.tiny_mosaic import MIXTURE
from videoqat.training.objective import shift_time

SAMPLING = SamplingConfig(num_frames=9, height=32, width=48, num_inference_steps=3, guidance_scale=6.0, max_text_tokens=16)
QUOTING = 'a bag with "Größe" and “up” on it'
PROMPTS = ["a sneaker moves left", QUOTING, "", "word " * 60]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny pipeline. Copy it before changing anything in it."""
    folder = tmp_path_factory.mktemp("hunyuan15") / "pipeline"
    build_pipeline(ExampleModelConfig(out=str(folder), family="hunyuan15", num_layers=2, head_dim=32))
    return folder


@pytest.fixture(scope="module")
def tiny_for_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hunyuan15 for images") / "pipeline"
    build_pipeline(ExampleModelConfig(out=str(folder), family="hunyuan15", num_layers=2, head_dim=32, image_to_video=True))
    return folder


def load_stock(pipeline_class: Any, folder: Path) -> Any:
    """diffusers' own, with as little padding as ours has, so that sums are over equally many terms."""
    pipeline = pipeline_class.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.tokenizer_max_length, pipeline.tokenizer_2_max_length, pipeline.vision_num_semantic_tokens = 16, 32, 0
    return pipeline


@pytest.fixture(scope="module")
def stock(tiny: Path) -> HunyuanVideo15Pipeline:
    return load_stock(HunyuanVideo15Pipeline, tiny)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    return Engine(tiny, RuntimeConfig(device="cpu", dtype="float32"))


def test_tiny_pipeline_is_a_function_of_its_configuration(tiny: Path, tmp_path: Path) -> None:
    weights = {"transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", "text_encoder_2/model.safetensors"}
    assert_a_function_of_its_configuration(tiny, tmp_path, "hunyuan15", weights)


# --- what is encoded


def test_prompts_are_encoded_as_the_pipeline_encodes_them(stock: Any, engine: Engine) -> None:
    """Without padding, and as if each were alone; glyphs are what stands in quotation marks."""
    with torch.no_grad():
        embeds, mask, embeds_2, mask_2 = stock.encode_prompt(PROMPTS, batch_size=len(PROMPTS))
    conditions = FAMILY.encode_prompts(engine.pipeline, PROMPTS, 16)
    assert [tuple(condition["text"].shape) for condition in conditions] == [(length, 64) for length in mask.sum(1).int().tolist()]
    assert [len(condition["glyph"]) for condition in conditions] == [0, 28, 0, 0]
    for i, condition in enumerate(conditions):
        assert torch.equal(condition["text"], embeds[i][mask[i].bool()])
        torch.testing.assert_close(condition["glyph"], embeds_2[i][mask_2[i].bool()])
    alone = [FAMILY.encode_prompts(engine.pipeline, [prompt], 24)[0] for prompt in PROMPTS[:3]]
    for one, condition in zip(alone, conditions, strict=False):
        torch.testing.assert_close(one["text"][: len(condition["text"])], condition["text"])
    counts = FAMILY.count_tokens(engine.pipeline, PROMPTS)
    assert counts[::2] == [5, 2]  # with the mark behind; nothing is said by a space
    assert counts[3] > 60
    assert len(conditions[3]["text"]) == 16


def test_a_batch_is_padded_behind_each_text(engine: Engine) -> None:
    conditions = FAMILY.encode_prompts(engine.pipeline, PROMPTS[:3], 16)
    batch = FAMILY.batch_conditions(conditions, 16)
    assert batch["text_len"].tolist() == [len(condition["text"]) for condition in conditions]
    assert batch["glyph_len"].tolist() == [0, len(conditions[1]["glyph"]), 0]
    assert batch["text"].shape == (3, 16, 64)
    assert batch["glyph"].shape == (3, len(conditions[1]["glyph"]), 32)
    for part in ("text", "glyph"):
        for i, condition in enumerate(conditions):
            length = len(condition[part])
            assert torch.equal(batch[part][i, :length], condition[part])
            assert not batch[part][i, length:].any()
    with pytest.raises(ConfigError, match=r"a text embedding of \d+ tokens doesn't fit into max_text_tokens=4"):
        FAMILY.batch_conditions(conditions, 4)


def test_quoted_text_that_is_cut_is_told(engine: Engine, capsys: pytest.CaptureFixture) -> None:
    FAMILY.encode_prompts(engine.pipeline, ['"' + "x" * 260 + '"', '"' + "x" * 100 + '"'], 16)
    told = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(told) == 1
    assert "quoted text has 270 tokens, of which the model sees the first 256" in told[0]


def test_large_videos_are_coded_in_tiles(engine: Engine) -> None:
    """As diffusers codes them after `enable_tiling`; the VAE's attention over all of a real video would need more memory than there is."""
    video = torch.rand(1, 3, 1, 272, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    vae, seen = engine.pipeline.vae, []
    hook = vae.encoder.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[3:])))
    latents = FAMILY.encode_video(engine.pipeline, video)
    hook.remove()
    assert seen == [(256, 32), (80, 32)]
    torch.testing.assert_close(latents, F.avg_pool3d(video, (1, 4, 4)).transpose(1, 4).matmul(MIXTURE.T).transpose(1, 4) * 2, atol=1e-4, rtol=0)


def test_video_is_coded_as_a_mosaic_and_decoded_by_the_pipeline(engine: Engine) -> None:
    """The pipeline decodes what `encode_video` gave, without any denoising, to the mean colour of each block of pixels and frames."""
    video = draw_video()
    latents = FAMILY.encode_video(engine.pipeline, video)
    assert latents.shape == (1, *FAMILY.geometry(engine.folder).latent_shape(9, 32, 48))
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(engine.pipeline.scheduler.config)
    scheduler.step = lambda prediction, t, sample, return_dict: (sample,)
    pipeline = HunyuanVideo15Pipeline(**engine.pipeline.components | {"scheduler": scheduler})
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline("a bag", height=32, width=48, num_frames=9, num_inference_steps=1, latents=latents, output_type="pt").frames
    torch.testing.assert_close(frames.transpose(1, 2) * 2 - 1, mosaic_of(video), atol=2e-3, rtol=0)


# --- what the transformer is told


def test_forward_is_what_the_pipeline_computes(stock: Any, tiny: Path) -> None:
    seen: list[tuple[dict[str, Any], Tensor]] = []
    hook = record_calls(stock.transformer, seen)
    stock(QUOTING, "a coat", height=32, width=48, num_frames=9, num_inference_steps=3)
    hook.remove()
    sigmas = [shift_time(t, 5.0) for t in (1, 2 / 3, 1 / 3) for _ in "+-"]
    transformer = FAMILY.load_transformer(tiny, "transformer", dtype=torch.float32)
    conditions = FAMILY.encode_prompts(FAMILY.load_encoders(tiny, device="cpu", dtype=torch.float32), [QUOTING, "a coat"], 16)
    assert len(seen) == 6
    for i, (kwargs, expected) in enumerate(seen):
        assert kwargs["timestep"].item() == pytest.approx(1000 * sigmas[i])
        condition = FAMILY.batch_conditions([conditions[i % 2]], 16)
        with torch.no_grad():
            ours = FAMILY.forward(transformer, kwargs["hidden_states"][:, :4], kwargs["timestep"] / 1000, condition)
        assert (ours - expected).norm() < 1e-5 * expected.norm()


def test_the_schedule_is_the_schedulers(tiny: Path) -> None:
    schedule = FAMILY.noise_schedule(tiny)
    assert schedule.flow_shift == 5.0
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny, subfolder="scheduler")
    latents, noise = (torch.randn(1, 2, 3, 4, 5, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    scheduler.set_timesteps(sigmas=[1.0, 0.5])
    for t in scheduler.timesteps:
        theirs = scheduler.scale_noise(latents, t[None], noise)
        torch.testing.assert_close(schedule.add_noise(latents, noise, t[None] / 1000), theirs)


def test_16_bits_leave_the_vae_and_rotary_tables_in_float32(tiny: Path) -> None:
    engine = Engine(tiny, RuntimeConfig(device="cpu", dtype="bfloat16"))
    seen: list[torch.dtype] = []
    engine.pipeline.vae.decoder.conv_in.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    frames = engine.generate("a bag", 0, replace(SAMPLING, num_inference_steps=2), "attn_qat").frames
    assert engine.transformers["transformer"].dtype == torch.bfloat16
    assert (set(seen), frames.std() > 1) == ({torch.float32}, True)


# --- whole videos


def test_engine_renders_the_stock_videos_under_bf16(stock: Any, engine: Engine) -> None:
    """Bit for bit: prompts of different length, guidance by a negative prompt or none, a flow shift; and each step is told."""
    for prompt, negative, scale, shift in (("a coat moves down", "a bag", 6.0, 0.0), (PROMPTS[3], "", 1.0, 3.0)):
        stock.guider = stock.guider.new(guidance_scale=scale)
        stock.tokenizer_2_max_length = 1
        usual = stock.scheduler
        stock.scheduler = FlowMatchEulerDiscreteScheduler.from_config(usual.config, **({"shift": shift} if shift else {}))
        theirs = stock(
            prompt, negative, height=32, width=48, num_frames=9, num_inference_steps=3, generator=torch.Generator().manual_seed(3), output_type="np"
        ).frames[0]
        stock.scheduler, stock.tokenizer_2_max_length = usual, 32
        sampling = replace(SAMPLING, guidance_scale=scale, negative_prompt=negative, flow_shift=shift)
        steps: list[int] = []
        ours = engine.generate(prompt, 3, sampling, "bf16", on_step=lambda done, _, steps=steps: steps.append(done))
        assert np.array_equal(ours.frames, np.rint(theirs * 255).astype(np.uint8))
        assert (ours.frames.std() > 5, steps, len(ours.timings["steps_s"])) == (True, [1, 2, 3], 3)
    quantised = engine.generate("a coat moves down", 3, sampling, "attn_qat")
    assert {receipt["recipe"]: receipt["calls"] for receipt in quantised.receipts} == {"bf16": 6, "attn_qat": 6}
    assert not np.array_equal(quantised.frames, ours.frames)


def test_guidance_and_negative_prompt_count(engine: Engine) -> None:
    def render(**changes: Any) -> np.ndarray:
        return engine.generate("a bag", 0, replace(SAMPLING, num_inference_steps=2, **changes), "bf16").frames

    plain, guided, against = render(guidance_scale=1.0), render(), render(negative_prompt="a coat")
    assert not np.array_equal(plain, guided)
    assert not np.array_equal(guided, against)
    assert np.array_equal(plain, render(guidance_scale=1.0, negative_prompt="a coat"))


def test_engine_renders_from_conditions_encoded_before(engine: Engine) -> None:
    conditions = tuple(FAMILY.batch_conditions([one], 16) for one in FAMILY.encode_prompts(engine.pipeline, [QUOTING, "a coat"], 16))
    whole = engine.generate(QUOTING, 1, replace(SAMPLING, negative_prompt="a coat"), "bf16")
    text_encoders = {name: getattr(engine.pipeline, name) for name in ("text_encoder", "text_encoder_2")}
    for name in text_encoders:
        setattr(engine.pipeline, name, None)
    try:
        encoded = engine.generate(QUOTING, 1, SAMPLING, "bf16", condition=conditions)
    finally:
        for name, module in text_encoders.items():
            setattr(engine.pipeline, name, module)
    assert np.abs(encoded.frames.astype(int) - whole.frames).max() <= 1


def test_a_prompt_that_is_cut_is_told(engine: Engine) -> None:
    cut = "a bag" + " a bag" * 12
    told = engine.generate(cut, 0, replace(SAMPLING, num_inference_steps=1), "bf16").warnings
    assert told == [f"the prompt has 27 tokens, of which the model sees the first 16: {cut!r}"]


# --- images


def draw_image(height: int = 32, width: int = 48) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_engine_renders_the_stock_videos_of_an_image_under_bf16(tiny_for_images: Path) -> None:
    """At the size asked for, which diffusers would choose itself; and forward is told what the pipeline tells."""
    folder, image = tiny_for_images, draw_image()
    stock = load_stock(HunyuanVideo15ImageToVideoPipeline, folder)
    stock.guider, stock.tokenizer_2_max_length = stock.guider.new(guidance_scale=3.0), 1
    stock.video_processor.calculate_default_height_width = lambda **_: (32, 48)
    seen: list[tuple[dict[str, Any], Tensor]] = []
    record_calls(stock.transformer, seen)
    theirs = stock(image, "a bag", "", num_frames=9, num_inference_steps=2, generator=torch.Generator().manual_seed(3), output_type="np").frames[0]
    engine = Engine(folder, RuntimeConfig(device="cpu", dtype="float32"))
    sampling = replace(SAMPLING, num_inference_steps=2, guidance_scale=3.0)
    ours = engine.generate("a bag", 3, sampling, "bf16", image=image)
    assert np.array_equal(ours.frames, np.rint(theirs * 255).astype(np.uint8))
    other = engine.generate("a bag", 3, sampling, "bf16", image=draw_image().rotate(180))
    assert not np.array_equal(other.frames, ours.frames)

    pixels_BCHW = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
    condition = FAMILY.encode_prompts(engine.pipeline, ["a bag"], 16)[0] | FAMILY.encode_image(engine.pipeline, pixels_BCHW, 9)[0]
    shapes = FAMILY.condition_shapes(folder, (9, 32, 48), 16)
    assert {part: tuple(value.shape) for part, value in condition.items() if part.startswith("image")} == {
        part: shape for part, shape in shapes.items() if part.startswith("image")
    }
    kwargs, expected = seen[0]
    batch = FAMILY.batch_conditions([condition], 16)
    assert FAMILY.given_frames(batch) == 0
    with torch.no_grad():
        prediction = FAMILY.forward(stock.transformer, kwargs["hidden_states"][:, :4], kwargs["timestep"] / 1000, batch)
    assert torch.equal(prediction, expected)


# --- what is refused, before weights are loaded


def test_text_length(tiny: Path, tmp_path: Path) -> None:
    assert (FAMILY.text_tokens(tiny), FAMILY.text_tokens(tiny, 16)) == (26, 16)
    real = edited(tiny, tmp_path / "real", "text_encoder/config.json", max_position_embeddings=128000)
    assert (FAMILY.text_tokens(real), FAMILY.text_tokens(real, 2000)) == (1000, 2000)
    with pytest.raises(
        ConfigError, match=r"sampling.max_text_tokens=27 is more than the text encoder of .* takes behind its template; legal: up to 26"
    ):
        check_sampling(tiny, replace(SAMPLING, max_text_tokens=27))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("transformer/config.json", {"use_meanflow": True}, r"is a MeanFlow model .*legal for HunyuanVideo 1.5: use_meanflow=false"),
        (
            "transformer/config.json",
            {"in_channels": 4},
            r"whose latent_channels=4: in_channels=4, out_channels=4; legal: in_channels=9 .*out_channels=4",
        ),
        ("vae/config.json", {"latent_channels": 32}, r"whose latent_channels=32: in_channels=9, out_channels=4; legal: in_channels=65"),
        ("transformer/config.json", {"num_layers": None}, None),
        ("model_index.json", {"transformer": [None, None]}, "model_index.json names no transformer"),
    ],
)
def test_configuration_that_does_not_fit(file: str, changes: dict[str, Any], message: str | None, tiny: Path, tmp_path: Path) -> None:
    folder = edited(tiny, tmp_path / "x", file, **changes)
    if message is None:
        path = folder / file
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in changes}))
        message = "the configuration of transformer or vae lacks 'num_layers'"
    with pytest.raises(CheckpointError, match=message):
        FAMILY.geometry(folder)
    with pytest.raises(CheckpointError, match=r"has no 'transformer_2'; it has: transformer$"):
        FAMILY.geometry(tiny, "transformer_2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "DDIMScheduler"}, "_class_name='DDIMScheduler'; legal for HunyuanVideo 1.5: 'FlowMatchEulerDiscreteScheduler'"),
        ({"num_train_timesteps": 100}, "num_train_timesteps=100; legal"),
        ({"use_dynamic_shifting": True}, "use_dynamic_shifting=True; legal"),
        ({"shift": 0}, "flow shift is 0, which is no positive number"),
    ],
)
def test_schedulers_that_models_were_not_trained_with(changes: dict[str, Any], message: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        FAMILY.noise_schedule(edited(tiny, tmp_path / "x", "scheduler/scheduler_config.json", **changes))


def test_what_a_video_and_a_tokenizer_must_be(tiny: Path, tiny_for_images: Path, engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"10 frames don't fit this model; legal: 4n\+1, such as 9 or 13"):
        check_sampling(tiny, replace(SAMPLING, num_frames=10))
    with pytest.raises(ConfigError, match=r"height 36 doesn't fit this model; legal: multiples of 8"):
        check_sampling(tiny, replace(SAMPLING, height=36))
    with pytest.raises(ConfigError, match="image"):
        engine.generate("a bag", 0, SAMPLING, "bf16", image=draw_image())
    assert (FAMILY.takes_image(tiny), FAMILY.takes_image(tiny_for_images)) == ("no", "required")
    assert family_of(tiny) is family_of(tiny_for_images) is FAMILY
    left = Path(shutil.copytree(tiny, tmp_path / "left"))
    path = left / "tokenizer/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"padding_side": "left"}))
    with pytest.raises(CheckpointError, match=r"the tokenizer's padding_side is 'left'; legal for HunyuanVideo 1.5: 'right'"):
        FAMILY.load_encoders(left, device="cpu", dtype=torch.float32)


def test_weights_that_do_not_fit(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "x"))
    change_weights(folder / "transformer", {"proj_out.weight": lambda w: w[:1]})
    with pytest.raises(CheckpointError, match=r"proj_out.weight has shape \(1, 64\)"):
        FAMILY.load_transformer(folder, "transformer", dtype=torch.float32)


def test_tokens_are_what_the_transformer_sees(tiny: Path) -> None:
    geometry = FAMILY.geometry(tiny)
    model = FAMILY.load_transformer(tiny, "transformer", dtype=torch.float32)
    install(model, "bf16")
    tokens: list[int] = []
    observe(model, lambda name, q, k, v: tokens.append(q.shape[1]))
    condition = FAMILY.batch_conditions([{"text": torch.zeros(4, geometry.text_dim), "glyph": torch.zeros(0, 32)}], 7)
    with torch.no_grad():
        FAMILY.forward(model, torch.zeros(1, *geometry.latent_shape(9, 32, 48)), torch.tensor([0.5]), condition)
    assert geometry.num_tokens(9, 32, 48) == 3 * 4 * 6
    assert tokens == [4] * 2 + [3 * 4 * 6 + 4] * 2


def test_from_scratch_is_a_function_of_the_seed(tiny: Path) -> None:
    assert_from_scratch_is_a_function_of_the_seed(FAMILY, tiny)
