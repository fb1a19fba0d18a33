"""Small training configurations, and what their runs left on disk."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from videoqat.config import LoopConfig, ModelConfig, OptimizerConfig, RuntimeConfig, TrainConfig
from videoqat.training import state
from videoqat.training.runlog import read_log


def tiny_config(pipeline: Path, cache: Path, out: Path, **changes: Any) -> TrainConfig:
    """Four fp32 steps of one sample with the plain recipe; `changes` are keys such as train__steps=2."""
    config = TrainConfig(
        model=ModelConfig(path=str(pipeline)),
        cache=str(cache),
        out=str(out),
        recipe="attn_qat",
        from_scratch=True,
        optimizer=OptimizerConfig(lr=3e-3),
        train=LoopConfig(steps=4, compute_dtype="float32", save_every=100, health_every=0),
        runtime=RuntimeConfig(device="cpu"),  # where "bit for bit" is promised
    )
    for key, value in changes.items():
        *parents, last = key.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        assert last in {field.name for field in dataclasses.fields(target)}, key
        setattr(target, last, value)
    config.validate()
    return config


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its flat key."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = {key: torch.empty(about.size, dtype=about.properties.dtype) for key, about in metadata.items()}
    state.load(checkpoint, found)
    return found


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Same losses at every step and the same bits in the last checkpoint."""
    rows, expected = ([(r["step"], r["epoch"], r["loss"], r["grad_norm"], r["lr"]) for r in read_log(p / "log.jsonl")] for p in (ours, theirs))
    assert rows == expected
    mine, other = (stored(state.whole(p / "checkpoints")[-1]) for p in (ours, theirs))
    assert mine.keys() == other.keys()
    for key, tensor in mine.items():
        assert torch.equal(tensor, other[key]), key
