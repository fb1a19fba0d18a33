"""Q, K, V (and later their saved codes) to the operands that the attention kernels multiply.

One pass over memory for each tensor: read it with whatever strides it has, quantise, write what the backward needs (packed codes and scales,
4.5 bits an element) and the values c * s as contiguous bf16, which holds them exactly. That copy lives as long as the call.

Layouts (N tokens, padded to Np rows; d channels, padded to Dp):
    operand  (B, H, Np, Dp) bf16, zeros in the padding. With `permute`, rows within each 4 * permute tokens are in the order that
             `token_of_column` describes, so that a thread of the score tile holds whole blocks of P.
    channel blocks (Q, K):  codes (B, H, N, d / 2),                  scales (B, H, N, ceil(d / block))
    token blocks (V):       codes (B, H, ceil(N / block) * block / 2, d), scales (B, H, ceil(N / block), d)
E4M3 elements (mxfp8) take one byte instead of half of one. The ablation `v_blocks: head_dim` gives V channel blocks.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from videoqat_kernels.triton_ops.probabilities import column_of_token
from videoqat_kernels.triton_ops.rounding import INTERPRET, reciprocal_e4m3, round_e2m1, round_e4m3

BLOCK_SIZES = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "bf16": 16, "fp8": 16}
BLOCK_FORMATS = ("nvfp4", "mxfp4", "mxfp8")
TILE_TOKENS = 32
ROW_PADDING = 128
OPERAND_DTYPE = torch.float32 if INTERPRET.value else torch.bfloat16


@triton.jit
def _round_element(y, E2M1: tl.constexpr):
    if E2M1:
        return tl.clamp(round_e2m1(y), -6.0, 6.0)
    else:
        return tl.clamp(round_e4m3(y), -448.0, 448.0)


@triton.jit
def _pair_sums(x):
    """Balanced tree over the last axis (16), each sum rounded."""
    for i in tl.static_range(4):
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 8 >> i, 2]))
        x = even + odd
    return tl.reshape(x, [x.shape[0], x.shape[1]])


@triton.jit
def _e4m3_scale_and_reciprocal(amax, inverse_divisor):
    scale = tl.minimum(round_e4m3(amax * inverse_divisor), 448.0)
    return scale, tl.where(scale == 0, 0.0, reciprocal_e4m3(scale))


@triton.jit
def _e8m0_value(biased):
    """2^(biased - 127), for 0 <= biased <= 254."""
    return tl.where(biased == 0, 0x00400000, biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3_bits(x):
    """Bit pattern of an E4M3 number held in fp32."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> 20) - 960
    small = (tl.abs(x) * 512.0).to(tl.int32)
    return tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _e4m3_value(bits):
    magnitude = bits & 0x7F
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, ((magnitude + 960) << 20).to(tl.float32, bitcast=True))
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(bits >= 128, -value, value)


@triton.jit
def _e2m1_bits(x, scaled):
    """4-bit code of the E2M1 value x; the sign is that of `scaled`, which x was rounded from."""
    magnitude = tl.abs(x)
    index = tl.where(magnitude < 1.0, (magnitude * 2.0).to(tl.int32), (magnitude.to(tl.int32, bitcast=True) >> 22) - 252)
    return index | ((scaled.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _e2m1_value(code):
    index = code & 7
    magnitude = tl.where(index < 2, index.to(tl.float32) * 0.5, ((index + 252) << 22).to(tl.float32, bitcast=True))
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def _quantize_kernel(
    X, OPERAND, CODES, SCALES, LENGTHS, MEAN,
    stride_b, stride_n, stride_h, N, NP, H, D, code_rows, scale_rows, scale_columns,
    DP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, ALONG_TOKENS: tl.constexpr,
    INVERSE_DIVISORS: tl.constexpr, PERMUTE: tl.constexpr, STORE_CODES: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, STORE_OPERAND: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    length = tl.load(LENGTHS + b)
    if ALONG_TOKENS:
        blocks: tl.constexpr = TILE // BLOCK
        lanes: tl.constexpr = DP
        tokens = tile * TILE + (tl.arange(0, blocks) * BLOCK)[:, None, None] + tl.arange(0, BLOCK)[None, None, :]
        channels = tl.arange(0, DP)[None, :, None]
    else:
        blocks: tl.constexpr = TILE
        lanes: tl.constexpr = DP // BLOCK
        tokens = tile * TILE + tl.arange(0, TILE)[:, None, None]
        channels = (tl.arange(0, DP // BLOCK) * BLOCK)[None, :, None] + tl.arange(0, BLOCK)[None, None, :]
    real = (tokens < length) & (channels < D)
    source = X + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + tokens.to(tl.int64) * stride_n + channels
    x = tl.load(source, mask=real, other=0.0).to(tl.float32)
    if SUBTRACT_MEAN > 0:
        # One mean for every SUBTRACT_MEAN tokens; all of them, if it is 1.
        mean_row = bh.to(tl.int64) * tl.cdiv(NP, SUBTRACT_MEAN) + tokens // SUBTRACT_MEAN
        if SUBTRACT_MEAN == 1:
            mean_row = bh.to(tl.int64) + tokens * 0
        x = tl.where(real, x - tl.load(MEAN + mean_row * D + channels, mask=real, other=0.0), 0.0)

    if FORMAT == "bf16":
        values = x
    elif FORMAT == "fp8":
        values = tl.where(x != x, x, _round_element(x, False))  # noqa: PLR0124 (NaN stays NaN)
    else:
        E2M1: tl.constexpr = FORMAT != "mxfp8"
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)  # as integers, where NaN is the largest of all
        bad = largest >= 0x7F800000
        amax = tl.where(bad, 0, largest).to(tl.float32, bitcast=True)
        if FORMAT == "nvfp4":
            scale, r = _e4m3_scale_and_reciprocal(amax, INVERSE_DIVISORS[0])
            if len(INVERSE_DIVISORS) > 1:
                error = _round_element(x * r[:, :, None], True) * scale[:, :, None] - x
                least = _pair_sums(error * error)
                for i in tl.static_range(1, len(INVERSE_DIVISORS)):
                    other_scale, other_r = _e4m3_scale_and_reciprocal(amax, INVERSE_DIVISORS[i])
                    error = _round_element(x * other_r[:, :, None], True) * other_scale[:, :, None] - x
                    other = _pair_sums(error * error)
                    better = other < least
                    least = tl.where(better, other, least)
                    scale = tl.where(better, other_scale, scale)
                    r = tl.where(better, other_r, r)
            scale_code = tl.where(bad, 0x7F, _e4m3_bits(scale))
        else:
            biased = tl.minimum(tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - (2 if E2M1 else 8), 0), 254)
            scale = _e8m0_value(biased)
            r = _e8m0_value(254 - biased)
            scale_code = tl.where(bad, 0xFF, biased)
        scaled = tl.where(bad[:, :, None], 0.0, x * r[:, :, None])
        rounded = _round_element(scaled, E2M1)
        values = rounded * tl.where(bad, float("nan"), scale)[:, :, None]
        if STORE_CODES:
            if E2M1:
                codes = tl.where((scale == 0)[:, :, None] | bad[:, :, None], 0, _e2m1_bits(rounded, scaled))
                even, odd = tl.split(tl.reshape(codes, [blocks, lanes, BLOCK // 2, 2]))
                stored = even | (odd << 4)
                per_byte: tl.constexpr = 2
            else:
                stored = _e4m3_bits(rounded) | ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80)
                per_byte: tl.constexpr = 1
            width: tl.constexpr = BLOCK // per_byte
            place = tl.arange(0, width)[None, None, :]
            block = tl.arange(0, blocks)[:, None, None] + tile * blocks
            lane = tl.arange(0, lanes)[None, :, None]
            if ALONG_TOKENS:
                row = block * width + place
                column = lane
                columns = D
                inside = (row < code_rows) & (lane < D)
            else:
                row = block
                column = lane * width + place
                columns = scale_columns * width
                inside = (row < code_rows) & (lane < scale_columns)
            at = (bh.to(tl.int64) * code_rows + row) * columns + column
            tl.store(CODES + at, stored.to(tl.uint8), mask=inside)
            row2 = tl.arange(0, blocks)[:, None] + tile * blocks
            column2 = tl.arange(0, lanes)[None, :]
            at2 = (bh.to(tl.int64) * scale_rows + row2) * scale_columns + column2
            tl.store(SCALES + at2, scale_code.to(tl.uint8), mask=(row2 < scale_rows) & (column2 < scale_columns))
    if STORE_OPERAND:
        row = tokens
        if PERMUTE > 0:
            row = column_of_token(tokens, PERMUTE)
        tl.store(OPERAND + (bh.to(tl.int64) * NP + row) * DP + channels, values.to(OPERAND.dtype.element_ty))


@triton.jit
def _dequantize_kernel(
    CODES, SCALES, OPERAND, N, NP, D, code_rows, scale_rows, scale_columns,
    DP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, ALONG_TOKENS: tl.constexpr, PERMUTE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    bh = tl.program_id(1)
    per_byte: tl.constexpr = 1 if FORMAT == "mxfp8" else 2
    width: tl.constexpr = BLOCK // per_byte
    if ALONG_TOKENS:
        blocks: tl.constexpr = TILE // BLOCK
        lanes: tl.constexpr = DP
    else:
        blocks: tl.constexpr = TILE
        lanes: tl.constexpr = DP // BLOCK
    block = tile * blocks + tl.arange(0, blocks)[:, None, None]
    lane = tl.arange(0, lanes)[None, :, None]
    place = tl.arange(0, width)[None, None, :]
    if ALONG_TOKENS:
        row = block * width + place
        at = (bh.to(tl.int64) * code_rows + row) * D + lane
        inside = (row < code_rows) & (lane < D)
    else:
        row = block
        at = (bh.to(tl.int64) * code_rows + row) * (scale_columns * width) + lane * width + place
        inside = (row < code_rows) & (lane < scale_columns)
    stored = tl.load(CODES + at, mask=inside, other=0).to(tl.int32)
    row2 = tile * blocks + tl.arange(0, blocks)[:, None]
    column2 = tl.arange(0, lanes)[None, :]
    at2 = (bh.to(tl.int64) * scale_rows + row2) * scale_columns + column2
    scale_code = tl.load(SCALES + at2, mask=(row2 < scale_rows) & (column2 < scale_columns), other=0).to(tl.int32)
    if FORMAT == "nvfp4":
        scale = _e4m3_value(scale_code)
    else:
        scale = tl.where(scale_code == 0xFF, float("nan"), _e8m0_value(tl.minimum(scale_code, 254)))
    if per_byte == 2:
        pair = tl.join(_e2m1_value(stored & 15), _e2m1_value(stored >> 4))
        values = tl.reshape(pair, [blocks, lanes, BLOCK])
    else:
        values = _e4m3_value(stored)
    values = values * scale[:, :, None]
    place16 = tl.arange(0, BLOCK)[None, None, :]
    if ALONG_TOKENS:
        tokens = block * BLOCK + place16
        channels = lane
    else:
        tokens = block
        channels = lane * BLOCK + place16
    if PERMUTE > 0:
        tokens = column_of_token(tokens, PERMUTE)
    tl.store(OPERAND + (bh.to(tl.int64) * NP + tokens) * DP + channels, values.to(OPERAND.dtype.element_ty))


def padded_tokens(n: int) -> int:
    """Rows of an operand for n tokens."""
    return -(-n // ROW_PADDING) * ROW_PADDING


def padded_channels(d: int) -> int:
    """Columns of an operand for d channels: the next power of two, at least 16."""
    return max(16, triton.next_power_of_2(d))


def quantize(
    x_BNHd: Tensor,
    format: str,
    *,
    along_tokens: bool,
    lengths_B: Tensor,
    divisors: Sequence[float] = (6.0,),
    permute: int = 0,
    store_codes: bool = False,
    mean: Tensor | None = None,
    mean_tokens: int = 0,
    store_operand: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    """The operand of x (None without `store_operand`) and, with `store_codes`, its [codes, scales] (layouts at the top of this file), in one pass.

    Args:
        x_BNHd: (B, N, H, d), any strides as long as channels lie side by side. Not changed.
        format: nvfp4, mxfp4, mxfp8; fp8 (a plain cast) or bf16 (nothing), which have none.
        along_tokens: blocks run along tokens (V), not channels (Q, K).
        lengths_B: (B,) int32; tokens from there on count as zeros.
        divisors: the scale divisors c to try (NVFP4).
        permute: 0, or the block size of P whose order of rows is wanted.
        mean: fp32 (B, H, M, d), subtracted first: M = 1 mean for all tokens (mean_tokens = 1), or one for every `mean_tokens` > 1.
    """
    B, N, H, d = x_BNHd.shape
    if x_BNHd.stride(3) != 1:
        raise ValueError(f"channels must lie side by side, got strides {x_BNHd.stride()}")
    block, Np, Dp = BLOCK_SIZES[format], padded_tokens(N), padded_channels(d)
    block_padded_d = max(Dp, block)
    operand = torch.empty(B, H, Np, block_padded_d, device=x_BNHd.device, dtype=OPERAND_DTYPE) if store_operand else None
    stored: list[Tensor] = []
    codes = scales = None
    code_rows = scale_rows = scale_columns = 0
    store_codes = store_codes and format in BLOCK_FORMATS
    if store_codes:
        codes, scales = code_buffers(x_BNHd, format, along_tokens)
        code_rows, scale_rows, scale_columns = codes.shape[2], scales.shape[2], scales.shape[3]
        stored = [codes, scales]
    _quantize_kernel[(Np // TILE_TOKENS, B * H)](
        x_BNHd, operand, codes, scales, lengths_B, mean,
        x_BNHd.stride(0), x_BNHd.stride(1), x_BNHd.stride(2), N, Np, H, d, code_rows, scale_rows, scale_columns,
        DP=block_padded_d, TILE=TILE_TOKENS, BLOCK=block, FORMAT=format, ALONG_TOKENS=along_tokens, INVERSE_DIVISORS=tuple(1.0 / c for c in divisors),
        PERMUTE=permute, STORE_CODES=store_codes, SUBTRACT_MEAN=0 if mean is None else mean_tokens, STORE_OPERAND=store_operand,
        num_warps=2 if along_tokens else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return operand, stored


def dequantize(codes: Tensor, scales: Tensor, format: str, *, along_tokens: bool, tokens: int, channels: int, permute: int = 0) -> Tensor:
    """The operand of stored codes and scales, as `quantize` made it."""
    B, H = codes.shape[:2]
    Np, Dp = padded_tokens(tokens), max(padded_channels(channels), BLOCK_SIZES[format])
    operand = torch.empty(B, H, Np, Dp, device=codes.device, dtype=OPERAND_DTYPE)
    _dequantize_kernel[(Np // TILE_TOKENS, B * H)](
        codes, scales, operand, tokens, Np, channels, codes.shape[2], scales.shape[2], scales.shape[3],
        DP=Dp, TILE=TILE_TOKENS, BLOCK=BLOCK_SIZES[format], FORMAT=format, ALONG_TOKENS=along_tokens, PERMUTE=permute,
        num_warps=2 if along_tokens else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return operand


def code_buffers(x_BNHd: Tensor, format: str, along_tokens: bool) -> list[Tensor]:
    """[codes, scales] for x, uninitialised."""
    B, N, H, d = x_BNHd.shape
    block, per_byte = BLOCK_SIZES[format], 1 if format == "mxfp8" else 2
    if along_tokens:
        blocks = -(-N // block)
        shapes = (B, H, blocks * block // per_byte, d), (B, H, blocks, d)
    else:
        blocks = -(-d // block)
        shapes = (B, H, N, blocks * block // per_byte), (B, H, N, blocks)
    return [torch.empty(shape, dtype=torch.uint8, device=x_BNHd.device) for shape in shapes]
