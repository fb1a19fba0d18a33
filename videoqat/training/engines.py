"""What the training loop asks of the library that holds weights, gradients and moments; and what all such engines prepare alike."""

import difflib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from videoqat.errors import ConfigError
from videoqat.models.install import install, shard_sequence
from videoqat.models.spec import AttentionLayer
from videoqat.parallel.checkpointing import checkpoint_blocks, compile_blocks
from videoqat.parallel.exchange import all_to_all
from videoqat.parallel.mesh import Mesh
from videoqat.parallel.ulysses import Ulysses
from videoqat.training.job import Job


class Engine(Protocol):
    """A transformer in training, spread over a mesh. All ranks call every method together.

    Attributes:
        transformer: called through `ModelFamily.forward`.
        layers: its quantised attention layers.
    """

    transformer: nn.Module
    layers: list[AttentionLayer]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of `loss`, averaged over all ranks. `last`: of this step's micro-batches; only then are gradients complete."""
        ...

    def gradient_norm(self) -> float:
        """The L2 norm of the whole gradient, before clipping, the same on all ranks."""
        ...

    def update(self, lr: float, norm: float, step: int) -> None:
        """Clips the gradient, whose norm is `norm`, takes AdamW's step number `step`, moves the average of the weights, and forgets the gradient.

        Raises:
            ValueError: `norm` is NaN or inf; the weights stay as they are.
        """
        ...

    def tensors(self) -> dict[str, Any]:
        """All that a checkpoint holds, nested, by name, for torch.distributed.checkpoint; the tensors themselves, not copies.

        `model`: parameters and persistent buffers. `optimizer`: exp_avg, exp_avg_sq and step of each parameter that ever had a gradient.
        `ema`, where there is one: the average of each parameter.
        """
        ...

    def restore(self, checkpoint: Path) -> None:
        """Takes all of that from a checkpoint of any layout.

        Raises:
            CheckpointError: something is missing, unreadable or of another shape.
        """
        ...


def make_engine(job: Job, mesh: Mesh) -> Engine:
    """The engine that `parallel.engine` names, with the model loaded and everything else at its start.

    Raises:
        ConfigError: the model can't be trained as configured.
        CheckpointError: the model's weights are torn, or of another model.
    """
    if job.config.parallel.engine == "deepspeed":
        from videoqat.training.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(job, mesh)
    from videoqat.training.engine_fsdp import FsdpEngine

    return FsdpEngine(job, mesh)


def prepare(
    job: Job,
    mesh: Mesh,
    exchange: Callable[[Tensor, str], Tensor] = all_to_all,
    adapt: Callable[[nn.Module], None] = lambda transformer: None,
) -> tuple[nn.Module, list[nn.Module], list[AttentionLayer]]:
    """The transformer without numbers (parameters on the meta device), but with all else that training does to it except sharding.

    Args:
        job, mesh: as for `make_engine`.
        exchange: for sequence parallelism.
        adapt: is given the transformer before checkpointing, which must compute again what `adapt` puts around the modules' forwards.

    Returns:
        The transformer, in training mode; its blocks; its quantised attention layers.
    """
    config, loop = job.config, job.config.train
    transformer = job.family.build(config.model.path, config.model.component).train()
    set_trainable(transformer, loop.trainable)
    layers = install(transformer, job.recipe, kernel=config.runtime.kernel, family=job.family, component=config.model.component)
    if mesh.sp_group is not None:
        shard_sequence(transformer, Ulysses(mesh.sp_group, config.parallel.ulysses_wire, exchange), family=job.family)
    adapt(transformer)
    blocks = job.family.blocks(transformer)
    checkpoint_blocks(blocks, loop.activation_checkpointing, offload=loop.offload_block_inputs)
    if loop.compile:
        compile_blocks(blocks)
    return transformer, blocks, layers


def set_trainable(transformer: nn.Module, patterns: list[str]) -> None:
    """Freezes every parameter whose name no pattern (fnmatch) matches.

    Raises:
        ConfigError: a pattern matches no parameter; near names are given.
    """
    names = [name for name, _ in transformer.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, 3, 0.0)
            raise ConfigError(f"train.trainable={pattern!r} matches no parameter of this model; near: {', '.join(near)}")
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
