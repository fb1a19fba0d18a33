"""One cache made by several processes: the same as one process makes, with the same errors, and nothing lost when one of them dies."""

import fcntl
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers.ranks import outcomes, run_ranks
from helpers.videos import gradient_frames

from videoqat.config import ModelConfig, PreprocessConfig, RuntimeConfig
from videoqat.data import precompute, shards
from videoqat.data.clips import write_video
from videoqat.data.dataset import CachedVideos
from videoqat.data.precompute import preprocess

pytestmark = pytest.mark.dist
CLIPS = 7


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Seven clips, two of them the same, one too short; a file that is no video, and a clip without a caption."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for i in range(CLIPS):
        frames = gradient_frames(6 + i, 32, 32)[i:] if i != 3 else gradient_frames(3, 32, 32)
        write_video(folder / f"{i}.mp4", frames, 16)
        (folder / f"{i}.txt").write_text(f"clip {i}" if i < 6 else "a caption of more words than sixteen tokens of the tiny tokenizer hold")
    (folder / "5.mp4").write_bytes((folder / "0.mp4").read_bytes())
    (folder / "5.txt").write_text("clip 0")
    (folder / "letter.mp4").write_text("dear reader")
    (folder / "letter.txt").write_text("a letter")
    (folder / "mute.mp4").write_bytes((folder / "0.mp4").read_bytes())
    return folder


def config_for(model: Path, source: Path, out: Path) -> PreprocessConfig:
    settings = {"buckets": ["5x32x32"], "shard_samples": 2, "max_text_tokens": 16, "runtime": RuntimeConfig(device="cpu")}
    return PreprocessConfig(model=ModelConfig(path=str(model)), source=str(source), out=str(out), **settings)


@pytest.fixture
def config(tiny_pipeline: Path, source: Path, tmp_path: Path) -> PreprocessConfig:
    return config_for(tiny_pipeline, source, tmp_path / "cache")


def on_ranks(config: PreprocessConfig) -> tuple[dict, int]:
    """What preprocess returns on a rank, and how many clips this rank put through the VAE."""
    calls = 0
    original = precompute.Encoder.video

    def counted(self, clips):
        nonlocal calls
        calls += len(clips)
        return original(self, clips)

    precompute.Encoder.video = counted
    return preprocess(config), calls


def killed_on_ranks(config: PreprocessConfig, dies: int) -> None:
    """Rank `dies` is killed before its third clip."""
    calls, original = 0, precompute.Encoder.video

    def mortal(self, frames):
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == str(dies) and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, frames)

    precompute.Encoder.video = mortal
    preprocess(config)


def told(out: Path) -> tuple[dict, dict]:
    """Index and report, but for what depends on who wrote which shard, where and when."""
    index, report = (json.loads((out / name).read_text()) for name in ("index.json", "report.json"))
    samples = [{key: value for key, value in sample.items() if key != "shard"} for sample in index["samples"]]
    about = {key: index[key] for key in ("settings", "geometry", "buckets")}
    report["config"].pop("out")
    return about | {"samples": samples, "null": index["null_condition"]["key"]}, {key: value for key, value in report.items() if key != "provenance"}


def assert_same_cache(one: str, other: str) -> None:
    assert told(Path(one)) == told(Path(other))
    mine, theirs = CachedVideos(one), CachedVideos(other)
    assert mine.fingerprint == theirs.fingerprint
    assert torch.equal(mine.null_condition["text"], theirs.null_condition["text"])
    for index in range(len(mine)):
        a, b = mine.load(index), theirs.load(index)
        assert all(torch.equal(a[name], b[name]) for name in ("latents", "text"))


def test_two_processes_make_the_cache_of_one_and_either_number_goes_on(config: PreprocessConfig, tiny_pipeline: Path, source: Path, tmp_path: Path):
    alone = config_for(tiny_pipeline, source, tmp_path / "alone")
    one = preprocess(alone)
    assert (one["samples"], one["skipped"]) == (6, {"cannot decode": 1, "no caption": 1, "too short": 1})
    first, second = run_ranks(on_ranks, 2, config)
    assert first[0] == second[0]
    shared = {key: value for key, value in first[0].items() if key not in ("out", "encoded", "reused")}
    assert shared == {key: one[key] for key in shared}
    # Rank 0 has clips 0, 2, 4 and 6; rank 1 has 1, the short one, 5 and the letter. 0 and 5 are one sample, which ranks can't know of each other.
    assert (one["encoded"], first[1], second[1]) == (5, 4, 2)
    assert_same_cache(alone.out, config.out)
    assert len(list((Path(config.out) / "shards").iterdir())) >= 4

    # What two made, one goes on with; what one made, two go on with. One clip is new, another one's caption has changed.
    write_video(source / "9.mp4", gradient_frames(16, 32, 32)[::-1][:6], 16)
    (source / "9.txt").write_text("new")
    (source / "1.txt").write_text("another caption")
    assert preprocess(config)["encoded"] == 2
    first, second = run_ranks(on_ranks, 2, alone)
    assert (first[0]["encoded"], first[1] + second[1]) == (2, 2)
    assert_same_cache(alone.out, config.out)
    assert [run[1] for run in run_ranks(on_ranks, 2, alone)] == [0, 0]


def test_a_killed_process_leaves_what_others_go_on_with(config: PreprocessConfig, tiny_pipeline: Path, source: Path, tmp_path: Path):
    for i in range(10, 18):
        write_video(source / f"{i}.mp4", gradient_frames(6 + i, 32, 32)[i:], 16)
        (source / f"{i}.txt").write_text(f"clip {i}")
    found = outcomes(killed_on_ranks, 2, config, 1)
    assert found[1].exit_code == -signal.SIGKILL
    assert found[0].exit_code == 1
    assert "WorkerLost: preprocess: another process ended" in found[0].error
    shards = Path(config.out) / "shards"
    assert not (Path(config.out) / "index.json").exists()
    done = {path.name for path in shards.glob("[!.]*.safetensors")}
    assert len(done) >= 3, "the empty caption's, and one full shard of each rank at least"
    result = preprocess(config)
    assert result["samples"] == 14
    assert 0 < result["encoded"] <= 13 - 4
    assert done <= {path.name for path in shards.iterdir()}
    alone = config_for(tiny_pipeline, source, tmp_path / "alone")
    preprocess(alone)
    assert_same_cache(alone.out, config.out)


def slow_to_remove(config: PreprocessConfig, damaged: Path) -> dict:
    """Rank 1 sees that a shard is damaged, and takes its time: until the other one has made it anew, if it does."""
    size = damaged.stat().st_size

    def take_time(message: str) -> None:
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline and not (damaged.is_file() and damaged.stat().st_size != size):
            time.sleep(0.05)

    if os.environ["RANK"] == "1":
        shards.say = take_time
    return preprocess(config)


def test_a_shard_that_is_made_again_is_not_taken_for_the_damaged_one(config: PreprocessConfig):
    preprocess(config)
    damaged = Path(config.out) / json.loads((Path(config.out) / "index.json").read_text())["null_condition"]["shard"]
    os.truncate(damaged, 100)
    assert run_ranks(slow_to_remove, 2, config, damaged)[0]["samples"] == 6
    assert CachedVideos(config.out).null_condition["text"].isfinite().all()


def test_errors_reach_every_process(config: PreprocessConfig, source: Path):
    for path in source.glob("*.mp4"):
        path.write_text("broken")
    for outcome in outcomes(on_ranks, 2, config):
        assert outcome.exit_code == 1
        assert "DataError: source=" in outcome.error
        assert "holds no usable clip: 8 cannot decode, 1 no caption; the first: 0.mp4" in outcome.error
    assert not (Path(config.out) / "index.json").exists()
    assert json.loads((Path(config.out) / "report.json").read_text())["usable"] == 0
    with open(Path(config.out) / precompute.MARK, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for outcome in outcomes(on_ranks, 2, config):
            assert outcome.exit_code == 1
            assert "UserError: out=" in outcome.error
            assert "another preprocess is at work in this folder" in outcome.error
