"""AdamW, its schedule, clipping and the moving average of the weights.

Weights, gradients, moments and average are fp32 and sharded alike; all that is done to them is done to each rank's own shards. The learning rate is a
pure function of the step, so no scheduler has a state that could be saved or restored wrongly.
"""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from videoqat.config import OptimizerConfig


def make_optimizer(cfg: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over `parameters`, one group, the fused implementation (one pass over memory, on CPU and GPU)."""
    return torch.optim.AdamW(parameters, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True)


def learning_rate(cfg: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of `step`, counted from 1, in a run of `steps`.

    Warm-up is linear and reaches `lr` at step `warmup_steps`. From there `cosine` and `linear` fall to `final_lr_ratio * lr`, reached at the
    last step; `constant` stays.
    """
    if step <= cfg.warmup_steps:
        return cfg.lr * step / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    done = (step - cfg.warmup_steps) / max(1, steps - cfg.warmup_steps)
    left = 0.5 * (1 + math.cos(math.pi * done)) if cfg.schedule == "cosine" else 1 - done
    return cfg.lr * (cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * left)


def _locals(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """This rank's part of each sharded tensor; None is left out."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors if x is not None]


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The L2 norm over all gradients together, whatever they are sharded over; the same on all ranks; clips nothing."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squared = torch.nn.utils.get_total_norm(_locals(gradients)).square()
    for gradient in gradients[:1]:
        if isinstance(gradient, DTensor):
            # Replicas hold the same: the last axis of the mesh is the one that gradients are sharded over.
            dist.all_reduce(squared, group=gradient.device_mesh.get_group(gradient.device_mesh.ndim - 1))
    return squared.sqrt().item()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float, norm: float) -> None:
    """Scales the gradients, whose norm is `norm`, to `clip_norm` if that is smaller. The factor is torch's own, clip_norm / (norm + 1e-6)."""
    gradients = _locals(parameter.grad for parameter in parameters)
    factor = clip_norm / (norm + 1e-6)
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)


class Ema:
    """Exponential moving average of parameters: average = d * average + (1 - d) * parameter, after each optimiser step.

    In step s, counted from 1, d = min(decay, s / (s + 9)), so that a run shorter than some 1 / (1 - decay) steps isn't dragged back to where it
    began: with 0.999 throughout, 1,880 steps from random weights would leave 15 % of these in the average.

    `tensors` maps parameter names to tensors like them (fp32 and sharded, as the master weights are); it starts at the initial weights. The
    average of a frozen parameter is that parameter itself.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.tensors = {name: p.detach().clone() if p.requires_grad else p.detach() for name, p in parameters.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self, parameters: Mapping[str, Tensor], step: int) -> None:
        """Takes in the parameters' values after `step`."""
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        decay = min(self._decay, step / (step + 9))
        torch._foreach_lerp_(_locals(self.tensors[name] for name in trained), _locals(parameters[name] for name in trained), 1 - decay)
