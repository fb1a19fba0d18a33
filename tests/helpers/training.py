"""Small training configurations for the tests."""

import dataclasses
from pathlib import Path
from typing import Any

from videoqat.config import LoopConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig


def tiny_config(pipeline: Path, cache: Path, out: Path, **changes: Any) -> TrainConfig:
    """Four fp32 steps of one sample with the plain recipe; `changes` are keys such as train__steps=2."""
    config = TrainConfig(
        model=ModelConfig(path=str(pipeline)),
        cache=str(cache),
        out=str(out),
        recipe="attn_qat",
        from_scratch=True,
        objective=ObjectiveConfig(),
        optimizer=OptimizerConfig(lr=3e-3),
        train=LoopConfig(steps=4, autocast="none", save_every=100, health_every=0),
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
