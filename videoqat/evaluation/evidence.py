"""One row of the evidence: one model under one recipe, its loss on held-out clips, its videos, and what these show.

`evidence_run` makes tables of such rows.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from videoqat.attention.backends import Receipt, record_receipts, resolve
from videoqat.config import MeasureConfig, ObjectiveConfig, RuntimeConfig, SamplingConfig, existing, require, to_dict
from videoqat.console import progress
from videoqat.data.dataset import CachedVideos
from videoqat.data.video_io import read_video, write_video
from videoqat.errors import ConfigError
from videoqat.evaluation import fidelity, st_lpips
from videoqat.evaluation.judges import CAPTIONS, NUM_FRAMES, Judges, accuracies
from videoqat.files import check_writable, writable_folder, write_json
from videoqat.generation.engine import Engine, VideoResult, check_recipe, check_sampling
from videoqat.generation.prompts import read_prompts
from videoqat.models.hub import check_weights
from videoqat.models.install import observe
from videoqat.models.spec import family_of
from videoqat.provenance import provenance
from videoqat.recipes import AttentionRecipe, get_recipe
from videoqat.training import validation
from videoqat.training.job import transformer_fingerprint
from videoqat.training.objective import resolve as resolve_objective

RESULT = "result.json"
FOUR_BITS = ("nvfp4", "mxfp4")


class _Checked(NamedTuple):
    """A configuration that can be measured; no weights of the model are loaded yet."""

    recipe: AttentionRecipe
    receipt: Receipt
    cache: CachedVideos
    prompts: list[str]
    judged: bool
    network: st_lpips.StLpips | None
    about_lpips: dict[str, str] | None


def _check(config: MeasureConfig) -> _Checked:
    config.validate()
    check_weights(config.model)
    recipe = get_recipe(config.recipe)
    cache = validation.check_cache(config.cache, [config.model], "cache")
    prompts = read_prompts(config.prompts) if config.prompts else []
    if prompts:
        check_sampling(config.model, config.sampling)
        fidelity.check_sizes([(config.sampling.height, config.sampling.width)])
    check_recipe(config.model, recipe, config.sampling)
    receipt = check_kernel(config.model, recipe, config.runtime)
    for place in range(len(prompts)) if config.reference else ():
        video = Path(config.reference) / "videos" / f"{place:03d}.mp4"
        require(video.is_file(), "reference", config.reference, f"the folder of a row with its videos, but it has no videos/{video.name}")
    if config.reference and prompts:
        _check_reference(config, prompts)
    judged = has_judges(prompts, config.sampling)
    network, about_lpips = None, None
    if prompts:
        network, about_lpips = st_lpips.load(config.st_lpips, [(config.sampling.height, config.sampling.width)], config.runtime.resolve()[0])
    check_writable("out", config.out)
    return _Checked(recipe, receipt, cache, prompts, judged, network, about_lpips)


def check_kernel(model: str, recipe: AttentionRecipe, runtime: RuntimeConfig) -> Receipt:
    """The kernel that the quantised layers of the model in a folder will get.

    Raises:
        ConfigError: no such device. AttentionError: no kernel can serve, or not the one that is asked for.
    """
    family, (device, dtype) = family_of(model), runtime.resolve()
    head_dim = family.geometry(model, family.components(model)[0]).head_dim
    return resolve(recipe, device, dtype, head_dim, runtime.kernel if recipe.is_quantised else "auto")


def sources(model: str, cache: CachedVideos) -> dict[str, Any]:
    """By what a row's weights and clips are known again.

    Of clips it is what they were made from that counts, not their latents: made again on another machine, those differ in their last bits, and mp4
    files in their bytes.

    Returns:
        `weights`: `transformer_fingerprint` of each transformer. `clips`: hash of the encoders and of each clip's name, size and caption, in order.
    """
    weights = {component: transformer_fingerprint(model, component, weights=True) for component in family_of(model).components(model)}
    about = [cache.settings.get(key) for key in ("encoder_fingerprint", "fps", "max_text_tokens")]
    about += [[sample.id, sample.bucket, sample.caption] for sample in cache.samples]
    return {"weights": weights, "clips": hashlib.sha256(json.dumps(about).encode()).hexdigest()}


def check_sources(record: Path, now: dict[str, Any], **given: str) -> None:
    """Requires `record`, a JSON file, to be of the same `sources` as there are `now`. One that isn't there, or doesn't tell, is taken for theirs.

    Args:
        given: the settings `base` and `held_out`, or that of them whose source is to be the same.

    Raises:
        ConfigError: it is of others.
    """
    known = json.loads(record.read_text()).get("sources", {}) if record.is_file() else {}
    for setting, folder in given.items():
        key = {"base": "weights", "held_out": "clips"}[setting]
        require(known.get(key, now[key]) == now[key], setting, folder, f"a folder with the {key} that {record} is of; or another out")


def plan(config: MeasureConfig) -> dict[str, Any]:
    """What `measure` would look at: `samples` and `videos` (how many), `recipe`, `receipt` (the kernel that would serve), `st_lpips`.

    Raises:
        UserError: whatever `measure` would refuse before it loads the model.
    """
    checked = _check(config)
    return {
        "samples": len(validation.choose_samples(len(checked.cache), config.samples)),
        "videos": len(checked.prompts),
        "recipe": checked.recipe.to_dict(),
        "receipt": checked.receipt.to_dict(),
        "st_lpips": checked.about_lpips,
    }


def measure(config: MeasureConfig) -> dict[str, Any]:
    """One model under one recipe: its loss clip by clip and, with prompts, its videos. Writes `out`/result.json and returns it.

    Returns:
        `clip_losses` (mean over times of each clip; the same clips, noise and times whatever the model: they are paired; null where the recipe
        keeps denoising steps in bf16, since a loss has no steps), `four_bit_share` (of attention's products of any kind in a video, those of 4-bit
        operands), `videos` (prompt, seed, `flicker`, `fidelity` to the reference's video or, without a reference, to the same video rendered again:
        the floor; `judged`: [garment, direction]), `st_lpips` (the hash of its weights, or why it is absent; null without videos), `judged`
        (`judges.accuracies`, and `real_clips`, the judges' own on those; null where a caption is none of the set's), `kernels` that served (losses
        and videos), `config`, `recipe`, `sources` and `provenance`.

    Raises:
        UserError: bad input. NonFiniteLoss, NonFiniteVideo: what the model gives is no number.
    """
    recipe, _, cache, prompts, judged, network, about_lpips = _check(config)
    out = writable_folder("out", config.out)
    found = sources(config.model, cache)
    engine = Engine(config.model, config.runtime)
    engine.install(recipe)
    with record_receipts() as receipts, _arithmetic(engine.transformers) as flops:
        losses = validation.paired_losses(
            engine.family,
            engine.folder,
            engine.transformers,
            cache,
            resolve_objective(ObjectiveConfig(), engine.family.noise_schedule(config.model)),
            samples=validation.choose_samples(len(cache), config.samples),
            num_times=config.timesteps,
            clips_at_once=config.clips_at_once,
        )
    judges = Judges.load() if judged else None
    batches = range(0, len(prompts), config.videos_at_once)
    videos = [video for first in progress(batches, desc="videos", unit="batch") for video in _videos(config, engine, judges, network, prompts, first)]
    seen = None
    if judges:
        seen = accuracies([CAPTIONS[prompt] for prompt in prompts], [(video["judged"][0], video["judged"][1]) for video in videos])
        seen["real_clips"] = {key: value for key, value in judges.card["real_clips"].items() if key != "confusion"}
    result = {
        "clip_losses": None if recipe.keep_first_steps or recipe.keep_last_steps else losses.mean(axis=1).tolist(),
        "four_bit_share": _four_bit_share(engine, recipe, flops, config.sampling.num_inference_steps),
        "videos": videos,
        "st_lpips": about_lpips,
        "judged": seen,
        "kernels": sorted({receipt.kernel for receipt in receipts} | {kernel for video in videos for kernel in video.pop("kernels")}),
        "config": to_dict(config),
        "recipe": recipe.to_dict(),
        "sources": found,
        "provenance": provenance(str(config.runtime.resolve()[0])),
    }
    write_json(out / RESULT, result)
    return {"loss": float(losses.mean()) if result["clip_losses"] else None, **result}


def _check_reference(config: MeasureConfig, prompts: list[str]) -> None:
    """Requires the reference's videos to be of the same prompts and seeds, sampled likewise: else it is not the rows that they differ by."""
    record = Path(config.reference) / RESULT
    existing("reference", str(record))
    try:
        result = json.loads(record.read_text())
        known, shown = result["config"], [(video["prompt"], video["seed"]) for video in result["videos"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"reference={config.reference!r} is no row that `evidence measure` wrote: {error!r}") from error
    for place, prompt in enumerate(prompts):
        mine, other = (prompt, config.seed + place), shown[place] if place < len(shown) else None
        require(mine == other, f"prompts, seed: video {place}", mine, f"{other}, as {config.reference} has it")
    sampled = to_dict(SamplingConfig()) | known["sampling"]
    for key, value in to_dict(config.sampling).items():
        require(value == sampled[key], f"sampling.{key}", value, f"{sampled[key]!r}, as {config.reference} was rendered")
    at_once = known.get("videos_at_once", 1)
    require(config.videos_at_once == at_once, "videos_at_once", config.videos_at_once, f"{at_once}, as {config.reference} was rendered")


@contextlib.contextmanager
def _arithmetic(transformers: Mapping[str, nn.Module]) -> Iterator[dict[tuple[str, str], float]]:
    """Within the block the dict fills: component and layer -> multiplications in the two products of its attention."""
    found: dict[tuple[str, str], float] = {}

    def observer_of(component: str) -> Any:
        def observer(layer: str, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
            found[component, layer] = found.get((component, layer), 0.0) + 2.0 * q_BNHD.numel() * k_BNHD.shape[1]

        return observer

    for component, transformer in transformers.items():
        observe(transformer, observer_of(component))
    try:
        yield found
    finally:
        for transformer in transformers.values():
            observe(transformer, None)


def _four_bit_share(engine: Engine, recipe: AttentionRecipe, flops: dict[tuple[str, str], float], steps: int) -> float:
    """Each of an attention's two products takes half of its arithmetic."""
    products = sum(format in FOUR_BITS for format in (recipe.qk, recipe.pv)) / 2
    layers = {(name, layer.name): layer for name, module in engine.transformers.items() for layer in engine.family.attention_layers(module)}
    covered = sum(flops[key] for key in flops if recipe.covers(layers[key].kind, layers[key].index, key[0]))
    quantised_steps = sum(not recipe.keeps_step(step, steps) for step in range(steps))
    return products * covered / sum(flops.values()) * quantised_steps / steps


def has_judges(prompts: list[str], sampling: SamplingConfig) -> bool:
    """Whether there are judges for these videos. Raises ConfigError where all captions are theirs, but videos are of another length."""
    known = bool(prompts) and all(prompt in CAPTIONS for prompt in prompts)
    require(not known or sampling.num_frames == NUM_FRAMES, "sampling.num_frames", sampling.num_frames, f"{NUM_FRAMES}, which the judges look at")
    return known


def _videos(
    config: MeasureConfig, engine: Engine, judges: Judges | None, network: st_lpips.StLpips | None, prompts: list[str], first: int
) -> list[dict[str, Any]]:
    """Renders, writes and looks at the videos from the `first` on that are rendered together. All is seen as it is on the disk."""
    places = range(len(prompts))[first : first + config.videos_at_once]
    asked = [prompts[place] for place in places]

    def render(suffix: str) -> list[VideoResult]:
        made = engine.generate_together(asked, [config.seed + place for place in places], config.sampling, config.recipe)
        for place, video in zip(places, made, strict=True):
            write_video(Path(config.out) / "videos" / f"{place:03d}{suffix}.mp4", video.frames, config.sampling.fps)
        return made

    made = render("")
    if not config.reference:
        render("-again")
    told = []
    for place, prompt, video in zip(places, asked, made, strict=True):
        mine = read_video(Path(config.out) / "videos" / f"{place:03d}.mp4")[0]
        other = Path(config.reference) / "videos" / f"{place:03d}.mp4" if config.reference else Path(config.out) / "videos" / f"{place:03d}-again.mp4"
        found = fidelity.fidelity(read_video(other)[0], mine, network)
        by_frame = ("psnr", "ssim", "st_lpips", "identical_frames")
        about = {"prompt": prompt, "seed": config.seed + place, "flicker": fidelity.flicker(mine)}
        about |= {"fidelity": {key: found[key] for key in found if key not in by_frame}, "judged": list(judges.judge(mine)) if judges else None}
        told.append(about | {"kernels": [receipt["kernel"] for receipt in video.receipts]})
    return told
