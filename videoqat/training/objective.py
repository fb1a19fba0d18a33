"""What is drawn for each sample, and its loss: mean (prediction - target)^2, weight 1; or less, beside a teacher's part (`distilled_losses`).

What the model sees at time t and what it is to predict is its family's noise schedule (`models.schedules`): flow matching for Wan, v-prediction
for CogVideoX. With flow matching the drawn time is warped once, by `flow_shift` s: t' = s t / (1 + (s - 1) t), which moves weight towards noise
where videos are large (arXiv 2403.03206, section 5.3.2).

Everything drawn for a sample is a pure function of (seed, epoch, sample index): two samples in one batch, or in two accumulated batches, or on
two ranks, see the same noise; and the same clip loses its caption in one epoch but not in the next.
"""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from videoqat.config import ObjectiveConfig
from videoqat.data.dataset import sample_generator
from videoqat.errors import ConfigError
from videoqat.models.schedules import NoiseSchedule
from videoqat.models.spec import Condition, ModelFamily

TimeRange = tuple[float, float]
Objective = TypeVar("Objective", bound=ObjectiveConfig)


@dataclass(frozen=True)
class Draw:
    """What chance decides for one sample in one epoch: noise (C, F, H, W) fp32, time t in [0, 1], whether its caption is dropped."""

    noise_CFHW: Tensor
    t: float
    drop_caption: bool


def resolve(cfg: Objective, schedule: NoiseSchedule) -> Objective:
    """`cfg` with what it leaves to the model filled in; everything else here wants it so.

    Raises:
        ConfigError: a flow shift for a schedule to which it means nothing.
    """
    if schedule.flow_shift is None and cfg.flow_shift not in (0, 1):
        why = f"this model is trained by {schedule.name}, which takes no flow shift"
        raise ConfigError(f"objective.flow_shift={cfg.flow_shift:g} is not legal: {why}; legal: 0 (the model's own), 1 (none)")
    sampling = schedule.timestep_sampling if cfg.timestep_sampling == "auto" else cfg.timestep_sampling
    return replace(cfg, flow_shift=cfg.flow_shift or schedule.flow_shift or 1.0, timestep_sampling=sampling)


def shift_time(t: float, flow_shift: float) -> float:
    """t' = s t / (1 + (s - 1) t): maps [0, 1] onto itself; 0 and 1 stay."""
    return flow_shift * t / (1 + (flow_shift - 1) * t)


def time_at_quantile(cfg: ObjectiveConfig, quantile: float) -> float:
    """The (shifted) flow time below which this share of all drawn times lies: the inverse distribution function, in fp64."""
    assert cfg.flow_shift > 0, "resolve it first"
    assert cfg.timestep_sampling != "auto", "resolve it first"
    t = quantile
    if cfg.timestep_sampling == "logit_normal":
        t = torch.sigmoid(cfg.logit_mean + cfg.logit_std * torch.special.ndtri(torch.tensor(quantile, dtype=torch.float64))).item()
    return shift_time(t, cfg.flow_shift)


def time_quantiles(cfg: ObjectiveConfig, time_range: TimeRange) -> TimeRange:
    """The part of the drawn distribution, as quantiles in [0, 1], whose *shifted* times lie in `time_range`.

    A transformer that serves only part of the schedule (an expert of Wan 2.2) is trained on the distribution of t conditioned on its part:
    a uniform quantile between these two bounds, put through the inverse distribution function, is exactly that. Nothing is rejected and
    redrawn, so every sample costs one number, whatever the range.

    Raises:
        ConfigError: the range has no weight under this distribution.
    """
    assert cfg.flow_shift > 0, "resolve it first"
    bounds = []
    for shifted in time_range:
        t = shifted / (cfg.flow_shift - (cfg.flow_shift - 1) * shifted)  # the inverse of shift_time
        if cfg.timestep_sampling == "uniform" or t in (0.0, 1.0):
            bounds.append(t)
        else:
            bounds.append(torch.special.ndtr(torch.tensor((math.log(t / (1 - t)) - cfg.logit_mean) / cfg.logit_std, dtype=torch.float64)).item())
    if not bounds[1] - bounds[0] > 1e-9:
        raise ConfigError(
            f"objective: flow times {time_range[0]:g} to {time_range[1]:g}, which this transformer serves, are never drawn with "
            f"timestep_sampling={cfg.timestep_sampling} logit_mean={cfg.logit_mean} logit_std={cfg.logit_std} flow_shift={cfg.flow_shift}"
        )
    return bounds[0], bounds[1]


def draw(cfg: ObjectiveConfig, seed: int, epoch: int, sample_index: int, latents_CFHW: Tensor, time_range: TimeRange) -> Draw:
    """Noise, time and caption dropout of one sample in one epoch.

    The three come from generators of their own, so that changing the dropout rate leaves noise and times as they were.

    Args:
        cfg: distribution of the times, flow shift, dropout rate.
        seed: the run's.
        epoch: counted from 0.
        sample_index: position in the cache.
        latents_CFHW: gives the noise its shape.
        time_range: (low, high) flow times that the transformer serves, (0, 1) for a whole model.
    """

    def uniform(stream: str) -> float:
        return torch.rand((), generator=sample_generator(seed, epoch, sample_index, stream), dtype=torch.float64).item()

    low, high = time_quantiles(cfg, time_range)
    t = time_at_quantile(cfg, low + (high - low) * uniform("time"))
    noise_CFHW = torch.randn(latents_CFHW.shape, generator=sample_generator(seed, epoch, sample_index, "noise"))
    # Rounding at the ends must not hand an expert a time of the other expert.
    t = min(max(t, time_range[0]), time_range[1])
    return Draw(noise_CFHW, t, uniform("caption") < cfg.caption_dropout)


def denoising_loss(
    family: ModelFamily,
    schedule: NoiseSchedule,
    transformer: nn.Module,
    latents_BCFHW: Tensor,
    noise_BCFHW: Tensor,
    t_B: Tensor,
    condition: Condition,
) -> Tensor:
    """The loss of each sample, (B,) fp32: a step's loss is the mean over *all* its samples, however they are batched, so it is not reduced here.

    Latents, noise and times are fp32; the transformer computes in its own precision.
    """
    prediction_BCFHW = family.forward(transformer, schedule.add_noise(latents_BCFHW, noise_BCFHW, t_B), t_B, condition)
    error_BCFHW = prediction_BCFHW.float() - schedule.target(latents_BCFHW, noise_BCFHW, t_B)
    return _mean_square(error_BCFHW, family.given_frames(condition))


def distilled_losses(
    family: ModelFamily,
    schedule: NoiseSchedule,
    transformer: nn.Module,
    teacher: nn.Module,
    weight: float,
    latents_BCFHW: Tensor,
    noise_BCFHW: Tensor,
    t_B: Tensor,
    condition: Condition,
) -> dict[str, Tensor]:
    """The losses of each sample, each (B,) fp32, where a teacher says what else is wanted (knowledge distillation, arXiv 1503.02531).

    The teacher is asked about the same noisy latents, times and condition, and gets no gradient.

    Returns:
        `denoising_loss`: as `denoising_loss` has it. `distill_loss`: the mean square of prediction - teacher's prediction, over the same frames.
        `loss`, which is to be minimised: (1 - weight) * denoising_loss + weight * distill_loss.
    """
    noisy_BCFHW = schedule.add_noise(latents_BCFHW, noise_BCFHW, t_B)
    with torch.no_grad():
        taught_BCFHW = family.forward(teacher, noisy_BCFHW, t_B, condition).float()
    prediction_BCFHW = family.forward(transformer, noisy_BCFHW, t_B, condition).float()
    given = family.given_frames(condition)
    denoising_B = _mean_square(prediction_BCFHW - schedule.target(latents_BCFHW, noise_BCFHW, t_B), given)
    distill_B = _mean_square(prediction_BCFHW - taught_BCFHW, given)
    return {"loss": (1 - weight) * denoising_B + weight * distill_B, "denoising_loss": denoising_B, "distill_loss": distill_B}


def _mean_square(error_BCFHW: Tensor, given: int) -> Tensor:
    """(B,), over all but the first `given` frames."""
    return error_BCFHW[:, :, given:].square().mean(dim=(1, 2, 3, 4))
