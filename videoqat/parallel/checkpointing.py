"""Activation checkpointing: what each block keeps for its backward. And torch.compile, block by block.

    none             everything
    full             its inputs; the backward computes the block again
    keep_attention   its inputs, and what attention over the video gave; all but attention is computed again

With offload, a block's largest input (the video's tokens) waits in the host's memory between forward and backward.

A block's forward is replaced, and the block is not wrapped: its parameters keep diffusers' names, and hooks on it (of FSDP, of sequence
parallelism) run once, not again when the block is computed again. Compiling comes after checkpointing, so that the compiler sees it, and sharding
comes last, so that FSDP's hooks stay outside of compiled code.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint, create_selective_checkpoint_contexts

import videoqat.attention.coded  # noqa: F401 - with `functional`, makes the operators below

# Every operator that torch.nn.functional.scaled_dot_product_attention can end in as one operator. Its last resort, on plain matrix products
# ("math"), is none: there the products are computed again.
_SDPA = tuple(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)
_OURS = torch.ops.videoqat.attention_forward.default
_CODED = torch.ops.videoqat.attention_forward_coded.default  # from codes that were exchanged: never cross-attention


def keep_attention(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `keep_attention`: results of attention are kept if there are at least as many keys as queries.

    That leaves out cross-attention to a text shorter than the video: to compute it again costs little, and its result is as large as that of
    self-attention. The exchange of sequence parallelism is done again, too: keeping what it brings would be keeping q, k and v.
    """
    keep = operator is _CODED
    if operator is _OURS or operator in _SDPA:
        q, k = args[:2]
        tokens = 1 if operator is _OURS else 2  # ours takes (B, N, H, D), SDPA (B, H, N, D)
        keep = k.shape[tokens] >= q.shape[tokens]
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_blocks(blocks: list[nn.Module], mode: str, *, offload: bool = False) -> None:
    """Has each block keep for its backward what `mode` says; see above.

    The backward must find the same attention processors in the blocks as the forward did, or it raises RuntimeError.

    Args:
        blocks: in order of execution, each called once in a forward.
        mode: none, full or keep_attention.
        offload: whether the largest input of each block waits in the host's memory; on a GPU it is copied while the block computes, and fetched
            back while the block after it is in its backward. Not for blocks that are to be compiled.
    """
    if mode == "none":
        return
    # torch.compile knows the default only by its absence.
    kept = {"context_fn": functools.partial(create_selective_checkpoint_contexts, keep_attention)} if mode == "keep_attention" else {}
    waiting: list[_Away | None] = [None] * len(blocks)
    for index, block in enumerate(blocks):
        forward = _checkpointed(block, kept)
        block.forward = _offloaded(forward, waiting, index) if offload else forward  # type: ignore[method-assign]


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Compiles each block's forward, hooks left out. Blocks of one class share their compiled code."""
    for block in blocks:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]


def _checkpointed(block: nn.Module, kept: dict[str, Any]) -> Callable[..., Any]:
    forward = block.forward
    attentions = [module for module in block.modules() if hasattr(module, "processor")]

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        processors = [attention.processor for attention in attentions]

        def compute(*args: Any, **kwargs: Any) -> Any:
            # A compiled block's backward is fixed when it is compiled.
            if not torch.compiler.is_compiling() and any(a.processor is not p for a, p in zip(attentions, processors, strict=True)):
                raise RuntimeError("another attention recipe was installed between a checkpointed block's forward and its backward")
            args, kwargs = tree_map_only(_Away, lambda away: away.take(), (args, kwargs))
            return forward(*args, **kwargs)

        return checkpoint(compute, *args, use_reentrant=False, **kept, **kwargs)

    return checkpointed


def _offloaded(checkpointed: Callable[..., Any], waiting: "list[_Away | None]", index: int) -> Callable[..., Any]:
    @functools.wraps(checkpointed)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return checkpointed(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        sizes = [leaf.numel() if isinstance(leaf, Tensor) and leaf.is_floating_point() else -1 for leaf in leaves]
        largest = sizes.index(max(sizes))
        # Checkpointing keeps its arguments: instead of the tensor it gets what brings it back.
        away = leaves[largest] = waiting[index] = _Away(leaves[largest])
        args, kwargs = tree_unflatten(leaves, spec)
        outputs = checkpointed(*args, **kwargs)

        def before_backward(grad: Tensor) -> None:
            away.arrive()
            waiting[index] = None
            before = waiting[index - 1] if index > 0 else None
            if before is not None:
                before.fetch()

        for output in tree_flatten(outputs)[0]:
            if output.requires_grad:
                output.register_hook(before_backward)
        return outputs

    return offloaded


class _Away:
    """A tensor that goes to the host's memory and comes back when it is needed; on the CPU, a copy of it.

    Attributes:
        here: the tensor, while it is on its device.
    """

    def __init__(self, x: Tensor) -> None:
        self.here: Tensor | None = x
        self._fetched = False
        self.device, self.requires_grad = x.device, x.requires_grad
        if self.device.type != "cuda":
            self.host = x.detach().clone()
            return
        stream = _copy_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x.detach(), non_blocking=True)
        x.record_stream(stream)  # its memory is not given away before the copy is done

    def take(self) -> Tensor | None:
        """The tensor, which from now on lives only as long as the caller needs it: this object lives as long as the whole graph."""
        here, self.here = self.here, None
        return here

    def fetch(self) -> None:
        """Begins to bring it back, once: a block of several outputs asks several times."""
        if self._fetched:
            return
        self._fetched = True
        if self.device.type != "cuda":
            self.here = self.host.requires_grad_(self.requires_grad)
            return
        stream = _copy_stream(self.device)
        with torch.cuda.stream(stream):
            self.here = self.host.to(self.device, non_blocking=True).requires_grad_(self.requires_grad)
            self.back = stream.record_event()

    def arrive(self) -> None:
        """Has all that is launched from now on find it `here`."""
        self.fetch()
        if self.device.type == "cuda" and self.here is not None:
            torch.cuda.current_stream(self.device).wait_event(self.back)
            self.here.record_stream(torch.cuda.current_stream(self.device))


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
