"""Models that take turns on a device within a budget for weights; and the meters of time and memory."""

import math
import shutil
import time
from pathlib import Path

import pytest
import torch

from videoqat.config import GenerationRuntimeConfig, SamplingConfig
from videoqat.errors import CheckpointError
from videoqat.generation.meter import Stopwatch, peak_memory, reset_peak_memory, total_memory
from videoqat.generation.pool import DEVICE_SHARE, GIB, EnginePool, warm_up, weights_bytes

CPU = GenerationRuntimeConfig(device="cpu")


@pytest.fixture(scope="module")
def folders(tiny_pipeline, tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("several")
    return [Path(shutil.copytree(tiny_pipeline, root / name)) for name in "abc"]


def test_weights_are_counted_without_loading_them(folders):
    engine = EnginePool(CPU).get(folders[0])
    parts = [part for part in engine.pipeline.components.values() if isinstance(part, torch.nn.Module)]
    loaded = sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
    assert weights_bytes(folders[0], torch.float32) == pytest.approx(loaded, rel=0.02)
    vae = sum(p.numel() for p in engine.pipeline.vae.parameters()) * 4
    assert weights_bytes(folders[0], torch.bfloat16) == pytest.approx((loaded - vae) / 2 + vae, rel=0.02)


def test_what_fits_stays_and_the_one_used_longest_ago_goes(folders):
    a, b, c = map(str, folders)
    pool = EnginePool(CPU, device_gib=2.5 * weights_bytes(a, torch.float32) / GIB)
    first, second = pool.get(a), pool.get(b)
    assert pool.get(a) is first
    pool.get(c)  # b was used longest ago
    assert pool.resident == [a, c]
    assert pool.set_aside == []
    assert pool.get(a) is first
    assert pool.get(b) is not second
    assert pool.resident == [a, b]


def test_a_model_set_aside_comes_back_without_being_loaded(folders):
    a, b, c = map(str, folders)
    one = weights_bytes(a, torch.float32)
    pool = EnginePool(CPU, device_gib=1.5 * one / GIB)
    pool.host_budget = int(1.5 * one)  # as on a GPU; here both memories are one
    first = pool.get(a)
    pool.get(b)
    assert (pool.resident, pool.set_aside) == ([b], [a])
    assert pool.get(a) is first
    assert (pool.resident, pool.set_aside) == ([a], [b])
    pool.get(c)  # a is set aside, and b, which waited longest, makes room
    assert (pool.resident, pool.set_aside) == ([c], [a])


def test_a_budget_that_was_given_is_kept(folders, tmp_path):
    with pytest.raises(CheckpointError, match=r"needs .* GiB .*memory.device_gib"):
        EnginePool(CPU, device_gib=1e-6).get(folders[0])
    assert EnginePool(CPU).device_budget == int(DEVICE_SHARE * total_memory(torch.device("cpu")))
    copy = Path(shutil.copytree(folders[0], tmp_path / "copy"))
    file = copy / "vae" / "diffusion_pytorch_model.safetensors"
    shutil.copy(file, file.with_name("diffusion_pytorch_model.fp16.safetensors"))  # another precision beside them isn't loaded
    assert weights_bytes(copy, torch.float32) == weights_bytes(folders[0], torch.float32)
    for torn in (b"\x08\0\0\0\0\0\0\0torn", b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(torn)
        with pytest.raises(CheckpointError, match="torn"):
            weights_bytes(copy, torch.float32)
    file.unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        weights_bytes(copy, torch.float32)


@pytest.mark.gpu
def test_on_a_gpu_a_model_leaves_the_device_and_comes_back(folders):
    a, b = map(str, folders[:2])
    runtime = GenerationRuntimeConfig(device="cuda")
    one = weights_bytes(a, torch.bfloat16)
    pool = EnginePool(runtime, device_gib=1.5 * one / GIB, host_gib=1.0)
    sampling = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16)
    first = pool.get(a)
    before = first.generate("a bag", 1, sampling, "attn_qat")
    assert before.peak_memory_bytes >= one
    pool.get(b)
    assert {p.device.type for p in first.transformers["transformer"].parameters()} == {"cpu"}
    again = pool.get(a)
    assert again is first
    assert math.isclose(float(abs(again.generate("a bag", 1, sampling, "attn_qat").frames.astype(int) - before.frames).max()), 0.0)


def test_warming_up_runs_every_recipe_once_and_ends(folders):
    engine = EnginePool(CPU).get(folders[0])
    steps: list[str] = []
    hook = engine.transformers["transformer"].register_forward_hook(
        lambda module, *_: steps.append(next(iter(module.attn_processors.values())).recipe.name)
    )
    warm_up(engine, SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=50, max_text_tokens=16), ["bf16", "attn_qat"])
    hook.remove()
    assert steps == ["bf16"] * 4 + ["attn_qat"] * 2  # with the prompt and without; of 50 steps the first


def test_the_meters_measure():
    watch = Stopwatch(torch.device("cpu"))
    start = watch.mark()
    time.sleep(0.02)
    assert 0.02 <= watch.seconds(start, watch.mark()) < 10
    reset_peak_memory(torch.device("cpu"))
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(64 * 2**20 // 4)
    after = peak_memory(torch.device("cpu"))
    assert after - before > 32 * 2**20
    assert after < total_memory(torch.device("cpu"))
    del block
