"""AdamW, its schedule, clipping and the moving average of the weights.

Weights, gradients, moments and average are fp32 (the master weights *are* the parameters; autocast makes the bf16 copies). The learning rate is a
pure function of the step, so no scheduler has a state that could be saved or restored wrongly.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

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


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The L2 norm over all gradients together, a scalar tensor; clips nothing."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class Ema:
    """Exponential moving average of a model's parameters: average = decay * average + (1 - decay) * parameter, after each optimiser step.

    `tensors` maps parameter names to tensors like them (fp32, as the master weights are); it starts at the initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._update = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Takes the model's present weights in."""
        self._update(list(self.tensors.values()), [p.detach() for p in model.parameters()], None)
