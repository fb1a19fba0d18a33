"""Block formats: small numbers that share one scale with their neighbours along an axis.

    a = max |x_i|  over the block      NVFP4:  s = E4M3(a * fp32(1/6)), blocks of 16 E2M1 elements
    r = 1 / s                          MXFP4:  s = 2^(floor(log2 a) - 2), blocks of 32 E2M1 elements
    c_i = round(x_i * r)               MXFP8:  s = 2^(floor(log2 a) - 8), blocks of 32 E4M3 elements
    x_i' = c_i * s

All arithmetic is fp32 and every step is rounded once, so the codes are the same wherever these four lines are computed: the definition is
`docs/numerics.md`, and this file is the oracle that the kernels are tested against. Blocks are counted from position 0 of the axis; a last,
shorter one behaves as if padded with zeros. Nothing here is differentiable: straight-through gradients are attention's business.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from videoqat.errors import AttentionError, ConfigError
from videoqat.formats.rounding import E2M1_MAX, E4M3_MAX, round_e2m1_, round_e4m3, round_e4m3_

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class BlockFormat:
    """A block format: `block_size` neighbours of type `element` ("e2m1" or "e4m3") under one scale of type `scale` ("e4m3" or "e8m0")."""

    name: str
    block_size: int
    element: str
    scale: str


FORMATS: dict[str, BlockFormat] = {
    "nvfp4": BlockFormat("nvfp4", 16, "e2m1", "e4m3"),
    "mxfp4": BlockFormat("mxfp4", 32, "e2m1", "e8m0"),
    "mxfp8": BlockFormat("mxfp8", 32, "e4m3", "e8m0"),
}
ELEMENTWISE_FORMATS = ("bf16", "fp8")


@dataclass(frozen=True)
class Quantized:
    """A quantised tensor, as codes and scales.

    Attributes:
        codes: uint8, (..., blocks * block_size), one code an element, the quantised axis moved last and padded with zeros to whole blocks.
            E2M1: sign << 3 | index into {0, 0.5, 1, 1.5, 2, 3, 4, 6}; a negative value that rounds to zero keeps its sign (code 8), but in an
            NVFP4 block whose scale is 0 every code is 0. E4M3: the bit pattern. In a NaN block the codes mean nothing.
        scales: uint8, (..., blocks): bit patterns of E4M3 (NVFP4; NaN is 0x7F) or E8M0 (MXFP4, MXFP8; NaN is 0xFF).
        format: key of `FORMATS`.
        axis: the quantised axis of the original tensor, counted from 0.
        length: that axis's length, without padding.
    """

    codes: Tensor
    scales: Tensor
    format: str
    axis: int
    length: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """c_i * s in the original layout. NVFP4 and MXFP4 are exact in bf16, too; in fp16 as long as its range allows."""
        spec = FORMATS[self.format]
        if spec.element == "e2m1":
            table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=self.codes.device)
            values = table[self.codes.int()]
        else:
            values = self.codes.view(torch.float8_e4m3fn).float()
        scale_type = torch.float8_e4m3fn if spec.scale == "e4m3" else torch.float8_e8m0fnu
        scales = self.scales.view(scale_type).float().unsqueeze(-1)
        x = (values.unflatten(-1, (-1, spec.block_size)) * scales).flatten(-2)
        return x[..., : self.length].movedim(-1, self.axis).to(dtype)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as stored: E2M1 codes two a byte (low nibble first), (..., blocks * block_size / 2); E4M3 codes as they are."""
        codes = pack_e2m1(self.codes) if FORMATS[self.format].element == "e2m1" else self.codes
        return codes, self.scales


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte along the last axis, the even position in the low nibble: uint8 (..., n) -> (..., ceil(n / 2))."""
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: Tensor, length: int) -> Tensor:
    """The inverse of `pack_e2m1`: uint8 (..., ceil(length / 2)) -> (..., length)."""
    if packed.shape[-1] != (length + 1) // 2:
        raise AttentionError(f"length={length} needs {(length + 1) // 2} packed bytes, got {packed.shape[-1]}")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :length]


def quantize(x: Tensor, format: str, axis: int = -1, scale_divisors: Sequence[float] = (6.0,)) -> Quantized:
    """Quantise `x` in blocks along `axis`. Arguments and errors as in `fake_quantize`, but `format` must be one of `FORMATS`."""
    spec = _block_format(format)
    axis = _checked_axis(x, axis)
    blocks, _, scales = _blocks_and_scales(x, spec, axis, scale_divisors)
    scaled = blocks * _reciprocal(scales)
    if spec.element == "e2m1":
        sign = torch.signbit(scaled).to(torch.uint8) << 3
        codes = _e2m1_index(round_e2m1_(scaled).abs_()).to(torch.uint8) | sign
    else:
        codes = round_e4m3(scaled).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill_((scales == 0) | scales.isnan(), 0).flatten(axis, axis + 1)
    scale_type, nan_code = (torch.float8_e4m3fn, 0x7F) if spec.scale == "e4m3" else (torch.float8_e8m0fnu, 0xFF)
    # NaN's sign is whatever the processor made it; the code is one and the same.
    scale_codes = scales.to(scale_type).view(torch.uint8).masked_fill_(scales.isnan(), nan_code).squeeze(axis + 1)
    return Quantized(codes.movedim(axis, -1).contiguous(), scale_codes.movedim(axis, -1).contiguous(), format, axis, x.shape[axis])


def fake_quantize(x: Tensor, format: str, axis: int = -1, scale_divisors: Sequence[float] = (6.0,)) -> Tensor:
    """The values that `x` has after quantising in blocks along `axis`: `quantize(...).dequantize()` without making the codes.

    Args:
        x: fp32, bf16, fp16 or fp64 of any shape and strides; not changed. All arithmetic is fp32 (fp64 is cast to it first).
        format: a key of `FORMATS`; or `fp8`, a plain saturating cast of each element to E4M3 without a scale; or `bf16`, x as it is.
        axis: the axis along which blocks run: the one that the matrix product sums over.
        scale_divisors: for NVFP4, the numbers c for which s = E4M3(a * fp32(1/c)) is tried; the block takes the s with the least sum of
            squared errors, the first of equals. The error is computed in fp32 with one rounding a step and no fused multiply-add: d_i = x_i -
            x_i', e_i = d_i * d_i, then ((e0 + e1) + (e2 + e3)) + ... as a balanced tree over the 16 elements. A candidate whose s is 0 or
            saturates takes part by the same rule. The other formats have one scale only and ignore it. ("search" in recipes: 6, 6.5, 5.6, 4.)

    Returns:
        fp32 (fp64 for fp64 input) of x's shape. A block that holds a NaN or an infinity is all NaN. The sign of zeros is not kept.

    Raises:
        ConfigError: an unknown format, or divisors that aren't positive numbers.
        AttentionError: x is not floating-point, or has no such axis.
    """
    if format == "bf16":
        return x
    axis = _checked_axis(x, axis)
    if format == "fp8":
        out = round_e4m3_(x.detach().to(torch.float32, copy=True))
    else:
        spec = _block_format(format, also_legal=ELEMENTWISE_FORMATS)
        blocks, _, scales = _blocks_and_scales(x, spec, axis, scale_divisors)
        out = _dequantised(blocks, scales, spec).flatten(axis, axis + 1).narrow(axis, 0, x.shape[axis])
    return out.double() if x.dtype == torch.float64 else out


def block_health(x: Tensor, format: str, axis: int = -1, scale_divisors: Sequence[float] = (6.0,)) -> tuple[int, int, int]:
    """How well the scales of `x` fit: (blocks, blocks flushed to zero, blocks clipped).

    Flushed: the scale is 0 although the block holds something else than zeros. Clipped: the largest magnitude is above 6 * 448, the most
    that NVFP4 can say. Scales that are powers of two do neither, and formats without blocks have none: (0, 0, 0).
    """
    if format in ELEMENTWISE_FORMATS:
        return 0, 0, 0
    spec = _block_format(format, also_legal=ELEMENTWISE_FORMATS)
    axis = _checked_axis(x, axis)
    _, largest, scales = _blocks_and_scales(x, spec, axis, scale_divisors)
    flushed = int(((scales == 0) & (largest > 0)).sum())
    clipped = int(((largest > E2M1_MAX * E4M3_MAX) & largest.isfinite()).sum()) if spec.scale == "e4m3" else 0
    return scales.numel(), flushed, clipped


def _block_format(format: str, also_legal: tuple[str, ...] = ()) -> BlockFormat:
    if format not in FORMATS:
        raise ConfigError(f"format={format!r} is not one of {', '.join(map(repr, (*FORMATS, *also_legal)))}")
    return FORMATS[format]


def _checked_axis(x: Tensor, axis: int) -> int:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise AttentionError(f"can't quantise {x.dtype}: float32, bfloat16, float16 and float64 are possible")
    if not -x.ndim <= axis < x.ndim:
        raise AttentionError(f"axis={axis} does not exist in shape {tuple(x.shape)}")
    return axis % x.ndim


def _blocks_and_scales(x: Tensor, spec: BlockFormat, axis: int, scale_divisors: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """x in fp32 with `axis` split into (blocks, block_size), a view where possible; max |x| and scale of each block, block_size kept as 1."""
    x = x.detach().float()
    missing = -x.shape[axis] % spec.block_size
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, missing))
    blocks = x.unflatten(axis, (x.shape[axis] // spec.block_size, spec.block_size))
    largest = _block_max(blocks, axis + 1)
    if spec.scale == "e8m0":
        return blocks, largest, _e8m0_scales(largest, largest_element_exponent=2 if spec.element == "e2m1" else 8)
    return blocks, largest, _searched_e4m3_scales(blocks, largest, spec, axis + 1, scale_divisors)


def _block_max(blocks: Tensor, dim: int) -> Tensor:
    """max |x| over `dim`, kept as 1. A NaN wins."""
    magnitude = blocks.abs()
    if magnitude.is_cpu and magnitude.numel() and dim == blocks.ndim - 1:
        # The same maximum as amax below, but on 16 contiguous numbers faster.
        return F.max_pool1d(magnitude.reshape(1, -1), blocks.shape[dim]).view(*blocks.shape[:-1], 1)
    return magnitude.amax(dim, keepdim=True)


def _e8m0_scales(largest: Tensor, largest_element_exponent: int) -> Tensor:
    """2^(floor(log2 a) - largest element's exponent), from 2^-127 (also where a = 0) to 2^127; NaN where a is not finite."""
    biased = ((largest.view(torch.int32) >> 23) - largest_element_exponent).clamp_(0, 254)
    biased.masked_fill_(~largest.isfinite(), 255)
    return biased.to(torch.uint8).view(torch.float8_e8m0fnu).float()


def _searched_e4m3_scales(blocks: Tensor, largest: Tensor, spec: BlockFormat, dim: int, divisors: Sequence[float]) -> Tensor:
    if not divisors or not all(2.0**-126 <= c <= 2.0**126 for c in divisors):  # beyond, fp32 has no 1/c
        raise ConfigError(f"scale_divisors={tuple(divisors)} must be one or more positive numbers, 2^-126 to 2^126")
    best, *others = (_e4m3_scales(largest, c) for c in divisors)
    if others:
        least = _squared_error(blocks, best, spec, dim)
        for scales in others:
            error = _squared_error(blocks, scales, spec, dim)
            better = error < least
            best = torch.where(better, scales, best)
            least = torch.where(better, error, least)
    return best


def _e4m3_scales(largest: Tensor, divisor: float) -> Tensor:
    scales = round_e4m3_(largest * torch.tensor(1.0 / divisor, dtype=torch.float32, device=largest.device))
    return scales.add_(largest - largest)  # + 0, or NaN where a is NaN or infinite


def _squared_error(blocks: Tensor, scales: Tensor, spec: BlockFormat, dim: int) -> Tensor:
    error = _dequantised(blocks, scales, spec).sub_(blocks)
    error.mul_(error)  # in a pass of its own, so that the square is rounded before it is added
    while error.shape[dim] > 1:
        even, odd = error.unflatten(dim, (-1, 2)).unbind(dim + 1)
        error = even + odd
    return error


def _dequantised(blocks: Tensor, scales: Tensor, spec: BlockFormat) -> Tensor:
    scaled = blocks * _reciprocal(scales)
    return (round_e2m1_(scaled) if spec.element == "e2m1" else round_e4m3_(scaled)).mul_(scales)


def _reciprocal(scales: Tensor) -> Tensor:
    return scales.reciprocal().nan_to_num_(nan=math.nan, posinf=0.0)


def _e2m1_index(magnitude: Tensor) -> Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 -> 0, 1, ..., 7: the doubled value, whose slope halves above 4 and again above 8."""
    doubled = magnitude * 2
    return doubled - (doubled - 4).clamp_(min=0) / 2 - (doubled - 8).clamp_(min=0) / 4
