"""The engine: bitwise diffusers with bf16, another recipe without reloading, honest receipts, timings and failures."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pipelines import change_weights, enliven, small_and_alive
from helpers.training import tiny_config

from videoqat.config import ExportConfig, GenerateConfig, GenerationRuntimeConfig, RuntimeConfig, SamplingConfig, VideoParallelConfig
from videoqat.data.video_io import read_video
from videoqat.errors import CheckpointError, ConfigError, NonFiniteVideo, UserError
from videoqat.generation import single
from videoqat.generation.engine import Engine, choose_recipe, doubts_about, text_tokens, with_flow_shift
from videoqat.generation.single import generate, plan
from videoqat.models.install import installed_recipe
from videoqat.recipes import RECIPES
from videoqat.training.export import export
from videoqat.training.trainer import train

PROMPT = "a sneaker moves left"
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16)
CPU = RuntimeConfig(device="cpu")


@pytest.fixture(scope="module")
def model(tiny_pipeline, tmp_path_factory) -> Path:
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("lively") / "model")


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine(model, CPU)


def stock_frames(folder: Path, sampling: SamplingConfig, seed: int, dtype: torch.dtype, device: str = "cpu") -> np.ndarray:
    """What diffusers alone renders, in the words of its documentation."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", torch_dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(folder, vae=vae, torch_dtype=dtype)
    if sampling.flow_shift:
        pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=sampling.flow_shift)
    pipe.set_progress_bar_config(disable=True)
    pipe.to(device)
    frames = pipe(
        prompt=PROMPT,
        negative_prompt=sampling.negative_prompt,
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.num_frames,
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        max_sequence_length=sampling.max_text_tokens,
        generator=torch.Generator().manual_seed(seed),
    ).frames[0]
    return np.rint(frames * 255).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"guidance_scale": 1.0, "flow_shift": 7.0}, {"negative_prompt": "a bag moves up", "guidance_scale": 6.0}])
def test_bf16_is_stock_diffusers_bit_for_bit(model, dtype, changes):
    sampling = dataclasses.replace(SAMPLING, **changes)
    ours = Engine(model, RuntimeConfig(device="cpu", dtype=dtype)).generate(PROMPT, 3, sampling, "bf16").frames
    theirs = stock_frames(model, sampling, 3, getattr(torch, dtype))
    assert ours.std() > 5, "a video that shows nothing proves nothing"
    assert np.array_equal(ours, theirs)


def test_two_transformers_are_stock_diffusers_and_both_quantised(tiny_pipeline_pair, tmp_path):
    folder = enliven(tiny_pipeline_pair, tmp_path / "pair")
    sampling = dataclasses.replace(SAMPLING, num_inference_steps=4)
    engine = Engine(folder, CPU)
    assert np.array_equal(engine.generate(PROMPT, 0, sampling, "bf16").frames, stock_frames(folder, sampling, 0, torch.float32))
    seen: set[str] = set()
    hooks = [t.register_forward_hook(lambda *_, name=name: seen.add(name)) for name, t in engine.transformers.items()]
    result = engine.generate(PROMPT, 0, sampling, "attn_qat")
    for hook in hooks:
        hook.remove()
    assert seen == {"transformer", "transformer_2"}
    assert all(installed_recipe(t) == RECIPES["attn_qat"] for t in engine.transformers.values())
    calls = {r["recipe"]: r["calls"] for r in result.receipts}
    assert calls == {"attn_qat": 4 * 2 * 2, "bf16": 4 * 2 * 2}  # steps, with and without the prompt, layers: self and cross


def test_seed_decides(engine):
    first, again, other = (engine.generate(PROMPT, seed, SAMPLING, "bf16").frames for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("recipe", ["bf16", "attn_qat"])
def test_videos_of_one_batch_are_those_of_their_own_calls(engine, recipe):
    """Each from its own prompt and noise; sums in another order change a few pixels, by little."""
    prompts, seeds = [PROMPT, "a bag moves up", PROMPT], [3, 3, 4]
    together = [video.frames.astype(int) for video in engine.generate_together(prompts, seeds, SAMPLING, recipe)]
    alone = [engine.generate(prompt, seed, SAMPLING, recipe).frames.astype(int) for prompt, seed in zip(prompts, seeds, strict=True)]
    off = np.array([[np.abs(one - other).mean() for other in alone] for one in together])
    assert off.diagonal().max() < 0.5
    assert off[~np.eye(3, dtype=bool)].min() > 10 * off.diagonal().max()
    assert off[0, 2] > 5  # another noise is another video
    with pytest.raises(ValueError, match="of a single prompt"):
        engine.generate_together(prompts, seeds, SAMPLING, recipe, condition=({}, {}))


@pytest.mark.parametrize("family", ["cogvideox", "hunyuanvideo", "hunyuan15"])
def test_videos_of_one_batch_are_those_of_their_own_calls_in_every_family(family, tmp_path):
    """With texts of different lengths, a negative prompt, and guidance where the pipeline may be called with or without it."""
    engine = Engine(small_and_alive(tmp_path, family, 2), RuntimeConfig(device="cpu", dtype="float32"))
    sampling = SamplingConfig(num_frames=9, height=32, width=32, num_inference_steps=2, negative_prompt="a bag and a coat")
    if engine.family.has_true_cfg:
        sampling.true_cfg_scale = 4.0
    prompts, seeds = [PROMPT, " and".join(["a bag moves up"] * 80), "hi"], [3, 3, 4]
    results = engine.generate_together(prompts, seeds, sampling, "attn_qat")
    assert [["model sees the first" in warning for warning in result.warnings] for result in results] == [[], [True], []]
    together = [result.frames.astype(int) for result in results]
    alone = [engine.generate(prompt, seed, sampling, "attn_qat").frames.astype(int) for prompt, seed in zip(prompts, seeds, strict=True)]
    off = np.array([[np.abs(one - other).mean() for other in alone] for one in together])
    assert off[~np.eye(3, dtype=bool)].min() > 1 > 10 * off.diagonal().max()


def test_recipes_are_switched_without_a_trace(engine):
    before = engine.generate(PROMPT, 1, SAMPLING, "bf16")
    quantised = [engine.generate(PROMPT, 1, SAMPLING, name).frames for name in ("attn_qat", "sage3", "mxfp4")]
    after = engine.generate(PROMPT, 1, SAMPLING, "bf16")
    assert np.array_equal(before.frames, after.frames)
    videos = [before.frames, *quantised]
    assert all(not np.array_equal(a, b) for i, a in enumerate(videos) for b in videos[:i])


def test_receipts_say_what_ran(engine):
    quantised = engine.generate(PROMPT, 1, SAMPLING, "attn_qat")
    assert quantised.recipe == RECIPES["attn_qat"]
    by_recipe = {r["recipe"]: r for r in quantised.receipts}
    assert (by_recipe["attn_qat"]["kernel"], by_recipe["attn_qat"]["native"], by_recipe["attn_qat"]["device"]) == ("torch", False, "cpu")
    assert by_recipe["attn_qat"]["calls"] == 2 * 2 * 2  # layers, steps, with and without the prompt
    assert by_recipe["bf16"]["kernel"] == "sdpa"  # cross-attention stays
    plain = engine.generate(PROMPT, 1, SAMPLING, "bf16")
    assert [(r["kernel"], r["native"]) for r in plain.receipts] == [("sdpa", True)]


def test_timings_have_every_stage(engine):
    result = engine.generate(PROMPT, 1, SAMPLING, "bf16")
    timings = result.timings
    assert result.peak_memory_bytes > 2**20
    assert len(timings["steps_s"]) == 2
    assert timings["denoise_s"] == pytest.approx(sum(timings["steps_s"]))
    assert all(timings[stage] > 0 for stage in ("text_s", "denoise_s", "vae_s"))
    assert timings["total_s"] >= timings["text_s"] + timings["denoise_s"] + timings["vae_s"]


def test_on_step_counts_and_cancels(engine, monkeypatch):
    steps = []
    expected = engine.generate(PROMPT, 1, SAMPLING, "bf16", on_step=lambda done, total: steps.append((done, total))).frames
    assert steps == [(1, 2), (2, 2)]

    class Cancelled(Exception):
        pass

    def cancel(done, total):
        raise Cancelled

    freed = []
    with monkeypatch.context() as patch, pytest.raises(Cancelled):
        patch.setattr(engine.pipeline, "maybe_free_model_hooks", lambda: freed.append("what was offloaded"))
        engine.generate(PROMPT, 1, SAMPLING, "bf16", on_step=cancel)
    assert freed == ["what was offloaded"]
    assert "encode_prompt" not in vars(engine.pipeline)
    assert "decode" not in vars(engine.pipeline.vae)
    assert np.array_equal(engine.generate(PROMPT, 1, SAMPLING, "bf16").frames, expected)


def test_checkpoint_recipe_and_mismatch(model, tmp_path, capsys):
    folder = enliven(model, tmp_path / "trained")
    assert choose_recipe(folder, "checkpoint") == (RECIPES["bf16"], [])
    assert choose_recipe(folder, "attn_qat") == (RECIPES["attn_qat"], [])  # nothing is said where nothing is known
    (folder / "videoqat.json").write_text(json.dumps({"recipe": RECIPES["attn_qat"].to_dict(), "training": {"max_text_tokens": 16}}))
    engine = Engine(folder, CPU)
    trained = engine.generate(PROMPT, 1, SAMPLING, "checkpoint")
    assert (trained.recipe, trained.warnings) == (RECIPES["attn_qat"], [])
    other = engine.generate(PROMPT, 1, SAMPLING, "sage3")
    engine.generate(PROMPT, 1, SAMPLING, "sage3")
    (warning,) = other.warnings
    assert "attn_qat" in warning
    assert "sage3" in warning
    assert capsys.readouterr().err.count(warning) == 1
    same_name = dataclasses.replace(RECIPES["attn_qat"], p_gain_log2=3)
    assert "other settings" in choose_recipe(folder, same_name)[1][0]


def test_text_is_padded_as_in_training(model, tmp_path, engine):
    assert text_tokens(model, dataclasses.replace(SAMPLING, max_text_tokens=0)) == 512
    assert text_tokens(model, SAMPLING) == 16
    folder = enliven(model, tmp_path / "trained")
    (folder / "videoqat.json").write_text(json.dumps({"recipe": RECIPES["bf16"].to_dict(), "training": {"max_text_tokens": 24}}))
    assert text_tokens(folder, dataclasses.replace(SAMPLING, max_text_tokens=0)) == 24
    seen = []
    hook = engine.transformers["transformer"].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["encoder_hidden_states"].shape[1]), with_kwargs=True
    )
    engine.generate(PROMPT, 1, SAMPLING, "bf16")
    hook.remove()
    assert set(seen) == {16}


def test_a_trained_model_generates_with_its_recipe_and_padding(tiny_pipeline, tiny_cache, tmp_path):
    train(tiny_config(tiny_pipeline, tiny_cache, tmp_path / "run", train__steps=1, recipe="attn_qat_search"))
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "model")))
    assert text_tokens(tmp_path / "model", dataclasses.replace(SAMPLING, max_text_tokens=0)) == 16  # tiny_cache's
    result = generate(config_for(tmp_path / "model", tmp_path / "a.mp4", sampling=dataclasses.replace(SAMPLING, max_text_tokens=0)))
    assert (result["recipe"]["name"], result["max_text_tokens"], result["warnings"]) == ("attn_qat_search", 16, [])
    assert {r["recipe"] for r in result["receipts"]} == {"attn_qat_search", "bf16"}


def test_flow_shift_reaches_the_scheduler():
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)
    for scheduler in (unipc, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)):
        shifted = with_flow_shift(scheduler, 4.0)
        shifted.set_timesteps(2)
        plain = with_flow_shift(scheduler, 1.0)
        plain.set_timesteps(2)
        assert shifted.sigmas[1] > plain.sigmas[1]
    assert unipc.config.flow_shift == 1.0
    # t = 1/2 shifted by 4: 4 t / (1 + 3 t) = 0.8
    with_shift = with_flow_shift(unipc, 4.0)
    with_shift.set_timesteps(2)
    assert with_shift.sigmas[1].item() == pytest.approx(0.8, abs=1e-3)
    for scheduler in (DDIMScheduler(), UniPCMultistepScheduler()):
        with pytest.raises(CheckpointError, match="flow shift"):
            with_flow_shift(scheduler, 3.0)


def test_nan_is_an_error_that_names_the_place(model, tmp_path):
    broken = enliven(model, tmp_path / "broken")
    change_weights(broken / "transformer", {"blocks.1.ffn.net.2.bias": lambda w: torch.full_like(w, torch.nan)})
    with pytest.raises(NonFiniteVideo, match=r"step 1 of 2.*recipe attn_qat.*seed 7"):
        Engine(broken, CPU).generate(PROMPT, 7, SAMPLING, "attn_qat")
    out = tmp_path / "out.mp4"
    with pytest.raises(NonFiniteVideo):
        generate(GenerateConfig(model=str(broken), prompt=PROMPT, out=str(out), sampling=SAMPLING, runtime=CPU))
    assert not list(tmp_path.glob("*out*"))


def test_nan_from_the_vae_is_an_error(engine, monkeypatch):
    bias = engine.pipeline.vae.decoder.conv_out.bias
    monkeypatch.setattr(bias, "data", torch.full_like(bias.data, torch.nan))
    with pytest.raises(NonFiniteVideo, match="VAE"):
        engine.generate(PROMPT, 1, SAMPLING, "bf16")


def test_videos_that_show_nothing_are_doubted():
    rng = np.random.default_rng(0)
    good = rng.integers(0, 255, (4, 16, 16, 3), dtype=np.uint8)
    assert doubts_about(good) == []
    black, flat = good.copy(), good.copy()
    black[:2] = 0
    flat[3] = (7, 200, 90)
    assert doubts_about(black) == ["2 of 4 frames are black"]
    assert doubts_about(flat) == ["1 of 4 frames are one flat colour"]


def config_for(folder: Path, video: Path, **changes) -> GenerateConfig:
    return GenerateConfig(**{"model": str(folder), "prompt": PROMPT, "seed": 5, "out": str(video), "sampling": SAMPLING, "runtime": CPU, **changes})


def test_generate_writes_a_video_and_all_it_takes_to_make_it_again(model, tmp_path, engine):
    out = tmp_path / "new" / "video.mp4"
    result = generate(config_for(model, out, recipe="attn_qat"))
    frames, times = read_video(out)
    expected = engine.generate(PROMPT, 5, SAMPLING, "attn_qat").frames
    assert frames.shape == expected.shape
    luma = [video.astype(float) @ (0.299, 0.587, 0.114) for video in (frames, expected)]  # mp4 halves the resolution of colour
    assert np.corrcoef(luma[0].ravel(), luma[1].ravel())[0, 1] > 0.98
    assert times[1] == pytest.approx(1 / SAMPLING.fps)
    record = json.loads(out.with_suffix(".json").read_text())
    assert record == result
    assert record["recipe"]["name"] == "attn_qat"
    assert record["timings"]["encode_s"] > 0
    assert record["peak_memory_bytes"] > 2**20
    assert {"date", "command", "commit", "versions", "device"} <= set(record["provenance"])
    assert {r["kernel"] for r in record["receipts"]} == {"torch", "sdpa"}
    # From the record alone to the same video.
    saved = record["config"]
    again = GenerateConfig(
        **{
            **saved,
            "sampling": SamplingConfig(**saved["sampling"]),
            "runtime": GenerationRuntimeConfig(**saved["runtime"]),
            "parallel": VideoParallelConfig(**saved["parallel"]),
            "overwrite": True,
        }
    )
    first = out.read_bytes()
    generate(again)
    assert out.read_bytes() == first
    assert sorted(p.name for p in out.parent.iterdir()) == ["video.json", "video.mp4"]


def test_plan_needs_no_weights(model, tmp_path, monkeypatch):
    monkeypatch.setattr(single, "Engine", None)
    planned = plan(config_for(model, tmp_path / "a.mp4", recipe="attn_qat_search"))
    assert planned["num_tokens"] == 2 * 4 * 4  # of latents 2x4x4 the patch is 1x1x1
    assert planned["receipt"]["kernel"] == "torch"
    assert planned["dtype"] == "torch.float32"
    json.dumps(planned)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": dataclasses.replace(SAMPLING, num_frames=6)}, ["num_frames", "6", "5 or 9"]),
        ({"sampling": dataclasses.replace(SAMPLING, height=40)}, ["height", "40", "32 or 48"]),
        ({"sampling": dataclasses.replace(SAMPLING, num_inference_steps=0)}, ["num_inference_steps", "at least 1"]),
        ({"model": "no/such/model"}, ["model", "no/such/model"]),
        ({"recipe": "fp3"}, ["fp3", "attn_qat"]),
        ({"prompt": "  "}, ["prompt"]),
        ({"out": "video.avi"}, ["video.avi", ".mp4"]),
        ({"recipe": "attn_qat", "runtime": RuntimeConfig(device="cpu", kernel="sdpa")}, ["sdpa", "attn_qat", "torch"]),
        ({"recipe": "attn_qat", "runtime": RuntimeConfig(device="cpu", kernel="magic")}, ["magic", "torch"]),
    ],
)
def test_bad_input_is_one_line_before_weights_are_loaded(model, tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr(single, "Engine", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        generate(config_for(model, tmp_path / "a.mp4", **changes))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["a.mp4", "a.json"])
def test_nothing_is_overwritten_unasked(model, tmp_path, monkeypatch, taken):
    monkeypatch.setattr(single, "Engine", None)
    (tmp_path / taken).write_text("mine")
    with pytest.raises(UserError, match=r"overwrite=true"):
        generate(config_for(model, tmp_path / "a.mp4"))
    assert (tmp_path / taken).read_text() == "mine"


def test_a_gpu_that_is_not_there(model):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"cuda:3.*legal"):
        Engine(model, RuntimeConfig(device="cuda:3"))


@pytest.mark.gpu
def test_on_a_gpu_it_is_stock_diffusers_too(model):
    engine = Engine(model, RuntimeConfig(device="cuda"))
    assert engine.dtype == torch.bfloat16
    result = engine.generate(PROMPT, 3, SAMPLING, "bf16")
    assert np.array_equal(result.frames, stock_frames(model, SAMPLING, 3, torch.bfloat16, "cuda"))
    quantised = engine.generate(PROMPT, 3, SAMPLING, "attn_qat")
    assert not np.array_equal(result.frames, quantised.frames)
    assert all(receipt["device"].startswith("cuda") for receipt in quantised.receipts)
    assert all(seconds > 0 for seconds in (result.timings["text_s"], result.timings["vae_s"], *result.timings["steps_s"]))


@pytest.mark.gpu
def test_the_noise_is_the_same_on_every_device(model, engine):
    first: dict[str, torch.Tensor] = {}

    def keep(name):
        def hook(module, args, kwargs):
            first.setdefault(name, kwargs["hidden_states"].cpu())

        return hook

    for name, one in {"cpu": engine, "cuda": Engine(model, RuntimeConfig(device="cuda", dtype="float32"))}.items():
        handle = one.transformers["transformer"].register_forward_pre_hook(keep(name), with_kwargs=True)
        one.generate(PROMPT, 3, SAMPLING, "bf16")
        handle.remove()
    assert torch.equal(first["cpu"], first["cuda"])
