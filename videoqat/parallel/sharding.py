"""HSDP by FSDP2: which parameters travel together, in which precision, and how they get their numbers.

Master weights, reductions and moments are fp32. Before a block runs, its weights are gathered in the compute dtype; after it they are freed.
There is a group of parameters (one all-gather, one reduce-scatter) for

* each block,
* each module outside the blocks (patch embedding, text embedding, output projection),
* everything that diffusers keeps in fp32 (`_keep_in_fp32_modules`: Wan's time embedder, norms and modulation tables, wherever they sit), together.
  It belongs to the root and stays gathered from forward to backward. Had a norm inside a block a group of its own, its hooks would run inside
  the block: a collective for a few kilobytes in every block, gathered out of turn when activation checkpointing computes the block again, and a
  hole in the block's compiled graph.

Inputs are never cast: times and rotary angles are fp32 on purpose. What must be in the compute dtype is made so by `ModelFamily.forward`.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from videoqat.parallel.mesh import Mesh


def compute_dtype(transformer: nn.Module) -> torch.dtype:
    """What the transformer's arithmetic runs in: as `shard` was told, or else the dtype of its weights."""
    chosen: torch.dtype | None = getattr(transformer, "_videoqat_compute_dtype", None)
    return transformer.dtype if chosen is None else chosen  # type: ignore[return-value]


def kept_in_fp32(transformer: nn.Module) -> set[nn.Parameter]:
    """The parameters that diffusers keeps in fp32 whatever the model's dtype: those with a part of their name in `_keep_in_fp32_modules`."""
    names = set(getattr(transformer, "_keep_in_fp32_modules", None) or ())
    return {parameter for name, parameter in transformer.named_parameters() if names.intersection(name.split("."))}


def _outer_modules(module: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules that hold parameters and no block, in order."""
    for child in module.children():
        if child in blocks:
            continue
        if blocks.intersection(child.modules()):
            yield from _outer_modules(child, blocks)
        elif any(True for _ in child.parameters()):
            yield child


def shard(transformer: nn.Module, blocks: list[nn.Module], mesh: Mesh, dtype: torch.dtype) -> None:
    """Shards the parameters over `mesh.fsdp_mesh`, in place; names stay as they are. Parameters may be on the meta device.

    Whether a parameter is trained (`requires_grad`) and what hooks and forwards the blocks have is decided before.

    Args:
        transformer: its parameters are the fp32 master weights; or all of them are frozen, and may lie in `dtype`.
        blocks: its transformer blocks, in order of execution.
        mesh: a mesh of one process goes the same road.
        dtype: of forward and backward; gradients are summed in fp32 either way.
    """
    fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_root = kept_in_fp32(transformer) | set(transformer.parameters(recurse=False))
    # The root comes first, while FSDP still looks into the blocks for parameters; what it takes are sharded tensors afterwards.
    fully_shard(transformer, mesh=mesh.fsdp_mesh, mp_policy=fp32, ignored_params=set(transformer.parameters()) - in_root)
    shared = mesh.layout.dp_shard * mesh.layout.sp > 1
    # Freeing weights that nobody else has would only mean casting them once more, for the backward; a frozen model has none.
    free = shared or not any(parameter.requires_grad for parameter in transformer.parameters())
    for module in (*_outer_modules(transformer, set(blocks)), *blocks):
        taken: set[nn.Parameter] = {parameter for parameter in module.parameters() if isinstance(parameter, DTensor)}
        if taken != set(module.parameters()):
            fully_shard(module, mesh=mesh.fsdp_mesh, mp_policy=policy, reshard_after_forward=free, ignored_params=taken)
    if shared:
        # The backward prefetches by itself. In the forward only a host that runs ahead of the device would; this asks for it.
        for block, following in itertools.pairwise(blocks):
            assert isinstance(block, FSDPModule)
            assert isinstance(following, FSDPModule)
            block.set_modules_to_forward_prefetch([following])
    transformer._videoqat_compute_dtype = dtype  # type: ignore[assignment]
    # Linear layers return views. What FSDP warns of, that somebody changes them in place, diffusers' transformers don't do.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)


def _rows(parameter: DTensor, mesh: Mesh) -> slice:
    """Which rows of a sharded parameter this rank holds. FSDP deals them out as `torch.chunk` does; the last ranks may get fewer, or none."""
    group = mesh.fsdp_mesh["dp_shard_sp"]
    height = -(-parameter.shape[0] // group.size())
    start = min(parameter.shape[0], group.get_local_rank() * height)
    return slice(start, start + parameter.to_local().shape[0])


def _fill(transformer: nn.Module, mesh: Mesh, rows_of: Callable[[str, DTensor, slice], Tensor]) -> None:
    """Gives each parameter on the meta device its rows, on the mesh's device in the dtype that it has."""
    filled = {}
    for name, parameter in transformer.named_parameters():
        assert isinstance(parameter, DTensor), name
        local = rows_of(name, parameter, _rows(parameter, mesh)).to(mesh.device, parameter.dtype).contiguous()
        whole = DTensor.from_local(local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride())
        filled[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    transformer.load_state_dict(filled, strict=False, assign=True)


def materialise_from(weights: list[Path], transformer: nn.Module, mesh: Mesh) -> None:
    """Reads a sharded transformer's weights. Of each parameter a rank reads its own rows; of a persistent buffer, all.

    Args:
        weights: safetensors files with every weight, checked by `models.weights.check_weights`.
        transformer: from `shard`, its parameters on the meta device and its buffers not.
        mesh: the one it was sharded over.
    """
    from safetensors import safe_open

    handles = [safe_open(path, framework="pt") for path in weights]
    files = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 - safe_open is no mapping

    def read(name: str, parameter: DTensor, rows: slice) -> Tensor:
        if rows.start == rows.stop:
            return torch.empty(0, *parameter.shape[1:])
        part: Tensor = files[name].get_slice(name)[rows.start : rows.stop]
        return part.clone()  # not the file's memory: training writes to it, and its storage can't be copied once the file is closed

    _fill(transformer, mesh, read)
    buffers = {name: buffer for name, buffer in transformer.named_buffers() if name in files}
    for name, buffer in buffers.items():
        buffer.copy_(files[name].get_tensor(name))


def materialise_by(build: Callable[[], nn.Module], transformer: nn.Module, mesh: Mesh) -> None:
    """Gives a sharded transformer the weights of the model that `build()` makes, on rank 0 alone: the same numbers in every layout.

    Args:
        build: makes the same transformer, whole, on the CPU.
        transformer: from `shard`, its parameters on the meta device.
        mesh: the one it was sharded over.
    """
    source = dict(build().named_parameters()) if mesh.rank == 0 else {}

    def receive(name: str, parameter: DTensor, rows: slice) -> Tensor:
        if mesh.rank == 0:
            whole = source.pop(name).detach().to(mesh.device, torch.float32)
        else:
            whole = torch.empty(parameter.shape, device=mesh.device)
        dist.broadcast(whole, src=0)
        return whole[rows].clone()

    _fill(transformer, mesh, receive)
