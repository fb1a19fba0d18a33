"""The training loop on a tiny real pipeline and cache: it learns, it doesn't depend on how samples are batched, and it resumes bit for bit."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.disks import full_disk
from helpers.training import assert_same_run, stored, tiny_config

from videoqat.config import ParallelConfig
from videoqat.errors import CheckpointError, UserError
from videoqat.parallel import folder
from videoqat.parallel.mesh import open_mesh
from videoqat.training import batches, runlog, state, step, trainer
from videoqat.training.batches import load_batch
from videoqat.training.job import check
from videoqat.training.objective import denoising_loss
from videoqat.training.runlog import RunLog, only_run, read_log, stop_on_signal
from videoqat.training.step import Run, Step
from videoqat.training.trainer import train


def test_loss_falls_on_a_fixed_set(make: Any) -> None:
    config = make("run", train__steps=60, train__batch_size=6, objective__caption_dropout=0.0, objective__logit_std=0.2, optimizer__warmup_steps=5)
    result = train(config)
    losses = [row["loss"] for row in read_log(Path(config.out) / "log.jsonl")]
    assert losses[0] == pytest.approx(2.0, abs=1.2)  # an output of zero: E (noise - x0)^2
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert result["steps"] == 60
    assert result["last_loss"] == losses[-1]
    assert result["mean_loss_last"] == pytest.approx(sum(losses[-50:]) / 50)


def test_batch_of_two_equals_two_accumulated_batches_of_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Batches of one come in an order of their own, so both layouts are given the same pairs.
    pairs = [[0, 3], [5, 1], [2, 4]]

    def batch(self: Any, index: int) -> tuple[int, list[int]]:
        samples = [pairs[index % 3]] if self.batch_size == 2 else [[i] for pair in pairs for i in pair]
        return (0, samples[0]) if self.batch_size == 2 else (0, samples[index % 6])

    monkeypatch.setattr("videoqat.data.dataset.BatchOrder.batch", batch)
    losses, weights = {}, {}
    for name, size in (("together", 2), ("accumulated", 1)):
        config = make(name, train__batch_size=size, train__global_batch_size=2, train__steps=3, optimizer__clip_norm=0.5, optimizer__eps=1e-3)
        train(config)
        rows = read_log(Path(config.out) / "log.jsonl")
        losses[name] = [value for row in rows for value in (row["loss"], row["grad_norm"])]
        weights[name] = stored(state.whole(Path(config.out) / "checkpoints")[-1])
    assert losses["together"] == pytest.approx(losses["accumulated"], rel=2e-6)
    for key, tensor in weights["together"].items():
        torch.testing.assert_close(tensor, weights["accumulated"][key], rtol=2e-5, atol=1e-6, msg=key)


def test_the_logged_norm_is_before_clipping_and_clipping_bounds_the_step(make: Any) -> None:
    free, clipped = make("free", train__steps=1, optimizer__clip_norm=1e6), make("clipped", train__steps=1, optimizer__clip_norm=1e-3)
    train(free)
    train(clipped)
    norms = [read_log(Path(c.out) / "log.jsonl")[0]["grad_norm"] for c in (free, clipped)]
    assert norms[0] == norms[1] > 1e-2
    # The first moment after one step is (1 - beta1) times the clipped gradient.
    moments = [value for key, value in stored(Path(clipped.out) / "checkpoints/step-000001").items() if key.endswith("exp_avg")]
    assert torch.cat([m.flatten() for m in moments]).norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


# Six samples, two accumulated batches of one: an epoch is three steps.
STOPS = {"in the middle of an epoch": [2], "at an epoch's end": [3], "twice in a row": [1, 5]}


@pytest.mark.parametrize("name", STOPS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make: Any, name: str, monkeypatch: pytest.MonkeyPatch, whole_run: Path) -> None:
    for stop in STOPS[name]:
        stop_at(monkeypatch, stop)
        stopped = train(make("parts", **RESUMED))
        assert (stopped["exit_code"], stopped["stopped_by"], stopped["steps"]) == (75, "SIGTERM", stop)
    monkeypatch.undo()
    result = train(make("parts", **RESUMED))
    assert result["resumed_from"].endswith(f"step-{STOPS[name][-1]:06d}")
    assert "exit_code" not in result
    assert_same_run(Path(make("parts").out), whole_run)
    sessions = json.loads((Path(make("parts").out) / "provenance.json").read_text())["sessions"]
    assert [s["first_step"] for s in sessions] == [1, *(stop + 1 for stop in STOPS[name])]


RESUMED = {
    "train__steps": 7,
    "train__global_batch_size": 2,
    "optimizer__ema_decay": 0.8,
    "recipe": "attn_qat_search",
    "optimizer__schedule": "cosine",
}


@pytest.fixture(scope="module")
def whole_run(tiny_pipeline: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven steps without a stop."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_config(tiny_pipeline, tiny_cache, out, **RESUMED))
    assert [row["epoch"] for row in read_log(out / "log.jsonl")] == [0, 0, 0, 1, 1, 1, 2]
    return out


@pytest.mark.parametrize("damage", ["killed after the last save", "newest torn"])
def test_after_a_kill_the_log_has_every_step_once(make: Any, damage: str, capsys: pytest.CaptureFixture[str], whole_run: Path) -> None:
    """What a kill -9 leaves: rows and TensorBoard events of steps that no checkpoint has, half a line, a `.partial` folder."""
    config = make("run", **RESUMED, train__save_every=2, train__keep_last=3)
    out = Path(config.out)
    train(config)
    shutil.rmtree(out / "checkpoints/step-000007")  # as if killed before the last save
    (out / "checkpoints/.step-000007.partial").mkdir()
    with open(out / "log.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    resumed = 6
    if damage == "newest torn":
        os.truncate(out / "checkpoints/step-000006/__0_0.distcp", 1000)
        resumed = 4
    result = train(config)
    assert result["resumed_from"].endswith(f"step-00000{resumed}")
    said = capsys.readouterr().err
    assert f"resuming from {out}/checkpoints/step-00000{resumed}" in said
    assert ("step-000006 is newer but not whole, so it is passed over: __0_0.distcp has 1000 bytes" in said) == (damage == "newest torn")
    assert not list((out / "checkpoints").glob(".*"))
    assert_same_run(out, whole_run)
    assert [event.step for event in scalars(out, "train/loss")] == list(range(1, 8))


def scalars(out: Path, tag: str) -> list[Any]:
    """TensorBoard's events, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    return list(board.Scalars(tag))


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Sends this process SIGTERM during `step`, as a scheduler does."""
    original = trainer.take_step

    def stepping(run: Run, number: int) -> Step:
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, number)

    monkeypatch.setattr(trainer, "take_step", stepping)


def test_one_wish_may_come_twice_but_a_later_one_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C under torchrun: the terminal sends SIGINT, and torchrun SIGTERM after it."""
    with stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGINT
        monkeypatch.setattr(runlog, "ONE_WISH_S", -1.0)  # as if that had been long ago
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_resume_never_refuses_to_overwrite(make: Any, whole_run: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_run, tmp_path / "run")

    def times() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name != ".lock"}

    before = times()
    with pytest.raises(UserError, match=r"^train.resume=never, but .*/run/checkpoints holds step-000007; choose another out, or"):
        train(make("run", **RESUMED, train__resume="never"))
    assert times() == before


@pytest.mark.parametrize(
    ("resume", "told"), [("latest", "the same command continues"), ("never", "train.resume=latest, instead of never, continues")]
)
def test_a_stopped_run_says_what_continues_it(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], resume: str, told: str
) -> None:
    stop_at(monkeypatch, 1)
    assert train(make("run", train__steps=2, train__resume=resume))["exit_code"] == 75
    assert f"SIGTERM: step 1 is done and saved; {told} from there" in capsys.readouterr().err


def test_resume_from_a_path_into_another_folder(make: Any, whole_run: Path, tmp_path: Path) -> None:
    checkpoint = str(whole_run / "checkpoints/step-000007")
    config = make("branch", **RESUMED | {"train__steps": 8, "optimizer__schedule": "cosine"}, train__resume=checkpoint)
    assert train(config)["resumed_from"] == checkpoint
    assert [row["step"] for row in read_log(Path(config.out) / "log.jsonl")] == [8]
    with pytest.raises(UserError, match=r"holds step-000008, which would be overwritten; choose another out, or train.resume=latest"):
        train(config)


def test_the_result_is_of_the_last_step_whatever_was_logged_and_saved(make: Any) -> None:
    full = read_log(Path(train(make("full"))["run"]) / "log.jsonl")
    sparse = {"train__log_every": 100, "train__save_every": 0}
    result = train(make("sparse", **sparse))
    assert (result["steps"], result["last_loss"], result["checkpoints"]) == (4, full[3]["loss"], [])
    train(make("resumed", train__steps=2))
    result = train(make("resumed", **sparse))
    assert (result["steps"], result["last_loss"]) == (4, full[3]["loss"])


def test_two_trainings_do_not_share_a_folder(make: Any) -> None:
    config = make("run")
    Path(config.out).mkdir()
    with only_run(Path(config.out)), pytest.raises(UserError, match="run': another training is at work in this folder"):
        train(config)
    assert sorted(p.name for p in Path(config.out).iterdir()) == [".lock"]


def test_a_folder_that_can_not_be_locked_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(handle: Any, how: int) -> None:  # as Lustre, mounted without them
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(folder.fcntl, "flock", no_locks)
    with only_run(tmp_path), open_mesh(ParallelConfig(), torch.device("cpu")) as mesh, folder.sole_user(tmp_path, "mark", "preprocess", mesh):
        pass
    said = capsys.readouterr().err
    assert "can't be locked (Function not implemented); see to it that no other training uses it" in said
    assert "no other preprocess uses it" in said


def test_a_finished_run_is_not_run_again(make: Any, whole_run: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_run, tmp_path / "run")
    result = train(make("run", **RESUMED))
    assert result["steps"] == 7
    assert result["receipts"] == []
    assert_same_run(tmp_path / "run", whole_run)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": "bf16"}, r"recipe 'attn_qat_search', not 'bf16'"),
        ({"objective__flow_shift": 5.0}, r"objective.flow_shift=3.0, not 5.0"),
        ({"train__global_batch_size": 1}, r"train.global_batch_size=2, not 1"),
        ({"from_scratch": False}, r"model .*from_scratch=True, not False"),
    ],
)
def test_resuming_under_other_settings_is_refused(make: Any, whole_run: Path, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    (tmp_path / "run").symlink_to(whole_run)
    with pytest.raises(CheckpointError, match=f"step-000007 was trained with another setting and can't be resumed: it has {named}"):
        train(make("run", **RESUMED | changes))


def test_resuming_with_another_model_is_refused(make: Any, whole_run: Path, tmp_path: Path, tiny_pipeline: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_pipeline, other)
    config = json.loads((other / "transformer/config.json").read_text())
    (other / "transformer/config.json").write_text(json.dumps(config | {"num_layers": 1}))
    (tmp_path / "run").symlink_to(whole_run)
    with pytest.raises(CheckpointError, match=r"it has model .*pipeline \(\w{12}\), not .*other \(\w{12}\)"):
        train(make("run", **RESUMED, model__path=str(other)))


def test_all_torn_is_said_and_nothing_is_overwritten(make: Any, whole_run: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_run, tmp_path / "run")
    (tmp_path / "run/checkpoints/step-000007/COMMITTED").unlink()
    for command in (train, trainer.plan):
        with pytest.raises(UserError, match=r"checkpoints holds no whole checkpoint \(step-000007: it has no COMMITTED file\)"):
            command(make("run", **RESUMED))


def test_a_checkpoint_that_is_torn_is_refused_by_path(make: Any, whole_run: Path, tmp_path: Path) -> None:
    torn = tmp_path / "step-000007"
    shutil.copytree(whole_run / "checkpoints/step-000007", torn)
    os.truncate(torn / ".metadata", 10)
    with pytest.raises(CheckpointError, match=r"step-000007 is not a whole checkpoint: .metadata has 10 bytes"):
        train(make("run", **RESUMED, train__resume=str(torn)))


def test_what_a_run_writes(whole_run: Path) -> None:
    assert {p.name for p in whole_run.iterdir()} == {"config.yaml", "provenance.json", "log.jsonl", "tensorboard", "checkpoints", ".lock"}
    rows = read_log(whole_run / "log.jsonl")
    keys = {"step", "epoch", "loss", "grad_norm", "lr", "step_time", "tokens_per_second", "mfu", "memory_bytes"}
    parts = {"data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"}
    assert [row.keys() - {"receipts"} for row in rows] == [keys | parts] * 7
    assert rows[-1]["lr"] == 0  # cosine down to final_lr_ratio=0
    assert all(row["mfu"] is None and row["memory_bytes"] > 10**7 for row in rows)  # nobody knows a CPU's peak
    assert all(min(row[part] for part in parts) > 0 and sum(row[part] for part in parts) == pytest.approx(row["step_time"]) for row in rows)
    assert rows[0]["tokens_per_second"] * rows[0]["step_time"] == pytest.approx(2 * 32)
    ran = {(r["kernel"], r["native"], r["recipe"]) for r in rows[0]["receipts"]}
    assert ran == {("torch", False, "attn_qat_search"), ("sdpa", True, "bf16")}  # self-attention quantised, cross-attention not
    for name in ("loss", "grad_norm", "lr", "tokens_per_second", "memory_bytes", "step_time"):
        assert [event.value for event in scalars(whole_run, f"train/{name}")] == pytest.approx([row[name] for row in rows])
    meta = state.read_meta(whole_run / "checkpoints/step-000007")
    assert (meta["step"], meta["loss"], meta["recipe"]["name"]) == (7, rows[-1]["loss"], "attn_qat_search")
    assert meta["versions"]["torch"] == torch.__version__


def test_the_average_is_what_the_steps_weights_say(make: Any) -> None:
    config = make("run", train__steps=2, train__save_every=1, optimizer__ema_decay=0.75)
    train(config)
    first, second = (stored(Path(config.out) / f"checkpoints/step-00000{step}") for step in (1, 2))
    averaged, weights = ({key.partition(".")[2] for key in second if key.startswith(part)} for part in ("ema.", "model."))
    assert averaged == weights != set()
    for key, average in second.items():
        if key.startswith("ema."):
            expected = 2 / 11 * first[key] + 9 / 11 * second["model." + key.removeprefix("ema.")]
            torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-8)


def test_the_next_step_is_loaded_while_this_one_computes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of each step but the last waits until loading has begun for the next, which it never would if loading came after it."""
    loads, waited = threading.Semaphore(0), []

    def load(*arguments: Any) -> Any:
        loads.release()
        return load_batch(*arguments)

    def forward(*arguments: Any) -> Any:
        if not waited:
            assert loads.acquire(timeout=20)  # of this step, before the first
        waited.append(len(waited) == 2 or loads.acquire(timeout=20))
        return denoising_loss(*arguments)

    monkeypatch.setattr(batches, "load_batch", load)
    monkeypatch.setattr(step, "denoising_loss", forward)
    train(make("run", train__steps=3, train__health_every=0))
    assert waited == [True, True, True]


def test_captions_are_dropped_by_epoch_in_what_the_model_sees(make: Any) -> None:
    job = check(make("run", objective__caption_dropout=0.5))
    null = job.cache.null_condition["text"].float()
    seen = []
    for epoch in range(8):
        batch = load_batch(job, epoch, list(range(6)))
        dropped = []
        for index, text_LD in enumerate(batch.condition["text"]):
            text = job.cache.load(index)["text"].float()
            is_null, is_own = (torch.equal(text_LD[: len(t)], t) and not text_LD[len(t) :].any() for t in (null, text))
            assert is_null != is_own
            dropped.append(is_null)
        seen.append(dropped)
    assert len({tuple(dropped) for dropped in seen}) > 4
    assert 0.25 < sum(map(sum, seen)) / 48 < 0.75


def test_activation_checkpointing_gives_the_same_numbers_under_the_same_recipe(make: Any) -> None:
    configs = [make(how, train__steps=2, train__activation_checkpointing=how, recipe="attn_qat_search") for how in ("none", "full")]
    results = [train(config) for config in configs]
    assert_same_run(Path(configs[0].out), Path(configs[1].out))
    calls = [{r["recipe"]: r["calls"] for r in result["receipts"]} for result in results]
    assert calls[1] == {recipe: 2 * count for recipe, count in calls[0].items()}  # every block was computed twice, and by the same recipe


def test_qat_trains_on_other_gradients_than_bf16(make: Any) -> None:
    norms, receipts = {}, {}
    for recipe in ("bf16", "attn_qat"):
        config = make(recipe, recipe=recipe, train__steps=3)
        receipts[recipe] = {(r["kernel"], r["native"]) for r in train(config)["receipts"]}
        norms[recipe] = [row["grad_norm"] for row in read_log(Path(config.out) / "log.jsonl")]
    assert norms["bf16"] != norms["attn_qat"]
    assert norms["bf16"] == pytest.approx(norms["attn_qat"], rel=0.2)
    assert receipts == {"bf16": {("sdpa", True)}, "attn_qat": {("torch", False), ("sdpa", True)}}


def test_bf16_arithmetic_keeps_master_weights_in_fp32(make: Any) -> None:
    config = make("run", train__compute_dtype="bfloat16", train__steps=2, optimizer__ema_decay=0.5)
    assert train(config)["steps"] == 2
    assert {tensor.dtype for tensor in stored(Path(config.out) / "checkpoints/step-000002").values()} == {torch.float32}


def test_a_disk_that_fills_up_leaves_the_older_checkpoint(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = state.dcp_save

    def full(tensors: Any, checkpoint_id: Path, **options: Any) -> Any:
        if "000002" in checkpoint_id.name:
            (checkpoint_id / "__0_0.distcp").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return saving(tensors, checkpoint_id=checkpoint_id, **options)

    monkeypatch.setattr(state, "dcp_save", full)
    config = make("run", train__save_every=1)
    with pytest.raises(CheckpointError, match=r"step-000002 can't be written: No space left on device; older checkpoints are untouched"):
        train(config)
    assert [p.name for p in (Path(config.out) / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread prints what `close` raises
def test_what_tensorboard_can_not_write_is_one_line_and_hides_no_other_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with full_disk(5_000), pytest.raises(UserError, match=r"tensorboard can't be written: File too large"), RunLog(tmp_path, 0) as log:
        log.show("noise", noise, 1)
    with full_disk(5_000), pytest.raises(CheckpointError, match="what matters"), RunLog(tmp_path, 0) as log:
        log.show("noise", noise, 1)
        raise CheckpointError("what matters")
    assert "WARNING: " + str(tmp_path / "tensorboard") in capsys.readouterr().err
