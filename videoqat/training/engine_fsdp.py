"""Training by FSDP2: sharded fp32 master weights, AdamW on each rank's own shards, and their moving average."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from videoqat.models.weights import check_weights, weight_files
from videoqat.parallel.mesh import Mesh
from videoqat.parallel.sharding import materialise_by, materialise_from, shard
from videoqat.training import state
from videoqat.training.engines import prepare
from videoqat.training.job import Job
from videoqat.training.optim import Ema, clip_gradients, gradient_norm, make_optimizer


class FsdpEngine:
    """`videoqat.training.engines.Engine` by FSDP2; the methods are documented there."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        config = job.config
        dtype = torch.bfloat16 if config.train.compute_dtype == "bfloat16" else torch.float32
        folder, component = Path(config.model.path), config.model.component
        self.mesh = mesh
        self.transformer, blocks, self.layers = prepare(job, mesh)
        if not config.from_scratch:
            shapes = {key: value.shape for key, value in self.transformer.state_dict().items()}
            check_weights(folder / component, shapes, tuple(getattr(self.transformer, "_keys_to_ignore_on_load_unexpected", None) or ()))
        shard(self.transformer, blocks, mesh, dtype)
        if config.from_scratch:

            def build() -> torch.nn.Module:
                return job.family.load_transformer(folder, component, dtype=torch.float32, from_scratch=True, seed=config.train.seed)

            materialise_by(build, self.transformer, mesh)
        else:
            materialise_from(weight_files(folder / component), self.transformer, mesh)
        # The sharded ones: between a forward and its backward the modules hold gathered weights instead.
        self.parameters = dict(self.transformer.named_parameters())
        self.optimizer = make_optimizer(config.optimizer, [p for p in self.parameters.values() if p.requires_grad])
        self.clip_norm = config.optimizer.clip_norm
        self.ema = Ema(self.parameters, config.optimizer.ema_decay) if config.optimizer.ema_decay else None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Every micro-batch's gradient is summed over the shards at once, so that it lies sharded; over the replicas only in the last."""
        assert isinstance(self.transformer, FSDPModule)
        self.transformer.set_is_last_backward(last)
        self.transformer.set_requires_all_reduce(last)
        loss.backward()

    def gradient_norm(self) -> float:
        return gradient_norm(self.parameters.values())

    def update(self, lr: float, norm: float, step: int) -> None:
        if not math.isfinite(norm):
            raise ValueError(f"a gradient of norm {norm} is nothing to update by")
        clip_gradients(self.parameters.values(), self.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(self.parameters, step)

    def tensors(self) -> dict[str, Any]:
        moments = {name: dict(self.optimizer.state[p]) for name, p in self.parameters.items() if self.optimizer.state.get(p)}
        return {"model": self.transformer.state_dict(), "optimizer": moments} | ({"ema": self.ema.tensors} if self.ema else {})

    def restore(self, checkpoint: Path) -> None:
        stored = state.tensor_keys(checkpoint)
        for name, parameter in self.parameters.items():
            # A parameter that never got a gradient (a branch that the objective doesn't use) has no moments.
            if f"optimizer.{name}.exp_avg" in stored:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        state.load(checkpoint, self.tensors())
