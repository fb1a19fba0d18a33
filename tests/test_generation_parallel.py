"""One video on several processes: tokens divided, and the forwards with and without the prompt; the frames are those of one process."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pipelines import enliven, small_and_alive
from helpers.ranks import outcomes, run_ranks
from numpy.typing import NDArray

from videoqat.config import GenerateConfig, GenerationRuntimeConfig, SamplingConfig, VideoParallelConfig
from videoqat.data.video_io import read_video
from videoqat.errors import ConfigError
from videoqat.generation import batch, single
from videoqat.generation.batch import generate, plan
from videoqat.generation.division import open_division
from videoqat.generation.engine import Engine
from videoqat.recipes import get_recipe

PROMPT = "a sneaker moves left"
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16)
OWN = {"cogvideox": {"num_frames": 9}, "hunyuanvideo": {"guidance_scale": 6.0, "true_cfg_scale": 3.0}}
CPU = GenerationRuntimeConfig(device="cpu")
LAYOUTS = {"sp": VideoParallelConfig(sp=2), "cfg": VideoParallelConfig(cfg=2), "both": VideoParallelConfig(sp=2, cfg=2)}
CLOSE = 1  # of 255: floats that differ in their last bits are rounded to another integer here and there


@pytest.fixture(scope="module")
def folders(tiny_pipeline, tiny_pipeline_pair, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("divided")
    made = {"wan": enliven(tiny_pipeline, root / "wan"), "pair": enliven(tiny_pipeline_pair, root / "pair")}
    return made | {family: small_and_alive(root / family, family, 2) for family in ("cogvideox", "hunyuanvideo", "hunyuan15")}


def recipes(name: str) -> tuple[str, ...]:
    return ("bf16", "attn_qat") if name == "wan" else ("attn_qat",)


def sampled(name: str) -> SamplingConfig:
    return dataclasses.replace(SAMPLING, **OWN.get(name, {}))


@pytest.fixture(scope="module")
def whole(folders) -> dict[tuple[str, str], NDArray[np.uint8]]:
    """What one process renders, by model and recipe."""
    return {
        (name, recipe): engine.generate(PROMPT, 3, sampled(name), recipe).frames
        for name, folder in folders.items()
        for engine in [Engine(folder, CPU)]
        for recipe in recipes(name)
    }


def render_all(folders: dict[str, Path], parallel: VideoParallelConfig) -> dict[tuple[str, str], tuple[NDArray[np.uint8], int]]:
    """Frames of each model and recipe, and how many forwards this rank computed for them."""
    found = {}
    first, ranks = next(iter(folders.values())), parallel.sp * parallel.cfg
    with open_division(parallel, first, [get_recipe("attn_qat")], torch.device("cpu"), ranks) as (_, division):
        for name, folder in folders.items():
            engine = Engine(folder, CPU, division=division)
            for recipe in recipes(name):
                samples = 0

                def count(module, args, output):
                    nonlocal samples
                    samples += (output[0] if isinstance(output, tuple) else output).shape[0]

                last = [t.proj_out.register_forward_hook(count) for t in engine.transformers.values()]
                found[name, recipe] = (engine.generate(PROMPT, 3, sampled(name), recipe).frames, samples)
                for hook in last:
                    hook.remove()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frames_are_those_of_one_process_and_work_is_divided(folders, whole, layout):
    parallel = LAYOUTS[layout]
    left_out = {"sp": ["pair"], "cfg": [], "both": ["wan", "pair", "hunyuanvideo", "hunyuan15"]}[layout]
    chosen = {name: folder for name, folder in folders.items() if name not in left_out}
    per_rank = run_ranks(render_all, parallel.sp * parallel.cfg, chosen, parallel)
    for key, expected in whole.items():
        if key[0] not in chosen:
            continue
        assert expected.std() > 5, "a video that shows nothing proves nothing"
        for rank, found in enumerate(per_rank):
            frames, samples = found[key]
            difference = np.abs(frames.astype(int) - expected)
            assert difference.max() <= CLOSE, (key, rank, difference.max())
            assert np.array_equal(frames, per_rank[0][key][0])
            assert samples == 2 * 2 // parallel.cfg, (key, "steps, with and without the prompt")
    assert not np.array_equal(whole["wan", "bf16"], whole["wan", "attn_qat"])


# --- files and failures


def config_for(model: Path, folder: Path, **changes) -> GenerateConfig:
    settings = {"model": str(model), "out": str(folder / "out"), "sampling": SAMPLING, "runtime": CPU, "seed": 7}
    return GenerateConfig(**(settings | changes))


@pytest.fixture
def many(folders, tmp_path) -> GenerateConfig:
    """Three prompts; the line of the second asks for more steps."""
    lines = [{"prompt": PROMPT}, {"prompt": "a bag moves up", "num_inference_steps": 3}, {"prompt": "a dress"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config_for(folders["wan"], tmp_path, prompts=str(tmp_path / "prompts.jsonl"), parallel=VideoParallelConfig(cfg=2))


def make(config: GenerateConfig, poisoned: int | None = None, killed: tuple[int, int] | None = None) -> tuple[dict, list[int]]:
    """What generate returns on a rank, and the seeds it had a part in; seed `poisoned` gives NaN on one rank alone; with `killed` (rank, seed) the
    rank ends in its first step."""
    seeds: list[int] = []
    original = Engine.generate
    rank = int(os.environ["RANK"])

    def watched(self, prompt, seed, *args, **options):
        seeds.append(seed)
        hooks = []
        if seed == poisoned and rank % 2:
            hooks = [t.register_forward_hook(lambda *_: (torch.full((1, 16, 2, 4, 4), torch.nan),)) for t in self.transformers.values()]
        if (rank, seed) == killed:
            hooks = [t.register_forward_hook(lambda *_: os._exit(9)) for t in self.transformers.values()]
        try:
            return original(self, prompt, seed, *args, **options)
        finally:
            for hook in hooks:
                hook.remove()

    Engine.generate = watched
    return generate(config), seeds


@pytest.mark.dist
def test_one_video_by_two_is_written_once_and_says_so(folders, tmp_path):
    config = config_for(folders["wan"], tmp_path, prompt=PROMPT, recipe="attn_qat", parallel=LAYOUTS["sp"], out=str(tmp_path / "two.mp4"))
    results = run_ranks(make, 2, config)
    record = json.loads((tmp_path / "two.json").read_text())
    assert all(result == record for result, _ in results)
    assert record["parallel"] == {"sp": 2, "cfg": 1, "wire": "bf16"}
    assert {r["recipe"]: r["calls"] for r in record["receipts"]} == {"attn_qat": 2 * 2 * 2, "bf16": 2 * 2 * 2}  # steps, forwards and layers
    alone = single.generate(dataclasses.replace(config, parallel=VideoParallelConfig(), out=str(tmp_path / "one.mp4")))
    assert alone["parallel"] == {"sp": 1, "cfg": 1}
    frames, alone_frames = (read_video(tmp_path / name)[0].astype(int) for name in ("two.mp4", "one.mp4"))
    assert np.abs(frames - alone_frames).max() <= 4  # of 255, after compression
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "one.mp4", "two.json", "two.mp4"]


@pytest.mark.dist
def test_pairs_share_out_prompts_and_what_fails_on_one_rank_fails_on_both(many):
    results = run_ranks(make, 4, many, 9)
    assert [seeds for _, seeds in results] == [[7, 9], [7, 9], [8], [8]]
    told = results[0][0]
    assert all(result == told for result, _ in results)
    assert [told[key] for key in ("videos", "rendered", "failed", "ranks", "exit_code")] == [3, 2, 1, 4, 1]
    (failure,) = map(json.loads, (Path(many.out) / "failed.jsonl").read_text().splitlines())
    assert (failure["seed"], "NaN" in failure["error"]) == (9, True)
    # One process goes on where four stopped: layouts make the same videos.
    result = generate(dataclasses.replace(many, parallel=VideoParallelConfig()))
    assert [result[key] for key in ("rendered", "skipped", "failed")] == [1, 2, 0]


@pytest.mark.dist
def test_a_rank_that_dies_within_a_step_ends_the_others_and_is_told(many):
    found = outcomes(make, 2, many, None, (1, 8))
    assert found[1].exit_code == 9
    assert found[0].exit_code == 1
    assert "WorkerLost: generate: another process ended" in found[0].error
    assert sorted(path.name for path in Path(many.out).glob("*.mp4")) == [f"{PROMPT}-0.mp4"]


@pytest.mark.parametrize(
    ("world", "changes", "words"),
    [
        (2, {"parallel": VideoParallelConfig(sp=3)}, "parallel.sp=3 is not legal; legal: a divisor of the 2 heads: 1, 2"),
        (3, {"parallel": VideoParallelConfig(sp=2)}, "not legal for 3 processes; legal: 2 processes times the number of videos"),
        (4, {"prompts": "", "prompt": PROMPT, "out": "a.mp4", "parallel": VideoParallelConfig(sp=2)}, "legal: 2 processes for one video"),
        (1, {"parallel": VideoParallelConfig(cfg=2)}, "for 1 processes; legal: 2 processes"),
        (2, {"sampling": dataclasses.replace(SAMPLING, guidance_scale=1.0)}, "line 1: parallel.cfg=2 .*guidance_scale=1: without guidance"),
        (2, {"parallel": VideoParallelConfig(cfg=3)}, "parallel.cfg=3"),
        (2, {"parallel": VideoParallelConfig(ulysses_wire="fax")}, "parallel.ulysses_wire='fax'"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_is_loaded(many, monkeypatch, world, changes, words):
    monkeypatch.setattr(batch, "Engine", None)
    monkeypatch.setattr(single, "Engine", None)
    for name, value in {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for run in (plan, generate):
        with pytest.raises(ConfigError, match=words):
            run(dataclasses.replace(many, **changes))
    assert not Path(many.out).exists()
