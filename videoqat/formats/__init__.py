"""What a number looks like: NVFP4, MXFP4, MXFP8. Pure torch, and the oracle for every kernel; defined in `docs/numerics.md`."""

from videoqat.formats.block import FORMATS, BlockFormat, Quantized, block_health, fake_quantize, pack_e2m1, quantize, unpack_e2m1
from videoqat.formats.rounding import round_e2m1, round_e4m3

__all__ = [
    "FORMATS",
    "BlockFormat",
    "Quantized",
    "block_health",
    "fake_quantize",
    "pack_e2m1",
    "quantize",
    "round_e2m1",
    "round_e4m3",
    "unpack_e2m1",
]
