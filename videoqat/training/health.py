"""Two looks into a model in training: how well its 4-bit attention does, and where it broke.

Both only watch, in forwards of their own. What training computes is the same, bit for bit, with and without them.

Where weights are sharded a forward is collective, so all ranks go through the same ones to their end, whatever a rank finds on the way.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from videoqat.attention.metrics import attention_health
from videoqat.models.install import observe
from videoqat.models.spec import AttentionLayer
from videoqat.recipes import AttentionRecipe


@contextlib.contextmanager
def forwards_alone(transformer: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; afterwards the transformer is in training again, if it was, and its weights are sharded.

    Compiled blocks run uncompiled: modules can be looked into, and no code is made for shapes of a look that training would use from then on.
    """
    training = transformer.training
    transformer.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        transformer.train(training)
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextlib.contextmanager
def quantisation_health(transformer: nn.Module, recipe: AttentionRecipe, layers: list[AttentionLayer]) -> Iterator[dict[str, dict[str, float]]]:
    """Within the block, every quantised layer's first attention call is also judged by `attention.metrics.attention_health`.

    Where a sequence is divided among ranks (sp), what is judged is the whole sequence, by the heads that this rank attends with.

    Args:
        transformer: with `recipe` installed.
        recipe: what the quantised layers compute by.
        layers: the quantised layers, as `install` returned them.

    Yields:
        A dict that fills as the forward runs: layer name -> its numbers.
    """
    found: dict[str, dict[str, float]] = {}
    names = {layer.name for layer in layers}

    def observer(name: str, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
        if name in names and name not in found:
            with torch.no_grad():
                found[name] = attention_health(q_BNHD.detach(), k_BNHD.detach(), v_BNHD.detach(), recipe)

    observe(transformer, observer)
    try:
        yield found
    finally:
        observe(transformer, None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _finite(value: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _tensors(value) if tensor.is_floating_point())


def first_nonfinite(transformer: nn.Module, forwards: Sequence[Callable[[], Any]]) -> str | None:
    """The first place in `forwards`, run again, where NaN or inf comes up; None if all modules' numbers are finite.

    A module is named by its path: `output of blocks.3.ffn.net.2`, or `input of blocks.3.attn1.to_out.0` where what goes into a module is
    already broken and no module before it was to blame (attention itself is not a module).

    Args:
        transformer: whose modules are watched.
        forwards: each runs the transformer once, with the inputs of the step that broke.
    """
    found: list[str] = []

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not found and not _finite((args, kwargs)):
                found.append(f"input of {name}")

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not found and not _finite(output):
                found.append(f"output of {name}")

        return hook

    handles = []
    for path, module in transformer.named_modules():
        name = path.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "") or "the transformer"
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        with forwards_alone(transformer):
            for forward in forwards:
                forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def nonfinite_gradient(transformer: nn.Module) -> str | None:
    """The parameter whose gradient holds NaN or inf; of several the last one, since the backward starts at the end. None if all are finite.

    Where gradients are sharded, this rank's part of them.
    """
    for name, parameter in reversed(list(transformer.named_parameters())):
        gradient = parameter.grad
        if gradient is not None and not _finite(gradient.to_local() if isinstance(gradient, DTensor) else gradient):
            return name
    return None
