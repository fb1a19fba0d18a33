"""Four optimiser steps on a tiny Wan, in any engine and layout, with a save after the second; and the same by nothing but torch."""

import gc
from pathlib import Path
from typing import Any

import torch
from helpers.engines import accumulate, loss_of, tiny_job
from torch import Tensor

from videoqat.config import ParallelConfig
from videoqat.models.install import install
from videoqat.models.spec import family_of
from videoqat.parallel.mesh import Mesh, open_mesh
from videoqat.training import state
from videoqat.training.engines import make_engine

RATES = [1e-2, 5e-3, 2e-3, 1e-2]
# eps so large that a gradient of rounding errors alone moves nothing; clipping at less than every gradient's norm.
SETTINGS = {"train__batch_size": 2, "optimizer__eps": 1e-3, "optimizer__clip_norm": 0.5, "optimizer__weight_decay": 0.1, "optimizer__ema_decay": 0.7}
Found = tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]  # loss and norm of each step, last weights, last average


def plain_run(folder: Path) -> Found:
    """All by plain torch, four samples a step."""
    family = family_of(folder)
    transformer = family.load_transformer(folder, "transformer", dtype=torch.float32).train()
    install(transformer, "attn_qat")
    optimizer = torch.optim.AdamW(transformer.parameters(), betas=(0.9, 0.999), eps=1e-3, weight_decay=0.1)
    average = {name: p.detach().clone() for name, p in transformer.named_parameters()}
    rows = []
    for decay, rate in zip((0.1, 2 / 11, 0.25, 4 / 13), RATES, strict=True):
        optimizer.zero_grad()
        loss = loss_of(family, transformer, folder, [0, 1, 2, 3]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(transformer.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for name, parameter in transformer.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * parameter.detach()
        rows.append((loss.item(), norm.item()))
    return rows, {name: p.detach() for name, p in transformer.named_parameters()}, average


def steps(engine: Any, job: Any, mesh: Mesh, first: int, rates: list[float]) -> list[tuple[float, float]]:
    rows = []
    for step, rate in enumerate(rates, first):
        loss = accumulate(engine, job, mesh, 4)
        norm = engine.gradient_norm()
        engine.update(rate, norm, step)
        rows.append((loss, norm))
    return rows


def engine_run(
    folder: Path, layout: tuple[int, int, int], out: Path | None = None, start: Path | None = None, stage: int = 0, **changes: Any
) -> Found:
    """On one rank: two steps, saved to `out`, then two steps on; or, from checkpoint `start`, only these. `stage`: of ZeRO, 0 for FSDP."""
    replicate, shard, sp = layout
    parallel = ParallelConfig(dp_replicate=replicate, dp_shard=shard, sp=sp)
    if stage:
        parallel.engine, parallel.zero_stage = "deepspeed", stage
    with open_mesh(parallel, torch.device("cpu")) as mesh:
        return run_in(mesh, folder, parallel, out, start, **changes)


def run_in(mesh: Mesh, folder: Path, parallel: ParallelConfig, out: Path | None, start: Path | None, **changes: Any) -> Found:
    """`engine_run` in a mesh that is there already."""
    job = tiny_job(folder, **SETTINGS | {"parallel": parallel} | changes)
    engine: Any = make_engine(job, mesh)
    rows = []
    if start is not None:
        engine.restore(start)
    else:
        rows += steps(engine, job, mesh, 1, RATES[:2])
    if out is not None:
        state.save(out, 2, engine.tensors(), {"step": 2}, keep_last=1, group=mesh.cpu_group)
    rows += steps(engine, job, mesh, 3, RATES[2:])
    tensors = engine.tensors()
    del engine
    gc.collect()
    weights, average = ({name: x.full_tensor() for name, x in tensors[kind].items()} for kind in ("model", "ema"))
    return rows, weights, average


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm() + 1e-7, name


def assert_same_training(found: Found, expected: Found, tolerance: float) -> None:
    """Losses, norms, weights and averages; `found` may have only the last steps."""
    for ours, theirs in zip(found[0], expected[0][-len(found[0]) :], strict=True):
        assert abs(ours[0] / theirs[0] - 1) <= tolerance
        assert abs(ours[1] / theirs[1] - 1) <= tolerance
    assert_close(found[1], expected[1], tolerance)
    assert_close(found[2], expected[2], tolerance)
