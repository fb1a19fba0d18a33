"""The Hadamard rotation of Q and K (`rotate_qk`; `docs/numerics.md`, section 4).

An orthonormal matrix H changes no logit, (Q H)(K H)^T = Q K^T, but it spreads a channel that sticks out over all (QuaRot, arXiv 2404.00456). It is
applied where attention begins, before any kernel is called, and so is the same for all of them.

The order of evaluation is fixed: butterflies of sums and differences, not a matrix product, whose last bits would depend on the device and on how
many rows share the call. A rank that rotates its part of a sequence therefore gets the codes of the whole.
"""

import torch
from torch import Tensor

from videoqat.recipes import AttentionRecipe


def rotated(x_BNHd: Tensor, recipe: AttentionRecipe) -> Tensor:
    """Q or K as `recipe` has it quantised: rotated with `rotate_qk`, else as it came. H is its own inverse, so dQ and dK go back by it, too."""
    return hadamard(x_BNHd) if recipe.rotate_qk else x_BNHd


def hadamard(x: Tensor) -> Tensor:
    """Runs of n neighbours along the last axis, each times Sylvester's n x n matrix / sqrt(n); n: the largest power of two that divides the axis.

    In fp32 (fp64 for fp64), one rounding a step, and then rounded to x's dtype. Any strides; contiguous in return, and never x itself.
    """
    size = x.shape[-1] & -x.shape[-1]
    y = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    half = 1
    while half < size:
        first, second = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        difference = first - second
        first.add_(second)
        second.copy_(difference)
        half *= 2
    return y.mul_(size**-0.5).to(x.dtype)
