"""Curves from a training's log.jsonl: the loss, and the quantisation error of each layer where it was logged."""

from pathlib import Path
from typing import Any

from videoqat.errors import DataError
from videoqat.training.runlog import read_log


def read_curves(run: str | Path) -> dict[str, Any]:
    """The curves of a training run's output folder.

    Returns:
        `step`, `loss`: lists of equal length. `health`: `step` and `layers`, layer -> relative errors, one for each of its steps (None where a
        layer is missing); None if no health was logged.

    Raises:
        DataError: no log, or nothing in it.
    """
    rows = [row for row in read_log(Path(run) / "log.jsonl") if row.get("loss") is not None]
    if not rows:
        raise DataError(f"run={str(run)!r} holds no training log (log.jsonl); legal: the output folder of a training that made a step")
    watched = [row for row in rows if row.get("health")]
    health = None
    if watched:
        layers = dict.fromkeys(layer for row in watched for layer in row["health"])
        errors = {layer: [row["health"].get(layer, {}).get("relative_error") for row in watched] for layer in layers}
        health = {"step": [row["step"] for row in watched], "layers": errors}
    return {"step": [row["step"] for row in rows], "loss": [row["loss"] for row in rows], "health": health}
