"""Quantisation error of every quantised layer, on the queries, keys and values that denoising really sends through it."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from videoqat.attention.metrics import attention_health
from videoqat.generation.engine import Engine
from videoqat.models.install import observe
from videoqat.recipes import AttentionRecipe


class LayerErrors:
    """Collects `attention_health` of each quantised layer while the engine renders, in the steps in which it is quantised.

    Args:
        engine: whose transformers are watched.
        recipe: what each layer's inputs are quantised by; unquantised recipes collect nothing.
    """

    def __init__(self, engine: Engine, recipe: AttentionRecipe) -> None:
        self.engine = engine
        self.recipe = recipe
        self.found: dict[str, list[dict[str, float]]] = defaultdict(list)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Puts the recipe in and measures every attention of its layers until the block ends."""
        self.engine.install(self.recipe)
        for component, transformer in self.engine.transformers.items():
            modules = {layer.name: layer.module for layer in self.engine.family.attention_layers(transformer)}
            observe(transformer, functools.partial(self._measure, component, modules))
        try:
            yield
        finally:
            for transformer in self.engine.transformers.values():
                observe(transformer, None)

    def _measure(self, component: str, modules: dict[str, Any], layer: str, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
        if modules[layer].processor.recipe.is_quantised:  # neither a layer nor a step that stays in bf16
            name = layer if len(self.engine.transformers) == 1 else f"{component}.{layer}"
            self.found[name].append(attention_health(q_BNHD, k_BNHD, v_BNHD, self.recipe))

    def means(self) -> dict[str, dict[str, float]]:
        """Layer -> each figure of `attention_health`, averaged over the calls seen."""
        return {layer: {key: sum(one[key] for one in calls) / len(calls) for key in calls[0]} for layer, calls in self.found.items()}
