"""What is known before training starts: settings, model and cache that don't fit, and what a job will take."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import tiny_config
from safetensors.torch import load_file

from videoqat.errors import ConfigError, UserError
from videoqat.training import trainer
from videoqat.training.job import check
from videoqat.training.trainer import load_batch, train


def test_an_expert_of_a_pair_is_trained_on_its_times(tiny_pipeline_pair: Path, tiny_cache: Path, tmp_path: Path) -> None:
    for component, (low, high) in (("transformer", (0.875, 1.0)), ("transformer_2", (0.0, 0.875))):
        config = tiny_config(tiny_pipeline_pair, tiny_cache, tmp_path / component, model__component=component, from_scratch=False)
        job = check(config)
        t_B = torch.cat([load_batch(job, epoch, list(range(6))).t_B for epoch in range(5)])
        assert ((t_B >= low) & (t_B <= high)).all()
        assert t_B.max() - t_B.min() > 0.4 * (high - low)


BAD = {
    "component": ({"model__component": "transformer_2"}, "has no 'transformer_2'; it has: transformer"),
    "warm-up": ({"optimizer__warmup_steps": 9}, "optimizer.warmup_steps=9 is not legal; legal: at most train.steps=4"),
    "dtype": ({"runtime__dtype": "bfloat16"}, "runtime.dtype='bfloat16' is not legal; legal: auto or float32"),
    "kernel": ({"runtime__kernel": "cuda_nvfp4"}, "kernel='cuda_nvfp4'"),
    "kernel that can't": ({"runtime__kernel": "sdpa"}, "kernel='sdpa' can't serve recipe 'attn_qat'"),
    "batch": ({"train__batch_size": 7}, "batch_size=7 is more than any bucket of .* holds .5x32x32: 6"),
    "keep_layers": ({"recipe": "bad.json"}, r"keep_layers=\[9\] is not legal; legal: blocks 0 to 1"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", [train, trainer.plan])
def test_what_can_not_be_trained_is_one_line_before_anything_is_written(
    make: Any, name: str, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"base": "attn_qat", "name": "mine", "keep_layers": [9]}')
    changes, message = BAD[name]
    with pytest.raises(UserError, match=message):
        command(make("run", **changes))
    assert not (tmp_path / "run").exists()


def test_out_that_can_not_be_written_is_one_line(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"^out='.*/file/run' can't be written: Not a directory$"):
        train(make("file/run"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_cache_of_another_encoder_is_refused(make: Any, tmp_path: Path, tiny_pipeline: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_pipeline, other)
    weights = next((other / "vae").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        UserError, match=r"tiny_cache.* was made with the VAE and text encoder of .*pipeline \(\w{12}\), not of model.path='.*other' \("
    ):
        check(make("run", model__path=str(other)))


def test_a_cache_that_the_transformer_can_not_take_is_refused(make: Any, tmp_path: Path, tiny_pipeline: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_pipeline, other)
    config = json.loads((other / "transformer/config.json").read_text())
    (other / "transformer/config.json").write_text(json.dumps(config | {"patch_size": [1, 8, 8]}))
    with pytest.raises(ConfigError, match="bucket 5x32x32: height 32 doesn't fit this model"):
        check(make("run", model__path=str(other)))
    (other / "transformer/config.json").write_text(json.dumps(config | {"text_dim": 32}))
    with pytest.raises(UserError, match=r"does not fit model.path=.* and text of width 64, the model takes \(16, 2, 4, 4\) and 32"):
        check(make("run", model__path=str(other)))


def test_plan_counts_without_loading(make: Any, tmp_path: Path, tiny_pipeline: Path) -> None:
    config = make("run", train__batch_size=2, train__accumulation=3, train__steps=10, optimizer__ema_decay=0.9, from_scratch=False)
    planned = trainer.plan(config)
    weights = load_file(tiny_pipeline / "transformer/diffusion_pytorch_model.safetensors")
    assert planned["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert planned["quantised_layers"] == ["blocks.0.attn1", "blocks.1.attn1"]
    assert planned["tokens_per_sample"] == {"5x32x32": 32}
    assert (planned["samples"], planned["samples_per_step"], planned["steps_per_epoch"], planned["epochs"]) == (6, 6, 1.0, 10.0)
    memory = planned["memory_bytes"]
    assert memory["weights"] == memory["ema"] == 4 * planned["parameters"]
    assert memory["total"] == sum(value for key, value in memory.items() if key != "total")
    assert planned["kernel"]["kernel"] == "torch"
    json.dumps(planned, allow_nan=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_the_activation_estimate_is_near_what_autograd_keeps(make: Any, autocast: str) -> None:
    config = make("run", train__autocast=autocast, train__batch_size=6)
    job = check(config)
    run = trainer._start(job)
    batch = load_batch(job, 0, list(range(6)))
    own = {p.untyped_storage().data_ptr() for p in run.transformer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer._loss(run, batch)
    estimate = trainer.plan(config)["memory_bytes"]
    measured = sum(storage.nbytes() for storage in kept.values())
    assert estimate["activations"] + estimate["autocast_copies"] == pytest.approx(measured, rel=0.4)
