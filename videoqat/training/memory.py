"""How much memory a GPU will need, by what it is for, before anything is loaded.

P weights in all, T of them trained; S = dp_shard * sp ranks share a replica. FSDP2, in bytes:

    weights      4 P / S    fp32
    gradients    4 T / S    fp32
    moments      8 T / S    two of AdamW, fp32
    ema          4 T / S    where there is one
    gathered     in the compute dtype (c bytes), two blocks (one in use, one on its way) and what lies outside of blocks; with S = 1 all P weights.
                 And of one block the gradients, in c bytes and twice in fp32, on their way to the ranks that keep them
    teacher      c P / S    where there is one (objective.distill_weight); what it gathers is free again before activations come
    activations  what autograd keeps, counted by `throughput.forward_cost` at the real shape, times the batch, divided by sp:
                 none             everything
                 full             the blocks' inputs, and everything of one block while that is computed again
                 keep_attention   the same, and what attention over the video returned and keeps for its backward (4-bit codes, in a 4-bit recipe)
                 with train.offload_block_inputs the largest input of each block is in the host's memory, two of them at a time on the GPU

DeepSpeed's ZeRO differs in all but teacher and activations (`_zero`). What comes on top: CUDA and NCCL themselves, what kernels need while they run,
and what the allocator can't use: a tenth is a fair reserve.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from videoqat.attention import backends
from videoqat.config import LoopConfig, ParallelConfig, parse_bucket
from videoqat.console import say
from videoqat.parallel.mesh import Layout
from videoqat.provenance import device_name
from videoqat.recipes import AttentionRecipe
from videoqat.training.engine_deepspeed import BUCKET
from videoqat.training.job import Job
from videoqat.training.throughput import AttentionCall, ForwardCost, flops_per_sample, forward_cost, job_cost

GIB = 2**30
ASSUMED_GPU = ("an 80 GB GPU", 79 * GIB)  # where there is none to ask; an H100 or A100 says 79 GiB

TYPICAL_LAYOUTS = ((1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 4, 2), (2, 8, 1), (8, 8, 1), (8, 4, 2))  # dp_replicate, dp_shard, sp


def memory_per_gpu(
    cost: ForwardCost,
    recipe: AttentionRecipe,
    layout: Layout,
    loop: LoopConfig,
    parallel: ParallelConfig,
    *,
    ema: bool,
    kernel: str,
    teacher: bool = False,
) -> dict[str, int]:
    """Bytes by part, as above, and their `total`.

    Args:
        cost: of one sample, under `recipe`.
        loop: batch size, compute dtype and activation checkpointing.
        parallel: the engine.
        ema: whether a moving average is kept.
        kernel: of the quantised layers (a key of `backends.KERNELS`).
        teacher: whether it is distilled from one.
    """
    width = 2 if loop.compute_dtype == "bfloat16" else 4
    parts = _zero(cost, layout, loop, parallel, width, ema) if parallel.engine == "deepspeed" else _fsdp(cost, layout, width, ema)
    parts["teacher"] = teacher_bytes(cost, layout, width) if teacher else 0
    parts["activations"] = _activations(cost, recipe, layout, loop, kernel, width)
    return parts | {"total": sum(parts.values())}


def teacher_bytes(cost: ForwardCost, layout: Layout, width: int = 2) -> int:
    """What a teacher takes on each GPU, in a compute dtype of `width` bytes."""
    return width * cost.parameters // (layout.dp_shard * layout.sp)


def _fsdp(cost: ForwardCost, layout: Layout, width: int, ema: bool) -> dict[str, int]:
    ranks = layout.dp_shard * layout.sp
    gathered = cost.parameters if ranks == 1 else min(cost.parameters, 2 * cost.block_parameters + cost.outer_parameters)
    leaving = (width + 8) * cost.block_parameters if cost.trained else 0
    return {
        "weights": 4 * cost.parameters // ranks,
        "gradients": 4 * cost.trained // ranks,
        "moments": 8 * cost.trained // ranks,
        "ema": 4 * cost.trained // ranks if ema else 0,
        "gathered": width * gathered + leaving,
    }


def _zero(cost: ForwardCost, layout: Layout, loop: LoopConfig, parallel: ParallelConfig, width: int, ema: bool) -> dict[str, int]:
    """ZeRO's weights are fp32, whole in stages 1 and 2 besides the shard that AdamW works on, and are cast where they are used.

    Autograd keeps what a block used for its backward: the cast weights or, in fp32 and stage 3, those that were gathered; of all blocks at once
    where none is computed again.
    """
    ranks, stage = layout.world_size, parallel.zero_stage
    used = cost.parameters if loop.activation_checkpointing == "none" else min(cost.parameters, cost.block_parameters + cost.outer_parameters)
    gathered = 4 * min(cost.parameters, 2 * cost.block_parameters + cost.outer_parameters) if stage == 3 else 0
    kept = width * used if width == 2 or stage == 3 else 0
    leaving = (width + 4) * cost.block_parameters + 8 * min(BUCKET, cost.trained) if cost.trained else 0
    return {
        "weights": 4 * cost.parameters // ranks if stage == 3 else 4 * cost.parameters + 4 * cost.trained // ranks,
        "gradients": 4 * cost.trained // (ranks if stage >= 2 else 1),
        "moments": 8 * cost.trained // ranks,
        "ema": 4 * cost.trained // ranks if ema else 0,
        "gathered": (gathered + kept if width == 2 else max(gathered, kept)) + leaving,
    }


def _activations(cost: ForwardCost, recipe: AttentionRecipe, layout: Layout, loop: LoopConfig, kernel: str, width: int) -> int:
    """Of one micro-batch on one rank. Sequence parallelism divides all of it: tokens in most places, heads in attention."""
    blocks = [part.kept_bytes + sum(_difference(call, recipe, kernel, width) for call in part.attention) for part in cost.blocks]
    inputs = cost.input_bytes
    if loop.offload_block_inputs:
        inputs += -cost.largest_input_bytes + 2 * cost.largest_input_bytes // len(blocks)
    kept = cost.outer.kept_bytes + inputs + (sum(blocks) if loop.activation_checkpointing == "none" else max(blocks))
    if loop.activation_checkpointing == "keep_attention":
        kept += sum(_results(call, recipe, kernel, width) for part in cost.blocks for call in part.attention)
    return kept * loop.batch_size // layout.sp


def _difference(call: AttentionCall, recipe: AttentionRecipe, kernel: str, width: int) -> int:
    """How much more `kernel` keeps of a call for its backward than the CPU's, with which it was counted."""
    return _kept(call, recipe, kernel, width) - _kept(call, recipe, "torch", width) if call.quantised else 0


def _kept(call: AttentionCall, recipe: AttentionRecipe, kernel: str, width: int) -> int:
    """Bytes of q, k, v and of what else `kernel` keeps of a quantised call. Not of the output: the projection behind attention keeps that anyway."""
    served_by: Any = backends.KERNELS[kernel]
    q, k = _operands(call, width)
    return sum(x.nbytes for x, kept in zip((q, k, k), served_by.keeps(recipe)[:3], strict=True) if kept) + _own(call, recipe, kernel, width)


def _results(call: AttentionCall, recipe: AttentionRecipe, kernel: str, width: int) -> int:
    """Bytes of what `keep_attention` keeps of a call: its output, sums of its rows, and what of its own the kernel needs again."""
    B, num_queries, H, _ = call.q_BNHD
    if call.k_BNHD[1] < num_queries:
        return 0  # cross-attention, which is computed again
    row = 4 * B * num_queries * H
    return _operands(call, width)[0].nbytes + (3 * row + _own(call, recipe, kernel, width) if call.quantised else row)


def _own(call: AttentionCall, recipe: AttentionRecipe, kernel: str, width: int) -> int:
    served_by: Any = backends.KERNELS[kernel]
    return sum(x.nbytes for x in served_by.empty_kept(*_operands(call, width), recipe))


def _operands(call: AttentionCall, width: int) -> tuple[Tensor, Tensor]:
    """q and k without numbers."""
    dtype = torch.bfloat16 if width == 2 else torch.float32
    return torch.empty(call.q_BNHD, dtype=dtype, device="meta"), torch.empty(call.k_BNHD, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Limit:
    """The GPU that an estimate is held against."""

    name: str
    bytes: int


def gpu_limit(device: torch.device) -> Limit:
    """The GPU `device`; for a CPU, where a job is only planned, `ASSUMED_GPU`."""
    if device.type != "cuda":
        return Limit(*ASSUMED_GPU)
    return Limit(device_name(str(device)), torch.cuda.get_device_properties(device).total_memory)


def gpu_kernel(recipe: AttentionRecipe, kernel: str, device: torch.device) -> str:
    """The kernel that a GPU would serve `recipe` with: the resolved `kernel` on a GPU; elsewhere Triton's, if it is there to be asked."""
    return "triton" if device.type != "cuda" and recipe.is_quantised and importlib.util.find_spec("triton") else kernel


def typical_layouts(
    folder: str, component: str, num_heads: int, bucket: str, text_tokens: int, recipe: AttentionRecipe
) -> list[tuple[Layout, dict[str, dict[str, int]], int]]:
    """Layouts of 1 to 64 GPUs that the model's heads allow, each with `memory_per_gpu` by mode of checkpointing, for one sample at a time, and with
    what a teacher would add."""
    cost = forward_cost(folder, component, bucket, text_tokens, recipe)
    kernel = gpu_kernel(recipe, "sdpa" if not recipe.is_quantised else "torch", torch.device("cpu"))
    rows = []
    for layout in (Layout(*degrees) for degrees in TYPICAL_LAYOUTS if num_heads % degrees[2] == 0):
        by_mode = {
            mode: memory_per_gpu(cost, recipe, layout, LoopConfig(activation_checkpointing=mode), ParallelConfig(), ema=False, kernel=kernel)
            for mode in ("full", "keep_attention", "none")
        }
        rows.append((layout, by_mode, teacher_bytes(cost, layout)))
    return rows


def job_memory(job: Job) -> dict[str, int]:
    """`memory_per_gpu` of the job's largest bucket."""
    config = job.config
    largest = max({sample.bucket for sample in job.cache.samples}, key=lambda bucket: job.geometry.num_tokens(*parse_bucket("bucket", bucket)))
    kernel = gpu_kernel(job.recipe, job.receipt.kernel, job.device)
    ema, teacher = bool(config.optimizer.ema_decay), bool(config.objective.distill_weight)
    return memory_per_gpu(job_cost(job, largest), job.recipe, job.layout, config.train, config.parallel, ema=ema, kernel=kernel, teacher=teacher)


def warn_if_too_large(job: Job) -> None:
    """A WARNING where the estimate is more than the GPU has, with what would lower it."""
    memory, limit = job_memory(job), gpu_limit(job.device)
    if memory["total"] <= limit.bytes:
        return
    loop = job.config.train
    state, activations = sum(memory[part] for part in ("weights", "gradients", "moments", "ema", "teacher", "gathered")), memory["activations"]
    advice = []
    if activations > state / 4:
        if loop.activation_checkpointing != "full":
            advice.append("train.activation_checkpointing=full")
        elif not loop.offload_block_inputs:
            advice.append("train.offload_block_inputs=true")
        advice += ["a larger parallel.sp"] + (["a smaller train.batch_size"] if loop.batch_size > 1 else [])
    if state > activations / 4:
        advice.append("a larger parallel.dp_shard")
    parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in memory.items() if part != "total" and size)
    say(
        f"WARNING: this layout ({job.layout}) needs about {memory['total'] / GIB:.0f} GiB on each GPU ({parts}), and {limit.name} has "
        f"{limit.bytes / GIB:.0f} GiB; what would help: {', '.join(advice)}"
    )


def estimate(job: Job) -> dict[str, Any]:
    """What the job amounts to: weights, tokens, steps, FLOPs and memory. Nothing is loaded; warns where the memory won't do."""
    loop = job.config.train
    buckets = sorted({sample.bucket for sample in job.cache.samples})
    costs = {bucket: job_cost(job, bucket) for bucket in buckets}
    first = costs[buckets[0]]
    warn_if_too_large(job)
    samples_per_step = loop.batch_size * job.accumulation * job.layout.dp
    steps_per_epoch = job.order.batches_per_epoch * loop.batch_size / samples_per_step
    return {
        "parameters": first.parameters,
        "trained_parameters": first.trained,
        "quantised_layers": first.quantised_layers,
        "recipe": job.recipe.name,
        "kernel": job.receipt.to_dict(),
        "device": str(job.device),
        "layout": str(job.layout),
        "samples": len(job.cache),
        "tokens_per_sample": {bucket: job.geometry.num_tokens(*parse_bucket("bucket", bucket)) for bucket in buckets},
        "flops_per_sample": {bucket: flops_per_sample(job, bucket) for bucket in buckets},
        "accumulation": job.accumulation,
        "samples_per_step": samples_per_step,
        "steps_per_epoch": steps_per_epoch,
        "epochs": loop.steps / steps_per_epoch,
        "flow_time_range": list(job.time_range),
        "memory_bytes": job_memory(job),
        "memory_limit_bytes": gpu_limit(job.device).bytes,
    }
