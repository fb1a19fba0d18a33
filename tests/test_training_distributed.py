"""Training on two gloo ranks against one process, and what happens to all when one of them has a problem.

Scenarios share processes, since starting one costs more than training: each opens a mesh of its own, over a store of its own.
"""

import contextlib
import io
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.pipelines import enliven
from helpers.ranks import outcomes, run_ranks
from helpers.training import tiny_config
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from videoqat import cli
from videoqat.config import SamplingConfig
from videoqat.data.dataset import CachedVideos
from videoqat.data.video_io import read_video
from videoqat.errors import DataError
from videoqat.training import state, trainer
from videoqat.training.batches import batches_of
from videoqat.training.job import check
from videoqat.training.runlog import read_log
from videoqat.training.step import Run, Step

pytestmark = pytest.mark.dist

SETTINGS: dict[str, Any] = {"recipe": "attn_qat_search", "train__global_batch_size": 4, "train__steps": 3}
LOOKS: dict[str, Any] = {
    "validation__every": 3,
    "validation__samples": 3,
    "validation__timesteps": 3,  # nine forwards for two ranks: one rank's last counts for nothing
    "validation__prompts": ["a bag moves up", "a dress moves left", "a sneaker moves left"],
    "validation__sampling": SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2),
    "train__health_every": 2,
}


def each_in_a_mesh_of_its_own(ports: list[int], scenarios: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Runs functions of this module, by name, on this rank."""
    results = []
    for port, (name, arguments) in zip(ports, scenarios, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(globals()[name](*arguments))
    return results


def on_two_ranks(*scenarios: tuple[Any, ...]) -> list[list[Any]]:
    """What each scenario (function, arguments) returned, by rank."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in scenarios]
    named = [(function.__name__, arguments) for function, *arguments in scenarios]
    by_rank = run_ranks(each_in_a_mesh_of_its_own, 2, [store.port for store in stores], named)
    return [list(results) for results in zip(*by_rank, strict=True)]


def train(config: Any) -> dict[str, Any]:
    return trainer.train(config)


def fails(config: Any, harm: str = "", rank: int = 1) -> tuple[str, str]:
    """Trains, with something wrong on one rank; the error's kind and text."""
    with pytest.MonkeyPatch.context() as patch:
        if harm and os.environ["RANK"] == str(rank):
            globals()[harm](config, patch)
        try:
            trainer.train(config)
        except Exception as error:
            return type(error).__name__, str(error)
    return "nothing", ""


@pytest.fixture(scope="module")
def run_config(tiny_pipeline: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """run_config(name, ...): a training of a model that predicts something, by steps so small that its weights stay as they are."""
    folder = tmp_path_factory.mktemp("distributed")
    model = enliven(tiny_pipeline, folder / "model")

    def make(name: str, **changes: Any) -> Any:
        settings = SETTINGS | {"from_scratch": False, "optimizer__lr": 1e-9} | changes
        return tiny_config(model, tiny_cache, folder / name, **settings)

    return make


def rows_of(config: Any, name: str = "log.jsonl") -> list[dict[str, Any]]:
    return read_log(Path(config.out) / name)


LAYOUTS = {"shard": {"parallel__dp_shard": 2}, "sp": {"parallel__sp": 2}}


@pytest.fixture(scope="module")
def runs(run_config: Callable[..., Any], tiny_cache: Path) -> dict[str, Any]:
    """The same training in one process and in two layouts of two, with looks at everything: name -> configuration."""
    looks = LOOKS | {"validation__cache": str(tiny_cache)}
    configs = {name: run_config(name, **looks, **layout) for name, layout in ({"one": {}} | LAYOUTS).items()}
    results = on_two_ranks(*((train, configs[name]) for name in LAYOUTS))
    for ours, theirs in results:
        assert ours == theirs
        assert ours["steps"] == 3
    train(configs["one"])
    return configs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logs_are_those_of_one_process(runs: dict[str, Any], layout: str) -> None:
    rows, expected = rows_of(runs[layout]), rows_of(runs["one"])
    assert [(row["step"], row["epoch"], row["lr"]) for row in rows] == [(row["step"], row["epoch"], row["lr"]) for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=5e-6 if layout != "sp" else 1e-4), key
    for row in rows:
        assert row["tokens_per_second"] * row["step_time"] == pytest.approx(4 * 32)  # of all ranks, and a divided sequence counts once
        assert sum(row[f"{part}_seconds"] for part in ("data", "forward", "backward", "optimizer")) == pytest.approx(row["step_time"])
    traced = [row["step"] for row in rows if "communication_seconds" in row]
    assert traced == [3]  # of each session
    assert 0 <= rows[2]["communication_exposed_seconds"] <= rows[2]["communication_seconds"]
    assert rows[2]["communication_seconds"] > 0
    assert not any("communication_seconds" in row for row in expected)
    sessions = json.loads((Path(runs[layout].out) / "provenance.json").read_text())["sessions"]
    assert [session["layout"][:1] for session in sessions] == ["2"]
    assert sessions[0]["engine"] == "fsdp"
    assert sessions[0]["ulysses"] == (None if layout == "shard" else {"degree": 2, "wire": "bf16", "asked_for": "auto"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_losses_are_those_of_one_process(runs: dict[str, Any], layout: str) -> None:
    rows, expected = rows_of(runs[layout], "validation.jsonl"), rows_of(runs["one"], "validation.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [3]
    for row, other in zip(rows, expected, strict=True):
        for recipe, losses in row["losses"].items():
            assert np.shape(losses) == (3, 3)
            tolerance = 1e-6 if layout != "sp" or recipe == "bf16" else 1e-3  # products of other shapes flip a 4-bit code now and then
            assert np.allclose(losses, other["losses"][recipe], rtol=tolerance, atol=0), recipe
    assert rows_of(runs[layout])[2]["validation"].keys() == {"bf16", "attn_qat_search"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sample_videos_are_those_of_one_process(runs: dict[str, Any], layout: str) -> None:
    folders = [Path(runs[name].out) / "samples/step-000003" for name in (layout, "one")]
    assert [sorted(p.name for p in folder.iterdir()) for folder in folders] == [[f"prompt-0{i}.{k}" for i in range(3) for k in ("json", "mp4")]] * 2
    for i in range(3):
        ours, theirs = (read_video(folder / f"prompt-0{i}.mp4")[0].astype(float) for folder in folders)
        assert np.abs(ours - theirs).mean() < 1
        record = json.loads((folders[0] / f"prompt-0{i}.json").read_text())
        assert {r["kernel"] for r in record["receipts"] if r["recipe"] == "attn_qat_search"} == {"torch"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_health_is_rank_zeros_view(runs: dict[str, Any], layout: str) -> None:
    for row, expected in zip(rows_of(runs[layout])[:2], rows_of(runs["one"])[:2], strict=True):
        assert list(row["health"]) == ["blocks.0.attn1", "blocks.1.attn1"]
        for layer, numbers in row["health"].items():
            ours, theirs = numbers["relative_error"], expected["health"][layer]["relative_error"]
            if layout == "sp":  # one of two heads
                assert 0.3 * theirs < ours < 3 * theirs
                assert ours != pytest.approx(theirs, rel=1e-6)
            else:  # its first sample is the step's first
                assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_steps_samples_do_not_depend_on_the_layout(run_config: Callable[..., Any]) -> None:
    for step in (1, 2, 5):
        sets = []
        for world_size, layout in ((1, {}), (2, {}), (4, {}), (4, {"parallel__sp": 2}), (2, {"parallel__dp_replicate": 2})):
            job = check(run_config("order", **layout), world_size)
            sets.append(batches_of(job, step))
        assert all(other == sets[0] for other in sets)
        assert len(sets[0]) == 4


# What goes wrong, on rank 1 alone.


def other_seed(config: Any, patch: pytest.MonkeyPatch) -> None:
    config.train.seed = 1


def other_version(config: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trainer, "versions", lambda: {"torch": "1.0"})


def full_disk(config: Any, patch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(FileSystemWriter, "write_data", write)


def bad_numbers(config: Any, patch: pytest.MonkeyPatch) -> None:
    load = CachedVideos.load
    patch.setattr(CachedVideos, "load", lambda self, index: {name: tensor * math.inf for name, tensor in load(self, index).items()})


def shard_lost(config: Any, patch: pytest.MonkeyPatch) -> None:
    load, left = CachedVideos.load, [7]  # one to check the cache, two a step: broken when the third step is loaded

    def losing(self: CachedVideos, index: int) -> dict[str, torch.Tensor]:
        left[0] -= 1
        if left[0] < 0:
            raise DataError("shard 'cache/0.safetensors' can't be read: Input/output error")
        return load(self, index)

    patch.setattr(CachedVideos, "load", losing)


def asked_to_stop(config: Any, patch: pytest.MonkeyPatch) -> None:
    take_step = trainer.take_step

    def signalled(run: Run, step: int) -> Step:
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return take_step(run, step)

    patch.setattr(trainer, "take_step", signalled)


def stops(config: Any) -> dict[str, Any]:
    """What training returns that is asked to stop on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            asked_to_stop(config, patch)
        return trainer.train(config)


def test_what_goes_wrong_on_one_rank_ends_all_with_its_reason(run_config: Callable[..., Any]) -> None:
    harms = ("other_seed", "other_version", "full_disk", "bad_numbers", "shard_lost")
    configs = {harm: run_config(harm, train__save_every=1, train__keep_last=9, train__steps=4, train__profile_every=0) for harm in harms}
    stopping = run_config("stopping", train__steps=9, train__profile_every=0)
    *errors, stopped = on_two_ranks(*((fails, configs[harm], harm) for harm in harms), (stops, stopping))

    found = dict(zip(harms, errors, strict=True))
    differ = "ranks differ in {}: {} on rank 1, {} on rank 0; all must be started alike"
    assert found["other_seed"] == [("UserError", differ.format("train.seed", 1, 0))] * 2
    kind, text = found["other_version"][0]
    assert found["other_version"] == [(kind, text)] * 2
    assert text.startswith("ranks differ in versions.")
    for harm in ("other_seed", "other_version"):
        assert not Path(configs[harm].out).exists()

    for kind, text in found["full_disk"]:
        assert kind == "CheckpointError"
        assert "step-000001 can't be written: No space left on device (rank 1); older checkpoints are untouched" in text
    assert list((Path(configs["full_disk"].out) / "checkpoints").iterdir()) == []

    name = CachedVideos(configs["bad_numbers"].cache).samples[batches_of(check(configs["bad_numbers"], 2), 1)[1][1][0]].id
    for kind, text in found["bad_numbers"]:
        assert kind == "TrainingDiverged"
        assert text.startswith("step 1: loss is ")
        assert f"is in: the cache's sample {name} (on rank 1); last good checkpoint: none was saved yet" in text
    assert rows_of(configs["bad_numbers"]) == []

    reason = "shard 'cache/0.safetensors' can't be read: Input/output error"
    assert found["shard_lost"] == [("DataError", f"rank 1: {reason}"), ("DataError", reason)]
    assert state.whole(Path(configs["shard_lost"].out) / "checkpoints") != []

    assert stopped[0] == stopped[1]
    assert (stopped[0]["exit_code"], stopped[0]["stopped_by"], stopped[0]["steps"]) == (75, "SIGUSR1", 2)
    assert [path.name for path in state.whole(Path(stopping.out) / "checkpoints")] == ["step-000002"]


def killed_at_the_third_step(words: list[str]) -> tuple[int, str]:
    """The command's exit code and what it said; on rank 1 it doesn't come back."""
    take_step = trainer.take_step

    def dying(run: Run, step: int) -> Step:
        if step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(run, step)

    trainer.take_step = dying
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.main(words)
    return code, said.getvalue()


def test_a_killed_rank_ends_the_other_with_one_line_and_the_run_can_go_on(run_config: Callable[..., Any]) -> None:
    config = run_config("killed", train__save_every=1, train__steps=9)
    settings = {"model.path": config.model.path, "cache": config.cache, "out": config.out, "recipe": config.recipe}
    loop = {f"train.{key}": getattr(config.train, key) for key in ("steps", "save_every", "global_batch_size", "compute_dtype", "health_every")}
    words = ["train", "train.async_save=false", *(f"{key}={value}" for key, value in (settings | loop).items())]
    survivor, killed = outcomes(killed_at_the_third_step, 2, words, timeout=90)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.exit_code == 0, survivor.error
    assert survivor.ended_at - killed.ended_at < 30
    code, said = survivor.result
    assert code == 1
    line = said.strip().splitlines()[-1]
    assert line.startswith("videoqat train [rank 0]: step 3: another process ended or stopped answering (")
    assert "Traceback" not in said
    kept = state.whole(Path(config.out) / "checkpoints")
    assert kept[-1].name == "step-000002"
    assert [row["step"] for row in rows_of(config)] == [1, 2]
