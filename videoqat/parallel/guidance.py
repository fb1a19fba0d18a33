"""Guidance divided between two ranks: one computes the forward with the prompt, the other the one without, and they exchange what came out.

Classifier-free guidance (arXiv 2207.12598) asks a transformer twice in each denoising step. The loop is the pipeline's own and stays as it is; it is
the transformer's `forward` that is replaced while a video is made, and it knows both ways in which pipelines ask:

    one call with a batch of two (CogVideoX)      each rank computes its half, both get the whole
    two calls, one after the other (the others)   the first rank computes the first, the second the second; both get both

In two calls the second rank has nothing to return from the first: it returns a tensor that is filled when the second call is over. No pipeline looks
at a prediction before it has both; one that did would see NaN. Both ranks get the same bits, and so go on alike.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

DEGREE = 2  # with and without the prompt


class Guidance:
    """The two ranks that share the forwards of each denoising step.

    Args:
        group: the two; both make every call together. They hold the same weights, and are given the same.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        assert group.size() == DEGREE
        self.group, self.rank = group, group.rank()
        self._first: Tensor | None = None  # what the first of two calls returned
        self._complete = False

    @contextlib.contextmanager
    def dividing(self, transformers: Iterable[nn.Module]) -> Iterator[None]:
        """While open, every forward of `transformers` (a pipeline's, of which one or the other serves a step) is divided."""
        with contextlib.ExitStack() as undo:
            for transformer in transformers:
                undo.enter_context(_replaced(transformer, functools.partial(self._divided, transformer, transformer.forward)))
            self._first, self._complete = None, False
            yield

    def end_step(self) -> None:
        """To be called after each denoising step.

        Raises:
            RuntimeError: both predictions weren't asked for in it.
        """
        if not self._complete:
            raise RuntimeError("a denoising step without two predictions can't be divided by guidance (parallel.cfg=2)")
        self._first, self._complete = None, False

    def _divided(self, transformer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor]:
        if self._complete:
            raise RuntimeError("a denoising step with more than two predictions can't be divided by guidance (parallel.cfg=2)")
        batch = kwargs["hidden_states"].shape[0]
        if batch == DEGREE:
            halves = {key: x[self.rank : self.rank + 1] if isinstance(x, Tensor) and x.shape[:1] == (batch,) else x for key, x in kwargs.items()}
            self._complete = True
            return (torch.cat(self._exchange(forward(*args, **halves)[0])),)
        if self._first is None:
            mine = self.rank == 0
            self._first = forward(*args, **kwargs)[0] if mine else _to_be_filled(kwargs["hidden_states"], transformer.config.out_channels)
            return (self._first,)
        first, second = self._exchange(self._first if self.rank == 0 else forward(*args, **kwargs)[0])
        if (first.shape, first.dtype) != (self._first.shape, self._first.dtype):
            raise RuntimeError(f"a prediction {tuple(first.shape)}, {first.dtype} was foreseen as {tuple(self._first.shape)}, {self._first.dtype}")
        self._first.copy_(first)
        self._complete = True
        return (second,)

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        both = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(DEGREE)]
        dist.all_gather(both, mine.contiguous(), group=self.group)
        return both


def _to_be_filled(x_BCFHW: Tensor, channels: int) -> Tensor:
    batch, _, *size = x_BCFHW.shape
    return x_BCFHW.new_full((batch, channels, *size), torch.nan)


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module.forward`, which offloading may have replaced before, is `forward` while the block runs."""
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before  # type: ignore[method-assign]
