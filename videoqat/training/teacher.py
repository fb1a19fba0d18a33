"""The teacher of `objective.distill_weight`: the model that training starts from, with plain attention.

Nothing of it is trained, so it has neither gradients nor moments, and no checkpoint holds it: whoever resumes reads it from the same folder again.
"""

from pathlib import Path

import torch
from torch import nn

from videoqat.models.install import install, shard_sequence
from videoqat.models.weights import weight_files
from videoqat.parallel.checkpointing import compile_blocks
from videoqat.parallel.mesh import Mesh
from videoqat.parallel.sharding import kept_in_fp32, materialise_from, shard
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import RECIPES
from videoqat.training.job import Job


def load_teacher(job: Job, mesh: Mesh) -> nn.Module:
    """The folder's own transformer under recipe bf16, frozen, in eval mode; sharded by FSDP2 as in training, whatever the engine. Collective.

    Its weights lie in the compute dtype, but for those that diffusers keeps in fp32: before the first step it computes, bit for bit, what the model
    in training computes under recipe bf16.

    Args:
        job: not from scratch; the engine has checked the folder's weights.
        mesh: of the training.
    """
    config = job.config
    folder, component, dtype = Path(config.model.path), config.model.component, getattr(torch, config.train.compute_dtype)
    teacher = job.family.build(folder, component).requires_grad_(False)
    install(teacher, RECIPES["bf16"], family=job.family, component=component)
    if mesh.sp_group is not None:
        shard_sequence(teacher, Ulysses(mesh.sp_group, "bf16"), family=job.family)
    blocks = job.family.blocks(teacher)
    if config.train.compile:
        compile_blocks(blocks)
    computed_in_fp32 = kept_in_fp32(teacher) | set(teacher.parameters(recurse=False))  # the group of the root, see `sharding`
    for parameter in teacher.parameters():
        if parameter not in computed_in_fp32:
            parameter.data = parameter.data.to(dtype)
    shard(teacher, blocks, mesh, dtype)
    materialise_from(weight_files(folder / component), teacher, mesh)
    return teacher
