"""The Triton quantisers against the torch oracle, bit by bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from videoqat_kernels.triton_ops.probabilities import block_max, by_thread, p_codes, p_operand, p_scale
from videoqat_kernels.triton_ops.quantize import OPERAND_DTYPE, dequantize, quantize

from videoqat.attention.reference import quantise_p
from videoqat.formats import quantize as oracle
from videoqat.recipes import SEARCH_DIVISORS, AttentionRecipe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def token_order(rows: int, group: int) -> torch.Tensor:
    """The token in each row of a permuted operand, written down as the thread layout says it: 8c + 2q + e holds group * q + 2c + e."""
    if group == 0:
        return torch.arange(rows)
    order = torch.empty(4 * group, dtype=torch.long)
    for c in range(group // 2):
        for q in range(4):
            for e in range(2):
                order[8 * c + 2 * q + e] = group * q + 2 * c + e
    return torch.cat([order + start for start in range(0, rows, 4 * group)])


def difficult(batch, tokens, heads, channels, dtype=torch.float32):
    """Magnitudes from 2^-14 to 2^9, zeros, subnormal scales, ties, NaN and infinities."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(batch, tokens, heads, channels, generator=generator)
    x *= torch.exp2(torch.randint(-14, 10, (batch, tokens, heads, 1), generator=generator).float())
    x[0, 1 % tokens] = 0
    x[0, 2 % tokens, 0] = -1e-9
    x[0, 4 % tokens, 0, :8] = torch.tensor([6, 0.25, 0.75, 1.25, -2.5, 3.5, 5, -0.0])
    if tokens > 32:
        x[0, 7, 0, 2], x[0, 20, 0, 3], x[-1, -1, -1, -1] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype).to(DEVICE)


def same(a, b):
    return torch.equal(torch.nan_to_num(a.float(), nan=12345.0), torch.nan_to_num(b.float(), nan=12345.0))


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize(
    ("format", "divisors", "permute", "tokens", "channels", "dtype"),
    [
        ("nvfp4", (6.0,), 16, 77, 64, torch.bfloat16),
        ("nvfp4", (6.0,), 0, 1, 16, torch.float32),
        ("nvfp4", SEARCH_DIVISORS, 16, 130, 96, torch.float32),
        ("nvfp4", (4.0, 6.0), 16, 40, 80, torch.float16),
        ("mxfp4", (6.0,), 32, 70, 64, torch.float32),
        ("mxfp4", (6.0,), 0, 33, 80, torch.bfloat16),
        ("mxfp8", (6.0,), 32, 50, 48, torch.float32),
    ],
)
def test_codes_are_the_oracles(format, divisors, permute, tokens, channels, dtype, along_tokens):
    x = difficult(2, tokens, 2, channels, dtype)
    before = x.clone()
    lengths = torch.full((2,), tokens, dtype=torch.int32, device=DEVICE)
    operand, (codes, scales) = quantize(x, format, along_tokens=along_tokens, lengths_B=lengths, divisors=divisors, permute=permute, store_codes=True)
    assert same(x, before)

    expected = oracle(x.transpose(1, 2), format, axis=2 if along_tokens else 3, scale_divisors=divisors)
    expected_codes, expected_scales = expected.packed()
    if along_tokens:
        expected_codes, expected_scales = expected_codes.transpose(2, 3), expected_scales.transpose(2, 3)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)

    values = torch.zeros_like(operand, dtype=torch.float32)
    values[:, :, :tokens, :channels] = expected.dequantize()
    values = values[:, :, token_order(values.shape[2], permute).to(DEVICE)]
    assert operand.dtype == OPERAND_DTYPE
    real = torch.isin(token_order(values.shape[2], permute), torch.arange(tokens)).to(DEVICE)  # a NaN block may run into the padding
    assert same(operand[:, :, real, :channels], values[:, :, real, :channels])
    assert not operand[:, :, ~real].nan_to_num(nan=0.0).any()
    again = dequantize(codes, scales, format, along_tokens=along_tokens, tokens=tokens, channels=channels, permute=permute)
    assert same(again, operand)


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "bf16"])
def test_strides_and_lengths(format):
    whole = difficult(3, 50, 4, 128)
    x = whole[1:, 5:49:2, ::2, 16:80]
    lengths = torch.tensor([9, 0], dtype=torch.int32, device=DEVICE)
    for along_tokens in (False, True):
        operand, _ = quantize(x, format, along_tokens=along_tokens, lengths_B=lengths)
        cleared = torch.where(torch.arange(22, device=DEVICE)[:, None, None] < lengths[:, None, None, None], x, 0.0).contiguous()
        full = torch.full((2,), 22, dtype=torch.int32, device=DEVICE)
        assert same(operand, quantize(cleared, format, along_tokens=along_tokens, lengths_B=full)[0])


def test_means_are_subtracted():
    x = torch.randn(1, 300, 2, 32, device=DEVICE)
    lengths = torch.full((1,), 300, dtype=torch.int32, device=DEVICE)
    mean = torch.randn(1, 2, 3, 32, device=DEVICE)
    operand, _ = quantize(x, "nvfp4", along_tokens=False, lengths_B=lengths, mean=mean, mean_tokens=128)
    smoothed = x - mean.transpose(1, 2).repeat_interleave(128, dim=1)[:, :300]
    assert same(operand, quantize(smoothed, "nvfp4", along_tokens=False, lengths_B=lengths)[0])
    operand, _ = quantize(x, "nvfp4", along_tokens=False, lengths_B=lengths, mean=mean[:, :, :1].contiguous(), mean_tokens=1)
    assert same(operand, quantize(x - mean[:, :, 0], "nvfp4", along_tokens=False, lengths_B=lengths)[0])


def _fp32(exact: Fraction) -> np.float32:
    near = np.float32(float(exact))
    return min(np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf)), key=lambda x: abs(Fraction(float(x)) - exact))


def test_one_newton_step_makes_the_reciprocal_exact():
    """Whatever a GPU's approximate reciprocal gives for an E4M3 number, as long as it is within 5 units in the last place."""
    for scale in torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist():
        exact = _fp32(1 / Fraction(scale))
        start = exact
        for _ in range(5):
            start = np.nextafter(start, np.float32(0))
        for _ in range(11):
            rest = _fp32(1 - Fraction(scale) * Fraction(float(start)))
            assert _fp32(Fraction(float(start)) + Fraction(float(start)) * Fraction(float(rest))) == exact
            start = np.nextafter(start, np.float32(np.inf))


@triton.jit
def _p_kernel(P, OUT, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    p5 = by_thread(tl.load(P + at), GROUP)
    scale, r = p_scale(block_max(p5), FORMAT)
    codes = p_codes(p5 * r[:, :, None, :, None], FORMAT)
    tl.store(OUT + at, tl.reshape(p_operand(codes, scale[:, :, None, :, None], FORMAT), [M, N]).to(tl.float32))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_codes_of_p_are_the_oracles(format):
    """Given the same fp32 p: over the whole range down to scales that are subnormal or zero, and every tie."""
    group = 16 if format == "nvfp4" else 32
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(256, 128, generator=generator) * torch.exp2(torch.randint(-20, 12, (256, 1), generator=generator).float())
    p *= torch.exp2(torch.randint(-6, 1, (256, 128), generator=generator).float())
    p[0] = 0
    grid = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, 8, 9, 0.5, 3, 4, 0, 2])
    p[1:40] = (grid.repeat(8) * torch.exp2(torch.arange(-20, 19).float())[:, None]).clamp(max=2048)
    expected = quantise_p(p.T.unsqueeze(0).clone(), AttentionRecipe("p", pv=format), torch.empty(1, 128, 256)).squeeze(0).T
    order = token_order(128, group)
    out = torch.empty(256, 128, device=DEVICE)
    _p_kernel[(1,)](p[:, order].contiguous().to(DEVICE), out, 256, 128, group, format)
    assert torch.equal(out.cpu(), expected[:, order])
