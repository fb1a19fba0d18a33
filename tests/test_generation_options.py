"""What `generate` can be told beside prompts: VBench's layout, recipes to compare, warming up, compiling; and that a seed is all that decides."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pipelines import enliven
from helpers.videos import random_st_lpips

from videoqat.config import GenerateConfig, GenerationRuntimeConfig, SamplingConfig
from videoqat.errors import ConfigError, NonFiniteVideo, UserError
from videoqat.evaluation import pairs
from videoqat.generation import batch
from videoqat.generation.engine import Engine
from videoqat.generation.prompts import videos

PROMPT = "a sneaker moves left"
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16)
CPU = GenerationRuntimeConfig(device="cpu")


@pytest.fixture(scope="module")
def model(tiny_pipeline, tmp_path_factory) -> Path:
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("lively") / "model")


@pytest.fixture
def config(model, tmp_path) -> GenerateConfig:
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\na dress: what?\n")
    return GenerateConfig(model=str(model), prompts=str(tmp_path / "prompts.txt"), out=str(tmp_path / "out"), seed=7, sampling=SAMPLING, runtime=CPU)


@pytest.fixture
def engine_calls(monkeypatch) -> list[tuple]:
    """(prompt, recipe, steps asked for) of each call of an engine."""
    seen: list[tuple] = []
    original = Engine.generate

    def watched(self, prompt, seed, sampling, recipe, **options):
        seen.append((prompt, recipe, sampling.num_inference_steps))
        return original(self, prompt, seed, sampling, recipe, **options)

    monkeypatch.setattr(Engine, "generate", watched)
    return seen


def test_vbench_gets_five_of_each_prompt_named_by_it_to_the_letter(config, tmp_path):
    found = videos(dataclasses.replace(config, vbench=True))
    assert [video.name for video in found] == [f"{prompt}-{index}" for prompt in (PROMPT, "a dress: what?") for index in range(5)]
    assert [video.seed for video in found] == list(range(7, 17))
    assert len(videos(dataclasses.replace(config, vbench=True, samples_per_prompt=25))) == 50  # as VBench asks for temporal flickering
    assert [video.name for video in videos(config)] == [f"{PROMPT}-0", "a dress_ what_-0"]  # any system's file names, without vbench
    for prompt in ("a/b", ".hidden", "x" * 200):
        (tmp_path / "prompts.txt").write_text(prompt)
        with pytest.raises(UserError, match=r"line 1: vbench=true names files by their prompts, which .* can't be; legal: "):
            batch.plan(dataclasses.replace(config, vbench=True))


def test_warming_up_is_done_once_for_each_size_and_changes_no_video(config, tmp_path, engine_calls):
    lines = [{"prompt": "a"}, {"prompt": "b", "height": 48}, {"prompt": "c"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = dataclasses.replace(config, prompts=str(tmp_path / "p.jsonl"), recipe="attn_qat")
    batch.generate(config)
    assert [prompt for prompt, *_ in engine_calls] == ["a", "b", "c"]
    engine_calls.clear()
    batch.generate(dataclasses.replace(config, warm_up=True, out=str(tmp_path / "warm")))
    assert [prompt for prompt, *_ in engine_calls] == ["warm-up", "warm-up", "a", "warm-up", "warm-up", "b", "c"]
    assert {recipe for prompt, recipe, _ in engine_calls if prompt == "warm-up"} == {"bf16", "attn_qat"}
    for name in ("a-0.mp4", "b-0.mp4", "c-0.mp4"):
        assert (tmp_path / "warm" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_compare_renders_the_same_seeds_by_each_recipe_and_reports(config, tmp_path, engine_calls, monkeypatch):
    loaded: list[Path] = []
    original = Engine.__init__

    def counting(self, folder, *args, **options):
        loaded.append(Path(folder))
        original(self, folder, *args, **options)

    monkeypatch.setattr(Engine, "__init__", counting)
    weights = random_st_lpips(tmp_path / "st_lpips.pth")
    config = dataclasses.replace(config, compare=["bf16", "attn_qat"], st_lpips=str(weights))
    planned = pairs.plan(config)
    assert {name: one["recipe"]["name"] for name, one in planned["folders"].items()} == {"bf16": "bf16", "attn_qat": "attn_qat", "bf16-again": "bf16"}
    assert not (tmp_path / "out").exists()
    result = pairs.generate(config)
    assert (result["exit_code"], len(loaded)) == (0, 1)
    assert engine_calls == [(prompt, recipe, 2) for recipe in ("bf16", "attn_qat", "bf16") for prompt in (PROMPT, "a dress: what?")]
    records = {name: json.loads((tmp_path / "out" / name / f"{PROMPT}-0.json").read_text()) for name in planned["folders"]}
    assert {record["config"]["seed"] for record in records.values()} == {7}
    assert records["bf16"]["video_sha256"] == records["bf16-again"]["video_sha256"] != records["attn_qat"]["video_sha256"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [entry["name"] for entry in report["entries"]] == ["bf16", "attn_qat"]
    assert (report["floor"]["identical_videos"], report["floor"]["videos"]) == (2, 2)
    fidelity = report["entries"][1]["fidelity"]
    assert (fidelity["videos"], fidelity["identical_videos"]) == (2, 0)
    assert 5 < fidelity["psnr_mean"] < 60
    assert fidelity["st_lpips_mean"] > report["floor"]["st_lpips_mean"] == 0
    assert report["st_lpips"]["sha256"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<video") == 4
    assert "as they are in the mp4 files" in page
    assert "after an untimed warm-up" not in page
    assert "warm_up=true" in page
    # The same command again has nothing to do, and a video that fails under one recipe is left out of the report.
    engine_calls.clear()
    assert pairs.generate(config)["exit_code"] == 0
    assert engine_calls == []
    (tmp_path / "out" / "attn_qat" / f"{PROMPT}-0.mp4").unlink()
    monkeypatch.setattr(Engine, "generate", lambda *_, **__: (_ for _ in ()).throw(NonFiniteVideo("NaN")))
    assert pairs.generate(config)["exit_code"] == 1
    assert [video["prompt"] for video in json.loads((tmp_path / "out" / "report.json").read_text())["videos"]] == ["a dress: what?"] * 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compare": ["bf16"]}, "compare=.*two or more"),
        ({"compare": ["bf16", "bf16"]}, "compare=.*that differ"),
        ({"compare": ["bf16", "fp3"]}, "fp3"),
        ({"compare": ["bf16", "attn_qat"], "recipe": "sage3"}, "recipe='sage3'.*compare"),
        ({"compare": ["bf16", "attn_qat"], "prompts": "", "prompt": "a", "out": "a.mp4"}, "compare=.*prompts=FILE"),
        ({"warm_up": True, "prompts": "", "prompt": "a", "out": "a.mp4"}, "warm_up=True.*prompts=FILE"),
        ({"st_lpips": "installed"}, "st_lpips='installed'.*without compare="),
        ({"compare": ["bf16", "attn_qat"], "st_lpips": "no"}, "st_lpips='no'.*legal: auto"),
        ({"compare": ["bf16", "attn_qat"]}, "height x width='32x32' is not legal; legal: 33 or more"),
        ({"runtime": dataclasses.replace(CPU, device="cuda", compile=True, offload="sequential")}, "runtime.compile=True.*sequential"),
    ],
)
def test_options_that_cannot_be(config, monkeypatch, changes, words):
    monkeypatch.setattr(batch, "Engine", None)
    monkeypatch.setattr("videoqat.evaluation.fidelity.SMALLEST", 33)  # as if videos were smaller than the window of SSIM
    for run in (pairs.plan, pairs.generate):
        with pytest.raises(ConfigError, match=words):
            run(dataclasses.replace(config, **changes))


@pytest.mark.parametrize("names", [("mine", "mine"), ("mine", "bf16-again"), ("attn_qat", "mine"), ("mine", "../mine"), ("mine", "..")])
def test_recipes_that_would_share_a_folder_are_refused(config, tmp_path, monkeypatch, names):
    """One of them was left out without a word, or rendered outside of `out`."""
    monkeypatch.setattr(batch, "Engine", None)
    files = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    for file, name in zip(files, names, strict=True):
        file.write_text(f"base: sage3\nname: {name}\n")
    for run in (pairs.plan, pairs.generate):
        with pytest.raises(ConfigError, match=r"compare=.*recipes whose names differ"):
            run(dataclasses.replace(config, compare=["bf16", "attn_qat", *map(str, files)]))


def test_compiled_blocks_render_the_same_video_under_any_recipe(model, monkeypatch):
    """The compiler behind dynamo is left out: what it gets is what could be wrong, such as a recipe that was switched and is still the old one."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("videoqat.parallel.checkpointing.torch.compile", functools.partial(torch.compile, fullgraph=True, backend=counting))
    torch._dynamo.reset()
    plain, compiled = Engine(model, CPU), Engine(model, dataclasses.replace(CPU, compile=True))
    for recipe in ("bf16", "attn_qat", "bf16"):
        expected = plain.generate(PROMPT, 3, SAMPLING, recipe).frames
        before = len(graphs)
        frames = compiled.generate(PROMPT, 3, SAMPLING, recipe).frames
        assert np.abs(frames.astype(int) - expected).max() <= 1
        graphs_of_recipe = len(graphs) - before
        assert (graphs_of_recipe > 0) == (recipe == "attn_qat" or before == 0), "a recipe that came back is compiled already"
    torch._dynamo.reset()


# --- a seed decides, and nothing else


def test_a_video_is_the_same_alone_and_as_any_of_many(config, model, tmp_path):
    """Whatever was rendered before it by the same engine, of whatever size and recipe. (Processes: test_generation_parallel.py.)"""
    alone = Engine(model, CPU).generate(PROMPT, 9, SAMPLING, "attn_qat").frames
    engine = Engine(model, CPU)
    engine.generate("a dress", 1, dataclasses.replace(SAMPLING, height=48, num_inference_steps=3), "sage3")
    torch.randn(7)  # torch's own generator has no say either
    assert np.array_equal(engine.generate(PROMPT, 9, SAMPLING, "attn_qat").frames, alone)


@pytest.mark.gpu
def test_a_video_is_the_same_however_the_pipeline_is_offloaded(model):
    expected = Engine(model, GenerationRuntimeConfig(device="cuda")).generate(PROMPT, 9, SAMPLING, "attn_qat").frames
    for offload in ("model", "sequential"):
        engine = Engine(model, GenerationRuntimeConfig(device="cuda", offload=offload))
        assert np.array_equal(engine.generate(PROMPT, 9, SAMPLING, "attn_qat").frames, expected), offload
    compiled = Engine(model, GenerationRuntimeConfig(device="cuda", compile=True)).generate(PROMPT, 9, SAMPLING, "attn_qat").frames
    assert np.abs(compiled.astype(int) - expected).mean() < 8  # other roundings in bf16 go another way here and there
