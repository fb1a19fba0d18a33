"""A comparison by two processes says what one process says, and goes on with what another number of processes left."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.pipelines import enliven
from helpers.ranks import outcomes, run_ranks

from videoqat.config import CompareConfig, CompareEntry, RuntimeConfig, SamplingConfig
from videoqat.evaluation import compare as compare_module
from videoqat.evaluation.compare import compare
from videoqat.generation.engine import Engine
from videoqat.training import validation

pytestmark = pytest.mark.dist
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16)
PROMPTS = ["a sneaker moves left", "a bag moves up"]


@pytest.fixture(scope="module")
def root(tiny_pipeline, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    enliven(tiny_pipeline, folder / "base")
    enliven(tiny_pipeline, folder / "tuned", seed=1)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return folder


def config_for(root: Path, cache: Path, out: Path) -> CompareConfig:
    """Three scenes: one rank has two of them."""
    return CompareConfig(
        entries=[
            CompareEntry("BF16", str(root / "base"), "bf16"),
            CompareEntry("tuned", str(root / "tuned"), "attn_qat"),
            CompareEntry("FP4", str(root / "base"), "attn_qat"),
        ],
        prompts=str(root / "prompts.txt"),
        seeds=[3, 4],
        validation_cache=str(cache),
        validation_samples=3,
        validation_timesteps=3,
        out=str(out),
        sampling=SAMPLING,
        runtime=RuntimeConfig(device="cpu"),
    )


def on_ranks(config: CompareConfig, dies: int | None = None) -> tuple[dict, list[tuple[str, str, int]], int]:
    """On a rank: the report, (model, prompt, seed) of each full video it rendered, and how many forwards of the validation loss it ran.

    Rank `dies` ends before its fifth video.
    """
    rendered, forwards = [], 0
    generate, loss = Engine.generate, validation.denoising_loss

    def watched(self, prompt, seed, sampling, recipe, **options):
        if sampling.num_inference_steps != compare_module.WARM_UP_STEPS:
            if os.environ["RANK"] == str(dies) and len(rendered) == 4:
                os._exit(9)
            rendered.append((self.folder.name, prompt, seed))
        return generate(self, prompt, seed, sampling, recipe, **options)

    def counted(*arguments):
        nonlocal forwards
        forwards += 1
        return loss(*arguments)

    Engine.generate, validation.denoising_loss = watched, counted
    return compare(config), rendered, forwards


def figures(report: dict) -> dict:
    """What a report says, but for when, how fast and by how many."""
    entries = [{key: value for key, value in entry.items() if key != "latency"} for entry in report["entries"]]
    videos = [{key: value for key, value in video.items() if key not in ("timings", "ranks", "commit")} for video in report["videos"]]
    settings = {key: value for key, value in report["settings"].items() if key != "out"}
    same = ("reference", "prompts", "seeds", "floor")
    return {"entries": entries, "videos": videos, "settings": settings} | {key: report[key] for key in same}


@pytest.fixture(scope="module")
def alone(root, tiny_cache, tmp_path_factory) -> tuple[Path, dict]:
    """What one process says."""
    out = tmp_path_factory.mktemp("alone") / "out"
    return out, compare(config_for(root, tiny_cache, out))


def test_two_processes_say_what_one_says(root, tiny_cache, alone, tmp_path):
    out, one = alone
    config = config_for(root, tiny_cache, tmp_path / "out")
    (report, rendered, forwards), (other, theirs, others) = run_ranks(on_ranks, 2, config)
    assert report == other
    assert figures(report) == figures(one)
    scenes = [(prompt, seed) for prompt in PROMPTS for seed in (3, 4)]
    assert [{(prompt, seed) for _, prompt, seed in done} for done in (rendered, theirs)] == [set(scenes[::2]), set(scenes[1::2])]
    assert len(rendered) == len(theirs) == 2 * 4
    assert forwards == others == 3 * 2  # three clips of each of three entries, and one that fills up
    for video in out.glob("videos/*"):
        assert (tmp_path / "out" / "videos" / video.name).read_bytes() == video.read_bytes()
    assert (one["ranks"], report["ranks"]) == ([1], [2])
    assert "rendered by 2 processes" in (tmp_path / "out" / "report.html").read_text()
    assert "processes at the same time" not in (out / "report.html").read_text()
    assert np.isfinite([entry["latency"]["total_s"] for entry in report["entries"]]).all()


def test_a_lost_process_ends_all_and_one_goes_on_from_there(root, tiny_cache, alone, tmp_path):
    config = config_for(root, tiny_cache, tmp_path / "out")
    found = outcomes(on_ranks, 2, config, 1)
    assert [outcome.exit_code for outcome in found] == [1, 9]
    assert "WorkerLost" in found[0].error
    assert not (tmp_path / "out" / "report.json").exists()
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "videos").iterdir()}
    assert len(done) >= 6
    report = compare(config)
    assert figures(report) == figures(alone[1])
    now = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "videos").iterdir()}
    kept = {name for name in done if now[name] == done[name]}
    assert {name for name in done if not name.startswith("0-")} <= kept  # the reference's frames are needed again where others are missing
    assert report["ranks"] == [1, 2]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["ranks"] == [1, 2]
