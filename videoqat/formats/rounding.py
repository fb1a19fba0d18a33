"""Rounding to the element grids E2M1 (4 bits) and E4M3 (8 bits): to nearest, ties to the even code, saturating.

Both grids are tiny floating-point formats, and one trick rounds to either. Between two powers of two the grid is even, with a spacing of
2^-mantissa_bits of the lower one; below the smallest normal number it goes on with the last spacing. Adding a number so large that fp32
itself has just that spacing there, and taking it away again, makes the processor round for us: to nearest, ties to even, exactly. The large
number is the power of two at or below |x| (x's bits with sign and mantissa masked out) times a constant, so the whole is five cheap passes
with no table, no search and no 8-bit cast: torch's cast back from E4M3 alone takes longer than all five.
"""

import torch
from torch import Tensor

from videoqat.errors import AttentionError

E2M1_MAX = 6.0
E4M3_MAX = 448.0

_EXPONENT_BITS = 0x7F800000
_SIGN_BIT = -(2**31)


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives) of each element.

    Args:
        x: fp32, any shape and strides; not changed.

    Returns:
        fp32 of x's shape. Ties go to the even code (0.25 -> 0, 0.75 -> 1, 2.5 -> 2, 3.5 -> 4, 5 -> 4), magnitudes above 6 give 6, the sign
        is kept (also of zero), NaN stays NaN.
    """
    return _restore_sign(round_e2m1_(_fp32_copy(x)), x)


def round_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 value (FN variant: largest 448, smallest normal 2^-6, smallest subnormal 2^-9) of each element.

    Args:
        x: fp32, any shape and strides; not changed.

    Returns:
        fp32 of x's shape. Ties go to the even code, magnitudes above 448 give 448 (inf too), the sign is kept (also of zero), NaN stays NaN.
    """
    return _restore_sign(round_e4m3_(_fp32_copy(x)), x)


def round_e2m1_(x: Tensor) -> Tensor:
    """`round_e2m1` in place, for an fp32 temporary of one's own. Faster in one point: what rounds to zero becomes +0."""
    return _round_(x, mantissa_bits=1, smallest_normal=1.0, largest_power_of_two=4.0, largest=E2M1_MAX)


def round_e4m3_(x: Tensor) -> Tensor:
    """`round_e4m3` in place, for an fp32 temporary of one's own. Faster in one point: what rounds to zero becomes +0."""
    return _round_(x, mantissa_bits=3, smallest_normal=2.0**-6, largest_power_of_two=256.0, largest=E4M3_MAX)


def _round_(x: Tensor, mantissa_bits: int, smallest_normal: float, largest_power_of_two: float, largest: float) -> Tensor:
    power_of_two = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp_(smallest_normal, largest_power_of_two)
    # 1.5 and not 1: then the sum stays within one binade for x of either sign. power_of_two * shift is exact, so fusing it changes nothing.
    shift = 1.5 * 2.0 ** (23 - mantissa_bits)
    return x.add_(power_of_two, alpha=shift).sub_(power_of_two, alpha=shift).clamp_(-largest, largest)


def _fp32_copy(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise AttentionError(f"rounding needs float32, got {x.dtype}: a second rounding on the way would break ties")
    return x.detach().clone()


def _restore_sign(rounded: Tensor, x: Tensor) -> Tensor:
    rounded.view(torch.int32).bitwise_or_(x.detach().view(torch.int32) & _SIGN_BIT)
    return rounded
