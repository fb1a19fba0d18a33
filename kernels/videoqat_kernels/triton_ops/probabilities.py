"""Quantising P where it is made: in the registers of the score tile.

A block of P runs along keys, and in the tile that a tensor core leaves behind, neighbouring keys of a row lie in four different threads.
Exchanging them costs more than all the rest of the quantiser, so the forward pass stores the rows of K and V in another order: with
`token_of_column`'s, the columns that one thread holds are exactly whole blocks. `by_thread` is that view of the tile, in which a block is
(axes 2 and 4) and a maximum over it stays within a thread. The blocks are the natural ones; only masks must ask for the token of a column.
"""

import triton
import triton.language as tl

from videoqat_kernels.triton_ops.rounding import INTERPRET, operand, reciprocal_e4m3, round_e2m1, round_e4m3


@triton.jit
def token_of_column(columns, GROUP: tl.constexpr):
    """The token that stands in row `columns` of a permuted operand: position 8c + 2q + e holds token GROUP * q + 2c + e (q < 4, e < 2)."""
    within = columns % (4 * GROUP)
    return columns - within + within % 8 // 2 * GROUP + within // 8 * 2 + within % 2


@triton.jit
def column_of_token(tokens, GROUP: tl.constexpr):
    """The inverse of `token_of_column`."""
    within = tokens % (4 * GROUP)
    return tokens - within + within % GROUP // 2 * 8 + within // GROUP * 2 + within % 2


@triton.jit
def by_thread(x, GROUP: tl.constexpr):
    """(M, N) in permuted order to (M, N / (4 GROUP), GROUP / 2, 4, 2): axes 2 and 4 run through a block of GROUP keys."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // (4 * GROUP), GROUP // 2, 4, 2])


@triton.jit
def block_max(x5):
    """Maximum over each block of `by_thread`: (M, N / (4 GROUP), 4)."""
    return tl.max(tl.max(x5, 4), 2)


@triton.jit
def p_scale(amax, FORMAT: tl.constexpr):
    """Scale of a block whose largest p is `amax`, and the reciprocal to multiply by (finite where the scale is 0: then all p' are 0 anyway)."""
    if FORMAT == "nvfp4":
        scale = round_e4m3(amax * 0.16666667163372039794921875)  # at most 2^11 / 6: never saturates
        return scale, reciprocal_e4m3(scale)
    else:
        exponent: tl.constexpr = 2 if FORMAT == "mxfp4" else 8
        bits = tl.maximum((amax.to(tl.int32, bitcast=True) & 0x7F800000) - (exponent << 23), 0)
        scale = tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)
        return scale, ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def p_codes(y, FORMAT: tl.constexpr):
    """y = p / scale >= 0 rounded to FORMAT's elements, in fp32, not yet saturated."""
    if FORMAT == "mxfp8":
        return round_e4m3(y)
    else:
        return round_e2m1(y)


@triton.jit
def p_operand(codes, scale, FORMAT: tl.constexpr):
    """Saturated codes times scale (broadcast) as a matrix operand; exact in bf16."""
    if INTERPRET:
        return tl.minimum(codes, 448.0 if FORMAT == "mxfp8" else 6.0) * scale
    codes, scale = tl.broadcast(codes.to(tl.bfloat16), scale.to(tl.bfloat16))
    # min(codes, largest) * scale - 0, two elements an instruction, which the compiler does not find by itself.
    head: tl.constexpr = "{ .reg .b32 c, largest, zero; mov.b32 largest, "
    tail: tl.constexpr = "; mov.b32 zero, 0x80008000; min.bf16x2 c, $1, largest; fma.rn.bf16x2 $0, c, $2, zero; }"
    largest: tl.constexpr = "0x43E043E0" if FORMAT == "mxfp8" else "0x40C040C0"
    return tl.inline_asm_elementwise(head + largest + tail, "=r,r,r", [codes, scale], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def p_without_blocks(p, FORMAT: tl.constexpr):
    """For formats without blocks: fp8 rounds each p >= 0 to E4M3 (saturating), bf16 is a plain cast."""
    if FORMAT == "fp8":
        return operand(tl.minimum(round_e4m3(p), 448.0))
    else:
        return operand(p)
