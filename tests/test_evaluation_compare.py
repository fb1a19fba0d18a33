"""A comparison from end to end on the tiny pipeline: what is rendered, measured, kept, resumed and refused."""

import dataclasses
import json
import re

import numpy as np
import pytest
from helpers.pipelines import change_weights, enliven
from helpers.videos import random_st_lpips

from videoqat.config import CompareConfig, CompareEntry, RuntimeConfig, SamplingConfig
from videoqat.data.video_io import read_video
from videoqat.errors import NonFiniteVideo, UserError
from videoqat.evaluation import compare as compare_module
from videoqat.evaluation.compare import compare, plan
from videoqat.evaluation.fidelity import fidelity, flicker
from videoqat.evaluation.st_lpips import StLpips
from videoqat.generation.engine import Engine
from videoqat.generation.prompts import read_prompts

CPU = RuntimeConfig(device="cpu")
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16)
PROMPTS = ["a sneaker moves left", "a <b>bag</b> moves up"]


@pytest.fixture(scope="module")
def models(tiny_pipeline, tiny_cache, tmp_path_factory):
    """Two models of one VAE and text encoder, a cache of clips, prompts, and a training's log."""
    root = tmp_path_factory.mktemp("models")
    enliven(tiny_pipeline, root / "base")
    enliven(tiny_pipeline, root / "tuned", seed=1)
    (root / "run").mkdir()
    (root / "run" / "log.jsonl").write_text("".join(json.dumps({"step": i, "loss": 1 / i}) + "\n" for i in (1, 2, 3)))
    (root / "prompts.txt").write_text("# what to show\n\n" + "\n".join(PROMPTS) + "\n")
    (root / "cache").symlink_to(tiny_cache)
    random_st_lpips(root / "st_lpips.pth")
    return root


def config_for(models, out, **changes) -> CompareConfig:
    entries = [
        CompareEntry("BF16", str(models / "base"), "bf16", str(models / "run")),
        CompareEntry("tuned", str(models / "tuned"), "attn_qat"),
        CompareEntry("FP4 / 1", str(models / "base"), "attn_qat"),
    ]
    settings = {
        "entries": entries,
        "prompts": str(models / "prompts.txt"),
        "seeds": [3],
        "validation_cache": str(models / "cache"),
        "validation_samples": 2,
        "validation_timesteps": 2,
        "st_lpips": str(models / "st_lpips.pth"),
        "out": str(out),
        "sampling": SAMPLING,
        "runtime": CPU,
    }
    return CompareConfig(**{**settings, **changes})


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """A finished comparison: its folder, what compare returned, and which folders were loaded in which order."""
    out = tmp_path_factory.mktemp("finished") / "out"
    loaded = []

    class Watched(Engine):
        def __init__(self, folder, runtime):
            loaded.append(str(folder))
            super().__init__(folder, runtime)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "Engine", Watched)
        report = compare(config_for(models, out))
    return out, report, loaded


def test_videos_are_those_of_the_engine(models, finished):
    out, report, loaded = finished
    assert loaded == [str(models / "base"), str(models / "tuned")]  # each once
    assert len(list((out / "videos").iterdir())) == (3 + 1) * 2
    engines = {name: Engine(models / name, CPU) for name in ("base", "tuned")}
    network = StLpips(models / "st_lpips.pth")
    pairs = {"BF16": ("base", "bf16"), "tuned": ("tuned", "attn_qat"), "FP4 / 1": ("base", "attn_qat")}
    for prompt in PROMPTS:
        frames = {name: engines[model].generate(prompt, 3, SAMPLING, recipe).frames for name, (model, recipe) in pairs.items()}
        for video in (v for v in report["videos"] if v["prompt"] == prompt and not v["repeat"]):
            assert video["flicker"] == flicker(frames[video["entry"]])
            if video["entry"] == "BF16":
                assert video["fidelity"] is None
            else:
                assert video["fidelity"] == fidelity(frames["BF16"], frames[video["entry"]], network)
                assert video["fidelity"]["st_lpips_mean"] > 0
                assert not video["fidelity"]["identical"]
            stored, _ = read_video(out / video["file"])
            luma = [f.astype(float) @ (0.299, 0.587, 0.114) for f in (stored, frames[video["entry"]])]
            assert np.corrcoef(luma[0].ravel(), luma[1].ravel())[0, 1] > 0.98


def test_report_holds_every_measurement(finished):
    out, report, _ = finished
    assert json.loads((out / "report.json").read_text()) == {k: v for k, v in report.items() if k not in ("report_html", "report_json")}
    assert report["floor"]["identical_videos"] == report["floor"]["videos"] == 2  # a CPU repeats itself
    assert report["floor"]["st_lpips_mean"] == 0
    reference, tuned, fp4 = report["entries"]
    assert fp4["fidelity"]["st_lpips_mean"] == np.mean([v["fidelity"]["st_lpips_mean"] for v in report["videos"] if v["entry"] == fp4["name"]])
    assert (reference["fidelity"], reference["layers"]) == (None, {})
    assert set(fp4["layers"]) == {"blocks.0.attn1", "blocks.1.attn1"}
    assert all(0.01 < layer["relative_error"] < 0.5 for layer in fp4["layers"].values())
    assert fp4["validation"]["difference"] == pytest.approx(np.mean(fp4["validation"]["losses"]) - np.mean(reference["validation"]["losses"]))
    assert np.array(fp4["validation"]["losses"]).shape == (2, 2)
    assert abs(fp4["validation"]["relative"]) < abs(tuned["validation"]["relative"])  # another recipe, against another model
    assert {(r["kernel"], r["native"], r["recipe"]) for r in fp4["receipts"]} == {("torch", False, "attn_qat"), ("sdpa", True, "bf16")}
    assert set(reference["latency"]) == {"text_s", "denoise_s", "vae_s", "total_s", "step_s"}
    assert reference["training"]["loss"] == [1, 1 / 2, 1 / 3]
    assert tuned["training"] is None
    html = (out / "report.html").read_text()
    assert f"{fp4['fidelity']['st_lpips_mean']:.4f}" in html
    assert html.count("data:video/mp4;base64,") == 6
    assert "<b>bag</b>" not in html
    assert "a &lt;b&gt;bag&lt;/b&gt; moves up" in html


def test_resume_renders_only_what_is_missing(models, finished, tmp_path, monkeypatch):
    out, _, _ = finished
    rendered = []
    generate = Engine.generate

    def watched(self, prompt, seed, sampling, recipe, **options):
        rendered.append((self.folder.name, prompt, getattr(recipe, "name", recipe), sampling.num_inference_steps))
        return generate(self, prompt, seed, sampling, recipe, **options)

    monkeypatch.setattr(Engine, "generate", watched)
    before = {path: path.stat().st_mtime_ns for path in (out / "videos").iterdir()}
    report = json.loads((out / "report.json").read_text())
    again = compare(config_for(models, out))
    assert rendered == []
    assert again["entries"] == report["entries"]
    assert {path: path.stat().st_mtime_ns for path in (out / "videos").iterdir()} == before

    # One video is gone. Its reference's frames are needed again, and nothing else; every figure stays.
    (lost,) = [v for v in report["videos"] if v["entry"] == "tuned" and v["prompt"] == PROMPTS[1]]
    (out / lost["file"]).unlink()
    again = compare(config_for(models, out))
    warm_up = compare_module.WARM_UP_STEPS
    expected = [("base", PROMPTS[0], "bf16", warm_up), ("base", PROMPTS[1], "bf16", 2)]
    assert rendered == [*expected, ("tuned", PROMPTS[0], "attn_qat", warm_up), ("tuned", PROMPTS[1], "attn_qat", 2)]
    assert [v["fidelity"] for v in again["videos"]] == [v["fidelity"] for v in report["videos"]]
    assert [e["validation"] for e in again["entries"]] == [e["validation"] for e in report["entries"]]
    assert not list((out / "parts").glob("*.npz"))


def test_interrupted_in_the_middle(models, finished, tmp_path, monkeypatch):
    _, whole, _ = finished
    generate, count = Engine.generate, 0

    def interrupted(self, *args, **options):
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt
        return generate(self, *args, **options)

    config = config_for(models, tmp_path / "out", validation_cache="")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare(config)
    assert not (tmp_path / "out" / "report.json").exists()
    done = {path.name for path in (tmp_path / "out" / "videos").iterdir()}
    assert 0 < len(done) < 8
    report = compare(config)
    assert [(v["entry"], v["prompt"], v["fidelity"]) for v in report["videos"]] == [(v["entry"], v["prompt"], v["fidelity"]) for v in whole["videos"]]
    assert report["entries"][0]["validation"] is None


def test_other_settings_are_refused_and_nothing_changes(models, finished, tmp_path):
    out, _, _ = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    entries = config_for(models, out).entries
    others = {
        r"sampling\.num_inference_steps=2, not 3": {"sampling": dataclasses.replace(SAMPLING, num_inference_steps=3)},
        r"seeds\[0\]=3, not 4": {"seeds": [4]},
        r"st_lpips\.absent=None, not 'st_lpips=none'": {"st_lpips": "none"},
        r"entries\[2\]\.recipe='attn_qat', not 'sage3'": {"entries": [*entries[:2], dataclasses.replace(entries[2], recipe="sage3")]},
    }
    for words, changes in others.items():
        with pytest.raises(UserError, match=words):
            compare(config_for(models, out, **changes))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("something else\n" + PROMPTS[1])
    with pytest.raises(UserError, match="something else"):
        compare(config_for(models, out, prompts=str(prompts)))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    # The same prompts elsewhere are the same settings.
    prompts.write_text("\n".join(PROMPTS))
    assert plan(config_for(models, out, prompts=str(prompts)))["videos"] == 8


def test_a_model_that_changed_is_other_settings(models, tmp_path):
    folder = enliven(models / "base", tmp_path / "model")
    entries = [CompareEntry("a", str(folder), "bf16"), CompareEntry("b", str(folder), "attn_qat")]
    out = tmp_path / "out"
    config = config_for(models, out, entries=entries, validation_cache="")
    out.mkdir()
    (out / "settings.json").write_text(json.dumps(compare_module._settings(config, [(prompt, "") for prompt in PROMPTS])))
    plan(config)
    change_weights(folder / "transformer", {"proj_out.bias": lambda w: w + 1})
    with pytest.raises(UserError, match=re.escape("transformer/diffusion_pytorch_model.safetensors")):
        plan(config)


def test_foreign_folders_are_left_alone(models, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not empty"):
        compare(config_for(models, tmp_path / "out"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        compare(config_for(models, tmp_path / "file"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_bad_input_is_named_before_weights_are_loaded(models, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "Engine", None)
    entries = config_for(models, tmp_path / "out").entries
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n\n   \n")
    cases = [
        ({"prompts": str(empty)}, "holds no prompt"),
        ({"prompts": str(tmp_path / "none.txt")}, "none.txt"),
        ({"entries": entries[:1]}, "two or more"),
        ({"entries": [entries[0], entries[0]]}, "names that differ"),
        ({"entries": [entries[0], dataclasses.replace(entries[1], recipe="fp3")]}, "fp3"),
        ({"entries": [entries[0], dataclasses.replace(entries[1], model=str(tmp_path / "no"))]}, "entries.1..model"),
        ({"entries": [entries[0], dataclasses.replace(entries[1], run=str(models / "base"))]}, "log.jsonl"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"sampling": dataclasses.replace(SAMPLING, width=24)}, "width 24.*32"),
        ({"validation_cache": str(models / "base")}, "no finished cache"),
        ({"runtime": RuntimeConfig(device="cpu", kernel="sdpa")}, "sdpa.*attn_qat"),
        ({"st_lpips": "yes"}, "st_lpips='yes' is not legal; legal: auto .*, installed"),
        ({"st_lpips": str(empty)}, "empty.txt holds no weights of ST-LPIPS"),
    ]
    for changes, words in cases:
        with pytest.raises(UserError, match=words) as error:
            compare(config_for(models, tmp_path / "out", **changes))
        assert "\n" not in str(error.value)
    monkeypatch.setattr("videoqat.evaluation.fidelity.SMALLEST", 33)  # the smallest videos of this model are larger than the window of SSIM
    with pytest.raises(UserError, match=r"height x width=.* is not legal; legal: 33 or more"):
        compare(config_for(models, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_plan_says_what_would_be_done(models, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_module, "Engine", None)
    planned = plan(config_for(models, tmp_path / "out"))
    assert planned["videos"] == 8
    assert planned["prompts"] == PROMPTS
    assert [entry["receipt"]["kernel"] for entry in planned["entries"]] == ["sdpa", "torch", "torch"]
    assert not (tmp_path / "out").exists()
    json.dumps(planned)


def test_a_broken_entry_is_an_error(models, tmp_path):
    folder = enliven(models / "base", tmp_path / "broken")
    change_weights(folder / "transformer", {"proj_out.bias": lambda w: w * float("nan")})
    entries = [CompareEntry("a", str(models / "base"), "bf16"), CompareEntry("b", str(folder), "bf16")]
    with pytest.raises(NonFiniteVideo, match="broken"):
        compare(config_for(models, tmp_path / "out", entries=entries, validation_cache=""))
    assert not (tmp_path / "out" / "report.html").exists()


def test_prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeff# Kommentar\n  a café #3 \r\n\na dog\na dog\n".encode())
    assert read_prompts(path) == ["a café #3", "a dog"]
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        read_prompts(path)
