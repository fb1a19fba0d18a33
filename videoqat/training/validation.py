"""Paired validation loss: every model meets the same clips, the same noise and the same times, so that small differences can be told from luck.

The loss of one model varies far more from clip to clip and from time to time than 4-bit attention changes it. Its *difference* to another model's
loss on the same (clip, noise, time) varies little; means, errors and intervals below are of these differences.

`videoqat compare` holds whole models against each other in this way, and a training its own weights under bf16 and under its recipe.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from videoqat.config import ObjectiveConfig
from videoqat.console import progress
from videoqat.data.dataset import CachedVideos, check_images, sample_generator
from videoqat.data.precompute import encoder_fingerprint
from videoqat.errors import DataError, NonFiniteLoss
from videoqat.models.spec import Condition, ModelFamily
from videoqat.parallel.mesh import Mesh
from videoqat.training.objective import TimeRange, denoising_loss, time_at_quantile, time_quantiles

SEED = 20_000  # of the noise and the times; the same for every comparison, so that losses of several reports can be held side by side
BOOTSTRAP_RESAMPLES = 2000


def check_cache(folder: str, models: Iterable[str], key: str = "validation_cache") -> CachedVideos:
    """The cache in `folder`, which the setting `key` names, if it was made with the VAE and text encoder of every one of `models`.

    Raises:
        DataError: no cache, an empty one, one made with others, or one with first frames for a model that takes none, or the other way round.
    """
    cache = CachedVideos(folder)
    if not len(cache):
        raise DataError(f"{key}={folder!r} holds no samples")
    for model in dict.fromkeys(models):
        if encoder_fingerprint(model) != cache.settings["encoder_fingerprint"]:
            made_with = cache.settings.get("model")
            raise DataError(f"{key}={folder!r} was made with another VAE or text encoder ({made_with}) than that of {model}; preprocess again")
        check_images(cache, model, key)
    return cache


def choose_samples(num_cached: int, wanted: int) -> list[int]:
    """`wanted` indices spread evenly over the cache (all of them if it holds fewer): a pure function of the two counts."""
    count = min(num_cached, wanted)
    return [i * num_cached // count for i in range(count)]


def stratified_times(cfg: ObjectiveConfig, sample_index: int, num_times: int, time_range: TimeRange = (0.0, 1.0)) -> list[float]:
    """Flow times of one clip: a pure function of the arguments.

    One is drawn from each of `num_times` equally likely parts of the training's time distribution (`cfg`, flow shift included, within `time_range`),
    so that few times already cover all noise levels and the mean estimates the training loss.
    """
    jitter_K = torch.rand(num_times, generator=sample_generator(SEED, 0, sample_index, "validation time"), dtype=torch.float64)
    low, high = time_quantiles(cfg, time_range)
    quantile_K = low + (high - low) * (torch.arange(num_times) + jitter_K) / num_times
    times = [time_at_quantile(cfg, quantile) for quantile in quantile_K.tolist()]
    return [min(max(t, time_range[0]), time_range[1]) for t in times]  # rounding at the ends hands no expert another's times


def stratified_noise(sample_index: int, latents_CFHW: Tensor, num_times: int) -> Tensor:
    """Noise (K, C, F, H, W) fp32 for one clip's K times: a pure function of the clip's index and the sizes."""
    return torch.randn((num_times, *latents_CFHW.shape), generator=sample_generator(SEED, 0, sample_index, "validation noise"))


def _alike(buckets: list[str], most: int) -> list[list[int]]:
    """Positions 0, 1, ... in order, neighbours of one bucket together, at most `most`."""
    groups: list[list[int]] = []
    for position, bucket in enumerate(buckets):
        if groups and len(groups[-1]) < most and buckets[groups[-1][0]] == bucket:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


@torch.no_grad()
def paired_losses(
    family: ModelFamily,
    folder: str | Path,
    transformers: Mapping[str, nn.Module],
    cache: CachedVideos,
    objective: ObjectiveConfig,
    *,
    samples: list[int],
    num_times: int,
    time_range: TimeRange = (0.0, 1.0),
    batch_size: int = 4,
    clips_at_once: int = 1,
    mesh: Mesh | None = None,
    before_forward: Callable[[], None] = lambda: None,
    desc: str = "validation loss",
) -> NDArray[np.float64]:
    """Losses (samples, times) of one model, as it stands with the recipe installed in it. Captions are never dropped.

    With a mesh, ranks divide the forwards among them: each goes through equally many, since a forward of sharded weights takes all ranks, and those
    that fill up a rank's share count for nothing. What is computed in one forward does not depend on the layout.

    Args:
        family, folder: of the model; where times are split between two transformers, each is asked for its own.
        transformers: component name -> transformer, on the device where they run.
        cache: clips, made with the same VAE and text encoder (`check_cache`).
        objective: the times' distribution, resolved (`objective.resolve`).
        samples: indices into the cache.
        num_times: stratified times per clip.
        time_range: what all `transformers` together serve.
        batch_size: how many times of one clip run at once; memory and speed, not the result.
        clips_at_once: how many clips of one size do; likewise.
        mesh: of the ranks that all call this, None for a process of its own.
        before_forward: called before each; what it raises (on all ranks together) ends the call.

    Returns:
        All losses, on every rank.

    Raises:
        NonFiniteLoss: a loss is NaN or inf; on every rank.
    """
    ranges = {name: family.flow_time_range(folder, name) for name in transformers}
    schedule = family.noise_schedule(folder)
    max_tokens = int(cache.settings["max_text_tokens"])
    times = [stratified_times(objective, index, num_times, time_range) for index in samples]
    work = []  # transformer, and which times of which rows it is asked for at once
    for rows in _alike([cache.samples[index].bucket for index in samples], clips_at_once):
        for name, (low, high) in ranges.items():
            mine = [(row, k) for row in rows for k, t in enumerate(times[row]) if low <= t < high or (t >= high == 1.0)]
            most = batch_size * clips_at_once
            work += [(name, mine[at : at + most]) for at in range(0, len(mine), most)]

    @functools.lru_cache(maxsize=clips_at_once)
    def load(row: int) -> tuple[Tensor, Tensor, Condition]:
        sample = cache.load(samples[row])
        latents_CFHW = sample.pop("latents")
        return latents_CFHW, stratified_noise(samples[row], latents_CFHW, num_times), family.batch_conditions([sample], max_tokens)

    rank, ranks = (mesh.dp_rank, mesh.layout.dp) if mesh else (0, 1)
    losses = np.zeros((len(samples), num_times))
    for at in progress(range(0, len(work), ranks), desc=desc, unit="forward"):
        before_forward()
        component, pairs = work[min(at + rank, len(work) - 1)]
        latents, noise, conditions = zip(*(load(row) for row, _ in pairs), strict=True)
        device = next(transformers[component].parameters()).device
        loss_B = denoising_loss(
            family,
            schedule,
            transformers[component],
            torch.stack(latents).to(device),
            torch.stack([noise_KCFHW[k] for noise_KCFHW, (_, k) in zip(noise, pairs, strict=True)]).to(device),
            torch.tensor([times[row][k] for row, k in pairs], device=device),
            {name: torch.cat([condition[name] for condition in conditions]).to(device) for name in conditions[0]},
        )
        if at + rank < len(work):
            losses[tuple(zip(*pairs, strict=True))] = loss_B.double().cpu().numpy()
    if mesh:
        losses = mesh.sum_over_dp(torch.from_numpy(losses).to(mesh.device)).cpu().numpy()
    for row, index in enumerate(samples):
        if not np.isfinite(losses[row]).all():
            raise NonFiniteLoss(f"{desc}: {folder} yields NaN or inf on clip {cache.samples[index].id}, flow times {times[row]}")
    return losses


def summarise(losses: Mapping[str, NDArray[np.float64]], first: str) -> dict[str, dict[str, Any]]:
    """Means, and paired differences to the entry `first`, with their uncertainty over clips.

    Args:
        losses: entry -> (samples, times), paired: the same clips, noise and times in every one.
        first: the entry the others are held against.

    Returns:
        entry -> `loss` (mean), `difference` (mean of loss - first's loss; above 0 is worse), `relative` (difference / first's loss),
        `standard_error` (over clips, None for a single one), `ci95` (low, high: percentiles of the difference's mean over
        bootstrap resamples of the clips, always the same resamples; None for a single clip), `samples`, `times`.
    """
    reference = losses[first]
    num_samples, num_times = reference.shape
    picks = np.random.default_rng(SEED).integers(0, num_samples, size=(BOOTSTRAP_RESAMPLES, num_samples))
    result: dict[str, dict[str, Any]] = {}
    for name, entry in losses.items():
        per_clip = (entry - reference).mean(axis=1)
        difference = float(per_clip.mean())
        several = num_samples > 1
        low, high = np.percentile(per_clip[picks].mean(axis=1), [2.5, 97.5])
        result[name] = {
            "loss": float(entry.mean()),
            "difference": difference,
            "relative": difference / float(reference.mean()),
            "standard_error": float(per_clip.std(ddof=1) / math.sqrt(num_samples)) if several else None,
            "ci95": [float(low), float(high)] if several else None,
            "samples": num_samples,
            "times": num_times,
        }
    return result
