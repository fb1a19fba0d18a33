"""One video as a file, and beside it all it takes to make it again: `videoqat generate prompt=... out=x.mp4`."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from videoqat.attention.backends import resolve
from videoqat.config import GenerateConfig, to_dict
from videoqat.console import progress
from videoqat.data.precompute import file_hash
from videoqat.data.video_io import write_video
from videoqat.errors import UserError
from videoqat.files import check_writable, file_stats, writable_folder, write_json
from videoqat.generation.division import check_division, check_guided, open_division
from videoqat.generation.engine import Engine, check_recipe, check_sampling, choose_recipe, text_tokens
from videoqat.generation.images import check_image, read_image
from videoqat.models.hub import check_weights, origin
from videoqat.parallel.mesh import collective_errors, world_size_from_launcher
from videoqat.provenance import provenance


def plan(config: GenerateConfig) -> dict[str, Any]:
    """What `generate(config)` would do, checked without loading weights: recipe, sizes, tokens, device and the kernel that would serve.

    Raises:
        UserError: whatever `generate` would refuse before it loads the model.
    """
    config.validate()
    check_weights(config.model)
    size = check_sampling(config.model, config.sampling)
    check_division(config.parallel, config.model, world_size_from_launcher(), many=False)
    check_guided(config.parallel, config.model, config.sampling)
    check_recipe(config.model, choose_recipe(config.model, config.recipe)[0], config.sampling)
    check_image(config.model, config.image)
    sidecar = Path(config.out).with_suffix(".json")
    if sidecar.exists() and not config.overwrite:
        raise UserError(f"out={config.out!r}: {sidecar} exists; legal: a name not taken yet, or overwrite=true")
    check_writable("out", Path(config.out).parent)
    return {**size, **plan_attention(config, size["head_dim"])}


def plan_attention(config: GenerateConfig, head_dim: int) -> dict[str, Any]:
    """By what recipe, on what device, in what dtype and by which kernel a model with heads of `head_dim` would run, and warnings.

    Raises:
        UserError: it can't run so.
    """
    recipe, warnings = choose_recipe(config.model, config.recipe)
    device, dtype = config.runtime.resolve()
    # A kernel that is insisted on is meant for quantised layers (`models.install`).
    receipt = resolve(recipe, device, dtype, head_dim, config.runtime.kernel if recipe.is_quantised else "auto")
    return {"recipe": recipe.to_dict(), "device": str(device), "dtype": str(dtype), "receipt": receipt.to_dict(), "warnings": warnings}


def generate(config: GenerateConfig) -> dict[str, Any]:
    """Writes one video to `config.out` (mp4), and a .json of the same name with all it takes to make it again and what really ran.

    Under torchrun all processes make it together (`generation.division`); the first one writes.

    Returns:
        On every process, what the .json holds: `video`, `video_sha256`, `image_sha256` (empty without an image), `config`, `model`
        (`models.hub.origin`), `model_fingerprint`, `recipe`, `receipts`, `timings` (`engine.VideoResult`'s, and `encode_s`: frames to mp4),
        `peak_memory_bytes`, `parallel` (`sp`, `cfg`), `warnings`, `num_tokens`, `max_text_tokens`, `dtype`, `provenance`. Of several processes
        receipts, timings and memory are the first one's.

    Raises:
        UserError: bad configuration or input; nothing is written.
        NonFiniteVideo: the model yielded NaN or inf; nothing is written.
        WorkerLost: under torchrun, another process ended; nothing is written.
    """
    plan(config)
    recipe, (device, _) = choose_recipe(config.model, config.recipe)[0], config.runtime.resolve()
    together = open_division(config.parallel, config.model, [recipe], device, world_size_from_launcher())
    with together as (mesh, division), collective_errors("generate"):
        sizes = {name: size for name, (size, _) in file_stats(config.model).items()}
        mesh.agree({"the configuration (hash)": digest(to_dict(config)), "the model's files and their sizes (hash)": digest(sizes)})
        mesh.on_rank_zero(lambda: str(writable_folder("out", Path(config.out).parent)))
        fingerprint = mesh.on_rank_zero(lambda: model_fingerprint(config.model))
        engine = Engine(config.model, dataclasses.replace(config.runtime, device=str(mesh.device)), division=division)
        with progress(total=config.sampling.num_inference_steps, desc="denoising", unit="step") as bar:
            record = render(engine, config, fingerprint, lambda *_: bar.update())
        first: dict[str, Any] = mesh.gather_objects(record)[0]
        return first


def digest(data: object) -> str:
    """Short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def model_fingerprint(folder: str | Path) -> str:
    """Hash of names, sizes and times of a model folder's files: another one after any change."""
    return hashlib.sha256(json.dumps(file_stats(folder), sort_keys=True).encode()).hexdigest()


def render(engine: Engine, config: GenerateConfig, fingerprint: str, on_step: Callable[[int, int], None]) -> dict[str, Any]:
    """Writes the one video that `config` describes with an engine of its model; see `generate`. Of ranks that render it together, the first writes;
    the others return an empty record.

    Args:
        engine: of config.model.
        config: `prompt` and `out` are those of the video.
        fingerprint: the model's (`model_fingerprint`), from before it was loaded.
        on_step: as in `Engine.generate`.
    """
    image, image_sha256 = read_image(config.image) if config.image else (None, "")
    result = engine.generate(config.prompt, config.seed, config.sampling, config.recipe, image=image, on_step=on_step)
    if engine.division.rank != 0:
        return {}
    sidecar = Path(config.out).with_suffix(".json")
    sidecar.unlink(missing_ok=True)  # an older video's record must never stand beside this one
    started = time.perf_counter()
    write_video(config.out, result.frames, config.sampling.fps)
    encode_s = time.perf_counter() - started
    record = {
        "video": config.out,
        "video_sha256": file_hash(Path(config.out)),
        "image_sha256": image_sha256,
        "config": to_dict(config),
        "model": origin(config.model),
        "model_fingerprint": fingerprint,
        "recipe": result.recipe.to_dict(),
        "receipts": result.receipts,
        "timings": {**result.timings, "encode_s": encode_s},
        "peak_memory_bytes": result.peak_memory_bytes,
        "parallel": engine.division.describe(result.recipe),
        "warnings": result.warnings,
        "num_tokens": check_sampling(config.model, config.sampling)["num_tokens"],
        "max_text_tokens": text_tokens(config.model, config.sampling),
        "dtype": str(engine.dtype),
        "provenance": provenance(str(engine.device)),
    }
    write_json(sidecar, record)
    return record
