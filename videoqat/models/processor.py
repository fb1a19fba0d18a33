"""What attention processors have in common, whatever model they serve: what they are told, whom they show Q, K and V, and in which dtype."""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from videoqat.errors import AttentionError
from videoqat.models.spec import AttentionLayer
from videoqat.parallel.ulysses import Observe, Ulysses
from videoqat.recipes import AttentionRecipe

if TYPE_CHECKING:
    from videoqat.models.install import Observer


class Processor:
    """Stands in one attention module. Subclasses compute, in `__call__`, what diffusers' own processor of that module does.

    Attributes:
        layer, kind: the module's path, and its attention's kind (`AttentionLayer.kind`).
        recipe, kernel: as for `attention`.
        observer: is called with `layer`, q_BNHD, k_BNHD and v_BNHD before each attention; None: nobody is.
        ulysses: among whose ranks the sequence is divided; None: it is whole.
    """

    def __init__(self, layer: AttentionLayer, recipe: AttentionRecipe, kernel: str) -> None:
        self.layer = layer.name
        self.kind = layer.kind
        self.recipe = recipe
        self.kernel = kernel
        self.observer: Observer | None = None
        self.ulysses: Ulysses | None = None

    def _observe(self) -> Observe | None:
        """The observer as `attend` takes it: it knows which layer it is in."""
        return None if self.observer is None else functools.partial(self.observer, self.layer)

    def _rotate(self, x_BNHD: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """diffusers' rotary embedding, by tables of cosines and sines (N, D) in float32; without tables, x.

        Raises:
            AttentionError: tables in another dtype.
        """
        from diffusers.models.embeddings import apply_rotary_emb

        if tables is None:
            return x_BNHD
        if tables[0].dtype != torch.float32:  # a blanket cast of a block's inputs would round cosines and sines to bf16, by up to 0.2 %
            raise AttentionError(f"{self.layer}: rotary tables must be float32, got {tables[0].dtype}")
        rotated: Tensor = apply_rotary_emb(x_BNHD, tables, sequence_dim=1)  # type: ignore[assignment]
        return rotated


def in_low_precision(*xs: Tensor) -> list[Tensor]:
    """Under autocast in its dtype. Norms leave q and k in float32 there, v is 16-bit; SDPA would cast all three, and what is quantised must be the
    same numbers."""
    device = xs[0].device.type
    return [x.to(torch.get_autocast_dtype(device)) for x in xs] if torch.is_autocast_enabled(device) else list(xs)
