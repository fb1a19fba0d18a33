"""Training by DeepSpeed's ZeRO: the same model, arithmetic and checkpoints as with FSDP2, with sharding, reduction and step by DeepSpeed.

ZeRO shards flat: the trained parameters are laid out one behind the other (in stage 3 each by itself), and every rank holds a range of numbers.
Master weights, gradients, moments and the average of the weights lie alike in it (`_Part`). Checkpoints hold whole parameters in rows, so each one is
put together, and cut again, when a checkpoint is written or read; one at a time.

ZeRO's own mixed precision rounds every weight to bf16, also those that diffusers keeps in fp32, and sums gradients of stage 1 in another optimiser.
So ZeRO is told of fp32 only, and each module casts its weights when it runs: gradients are those of FSDP2's policy, and are reduced in fp32.

Clipping and the norm are ours: ZeRO knows the norm after its step, and would step first.
"""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros
from torch.utils._python_dispatch import _disable_current_modes

from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.weights import check_weights, weight_files
from videoqat.parallel import zero
from videoqat.parallel.mesh import Mesh
from videoqat.parallel.sharding import kept_in_fp32
from videoqat.training import state
from videoqat.training.engines import prepare
from videoqat.training.job import Job
from videoqat.training.optim import Ema, make_optimizer

BUCKET = 50_000_000  # numbers reduced, or gathered, at once: 200 MB


class _Part(NamedTuple):
    """Which numbers of a parameter this rank holds: `size` of them from `start` on lie in the rank's flat tensor number `flat`, from `offset` on."""

    flat: int
    offset: int
    start: int
    size: int


class DeepSpeedEngine:
    """`videoqat.training.engines.Engine` by ZeRO; the methods are documented there."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        import deepspeed

        config, self.mesh, self.stage = job.config, mesh, job.config.parallel.zero_stage
        self.group = mesh.fsdp_mesh.get_group()
        zero.connect(mesh)
        dtype = torch.bfloat16 if config.train.compute_dtype == "bfloat16" else torch.float32
        self.transformer, blocks, self.layers = prepare(job, mesh, zero.all_to_all, functools.partial(_cast_weights, dtype=dtype))
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        live = sum(parameter.numel() for parameter in self.transformer.parameters()) - sum(sizes) + 2 * max(sizes)
        _materialise(job, self.transformer, mesh, partition=self.stage == 3)
        self.transformer._videoqat_compute_dtype = dtype  # type: ignore[assignment]
        self.parameters = dict(self.transformer.named_parameters())
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=self.transformer,
            model_parameters=trained,
            optimizer=make_optimizer(config.optimizer, trained),
            config=_settings(self.stage, config.train.batch_size, live),
        )
        if self.stage == 3:
            gathering = self.zero.parameter_offload.get_param_coordinator()
            for name in ("fetch_sub_module", "release_sub_module"):
                setattr(gathering, name, _unseen(getattr(gathering, name)))
        self.parts = dict(self._parts())
        self.clip_norm = config.optimizer.clip_norm
        self.ema = Ema(_numbered(self.flats), config.optimizer.ema_decay) if config.optimizer.ema_decay else None
        self._unreached = self._watch_for_gradients() if config.optimizer.weight_decay else None

    @property
    def flats(self) -> list[Tensor]:
        """This rank's fp32 weights, which AdamW updates."""
        return list(self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups)

    @property
    def gradients(self) -> list[Tensor]:
        """This rank's part of the gradient, complete after a step's last backward; zeros in the padding."""
        return [gradient for group in self.zero.averaged_gradients.values() for gradient in group]

    def _parts(self) -> Iterator[tuple[str, _Part]]:
        for name, parameter in self.parameters.items():
            about: Any = parameter
            if not parameter.requires_grad:
                continue
            if self.stage == 3:
                flat, offset, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
                start = size * self.mesh.fsdp_mesh.get_local_rank()
                if start < about.ds_numel:
                    yield name, _Part(flat, offset, start, min(size, about.ds_numel - start))
            elif about._hp_mapping is not None:
                here, there = about._hp_mapping.hp_fragment_address, about._hp_mapping.lp_fragment_address
                yield name, _Part(0, here.start, there.start, here.numel)

    def _watch_for_gradients(self) -> set[str]:
        """Names of the trained parameters that no backward has reached yet."""
        unreached = {name for name, parameter in self.parameters.items() if parameter.requires_grad}
        handles: dict[str, Any] = {}

        def reached(_: Tensor, name: str) -> None:
            unreached.discard(name)
            handles[name].remove()

        for name in sorted(unreached):
            handles[name] = self.parameters[name].register_hook(functools.partial(reached, name=name))
        return unreached

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # The transformer is called as such. DeepSpeed's engine, whose forward would do the first and the third of these, never is.
        self.zero.clear_backward_seen_flag()
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine._backward_prologue()
        self.engine.backward(loss)

    def gradient_norm(self) -> float:
        if self._unreached is not None:
            unreached = sorted(set.intersection(*self.mesh.gather_objects(self._unreached)))
            self._unreached = None  # what the first step doesn't reach, none will
            if unreached:
                raise ConfigError(
                    f"train.trainable includes {unreached[0]} ({len(unreached)} such in all), which training never reaches; ZeRO would decay its "
                    "weights with the others', AdamW doesn't; legal with parallel.engine=deepspeed: patterns without it, or optimizer.weight_decay=0"
                )
        squared = torch.nn.utils.get_total_norm(self.gradients).square().to(self.mesh.device)
        dist.all_reduce(squared, group=self.group)
        return squared.sqrt().item()

    def update(self, lr: float, norm: float, step: int) -> None:
        if not math.isfinite(norm):
            raise ValueError(f"a gradient of norm {norm} is nothing to update by")
        factor = self.clip_norm / (norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_(self.gradients, factor)
        for group in self.zero.param_groups:
            group["lr"] = lr
        self.engine.step()
        if self.ema:
            self.ema.update(_numbered(self.flats), step)

    def tensors(self) -> dict[str, Any]:
        """As documented; but copies, since ZeRO holds no rows: as much memory again as a rank's part of all takes."""
        return self._nested(self._rows, lambda: self._adamw.state[self.flats[0]]["step"])

    def restore(self, checkpoint: Path) -> None:
        stored = state.tensor_keys(checkpoint)
        if any(key.startswith("optimizer.") for key in stored):
            for flat in self.flats:
                moments = {"exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
                self._adamw.state[flat] = {"step": torch.zeros((), device=flat.device)} | moments
        targets: list[tuple[str, list[Tensor], DTensor]] = []

        def target(name: str, flats: list[Tensor]) -> DTensor:
            rows = zeros(self._shape(name), device_mesh=self.mesh.fsdp_mesh, placements=[Shard(0)])
            targets.append((name, flats, rows))
            return rows

        tensors = self._nested(target, lambda: torch.zeros(()))
        for name in list(tensors["optimizer"]):
            if f"optimizer.{name}.exp_avg" not in stored:  # FSDP's engine never got a gradient for it
                del tensors["optimizer"][name]
        state.load(checkpoint, tensors)
        steps = {moments["step"].item() for moments in tensors["optimizer"].values()}
        if len(steps) > 1:
            raise CheckpointError(f"{checkpoint} holds moments of {sorted(steps)} steps; ZeRO counts the steps of all parameters together")
        for step in steps:
            for flat in self.flats:
                self._adamw.state[flat]["step"].fill_(step)
        for name, flats, rows in targets:
            self._take(name, flats, rows.full_tensor())
        if self.stage == 3:
            for i in range(len(self.flats)):
                self.zero._reassign_or_swap_out_partitioned_parameters(i)
        else:
            self.zero.update_lp_params()

    @property
    def _adamw(self) -> torch.optim.AdamW:
        adamw: torch.optim.AdamW = self.zero.optimizer
        return adamw

    def _nested(self, make: Callable[[str, list[Tensor]], DTensor], step: Callable[[], Tensor]) -> dict[str, Any]:
        """What a checkpoint holds: `make(name, flats)` is the parameter's part of `flats` (of weights, a moment, averages), on all ranks in order."""
        weights = self.flats
        found: dict[str, Any] = {"model": {name: make(name, weights) for name in self.parameters}, "optimizer": {}}
        found["model"] |= {name: x for name, x in self.transformer.state_dict().items() if name not in self.parameters}  # persistent buffers
        if all(self._adamw.state.get(flat) for flat in weights):
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    moments = {key: [self._adamw.state[flat][key] for flat in weights] for key in ("exp_avg", "exp_avg_sq")}
                    found["optimizer"][name] = {key: make(name, flats) for key, flats in moments.items()} | {"step": step()}
        if self.ema:
            averages = list(self.ema.tensors.values())
            found["ema"] = {name: make(name, averages) for name in self.parameters}
        return found

    def _shape(self, name: str) -> torch.Size:
        shape: torch.Size = getattr(self.parameters[name], "ds_shape", self.parameters[name].shape)
        return shape

    def _own(self, name: str, flats: list[Tensor]) -> tuple[int, Tensor] | None:
        """This rank's numbers of a parameter and where in it they begin; None if it has none."""
        parameter: Any = self.parameters[name]
        if parameter.requires_grad:
            part = self.parts.get(name)
            return None if part is None else (part.start, flats[part.flat].narrow(0, part.offset, part.size))
        if self.stage == 3:
            start = parameter.ds_tensor.numel() * self.mesh.fsdp_mesh.get_local_rank()
            return (start, parameter.ds_tensor.data[: parameter.ds_numel - start]) if start < parameter.ds_numel else None
        return (0, parameter.data.view(-1))

    def _rows(self, name: str, flats: list[Tensor]) -> DTensor:
        """Collective: a parameter's part of `flats`, in rows, as FSDP2 deals them out."""
        shape = self._shape(name)
        whole, own = torch.zeros(shape.numel(), device=self.mesh.device), self._own(name, flats)
        if own is not None:
            whole[own[0] : own[0] + own[1].numel()] = own[1].detach()
        if self.parameters[name].requires_grad or self.stage == 3:
            dist.all_reduce(whole, group=self.group)
        rows = distribute_tensor(whole.view(shape), self.mesh.fsdp_mesh, [Shard(0)], src_data_rank=None)
        return DTensor.from_local(rows.to_local().clone(), self.mesh.fsdp_mesh, [Shard(0)], shape=rows.shape, stride=rows.stride())

    def _take(self, name: str, flats: list[Tensor], whole: Tensor) -> None:
        """The inverse of `_rows`, from the whole parameter."""
        own = self._own(name, flats)
        if own is not None:
            own[1].detach().copy_(whole.view(-1)[own[0] : own[0] + own[1].numel()])


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hides what `function` computes from selective checkpointing, which counts operators: weights are not gathered where a block is computed again
    as they were in its forward."""

    @functools.wraps(function)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return unseen


def _numbered(flats: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): flat for i, flat in enumerate(flats)}


def _settings(stage: int, batch_size: int, live: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Accumulation is told batch by batch. `live`: how many weights stage 3 should have gathered at a time."""
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_prefetch_bucket_size": BUCKET,
            # Small weights that stay gathered would have to be gathered anew whenever a checkpoint is read.
            "stage3_param_persistence_threshold": 0,
            # It would replace torch.nn.functional.linear, for every model in this process.
            "memory_efficient_linear": False,
        }
        | ({} if stage == 3 else {"compute_grad_norm": False}),
    }


def _cast_weights(transformer: nn.Module, dtype: torch.dtype) -> None:
    """Has every module run with its own weights in `dtype`, but for those that diffusers keeps in fp32. Their gradients are fp32."""
    kept = kept_in_fp32(transformer)
    for module in transformer.modules():
        names = [name for name, parameter in module.named_parameters(recurse=False) if parameter not in kept]
        if names and dtype != torch.float32:
            module.forward = _casting(module, names, dtype)  # type: ignore[method-assign]


def _casting(module: nn.Module, names: list[str], dtype: torch.dtype) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def casting(*args: Any, **kwargs: Any) -> Any:
        # An attribute of the object itself is found before the parameter of its name.
        module.__dict__.update({name: module._parameters[name].to(dtype) for name in names})  # type: ignore[union-attr]
        try:
            return forward(*args, **kwargs)
        finally:
            for name in names:
                del module.__dict__[name]

    return casting


def _materialise(job: Job, transformer: nn.Module, mesh: Mesh, *, partition: bool) -> None:
    """Gives parameters on the meta device their numbers, one at a time: rank 0 reads, or draws, and DeepSpeed hands them out.

    Args:
        job: which model, and whether from scratch.
        transformer: its parameters on the meta device, its buffers not.
        mesh: all ranks share the parameters.
        partition: each parameter is sharded as soon as it is there (stage 3). Else it becomes whole on every rank, when ZeRO starts.
    """
    import deepspeed
    from safetensors import safe_open

    config = job.config
    folder = Path(config.model.path) / config.model.component
    drawn: dict[str, Any] = {}
    files: dict[str, Any] = {}
    if not config.from_scratch:
        shapes = {key: value.shape for key, value in transformer.state_dict().items()}
        check_weights(folder, shapes, tuple(getattr(transformer, "_keys_to_ignore_on_load_unexpected", None) or ()))
        for path in weight_files(folder):
            handle = safe_open(path, framework="pt")
            files |= dict.fromkeys(handle.keys(), handle)
        for name, buffer in transformer.named_buffers():
            if name in files:
                buffer.copy_(files[name].get_tensor(name))
    elif mesh.rank == 0:
        whole = job.family.load_transformer(
            Path(config.model.path), config.model.component, dtype=torch.float32, from_scratch=True, seed=config.train.seed
        )
        drawn = dict(whole.named_parameters())
    for path, module in reversed(list(transformer.named_modules())):  # children before what holds them
        for name, parameter in list(module.named_parameters(recurse=False)):
            key = f"{path}.{name}" if path else name
            if mesh.rank == 0:
                numbers = (drawn.pop(key).detach() if drawn else files[key].get_tensor(key)).to(mesh.device, torch.float32, copy=True)
            else:
                numbers = torch.zeros(parameter.shape, device=mesh.device)
            module.register_parameter(name, nn.Parameter(numbers, requires_grad=parameter.requires_grad))
        if partition:
            group = mesh.fsdp_mesh.get_group()
            deepspeed.zero.Init(module=module, data_parallel_group=group, dtype=torch.float32, mem_efficient_linear=False)
