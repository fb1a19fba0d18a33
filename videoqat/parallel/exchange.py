"""The one way in which sequence-parallel ranks talk: all-to-all."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]


@torch.library.custom_op("videoqat::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """x[i] goes to rank i of the process group of that name; out[i] came from rank i. x is (P, ...) of any dtype.

    An operator, so that torch.compile and selective checkpointing see it as one thing; its gradient takes the same way back.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=_resolve_process_group(group))  # type: ignore[arg-type]
    return out


@all_to_all.register_fake
def _all_to_all_fake(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
    return all_to_all(grad, ctx.group), None  # type: ignore[attr-defined]


all_to_all.register_autograd(_backward, setup_context=_setup_context)
