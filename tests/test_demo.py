"""The demo, with everything in it but the time."""

import json
from pathlib import Path

import pytest

from videoqat.cli import main
from videoqat.models.embedded import CAPTIONS

SMALL = ["size=32", "num_clips=4", "num_held_out=2", "tune_steps=1", "num_inference_steps=1"]


@pytest.mark.slow
def test_the_whole_road(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", f"out={out}", *SMALL]) == 0
    said = capsys.readouterr().err.splitlines()
    first = [out / "first" / "bf16.mp4", out / "first" / "attn_qat_search.mp4"]
    places = [said.index(f"    {video.resolve()}") for video in first]
    assert places[0] < places[1] < next(place for place, line in enumerate(said) if line.startswith("=== Clips")), "videos come first"
    receipts = [json.loads(video.with_suffix(".json").read_text())["receipts"] for video in first]
    assert [{receipt["kernel"] for receipt in found} for found in receipts] == [{"sdpa"}, {"torch", "sdpa"}]
    assert said[-1] == f"The report: {(out / 'comparison' / 'report.html').resolve()}"  # last, where a person looks

    report = json.loads((out / "comparison" / "report.json").read_text())
    names = [entry["name"] for entry in report["entries"]]
    assert names == ["BF16", "FP4 without QAT", "FP4 after Attn-QAT", "base BF16"]
    assert all(entry["validation"]["samples"] == 2 for entry in report["entries"])
    assert len(list((out / "comparison" / "videos").glob("*.mp4"))) >= len(names) * len(CAPTIONS)
    recipes = {name: json.loads((out / "models" / name / "videoqat.json").read_text())["recipe"]["name"] for name in ("base", "attn_qat", "control")}
    assert recipes == {"base": "bf16", "attn_qat": "attn_qat_search", "control": "bf16"}

    # Again, after it ended between a video and its record: nothing is done twice.
    first[0].with_suffix(".json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (out / "models").rglob("*") if path.is_file()}
    assert main(["demo", f"out={out}", *SMALL]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (out / "models").rglob("*") if path.is_file()}
    assert "done before" in capsys.readouterr().err
    assert first[0].with_suffix(".json").exists()

    # With other settings it would mix two demos.
    assert main(["demo", f"out={out}", *SMALL[:-1], "num_inference_steps=2"]) == 2
    assert "num_inference_steps=1" in capsys.readouterr().err


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["demo", f"out={tmp_path}"]) == 2
    assert "holds no demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
