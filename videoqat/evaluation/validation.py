"""Paired validation loss: every model meets the same clips, the same noise and the same times, so that small differences can be told from luck.

The loss of one model varies far more from clip to clip and from time to time than 4-bit attention changes it. Its *difference* to another model's
loss on the same (clip, noise, time) varies little; means, errors and intervals below are of these differences.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from videoqat.config import ObjectiveConfig
from videoqat.console import progress
from videoqat.data.dataset import CachedVideos, sample_generator
from videoqat.data.precompute import encoder_fingerprint
from videoqat.errors import DataError, NonFiniteLoss
from videoqat.models.spec import ModelFamily
from videoqat.training.objective import flow_matching_loss, time_at_quantile

SEED = 20_000  # of the noise and the times; the same for every comparison, so that losses of several reports can be held side by side
BOOTSTRAP_RESAMPLES = 2000


def check_cache(folder: str, models: Iterable[str]) -> None:
    """Requires that the cache in `folder` was made with the VAE and text encoder of every one of `models`.

    Raises:
        DataError: no cache, an empty one, or one made with others.
    """
    cache = CachedVideos(folder)
    if not len(cache):
        raise DataError(f"validation_cache={folder!r} holds no samples")
    for model in dict.fromkeys(models):
        if encoder_fingerprint(model) != cache.settings["encoder_fingerprint"]:
            made_with = cache.settings.get("model")
            raise DataError(
                f"validation_cache={folder!r} was made with another VAE or text encoder ({made_with}) than that of {model}; preprocess again"
            )


def choose_samples(num_cached: int, wanted: int) -> list[int]:
    """`wanted` indices spread evenly over the cache (all of them if it holds fewer): a pure function of the two counts."""
    count = min(num_cached, wanted)
    return [i * num_cached // count for i in range(count)]


def draw_stratified(cfg: ObjectiveConfig, sample_index: int, latents_CFHW: Tensor, num_times: int) -> tuple[Tensor, Tensor]:
    """Noise (K, C, F, H, W) fp32 and flow times (K,) fp32 of one clip: a pure function of the arguments.

    The K times are stratified: one is drawn from each of K equally likely parts of the training's time distribution (`cfg`, flow shift included), so
    that few times already cover all noise levels and the mean estimates the training loss.
    """
    noise_generator = sample_generator(SEED, 0, sample_index, "validation noise")
    noise_KCFHW = torch.randn((num_times, *latents_CFHW.shape), generator=noise_generator)
    jitter_K = torch.rand(num_times, generator=sample_generator(SEED, 0, sample_index, "validation time"), dtype=torch.float64)
    quantile_K = (torch.arange(num_times) + jitter_K) / num_times
    return noise_KCFHW, torch.tensor([time_at_quantile(cfg, quantile) for quantile in quantile_K.tolist()])


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
    batch_size: int = 4,
    desc: str = "validation loss",
) -> NDArray[np.float64]:
    """Flow-matching losses (samples, times) of one model, as it stands with the recipe installed in it. Captions are never dropped.

    Args:
        family, folder: of the model; where times are split between two transformers, each is asked for its own.
        transformers: component name -> transformer, on the device where they run.
        cache: clips, made with the same VAE and text encoder (`check_cache`).
        objective: the times' distribution.
        samples: indices into the cache.
        num_times: stratified times per clip.
        batch_size: how many times of one clip run at once; memory and speed, not the result.

    Raises:
        NonFiniteLoss: a loss is NaN or inf.
    """
    ranges = {name: family.flow_time_range(folder, name) for name in transformers}
    max_tokens = int(cache.settings["max_text_tokens"])
    losses = np.zeros((len(samples), num_times))
    for row, index in enumerate(progress(samples, desc=desc, unit="clip")):
        sample = cache.load(index)
        latents_CFHW, text_LD = sample["latents"], sample["text"]
        noise_KCFHW, t_K = draw_stratified(objective, index, latents_CFHW, num_times)
        text_1LD = family.pad_text([text_LD], max_tokens)
        for name, transformer in transformers.items():
            low, high = ranges[name]
            mine = [k for k, t in enumerate(t_K.tolist()) if low <= t < high or (t >= high == 1.0)]
            device = next(transformer.parameters()).device
            for at in range(0, len(mine), batch_size):
                part = mine[at : at + batch_size]
                loss_B = flow_matching_loss(
                    family,
                    transformer,
                    latents_CFHW.expand(len(part), *latents_CFHW.shape).to(device),
                    noise_KCFHW[part].to(device),
                    t_K[part].to(device),
                    text_1LD.expand(len(part), -1, -1).to(device),
                )
                losses[row, part] = loss_B.double().cpu().numpy()
        if not np.isfinite(losses[row]).all():
            raise NonFiniteLoss(f"{desc}: {folder} yields NaN or inf on clip {cache.samples[index].id}, flow times {t_K.tolist()}")
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
