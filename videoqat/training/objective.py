"""Flow matching: what is drawn for each sample, and the loss.

    x_t = (1 - t) x_0 + t noise        target = noise - x_0        loss = mean (prediction - target)^2, weight 1

(rectified flow, arXiv 2209.03003; as Wan 2.1 and 2.2 are trained). The drawn time is warped once, by `flow_shift` s:
t' = s t / (1 + (s - 1) t), which moves weight towards noise where videos are large (arXiv 2403.03206, section 5.3.2).

Everything drawn for a sample is a pure function of (seed, epoch, sample index): two samples in one batch, or in two accumulated batches, or on
two ranks, see the same noise; and the same clip loses its caption in one epoch but not in the next.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from videoqat.config import ObjectiveConfig
from videoqat.data.dataset import sample_generator
from videoqat.errors import ConfigError
from videoqat.models.spec import ModelFamily

TimeRange = tuple[float, float]


@dataclass(frozen=True)
class Draw:
    """What chance decides for one sample in one epoch: noise (C, F, H, W) fp32, flow time t in [0, 1], whether its caption is dropped."""

    noise_CFHW: Tensor
    t: float
    drop_caption: bool


def shift_time(t: float, flow_shift: float) -> float:
    """t' = s t / (1 + (s - 1) t): maps [0, 1] onto itself; 0 and 1 stay."""
    return flow_shift * t / (1 + (flow_shift - 1) * t)


def time_at_quantile(cfg: ObjectiveConfig, quantile: float) -> float:
    """The (shifted) flow time below which this share of all drawn times lies: the inverse distribution function, in fp64."""
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


def flow_matching_loss(
    family: ModelFamily, transformer: nn.Module, latents_BCFHW: Tensor, noise_BCFHW: Tensor, t_B: Tensor, text_BLD: Tensor
) -> Tensor:
    """The loss of each sample, (B,) fp32: a step's loss is the mean over *all* its samples, however they are batched, so it is not reduced here.

    Latents, noise and times are fp32; autocast, where wanted, is the caller's.
    """
    t_B111 = t_B.float().view(-1, 1, 1, 1, 1)
    x_BCFHW = (1 - t_B111) * latents_BCFHW + t_B111 * noise_BCFHW
    prediction_BCFHW = family.forward(transformer, x_BCFHW, t_B, text_BLD)
    return (prediction_BCFHW.float() - (noise_BCFHW - latents_BCFHW)).square().mean(dim=(1, 2, 3, 4))
