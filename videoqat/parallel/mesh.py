"""How processes divide the work: the layout, checked before anything is loaded, and the process groups that carry it.

    world size = dp_replicate * dp_shard * sp

`sp` is innermost, so that the ranks that share one sequence (Ulysses) are neighbours on one host. Weights, gradients and moments are sharded over
the dp_shard * sp ranks of a replica and copied dp_replicate times (HSDP). A data-parallel position (`dp_rank`, of dp = dp_replicate * dp_shard)
has samples of its own; the sp ranks of one position hold the same samples and divide their tokens.

One process outside torchrun gets a group of one over a store in memory: one code path, whatever the number of processes.
"""

import gc
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout

from videoqat.config import ParallelConfig
from videoqat.errors import ConfigError, UserError, WorkerLost
from videoqat.parallel import zero
from videoqat.parallel.watch import Watch

T = TypeVar("T")

# parallel.start_timeout_s of commands that only share out work: a process with the longer share may come hours after the others. One that ends is
# noticed at once all the same.
LONGEST_WAIT_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Layout:
    """A resolved layout: world size = dp_replicate * dp_shard * sp, all at least 1."""

    dp_replicate: int
    dp_shard: int
    sp: int

    @property
    def dp(self) -> int:
        """Data-parallel positions, each with samples of its own."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.sp

    def __str__(self) -> str:
        return f"{self.world_size} = dp_replicate {self.dp_replicate} * dp_shard {self.dp_shard} * sp {self.sp}"


def divisors(number: int) -> list[int]:
    """All divisors of `number` >= 1, ascending."""
    return [i for i in range(1, number + 1) if number % i == 0]


def resolve_layout(config: ParallelConfig, world_size: int, num_heads: int | None = None) -> Layout:
    """The layout of `world_size` processes: dp_shard=-1 takes what dp_replicate and sp leave.

    Args:
        config: the three degrees and the engine.
        world_size: number of processes.
        num_heads: of the model; Ulysses gives each of the sp ranks num_heads / sp of them. None: not checked.

    Raises:
        ConfigError: the equation doesn't hold, or sp doesn't divide the heads; says the whole equation and what is legal.
    """
    replicate, shard, sp = config.dp_replicate, config.dp_shard, config.sp
    if config.engine == "deepspeed" and replicate != 1:
        raise ConfigError(f"parallel.dp_replicate={replicate} is not legal; legal: 1 with parallel.engine=deepspeed (ZeRO shards over all ranks)")
    if num_heads is not None and num_heads % sp:
        degrees = ", ".join(map(str, divisors(math.gcd(num_heads, world_size))))
        raise ConfigError(f"parallel.sp={sp} does not divide the model's {num_heads} heads; legal for {world_size} processes: {degrees}")
    rest, over = divmod(world_size, replicate * sp)
    if over or shard not in (-1, rest):
        given = f"dp_replicate {replicate} * dp_shard {'(what is left)' if shard == -1 else shard} * sp {sp}"
        parts = f"dp_replicate * sp one of {', '.join(map(str, divisors(world_size)))}, and dp_shard=-1"
        legal = parts if over else f"parallel.dp_shard={rest} or -1 with this dp_replicate and sp, or {parts}"
        raise ConfigError(f"parallel: world size {world_size} = dp_replicate * dp_shard * sp does not hold for {given}; legal: {legal}")
    return Layout(replicate, rest, sp)


def world_size_from_launcher() -> int:
    """How many processes torchrun started; 1 outside it.

    Raises:
        ConfigError: a launcher named several processes but no LOCAL_RANK: each would train on its own, unaware of the others.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 1
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size > 1 and "LOCAL_RANK" not in os.environ:
        raise ConfigError(f"WORLD_SIZE={world_size} is set, but not LOCAL_RANK; start the processes with torchrun (launch/README.md)")
    return world_size


@dataclass
class Mesh:
    """This process's place among all, and the groups it talks through. Every method is collective: all ranks call it.

    Attributes:
        layout: as resolved.
        device: of this rank.
        rank, world_size: among all processes.
        dp_rank: data-parallel position, 0 to layout.dp - 1: which samples.
        sp_rank: 0 to layout.sp - 1: which part of their tokens.
        device_mesh: (dp_replicate, dp_shard, sp), by these names.
        fsdp_mesh: what weights are sharded over: (dp_replicate, dp_shard_sp), or (dp_shard_sp,) alone where there is one replica.
        sp_group: the ranks that share this rank's samples; None where sp is 1.
        cpu_group: all ranks, over gloo, free for work in the background (checkpoints): the methods here use a group of their own, since
            collectives of two threads in one group would meet in different orders.
    """

    layout: Layout
    device: torch.device
    rank: int
    world_size: int
    dp_rank: int
    sp_rank: int
    device_mesh: DeviceMesh
    fsdp_mesh: DeviceMesh
    sp_group: dist.ProcessGroup | None
    cpu_group: dist.ProcessGroup
    control_group: dist.ProcessGroup
    step_timeout_s: int

    def sum_over_dp(self, tensor: Tensor) -> Tensor:
        """The sum over data-parallel positions, on every rank; each sp group counts once. Not differentiable."""
        total = tensor.detach().clone()
        for axis in ("dp_replicate", "dp_shard"):
            dist.all_reduce(total, group=self.device_mesh.get_group(axis))
        return total

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on some rank."""
        held = torch.tensor(int(flag))
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.control_group)
        return bool(held.item())

    def gather_objects(self, thing: Any) -> list[Any]:
        """Each rank's `thing` (picklable), by rank, on every rank."""
        things: list[Any] = [None] * self.world_size
        dist.all_gather_object(things, thing, group=self.control_group)
        return things

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, or the `UserError` that it meets there, on every rank."""
        result, problem = None, None
        if self.rank == 0:
            try:
                result = work()
            except UserError as error:
                problem = error
        result, problem = self.gather_objects((result, problem))[0]
        if problem is not None:
            raise problem
        return cast(T, result)

    def barrier(self) -> None:
        """Returns when all ranks are here."""
        dist.barrier(group=self.control_group)

    def agree(self, what: dict[str, Any]) -> None:
        """Requires `what` to be equal on all ranks.

        Raises:
            UserError: on every rank; names the first rank that differs from rank 0, the key and both values.
        """
        first, *others = self.gather_objects(what)
        for rank, theirs in enumerate(others, start=1):
            for key in [*first, *(key for key in theirs if key not in first)]:
                here, there = first.get(key, "nothing"), theirs.get(key, "nothing")
                if here != there:
                    raise UserError(f"ranks differ in {key}: {there!r} on rank {rank}, {here!r} on rank 0; all must be started alike")

    def steady(self) -> None:
        """From now on a collective waits parallel.step_timeout_s; until now parallel.start_timeout_s, since loading and first steps are slow.

        `cpu_group` keeps the longer one: in the background, ranks wait for each other's disks there.
        """
        self._set_timeout(self.step_timeout_s)

    def _set_timeout(self, seconds: int) -> None:
        groups = [dist.group.WORLD, self.control_group, *self.device_mesh.get_all_groups(), *self.fsdp_mesh.get_all_groups()]
        for group in groups:
            # There is no public call for it. This one serves gloo and NCCL, for collectives begun from now on; groups made without a timeout
            # of their own would else wait as long as their back end's default says.
            _set_pg_timeout(timedelta(seconds=seconds), group)


def _start_group(config: ParallelConfig, device: torch.device, world_size: int) -> None:
    if config.engine == "deepspeed":
        zero.load(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.start_timeout_s)
    if world_size > 1:
        dist.init_process_group(backend, timeout=timeout)  # rank and meeting point from torchrun's variables
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)


def local_device(device: torch.device) -> torch.device:
    """`cuda` without a number is, under torchrun, the GPU of this process's LOCAL_RANK.

    Raises:
        ConfigError: several processes of this host would share a GPU.
    """
    if device.type != "cuda":
        return device
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index is not None:
        if local_world > 1:
            raise ConfigError(f"runtime.device={device} is not legal for {local_world} processes on this host; legal: auto, cuda (a GPU each), cpu")
        return device
    if local_world > torch.cuda.device_count():
        raise ConfigError(f"{local_world} processes on this host, but {torch.cuda.device_count()} GPUs; legal: a process for each GPU")
    return torch.device("cuda", local_rank)


def shared_device(device: torch.device) -> torch.device:
    """As `local_device`, but processes of one host may outnumber its GPUs and then share them. They can't talk through NCCL then, only by gloo."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def open_mesh(config: ParallelConfig, device: torch.device, *, num_heads: int | None = None) -> Iterator[Mesh]:
    """The mesh of all processes that the launcher started, for as long as the block runs.

    Args:
        config: the layout, the engine and the timeouts.
        device: `cuda` becomes this process's GPU (LOCAL_RANK) and the current one.
        num_heads: of the model that will run (`resolve_layout`).

    Raises:
        ConfigError: an illegal layout, or deepspeed asked for and not there.
        WorkerLost: not all processes came within parallel.start_timeout_s.
        RuntimeError: a process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already; open_mesh starts its own, one at a time")
    layout = resolve_layout(config, world_size_from_launcher(), num_heads)
    device = local_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with collective_errors("meeting the other processes"):
        _start_group(config, device, layout.world_size)
    clean, watch = False, None
    try:
        with collective_errors("meeting the other processes"):
            mesh = _build(config, layout, device)
            mesh._set_timeout(config.start_timeout_s)
            watch = Watch(dist.new_group(backend="gloo"), mesh.rank, mesh.world_size)
        watch.start()
        yield mesh
        watch.close(clean=True)
        clean = True
    finally:
        gc.collect()  # models that still hold meshes must not outlive the groups
        if clean:
            dist.destroy_process_group()
        else:
            if watch is not None:
                watch.close(clean=False)
            _abort_process_group()  # after an error a peer may be gone or stuck elsewhere: waiting for it would hang


def _build(config: ParallelConfig, layout: Layout, device: torch.device) -> Mesh:
    device_mesh = init_device_mesh(device.type, (layout.dp_replicate, layout.dp_shard, layout.sp), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
    sharded = layout.dp_shard * layout.sp
    if layout.dp_replicate == 1:
        fsdp_mesh = init_device_mesh(device.type, (sharded,), mesh_dim_names=("dp_shard_sp",))
    else:
        fsdp_mesh = init_device_mesh(device.type, (layout.dp_replicate, sharded), mesh_dim_names=("dp_replicate", "dp_shard_sp"))
    rank = dist.get_rank()
    return Mesh(
        layout=layout,
        device=device,
        rank=rank,
        world_size=layout.world_size,
        dp_rank=rank // layout.sp,
        sp_rank=rank % layout.sp,
        device_mesh=device_mesh,
        fsdp_mesh=fsdp_mesh,
        sp_group=device_mesh.get_group("sp") if layout.sp > 1 else None,
        cpu_group=dist.new_group(backend="gloo", timeout=timedelta(seconds=config.start_timeout_s)),
        control_group=dist.new_group(backend="gloo"),
        step_timeout_s=config.step_timeout_s,
    )


@contextmanager
def collective_errors(what: str) -> Iterator[None]:
    """Failed communication in the block becomes `WorkerLost`, which says `what` was going on (such as `step 12`) and what to do.

    gloo notices at once when a peer's process ends. NCCL waits for the timeout; then its watchdog ends this process and says so itself, unless
    the error reaches this thread first.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and "gloo" not in text:
            raise
        reason = re.sub(r"^\[\S+:\d+\] ", "", text).partition(". ")[0].partition("\n")[0]  # without gloo's source line and its advice
        raise WorkerLost(
            f"{what}: another process ended or stopped answering ({reason[:300]}). The first error among the ranks says why; "
            "the same command, started again, continues from the last checkpoint"
        ) from error
