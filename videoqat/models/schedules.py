"""Noise schedules: how data and noise are mixed at time t, and what a model is to predict there.

Training counts time as t in [0, 1], 0 being data and 1 noise, for every family. What t means is the schedule's business.
"""

from typing import Protocol

import torch
from torch import Tensor

TRAIN_TIMESTEPS = 1000  # discrete times of a schedule made of betas


class NoiseSchedule(Protocol):
    """What training needs of a schedule. Latents and noise are (B, C, F, H, W) fp32, t is (B,)."""

    name: str
    flow_shift: float | None  # of the times, as the model's folder has it; None where a shift means nothing
    timestep_sampling: str  # how times are drawn where the configuration leaves it to the model

    def add_noise(self, latents_BCFHW: Tensor, noise_BCFHW: Tensor, t_B: Tensor) -> Tensor:
        """x_t, what the model sees."""
        ...

    def target(self, latents_BCFHW: Tensor, noise_BCFHW: Tensor, t_B: Tensor) -> Tensor:
        """What it should predict."""
        ...


class FlowMatching:
    """x_t = (1 - t) x_0 + t noise; target noise - x_0 (rectified flow, arXiv 2209.03003; Wan)."""

    name = "flow matching"
    timestep_sampling = "logit_normal"

    def __init__(self, flow_shift: float) -> None:
        self.flow_shift: float | None = flow_shift

    def add_noise(self, latents_BCFHW: Tensor, noise_BCFHW: Tensor, t_B: Tensor) -> Tensor:
        t_B111 = t_B.float().view(-1, 1, 1, 1, 1)
        return (1 - t_B111) * latents_BCFHW + t_B111 * noise_BCFHW

    def target(self, latents_BCFHW: Tensor, noise_BCFHW: Tensor, t_B: Tensor) -> Tensor:
        return noise_BCFHW - latents_BCFHW


class VPrediction:
    """x_k = a_k x_0 + s_k noise; target a_k noise - s_k x_0, with a_k^2 + s_k^2 = 1 (arXiv 2202.00512; CogVideoX, arXiv 2408.06072).

    k = min(floor(1000 t), 999): uniform t gives the uniform discrete times that such models are trained with. CogVideoX's own training writes
    the loss as (x_0 error)^2 / s_k^2, which is this target's squared error: the error of x_0 is s_k times that of v.

    Args:
        alphas_cumprod: a_k^2 for k = 0 to 999, as the folder's scheduler has them (shifted in SNR, and rescaled to end at zero SNR).
    """

    name = "v-prediction"
    flow_shift: float | None = None
    timestep_sampling = "uniform"

    def __init__(self, alphas_cumprod: Tensor) -> None:
        # In fp64, since 1 - a^2 loses most of fp32's digits where there is little noise.
        squares = alphas_cumprod.double()
        self._data_noise = torch.stack([squares.sqrt(), (1 - squares).sqrt()]).float()

    def _factors(self, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """a and s at t, each (B, 1, 1, 1, 1) fp32."""
        self._data_noise = self._data_noise.to(t_B.device)
        data_B, noise_B = self._data_noise[:, timestep(t_B)]
        return data_B.view(-1, 1, 1, 1, 1), noise_B.view(-1, 1, 1, 1, 1)

    def add_noise(self, latents_BCFHW: Tensor, noise_BCFHW: Tensor, t_B: Tensor) -> Tensor:
        a, s = self._factors(t_B)
        return a * latents_BCFHW + s * noise_BCFHW

    def target(self, latents_BCFHW: Tensor, noise_BCFHW: Tensor, t_B: Tensor) -> Tensor:
        a, s = self._factors(t_B)
        return a * noise_BCFHW - s * latents_BCFHW


def timestep(t_B: Tensor) -> Tensor:
    """The discrete time k (B,) int64 of flow time t in [0, 1]: min(floor(1000 t), 999)."""
    return (t_B.double() * TRAIN_TIMESTEPS).long().clamp(max=TRAIN_TIMESTEPS - 1)
