"""The training loop on a GPU: the Triton kernel in every quantised layer, in bf16, resumed and exported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from videoqat.config import ExportConfig, SamplingConfig
from videoqat.training import samples
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


@pytest.mark.parametrize("compiled", [False, True])
def test_looks_change_nothing_and_leave_encoders_off_the_gpu(make: Any, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    seen: list[tuple[str, bool]] = []
    render = samples.Sampler.render

    def rendering(self: samples.Sampler, *args: Any) -> Any:
        result = render(self, *args)
        pipeline = self._engine.pipeline
        seen.append((next(pipeline.vae.parameters()).device.type, pipeline.text_encoder is None))
        return result

    monkeypatch.setattr(samples.Sampler, "render", rendering)
    gpu = {"runtime__device": "cuda", "train__compute_dtype": "bfloat16", "train__compile": compiled, "train__steps": 6}
    alone, watched = make("alone", **gpu), make("watched", **gpu, train__health_every=2)
    watched.validation.every, watched.validation.cache, watched.validation.samples = 2, watched.cache, 3
    watched.validation.prompts = ["a bag moves up"]
    watched.validation.sampling = SamplingConfig(num_frames=5, height=64, width=32, num_inference_steps=2)  # of another size than the clips
    train(alone)
    result = train(watched)
    assert losses(watched.out) == pytest.approx(losses(alone.out), rel=1e-5)  # not to the bit: SDPA's backward adds in any order
    assert seen == [("cpu", True)] * 3
    record = json.loads((Path(watched.out) / "samples/step-000006/prompt-00.json").read_text())
    assert {(r["kernel"], r["device"]) for r in record["receipts"] if r["recipe"] == "attn_qat"} == {("triton", "cuda:0")}
    rows = read_log(Path(watched.out) / "validation.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(0 < abs(row["attn_qat"]["relative"]) < 0.5 for row in rows)
    assert result["steps"] == 6
