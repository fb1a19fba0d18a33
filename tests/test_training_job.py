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
from videoqat.parallel.mesh import Layout
from videoqat.training import trainer
from videoqat.training.batches import load_batch
from videoqat.training.job import check
from videoqat.training.trainer import train


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
    "heads": ({"parallel__sp": 3}, r"parallel.sp=3 does not divide the model's 2 heads; legal for 1 processes: 1"),
    "equation": ({"parallel__sp": 2}, r"world size 1 = dp_replicate \* dp_shard \* sp does not hold for dp_replicate 1 \* dp_shard \(what is left\)"),
    "replicas": ({"parallel__engine": "deepspeed", "parallel__dp_replicate": 2}, "parallel.dp_replicate=2 is not legal; legal: 1 with"),
    "codes": (
        {"parallel__ulysses_wire": "packed", "recipe": "sage3"},
        "parallel.ulysses_wire=packed is not possible with recipe 'sage3': it smooths .*; legal: auto, bf16",
    ),
    "global batch": (
        {"train__batch_size": 2, "train__global_batch_size": 8},
        "cache='.*' is too small for one step: its 6 samples fill 3 batches of train.batch_size=2 .6 samples., train.global_batch_size=8 takes 8",
    ),
    "batch": ({"train__batch_size": 7}, "batch_size=7 is more than any bucket of .* holds .5x32x32: 6"),
    "keep_layers": ({"recipe": "bad.json"}, r"'mine': keep_layers names block 9, but this model has blocks 0 to 1"),
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


def test_blocks_of_queries_that_a_layout_would_cut_are_refused_before_it_is_there(make: Any, tmp_path: Path) -> None:
    crossed = tmp_path / "crossed.yaml"
    crossed.write_text("base: sage3\nname: crossed\nattention_kinds: [self, cross]\n")
    assert trainer.plan(make("run", recipe=str(crossed)))["recipe"] == "crossed"
    assert trainer.plan(make("run", recipe="sage3", parallel__sp=2, parallel__world_size=2))["recipe"] == "sage3"
    with pytest.raises(
        ConfigError, match=r"recipe 'crossed': smooth_q works on blocks of queries, and parallel.sp=2 would cut those of blocks.0.attn2"
    ):
        trainer.plan(make("run", recipe=str(crossed), parallel__sp=2, parallel__world_size=2))


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


def test_the_global_batch_is_divided_among_data_parallel_positions(make: Any) -> None:
    for replicate, shard, sp, accumulation in ((1, 1, 1, 4), (1, 1, 2, 4), (2, 1, 2, 2), (1, 4, 1, 1)):
        layout = {"parallel__dp_replicate": replicate, "parallel__dp_shard": shard, "parallel__sp": sp}
        job = check(make("run", train__global_batch_size=4, **layout), replicate * shard * sp)
        assert job.layout == Layout(replicate, shard, sp)
        assert job.accumulation == accumulation
    assert check(make("run", train__batch_size=2), 3).accumulation == 1
    message = (
        r"train.global_batch_size=6 = train.batch_size 1 \* data-parallel positions 4 \* accumulation does not hold; "
        r"legal: a multiple of 4, such as 4 or 8, or dp_replicate \* dp_shard one of 1, 2, 3, 6"
    )
    with pytest.raises(ConfigError, match=message):
        check(make("run", train__global_batch_size=6), 4)
    with pytest.raises(ConfigError, match=r"legal: a multiple of 4, such as 4, or dp_replicate .* one of 1, 2"):
        check(make("run", train__global_batch_size=2), 4)


def test_a_layout_can_be_asked_for_without_its_gpus(make: Any) -> None:
    config = make("run", train__global_batch_size=4, parallel__world_size=8, parallel__sp=2, parallel__dp_replicate=2)
    planned = trainer.plan(config)
    assert planned["layout"] == "8 = dp_replicate 2 * dp_shard 2 * sp 2"
    assert (planned["samples_per_step"], planned["accumulation"]) == (4, 1)
    with pytest.raises(ConfigError, match=r"parallel.world_size=8 is not legal; legal: 0, or 1: as many as torchrun started"):
        train(config)


def test_plan_counts_without_loading(make: Any, tmp_path: Path, tiny_pipeline: Path) -> None:
    changes = {"train__batch_size": 2, "train__global_batch_size": 6, "train__steps": 10, "optimizer__ema_decay": 0.9, "from_scratch": False}
    planned = trainer.plan(make("run", **changes))
    weights = load_file(tiny_pipeline / "transformer/diffusion_pytorch_model.safetensors")
    assert planned["parameters"] == planned["trained_parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert planned["quantised_layers"] == ["blocks.0.attn1", "blocks.1.attn1"]
    assert planned["tokens_per_sample"] == {"5x32x32": 32}
    assert (planned["samples"], planned["samples_per_step"], planned["steps_per_epoch"], planned["epochs"]) == (6, 6, 1.0, 10.0)
    memory = planned["memory_bytes"]
    assert memory["weights"] == memory["ema"] == 4 * planned["parameters"]
    assert memory["total"] == sum(value for key, value in memory.items() if key != "total")
    assert planned["kernel"]["kernel"] == "torch"
    json.dumps(planned, allow_nan=False)
    assert not (tmp_path / "run").exists()


def test_frozen_weights_are_counted_and_their_patterns_checked(make: Any, tiny_pipeline: Path) -> None:
    planned = trainer.plan(make("run", train__trainable=["*.attn1.to_q.*", "*.attn1.to_k.weight"]))
    weights = load_file(tiny_pipeline / "transformer/diffusion_pytorch_model.safetensors")
    trained = sum(tensor.numel() for name, tensor in weights.items() if ".attn1.to_q." in name or ".attn1.to_k.weight" in name)
    assert 0 < trained < planned["parameters"]
    assert planned["trained_parameters"] == trained
    assert planned["memory_bytes"]["moments"] == 8 * trained
    with pytest.raises(ConfigError, match=r"train.trainable='attn3' matches no parameter of this model"):
        trainer.plan(make("run", train__trainable=["attn3"]))
