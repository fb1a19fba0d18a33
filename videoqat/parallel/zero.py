"""What DeepSpeed needs before it can share our process groups, and its all-to-all in place of ours.

DeepSpeed keeps its state in the process: an accelerator chosen when it is imported, a communication object, groups that it makes once. Here all of
that follows the mesh. Nothing of it is imported unless `parallel.engine=deepspeed` asks for it.
"""

import importlib
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from videoqat.errors import ConfigError

if TYPE_CHECKING:
    from videoqat.parallel.mesh import Mesh


def load(device: torch.device) -> None:
    """Imports DeepSpeed for `device`, before a process group exists: imported after, processes now and then abort at exit (its libraries race with
    gloo's threads).

    Raises:
        ConfigError: it isn't there, or was imported for another kind of device.
    """
    # What DeepSpeed computes on is decided at its import, and this is the only way to tell it.
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ.setdefault("LOCAL_RANK", "0")  # torchrun's; DeepSpeed insists on it for one process, too
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(f"parallel.engine=deepspeed needs the package deepspeed (pip install 'videoqat[deepspeed]'): {error}") from error
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise ConfigError(f"parallel.engine=deepspeed: DeepSpeed was imported for {found} in this process, and can't run on {device.type} as well")
    deepspeed.utils.logger.setLevel(logging.ERROR)


def connect(mesh: "Mesh") -> None:
    """Has DeepSpeed talk through the mesh's groups, whose timeouts are ours, instead of making its own."""
    import deepspeed

    # Its operator for shared memory between CPU processes would be compiled now, for most of a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed()  # finds torch's process group, and starts none
    deepspeed.utils.groups._WORLD_GROUP = mesh.fsdp_mesh.get_group()
    # It calls torch's collectives by names that torch is giving up.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def all_to_all(x: Tensor, group: str) -> Tensor:
    """`videoqat.parallel.exchange.all_to_all` by DeepSpeed's Ulysses: x (P, ...), x[i] goes to rank i; differentiable.

    Its exchange takes (tokens, batch, heads, head_dim), divides the heads and joins the tokens. For one token of P heads, that is ours.
    """
    from deepspeed.sequence.layer import _SeqAllToAll

    heads, tokens, batch = 2, 0, 1
    ranks = _resolve_process_group(group)  # type: ignore[arg-type]
    out: Tensor = _SeqAllToAll.apply(ranks, x.reshape(1, 1, x.shape[0], -1), heads, tokens, batch)
    return out.reshape(x.shape)
