"""Small calls of the CUDA kernels, for compute-sanitizer and for a quick look: python cuda_small.py. Imports torch and the kernels alone."""

from types import SimpleNamespace

import torch
from videoqat_kernels.cuda.attention import forward
from videoqat_kernels.cuda.library import LibraryError, load


def built_product() -> str:
    """native where this GPU has FP4 tensor cores, else emulated."""
    product = "native" if torch.cuda.get_device_capability() in ((12, 0), (12, 1)) else "emulated"
    load(product)
    return product


def recipe(**changes) -> SimpleNamespace:
    plain = {"p_gain_log2": 11, "scale_divisors": (6.0,), "normalizer": "exact", "smooth_q": False, "smooth_k": False}
    return SimpleNamespace(**{**plain, **changes})


def main() -> None:
    try:
        product = built_product()
    except LibraryError as error:
        raise SystemExit(str(error)) from error
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to("cuda", dtype)

    for d in (64, 128):
        for causal in (False, True):
            q, k, v = normal(2, 150, 4, d), normal(2, 300, 2, d), normal(2, 300, 2, d)
            kv_len = torch.tensor([300, 77], device="cuda")
            result = forward(product, q, k, v, kv_len, recipe(scale_divisors=(6.0, 4.0)), 0.1, causal)
            assert result.out.isfinite().all()
    q, k, v = (normal(1, n, 1, 64, dtype=torch.float16) for n in (5, 1, 1))
    out = forward(product, q, k, v, None, recipe(normalizer="quantised", p_gain_log2=0), 0.1, False).out
    assert (out - v).abs().max() < 0.5
    torch.cuda.synchronize()
    print(f"{product}: done")


if __name__ == "__main__":
    main()
