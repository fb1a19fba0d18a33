"""`videoqat bench generation`: whole videos of a Wan model of published size with random weights, stage by stage, under several recipes, beside plain
diffusers.

Times don't depend on what weights say. Transformer, VAE and text encoder have their published sizes; the tokenizer is a small one, padded to as many
tokens. All contenders render the same prompt from the same noise in one process, in turns, after a round of few steps that isn't timed. `diffusers`
is the same pipeline with its own attention processors, called as anybody would call it, with nothing of the engine around it but marks of time.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from videoqat.attention.backends import resolve
from videoqat.config import BenchGenerationConfig, SamplingConfig, choice, parse_bucket, to_dict
from videoqat.console import progress, say
from videoqat.data.video_io import write_video
from videoqat.generation.engine import Engine, check_recipe, check_sampling
from videoqat.generation.meter import Mark, Stopwatch, peak_memory, reset_peak_memory, watched
from videoqat.models.install import uninstall
from videoqat.models.published import published, random_transformer, write_folder
from videoqat.models.spec import read_model_json
from videoqat.models.tiny import build_tokenizer
from videoqat.provenance import provenance
from videoqat.recipes import get_recipe

STOCK = "diffusers"
STAGES = ("text_s", "denoise_s", "vae_s", "encode_s", "total_s")
PROMPT = "a sneaker moves left"
UMT5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 256384}
SMALL_UMT5 = {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 512}


def plan(config: BenchGenerationConfig) -> dict[str, Any]:
    """What would be timed: `size`, of `num_tokens`.

    Raises:
        UserError: whatever `bench_generation` refuses before it draws weights.
    """
    wans = [
        name
        for name, one in published().items()
        if one.pipeline == "WanPipeline" and len(one.components) == 1 and not one.index.get("expand_timesteps")
    ]
    choice("model", config.model, wans)
    device, dtype = config.runtime.resolve()
    with tempfile.TemporaryDirectory() as work:
        sampling, folder = _sampling(config), write_folder(Path(work) / "model", config.model)
        size = check_sampling(folder, sampling)
        for recipe in map(get_recipe, config.recipes):
            check_recipe(folder, recipe, sampling)
            resolve(recipe, device, dtype, size["head_dim"], config.runtime.kernel if recipe.is_quantised else "auto")
    return {"size": f"{sampling.num_frames}x{sampling.height}x{sampling.width}", "num_tokens": size["num_tokens"]}


def _sampling(config: BenchGenerationConfig) -> SamplingConfig:
    frames, height, width = parse_bucket("size", config.size or published()[config.model].size)
    steps, scale = config.num_inference_steps, config.guidance_scale
    sampling = SamplingConfig(num_frames=frames, height=height, width=width, num_inference_steps=steps, guidance_scale=scale)
    sampling.validate()
    return sampling


def bench_generation(config: BenchGenerationConfig) -> dict[str, Any]:
    """Times of the stages of a video by `config.model`, for plain diffusers and each recipe.

    Returns:
        config, provenance, dtype, size, num_tokens; `contenders`: name, the medians `text_s`, `denoise_s`, `vae_s` (latents to pixels), `encode_s`
        (frames to mp4) and `total_s` (the others and what lies between them), `rounds` (each video's), `denoise_ratio` (to diffusers),
        `peak_memory_bytes`, receipts, and `same_frames`: whether the video is diffusers' own, bit for bit.

    Raises:
        UserError: an unknown model or one that isn't a text-to-video Wan with one transformer, a size that it can't have, or a recipe that can't run.
    """
    planned, sampling = plan(config), _sampling(config)
    device, dtype = config.runtime.resolve()
    with tempfile.TemporaryDirectory() as work:
        folder = write_folder(Path(work) / "model", config.model)
        say(f"{config.model}: drawing weights on {device}")
        engine = Engine(folder, config.runtime, _pipeline(folder, device, dtype, config.seed))
        names = [STOCK, *config.recipes]
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        found: dict[str, dict[str, Any]] = {name: {"name": name} for name in names}
        stock_frames = None
        with progress(total=len(names) * (1 + config.repeats), desc=config.model, unit="video") as bar:
            for repeat in range(1 + config.repeats):
                for name in names:
                    reset_peak_memory(device)
                    pixels, timings, receipts = _stock(engine, sampling) if name == STOCK else _ours(engine, sampling, name)
                    peak = peak_memory(device)
                    started = time.perf_counter()
                    write_video(Path(work) / "video.mp4", pixels, sampling.fps)
                    timings["encode_s"] = time.perf_counter() - started
                    timings["total_s"] += timings["encode_s"]
                    bar.update()
                    if repeat == 0:  # what is loaded, compiled and allocated here isn't timed
                        stock_frames = pixels if stock_frames is None else stock_frames
                        found[name] |= {"same_frames": bool(np.array_equal(pixels, stock_frames)), "receipts": receipts}
                        continue
                    rounds[name].append({stage: timings[stage] for stage in STAGES})
                    found[name]["peak_memory_bytes"] = peak
    for name, one in found.items():
        one |= {stage: statistics.median(timings[stage] for timings in rounds[name]) for stage in STAGES} | {"rounds": rounds[name]}
        one["denoise_ratio"] = one["denoise_s"] / found[STOCK]["denoise_s"]
        say(f"{name:20} " + "  ".join(f"{stage} {one[stage]:8.3f}" for stage in STAGES) + f"  {one['denoise_ratio']:.3f} x diffusers")
    return {
        "config": to_dict(config),
        "provenance": provenance(str(device)),
        "dtype": str(dtype).removeprefix("torch."),
        **planned,
        "contenders": list(found.values()),
    }


def _pipeline(folder: Path, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """The folder's `WanPipeline`, weights drawn on the device: transformer and text encoder in `dtype`, the VAE in float32, as they are loaded."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
    from transformers import UMT5Config, UMT5EncoderModel

    transformer = random_transformer(folder, "transformer", device, dtype, seed)
    width = int(read_model_json(folder, "transformer/config.json")["text_dim"])
    sizes = UMT5_XXL if width == UMT5_XXL["d_model"] else SMALL_UMT5 | {"d_model": width}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        vae = AutoencoderKLWan.from_config(read_model_json(folder, "vae/config.json")).eval()
        text_encoder = UMT5EncoderModel(UMT5Config(**sizes, feed_forward_proj="gated-gelu")).to(dtype).eval()
    return WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=UniPCMultistepScheduler.from_config(read_model_json(folder, "scheduler/scheduler_config.json")),
    )


def _ours(engine: Engine, sampling: SamplingConfig, recipe: str) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    result = engine.generate(PROMPT, 0, sampling, get_recipe(recipe))
    return result.frames, dict(result.timings), result.receipts


def _stock(engine: Engine, sampling: SamplingConfig) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The pipeline as diffusers has it; what it takes is measured between the same moments as the engine does."""
    for transformer in engine.transformers.values():
        uninstall(transformer)
    pipeline, watch = engine.pipeline, Stopwatch(engine.device)
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    text: list[tuple[Mark, Mark]] = []
    vae: list[tuple[Mark, Mark]] = []
    steps: list[Mark] = []

    def after_step(*_: Any) -> dict[str, Any]:
        steps.append(watch.mark())
        return {}

    started = watch.mark()
    with (
        watched(pipeline, "encode_prompt", lambda start, end, _: text.append((start, end)), watch.mark),
        watched(pipeline.vae, "decode", lambda start, end, _: vae.append((start, end)), watch.mark),
    ):
        output = pipeline(
            prompt=PROMPT,
            negative_prompt=sampling.negative_prompt,
            height=sampling.height,
            width=sampling.width,
            num_frames=sampling.num_frames,
            num_inference_steps=sampling.num_inference_steps,
            guidance_scale=sampling.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(0),
            callback_on_step_end=after_step,
            output_type="np",
        )
    pixels = np.rint(np.asarray(output.frames[0]) * 255).astype(np.uint8)
    timings = {
        "text_s": watch.seconds(*text[0]),
        "denoise_s": watch.seconds(text[0][1], steps[-1]),
        "vae_s": sum(watch.seconds(*span) for span in vae),
        "total_s": watch.seconds(started, watch.mark()),
    }
    return pixels, timings, []
