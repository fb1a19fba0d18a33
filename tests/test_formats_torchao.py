"""The same codes and scales as torchao's, on the domain where both define the same thing.

Where torchao 0.18 defines otherwise, and why we don't follow:
* NVFP4's smallest scale is 2^-6 there (so a block below 6 * 2^-6 loses bits); ours goes down to 2^-9, as the hardware's E4M3 does.
* NVFP4's scale is a / 6 there, a * fp32(1/6) here (as kernels compute it): the two can differ where a / 6 is exactly between two scales.
* Infinity there gives a saturated NVFP4 scale, or an MX scale of 2^126, and a finite block; here NaN. (A NaN gives NaN in both, for MX.)
* MX elements are divided by 2^-126 there where the stored scale is 2^-127 (to spare compilers subnormal numbers); here by what is stored.
"""

import pytest
import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from videoqat.formats import quantize


def values(kind: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 128, generator=generator) * 2.0 ** torch.linspace(-6, 9, 256)[:, None]
    if kind == "coarse":  # ties are common
        x = (torch.randn(256, 128, generator=generator) * 8).round() / 4
        x[0] = 0
        x[1, ::2] = -0.0
    return x.bfloat16().float() if kind == "bf16" else x


@pytest.mark.parametrize("kind", ["fp32", "bf16", "coarse"])
def test_nvfp4(kind):
    x = values(kind)
    packed, scales = quantize(x, "nvfp4").packed()
    their_scales, their_packed = nvfp4_quantize(x)
    largest = x.view(256, 8, 16).abs().amax(-1)
    ours, theirs = ((largest * torch.tensor(1 / 6)), largest / 6)
    same = (ours.clamp(max=448).to(torch.float8_e4m3fn).float() == theirs.clamp(max=448).to(torch.float8_e4m3fn).float()) & (largest >= 6 * 2.0**-6)
    assert same.float().mean() > 0.85, "all but the smallest blocks belong to the common domain"
    assert torch.equal(scales[same], their_scales.view(torch.uint8).view(256, 8)[same])
    assert torch.equal(packed.view(256, 8, 8)[same], their_packed.view(256, 8, 8)[same])


@pytest.mark.parametrize("kind", ["fp32", "bf16", "coarse"])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_mx(name, kind, exponent):
    x = values(kind) * 2.0**exponent
    x[3, 40] = float("nan")
    element = torch.float4_e2m1fn_x2 if name == "mxfp4" else torch.float8_e4m3fn
    their_scales, their_codes = to_mx(x, element, 32, ScaleCalculationMode.FLOOR)
    codes, scales = quantize(x, name).packed()
    assert torch.equal(scales, their_scales.view(torch.uint8))
    assert (scales > 0).any()
    number = (scales != 0xFF)[..., None]
    shape = (256, 4, -1)
    assert torch.equal(codes.view(shape) * number, their_codes.view(torch.uint8).view(shape) * number)
    assert scales[3, 1] == 0xFF
