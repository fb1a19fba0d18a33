"""One video on several GPUs: its tokens divided (Ulysses, `parallel.sp`), and the forwards with and without the prompt (`parallel.cfg=2`).

    world size = videos at a time * cfg * sp        sp innermost: neighbours on one host

Text, the VAE and the sampler run on all ranks of a video alike; only the transformer's work is divided. So all of them hold the same frames at the
end, and the first of them writes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from videoqat.config import ParallelConfig, SamplingConfig, VideoParallelConfig, require
from videoqat.errors import ConfigError
from videoqat.models.install import check_sharded
from videoqat.models.spec import ModelFamily, family_of
from videoqat.parallel.guidance import Guidance
from videoqat.parallel.mesh import LONGEST_WAIT_S, Mesh, divisors, open_mesh
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import AttentionRecipe


def is_guided(family: ModelFamily, sampling: SamplingConfig) -> bool:
    """Whether the pipeline predicts without the prompt, too."""
    return (sampling.true_cfg_scale if family.has_true_cfg else sampling.guidance_scale) > 1


def check_division(config: VideoParallelConfig, folder: str | Path, world_size: int, *, many: bool) -> None:
    """Requires that `world_size` processes can divide videos of the model in `folder` so. `many`: several videos at a time, too.

    Raises:
        ConfigError: they can't; says what is legal.
    """
    family = family_of(folder)
    for component in family.components(folder):
        heads = family.geometry(folder, component).num_heads
        require(heads % config.sp == 0, "parallel.sp", config.sp, f"a divisor of the {heads} heads: {', '.join(map(str, divisors(heads)))}")
    need = config.sp * config.cfg
    if world_size % need or (world_size != need and not many):
        often = "times the number of videos at a time" if many else "for one video"
        legal = f"{need} processes {often}: torchrun --nproc-per-node {need}{'; or prompts=FILE, whose videos processes share out' * (not many)}"
        raise ConfigError(f"parallel.sp={config.sp} * parallel.cfg={config.cfg} is not legal for {world_size} processes; legal: {legal}")


def check_guided(config: VideoParallelConfig, folder: str | Path, sampling: SamplingConfig) -> None:
    """Requires that there are two forwards to divide where `parallel.cfg` is 2.

    Raises:
        ConfigError: there is one.
    """
    family = family_of(folder)
    key = "true_cfg_scale" if family.has_true_cfg else "guidance_scale"
    legal = f"1 with sampling.{key}={getattr(sampling, key):g}: without guidance there is one forward in a step; or a {key} above 1"
    require(config.cfg == 1 or is_guided(family, sampling), "parallel.cfg", config.cfg, legal)


@dataclass(frozen=True)
class Division:
    """The ranks that make one video together, as one of them sees it.

    Attributes:
        index, count: which of how many such groups this one is.
        rank, size: this process among them.
        ulysses: who divides the tokens; None: nobody.
        guidance: who divides the forwards with and without the prompt; None: nobody.
        group: all `size` ranks, over gloo; None where there is one.
    """

    index: int = 0
    count: int = 1
    rank: int = 0
    size: int = 1
    ulysses: Ulysses | None = None
    guidance: Guidance | None = None
    group: dist.ProcessGroup | None = None

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on some rank. Collective."""
        if self.group is None:
            return flag
        held = torch.tensor(int(flag))
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        return bool(held.item())

    def dividing_guidance(self, transformers: dict[str, torch.nn.Module]) -> contextlib.AbstractContextManager[None]:
        """While open, the forwards of a step are divided, if they are to be."""
        return contextlib.nullcontext() if self.guidance is None else self.guidance.dividing(transformers.values())

    def end_step(self) -> None:
        """Told after each denoising step; see `Guidance.end_step`."""
        if self.guidance is not None:
            self.guidance.end_step()

    def describe(self, recipe: AttentionRecipe) -> dict[str, Any]:
        """What a video's record says of it."""
        shared = {"sp": 1, "cfg": 1 if self.guidance is None else 2}
        return shared if self.ulysses is None else shared | {"sp": self.ulysses.degree, "wire": self.ulysses.describe(recipe)["wire"]}


@contextlib.contextmanager
def open_division(
    config: VideoParallelConfig, folder: str | Path, recipes: Sequence[AttentionRecipe], device: torch.device, world_size: int
) -> Iterator[tuple[Mesh, Division]]:
    """All processes and, among them, those that make the same video as this one, for as long as the block runs. Collective.

    Raises:
        UserError: one of `recipes` can't run on a divided sequence of the model in `folder`.
        WorkerLost: not all processes came.
    """
    size = config.sp * config.cfg
    # Generation shards no weights: what is the axis of shards in training is here that of guidance.
    layout = ParallelConfig(dp_replicate=world_size // size, dp_shard=config.cfg, sp=config.sp, start_timeout_s=LONGEST_WAIT_S)
    with open_mesh(layout, device) as mesh:
        index, rank = divmod(mesh.rank, size)
        ulysses = None if mesh.sp_group is None else Ulysses(mesh.sp_group, config.ulysses_wire)
        if ulysses is not None and recipes:
            family = family_of(folder)
            for component in family.components(folder):
                layers = family.attention_layers(family.build(folder, component))
                for recipe in recipes:
                    check_sharded(recipe, layers, ulysses, component)
        guidance = Guidance(mesh.device_mesh.get_group("dp_shard")) if config.cfg > 1 else None
        group = None
        for first in range(0, mesh.world_size if size > 1 else 0, size):  # all ranks make all groups
            made = dist.new_group(list(range(first, first + size)), backend="gloo", timeout=timedelta(seconds=LONGEST_WAIT_S))
            group = made if first == index * size else group
        yield mesh, Division(index, mesh.world_size // size, rank, size, ulysses, guidance, group)
