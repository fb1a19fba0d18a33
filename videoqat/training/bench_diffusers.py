"""Plain diffusers, timed: the transformer as diffusers has it, in bf16, gradient checkpointing on, torch's own attention, no optimiser.

It is what `bench training` holds its own steps against. Whatever diffusers does with more memory or time (an optimiser, fp32 master weights) is left
out, so the comparison is in its favour.
"""

import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from videoqat.config import BenchTrainingConfig, parse_bucket
from videoqat.models.spec import family_of


def measure_in_a_process(folder: Path, config: BenchTrainingConfig, device: str) -> dict[str, Any]:
    """`measure` in a process of its own, which leaves no memory taken on the device."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (folder, config, device))


def measure(folder: Path, config: BenchTrainingConfig, device: str) -> dict[str, Any]:
    """Forward and backward of a mean squared error, `config.batch_size` samples of `config.size`.

    Returns:
        `step_time` (s, median), `memory_bytes` (the most; null on a CPU), `attention` (which of torch's backends were allowed), `steps_timed`.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    family = family_of(folder)
    geometry = family.geometry(folder)
    transformer = family.load_transformer(folder, "transformer", dtype=torch.bfloat16).to(device).train()
    transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch_size, *geometry.latent_shape(*parse_bucket("size", config.size)))
    x_BCFHW, target_BCFHW = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    text_tokens = family.text_tokens(folder)
    shapes = family.condition_shapes(folder, parse_bucket("size", config.size), text_tokens)
    conditions = [{part: torch.randn(size, generator=generator) for part, size in shapes.items()} for _ in range(config.batch_size)]
    condition = {part: tensor.to(device) for part, tensor in family.batch_conditions(conditions, text_tokens).items()}
    t_B = torch.full((config.batch_size,), 0.5, device=device)
    on_gpu = device.startswith("cuda")
    backends = [SDPBackend.CUDNN_ATTENTION] if on_gpu else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def synchronised() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    with sdpa_kernel(backends):
        for _ in range(config.steps):
            started = synchronised()
            prediction_BCFHW = family.forward(transformer, x_BCFHW, t_B, condition)
            (prediction_BCFHW.float() - target_BCFHW.float()).square().mean().backward()
            times.append(synchronised() - started)
            transformer.zero_grad()
    counted = times[config.warmup :]
    return {
        "step_time": statistics.median(counted),
        "steps_timed": len(counted),
        "memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "attention": [backend.name for backend in backends],
    }
