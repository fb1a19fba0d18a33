"""The training loop on a GPU: the Triton kernel in every quantised layer, in bf16, resumed and exported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from videoqat.config import ExportConfig
from videoqat.training.export import export
from videoqat.training.runlog import read_log
from videoqat.training.trainer import train

pytestmark = pytest.mark.gpu


def losses(run: str) -> list[float]:
    return [row["loss"] for row in read_log(Path(run) / "log.jsonl")]


@pytest.mark.parametrize("recipe", ["attn_qat", "attn_qat_search"])
def test_triton_trains_what_the_torch_kernel_trains_on_the_cpu(make: Any, recipe: str) -> None:
    """The same noise and times on either device; bf16 on one side, so losses agree to a percent and not to the bit."""
    on_cpu = make("cpu", recipe=recipe)
    changes = {"train__compute_dtype": "bfloat16", "train__activation_checkpointing": "full", "train__health_every": 2, "runtime__device": "cuda"}
    on_gpu = make("gpu", recipe=recipe, **changes)
    train(on_cpu)
    result = train(on_gpu)
    quantised = [receipt for receipt in result["receipts"] if receipt["recipe"] == recipe]
    assert [(receipt["kernel"], receipt["device"]) for receipt in quantised] == [("triton", "cuda:0")]
    assert np.allclose(losses(on_gpu.out), losses(on_cpu.out), rtol=1e-2)
    rows = read_log(Path(on_gpu.out) / "log.jsonl")
    assert all(0 < layer["relative_error"] < 0.5 for layer in rows[1]["health"].values())
    assert rows[0]["memory_bytes"] > 0


def test_resumes_and_exports(make: Any, tmp_path: Path) -> None:
    """Stopped after two of four steps and started again; the losses are those of the run that never stopped."""
    gpu = {"runtime__device": "cuda", "train__compute_dtype": "bfloat16", "optimizer__ema_decay": 0.5, "train__save_every": 2}
    whole = make("whole", **gpu)
    train(whole)
    train(make("parts", train__steps=2, **gpu))
    parts = make("parts", **gpu)
    assert train(parts)["resumed_from"].endswith("step-000002")
    assert losses(parts.out) == pytest.approx(losses(whole.out), rel=1e-5)
    export(ExportConfig(run=parts.out, out=str(tmp_path / "exported")))
    assert json.loads((tmp_path / "exported" / "videoqat.json").read_text())["recipe"]["name"] == "attn_qat"
