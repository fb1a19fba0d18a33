"""For tests of sequence parallelism: a group of gloo ranks as `Ulysses`, and how results are compared."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from videoqat.config import ParallelConfig
from videoqat.parallel.mesh import open_mesh
from videoqat.parallel.ulysses import Ulysses

TOLERANCE = 5e-6  # relative, fp32: sums in another order


@contextlib.contextmanager
def sequence_ranks(degree: int) -> Iterator[dist.ProcessGroup]:
    """All ranks of this run as one sequence-parallel group. Once a process: a second set of groups would find the first one's traces in the store."""
    with open_mesh(ParallelConfig(sp=degree), torch.device("cpu")) as mesh:
        assert mesh.sp_group is not None
        yield mesh.sp_group


@contextlib.contextmanager
def ulysses_ranks(degree: int, wire: str, num_tokens: int = 0) -> Iterator[Ulysses]:
    """`sequence_ranks` as `Ulysses`."""
    with sequence_ranks(degree) as group:
        ulysses = Ulysses(group, wire)
        ulysses.num_tokens = num_tokens
        yield ulysses


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """The same normal numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def assert_close(xs: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """Shapes equal and relative L2 error within TOLERANCE, pair by pair."""
    for x, y in zip(xs, truth, strict=True):
        assert x.shape == y.shape
        error = float((x - y).norm() / y.norm().clamp(min=1e-30))
        assert error <= TOLERANCE, f"relative error {error}"


def with_gradients(function: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of a function that returns a tuple, and the gradients of its arguments."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    return [x.detach() for x in out], list(torch.autograd.grad(list(out), leaves, list(grads)))


def summed(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Over the ranks, as FSDP sums them (and then averages, which the loss's factor undoes)."""
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients
