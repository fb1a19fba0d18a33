"""Exact rounding to 4 and 8 bits in plain fp32 arithmetic.

The same instructions on every GPU and in Triton's interpreter (whose own conversions to small types are wrong), hence the same codes.
Rounding to a binary grid is done by adding a number so large that its last bit is the grid's quantum, and taking it away again: the
addition rounds to nearest, ties to even, in hardware. `tl.fma` is spelt out, and no product feeds a plain addition, so that the compiler's
contraction of a*b+c can't change a bit.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

# Triton's interpreter multiplies bf16 bit patterns in tl.dot and truncates instead of rounding; kernels branch on this where it matters.
INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _exponent_part(x, smallest: tl.constexpr):
    """2^floor(log2 |x|), at least `smallest` (a power of two)."""
    return tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), smallest)


@triton.jit
def round_e2m1(y):
    """fp32 of either sign to the nearest E2M1 value, ties to even. Whether it saturates depends on the hardware: callers clamp to 6."""
    if not INTERPRET and cuda_capability_geq(10, 0):
        # Two elements an instruction, there and back; the same codes (Blackwell: sm_100a, sm_120a and their kin).
        return tl.inline_asm_elementwise(
            "{ .reg .b8 codes; .reg .b32 pair; .reg .b16 low, high; cvt.rn.satfinite.e2m1x2.f32 codes, $3, $2; "
            "cvt.rn.f16x2.e2m1x2 pair, codes; mov.b32 {low, high}, pair; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,f,f", [y], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    power = _exponent_part(y, 1.0)
    return tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, y))  # 1.5 * 2^22: quantum 2^(e-1)


@triton.jit
def round_e4m3(x):
    """fp32 to the nearest E4M3 value, ties to even, *not* saturated."""
    power = _exponent_part(x, 0.015625)
    return tl.fma(power, -1572864.0, tl.fma(power, 1572864.0, x))  # 1.5 * 2^20: quantum 2^(e-3)


@triton.jit
def reciprocal_e4m3(s):
    """1/s rounded to nearest, for an E4M3 number s > 0 (a finite number for s = 0).

    For these 126 numbers one Newton step after any approximation within 2 units in the last place gives the correctly rounded quotient
    (tests/test_triton_quantize.py tries them all), which is cheaper than a division.
    """
    s = tl.maximum(s, 0.001953125)
    if INTERPRET:
        return tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [s], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(r, tl.fma(-s, r, 1.0), r)


@triton.jit
def operand(x):
    """Cast to what tl.dot multiplies: bf16, or fp32 in the interpreter."""
    if INTERPRET:
        return x.to(tl.float32)
    return x.to(tl.bfloat16)
