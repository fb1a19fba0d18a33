"""Times a recipe's attention beside SDPA, in turns, in one process."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from videoqat.attention.backends import record_receipts
from videoqat.attention.functional import attention
from videoqat.config import BenchAttentionConfig
from videoqat.provenance import provenance
from videoqat.recipes import get_recipe


def bench_attention(config: BenchAttentionConfig) -> dict[str, Any]:
    """Median milliseconds of the recipe's kernel and of SDPA (CPU: fp32 unless asked; CUDA: bf16, cuDNN and flash), and their ratios.

    Returns:
        recipe, shape, dtype, backward; milliseconds {contender: median}; ratio {SDPA's name: recipe's time / its time}; unavailable {contender:
        why}; receipt of what ran; provenance.

    Raises:
        AttentionError: shape, dtype or kernel that attention can't serve.
    """
    device = config.runtime.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    default = "float32" if device == "cpu" else "bfloat16"
    dtype = getattr(torch, default if config.runtime.dtype == "auto" else config.runtime.dtype)
    recipe = get_recipe(config.recipe)
    shape = (config.batch, config.num_tokens, config.num_heads, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(config.backward)

    def quantised() -> Tensor:
        out = attention(q, k, v, recipe, kernel=config.runtime.kernel)
        assert isinstance(out, Tensor)
        return out

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    def sdpa_by(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa()

        return run

    contenders: dict[str, Callable[[], Tensor]] = {"sdpa": sdpa}
    if device != "cpu":
        contenders = {"sdpa_cudnn": sdpa_by(SDPBackend.CUDNN_ATTENTION), "sdpa_flash": sdpa_by(SDPBackend.FLASH_ATTENTION)}

    def step(run: Callable[[], Tensor]) -> None:
        out = run()
        if config.backward:
            torch.autograd.grad(out, (q, k, v), grad_out)

    unavailable = {}
    for name, run in list(contenders.items()):
        try:
            step(run)  # warms up, too
        except RuntimeError as error:  # what torch raises where a backend can't serve this shape or GPU
            unavailable[name] = str(error).splitlines()[0]
            del contenders[name]
    with record_receipts() as receipts:
        step(quantised)
    contenders = {"recipe": quantised, **contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(config.repeats):
        for name, run in contenders.items():
            times[name].append(_milliseconds(lambda run=run: step(run), device))  # type: ignore[misc]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "recipe": recipe.name,
        "shape": {"batch": shape[0], "num_tokens": shape[1], "num_heads": shape[2], "head_dim": shape[3]},
        "dtype": str(dtype).removeprefix("torch."),
        "backward": config.backward,
        "repeats": config.repeats,
        "milliseconds": medians,
        "ratio": {name: medians["recipe"] / value for name, value in medians.items() if name != "recipe"},
        "unavailable": unavailable,
        "receipt": receipts[0].to_dict(),
        "provenance": provenance(device),
    }


def _milliseconds(run: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
