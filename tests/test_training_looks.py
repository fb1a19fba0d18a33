"""Looks at a training on its way: paired losses and sample videos, right by another road, and nothing changed by them."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training import assert_same_run, tiny_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from videoqat.config import ExportConfig, RuntimeConfig, SamplingConfig
from videoqat.data.dataset import CachedVideos
from videoqat.data.video_io import read_video
from videoqat.errors import ConfigError, DataError, NonFiniteVideo, UserError
from videoqat.generation.engine import Engine
from videoqat.models.install import install
from videoqat.models.spec import family_of
from videoqat.training import looks, samples, trainer
from videoqat.training.export import export
from videoqat.training.job import check
from videoqat.training.runlog import read_log
from videoqat.training.trainer import train
from videoqat.training.validation import choose_samples, paired_losses, summarise

PROMPTS = ["a sneaker moves left", "a bag moves up"]
SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, guidance_scale=2.0, negative_prompt="noise")
RECIPE = "attn_qat_search"


def looking(held_out: Path | str, **changes: Any) -> dict[str, Any]:
    settings = {"every": 2, "cache": str(held_out), "samples": 3, "timesteps": 2, "prompts": PROMPTS, "sampling": SAMPLING} | changes
    return {f"validation__{key}": value for key, value in settings.items()}


@pytest.fixture(scope="module")
def watched(tiny_pipeline: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with a look at everything after the second and at the end. Samples of one size and batches of two."""
    out = tmp_path_factory.mktemp("looks") / "watched"
    more = {"train__health_every": 1, "train__save_every": 2, "train__batch_size": 2}
    train(tiny_config(tiny_pipeline, tiny_cache, out, recipe=RECIPE, train__steps=3, **more, **looking(tiny_cache)))
    return out


def test_looking_changes_no_bit(watched: Path, make: Any) -> None:
    alone = make("alone", recipe=RECIPE, train__steps=3, train__batch_size=2)
    train(alone)
    assert_same_run(watched, Path(alone.out))
    assert not (Path(alone.out) / "validation.jsonl").exists()
    assert not (Path(alone.out) / "samples").exists()


@pytest.fixture(scope="module")
def exported(watched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after the third step, as a folder."""
    out = tmp_path_factory.mktemp("looks") / "exported"
    export(ExportConfig(run=str(watched), out=str(out)))
    return out


def test_losses_are_those_of_the_exported_model(watched: Path, exported: Path, tiny_cache: Path, make: Any) -> None:
    rows = read_log(watched / "validation.jsonl")
    assert [row["step"] for row in rows] == [2, 3]
    family, cache = family_of(exported), CachedVideos(tiny_cache)
    transformer = family.load_transformer(exported, "transformer", dtype=torch.float32)
    losses = {}
    for recipe in ("bf16", RECIPE):
        install(transformer, recipe)
        losses[recipe] = paired_losses(
            *(family, exported, {"transformer": transformer}, cache, check(make("job")).config.objective),
            samples=choose_samples(len(cache), 3),
            num_times=2,
            batch_size=2,
        )
        assert np.allclose(rows[1]["losses"][recipe], losses[recipe], rtol=1e-5)
    assert (losses["bf16"] != losses[RECIPE]).all()
    logged = {row["step"]: row["validation"] for row in read_log(watched / "log.jsonl") if "validation" in row}
    assert logged == {row["step"]: {recipe: row[recipe] for recipe in losses} for row in rows}
    found = summarise({recipe: np.array(values) for recipe, values in rows[1]["losses"].items()}, "bf16")
    assert logged[3] == found
    board = EventAccumulator(str(watched / "tensorboard"))
    board.Reload()
    for recipe in losses:
        assert [event.value for event in board.Scalars(f"validation/loss/{recipe}")] == pytest.approx(
            [logged[step][recipe]["loss"] for step in (2, 3)]
        )
    assert board.Scalars(f"validation/difference/{RECIPE}")[1].value == pytest.approx(found[RECIPE]["difference"])
    assert [event.step for event in board.Images("samples/prompt-01")] == [2, 3]


def test_videos_are_those_of_the_exported_model(watched: Path, exported: Path) -> None:
    folder = watched / "samples/step-000003"
    assert sorted(p.name for p in folder.iterdir()) == [f"prompt-0{i}.{kind}" for i in (0, 1) for kind in ("json", "mp4")]
    assert sorted(p.name for p in (watched / "samples").iterdir()) == ["step-000002", "step-000003"]
    engine = Engine(exported, RuntimeConfig(device="cpu"))
    expected = [engine.generate(prompt, i, SAMPLING, RECIPE).frames.astype(float) for i, prompt in enumerate(PROMPTS)]
    for i, prompt in enumerate(PROMPTS):
        frames, _ = read_video(folder / f"prompt-0{i}.mp4")
        assert frames.shape == expected[i].shape == (5, 32, 32, 3)
        assert np.abs(frames - expected[i]).mean() < 3  # what compression costs
        assert np.abs(frames - expected[1 - i]).mean() > 10
        record = json.loads((folder / f"prompt-0{i}.json").read_text())
        assert (record["prompt"], record["seed"], record["recipe"]["name"]) == (prompt, i, RECIPE)
        assert {r["kernel"] for r in record["receipts"] if r["recipe"] == RECIPE} == {"torch"}
        assert record["sampling"]["max_text_tokens"] == 16  # as the cache was made
        assert len(record["timings"]["steps_s"]) == 2


def test_a_resumed_run_forgets_looks_of_steps_that_it_takes_again(watched: Path, make: Any, tiny_cache: Path, tmp_path: Path) -> None:
    (watched / "checkpoints/step-000003").rename(tmp_path / "step-000003")
    before = read_log(watched / "validation.jsonl")
    config = make("run", recipe=RECIPE, train__steps=3, train__health_every=1, train__save_every=2, train__batch_size=2, **looking(tiny_cache))
    config.out = str(watched)
    assert train(config)["resumed_from"].endswith("step-000002")
    assert read_log(watched / "validation.jsonl") == before


def test_a_video_that_breaks_is_told_and_training_goes_on(make: Any, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise NonFiniteVideo("latents became NaN")

    monkeypatch.setattr(samples.Sampler, "render", broken)
    config = make("run", train__steps=2, **looking(""))
    assert train(config)["steps"] == 2
    assert "WARNING: validation of step 2: latents became NaN" in capsys.readouterr().err
    assert read_log(Path(config.out) / "validation.jsonl") == [{"step": 2, "error": "latents became NaN"}]


def test_a_signal_ends_a_look_early(make: Any, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Minutes of videos must not keep a run from saving in time."""
    heed = looks.Looks._heed

    def signalled(self: looks.Looks) -> None:
        self._run.stop.signal = self._run.stop.signal or signal.SIGUSR1
        heed(self)

    monkeypatch.setattr(looks.Looks, "_heed", signalled)
    config = make("run", train__steps=9, **looking(tiny_cache))
    result = train(config)
    assert (result["stopped_by"], result["steps"]) == ("SIGUSR1", 3)
    assert "validation of step 2 was cut short by a signal" in capsys.readouterr().err
    assert not (Path(config.out) / "samples").exists()


def test_what_can_not_be_looked_at_is_told_before_anything_is_loaded(
    make: Any, tiny_cache: Path, tiny_pipeline_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "make_engine", lambda *_: pytest.fail("weights were loaded"))
    refused: list[tuple[type[UserError], str, Any]] = [
        (DataError, r"no finished cache", looking(tmp_path)),
        (ConfigError, r"sampling: height 40 doesn't fit", looking(tiny_cache, sampling=SamplingConfig(num_frames=5, height=40, width=32))),
        (ConfigError, r"validation.prompts=.*; legal: none: samples need transformer and transformer_2", looking(tiny_cache)),
    ]
    for (kind, message, settings), folder in zip(refused, (None, None, tiny_pipeline_pair), strict=True):
        more = {} if folder is None else {"model__path": str(folder), "from_scratch": False}
        for command in (train, trainer.plan):
            with pytest.raises(kind, match=message):
                command(make("run", **settings, **more))
    assert not (tmp_path / "run").exists()


def test_pictures_for_tensorboard_show_first_and_last_frame() -> None:
    frames = np.arange(10, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 3), np.uint8)
    strip = samples.strip(frames)
    assert strip.shape == (2, 18, 3)
    assert strip[0, ::3, 0].tolist() == [0, 2, 4, 5, 7, 9]
