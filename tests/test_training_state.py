"""Checkpoints on disk: whole or not there, whatever happens to the process, the disk or the files."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.disks import full_disk

from videoqat.config import TrainConfig, to_dict
from videoqat.errors import CheckpointError
from videoqat.training import state


def tensors(value: float, size: int = 8) -> dict[str, Any]:
    return {"model": {"a.weight": torch.full((size, 2), value), "b": torch.tensor(value)}, "ema": {"a.weight": torch.full((size, 2), -value)}}


def save(folder: Path, step: int, keep_last: int = 2, **kwargs: Any) -> Path:
    return state.save(folder, step, tensors(float(step), **kwargs), {"step": step}, keep_last)


def test_saved_tensors_come_back_equal(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    found = tensors(0.0)
    state.load(path, found)
    for part, expected in tensors(7.0).items():
        for name, tensor in expected.items():
            assert torch.equal(found[part][name], tensor)
    assert path.name == "step-000007"
    assert state.read_meta(path) == {"step": 7}
    assert state.tensor_keys(path) == {"model.a.weight", "model.b", "ema.a.weight"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000007"]


def test_retention_keeps_the_last_and_leaves_torn_ones_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "COMMITTED").unlink()
    save(tmp_path, 3)
    save(tmp_path, 1_000_000)
    assert [p.name for p in state.whole(tmp_path)] == ["step-000003", "step-1000000"]
    assert [p.name for p in state.torn(tmp_path)] == ["step-000002"]


def test_an_old_checkpoint_that_can_not_be_removed_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)

    def busy(path: Path, **kwargs: Any) -> None:
        if not kwargs:  # not the look for leftovers before
            raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    save(tmp_path, 2, keep_last=1)
    assert "WARNING: an older checkpoint can't be removed: [Errno 16] Device or resource busy" in capsys.readouterr().err
    assert [p.name for p in state.whole(tmp_path)] == ["step-000002"]
    assert state.torn(tmp_path) == {}


def cut(path: Path, to: int) -> None:
    os.truncate(path, to)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no marker": (lambda c: (c / "COMMITTED").unlink(), "no COMMITTED"),
    "empty marker": (lambda c: cut(c / "COMMITTED", 0), "COMMITTED file can't be read"),
    "marker cut": (lambda c: cut(c / "COMMITTED", 20), "COMMITTED file can't be read"),
    "marker of another kind": (lambda c: (c / "COMMITTED").write_text("[]"), "COMMITTED file can't be read"),
    "marker that lists nothing": (lambda c: (c / "COMMITTED").write_text('{"files": {}}'), "does not list"),
    "tensors cut": (lambda c: cut(c / "__0_0.distcp", 100), "__0_0.distcp has 100 bytes"),
    "tensors one byte short": (lambda c: cut(c / "__0_0.distcp", (c / "__0_0.distcp").stat().st_size - 1), "__0_0.distcp has"),
    "tensors too long": (lambda c: cut(c / "__0_0.distcp", (c / "__0_0.distcp").stat().st_size + 1), "__0_0.distcp has"),
    "tensors missing": (lambda c: (c / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "metadata missing": (lambda c: (c / ".metadata").unlink(), ".metadata is missing"),
    "metadata cut": (lambda c: cut(c / ".metadata", 3), ".metadata has 3 bytes"),
    "meta.json cut": (lambda c: cut(c / "meta.json", 1), "meta.json has 1 bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_never_taken_for_whole(tmp_path: Path, name: str) -> None:
    damage, reason = DAMAGE[name]
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage(bad)
    assert state.whole(tmp_path) == [good]
    assert list(state.torn(tmp_path)) == [bad]
    with pytest.raises(CheckpointError, match=f"step-000002 is not a whole checkpoint: .*{reason}"):
        state.read_meta(bad)
    assert save(tmp_path, 2) == bad  # saving that step again puts a whole one in its place
    assert state.whole(tmp_path) == [good, bad]


def test_bytes_that_changed_without_the_size_are_an_error_of_ours_not_a_traceback(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / ".metadata").write_bytes(b"x" * (path / ".metadata").stat().st_size)
    with pytest.raises(CheckpointError, match="step-000001 can't be read"):
        state.load(path, tensors(0.0))


def test_missing_key_and_other_shape_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="more"):
        state.load(path, {"model": {"more": torch.zeros(1)}})
    with pytest.raises(CheckpointError, match="step-000001 can't be read"):
        state.load(path, tensors(0.0, size=9))


# Where in a save the process is killed: before the tensors are complete, before meta.json, before the marker, before the rename.
KILL = {
    "in the tensors": "import torch.distributed.checkpoint.filesystem as m; m.FileSystemWriter.finish = die",
    "before meta.json": "state.write_json = die",
    "before the marker": "w = state.write_json; state.write_json = lambda p, d: die() if p.name == 'COMMITTED' else w(p, d)",
    "before the rename": "os.rename = die",
}
KILL_LATER = {  # by then the new one is whole, and the old one must be either whole or gone
    "before the old one is removed": "state._remove_old = die",
    "in the removal of the old one": "import shutil; shutil.rmtree = lambda p, **k: (os.unlink(p / 'COMMITTED'), die()) if not k else None",
}


def test_a_killed_save_leaves_the_older_checkpoints_and_no_new_one(tmp_path: Path) -> None:
    # Forks of one process, so that torch is imported once.
    program = """
import json, os, pathlib, signal, sys, torch
from videoqat.training import state
def die(*a, **k): os.kill(os.getpid(), signal.SIGKILL)
def save(folder, step): return state.save(pathlib.Path(folder), step, {"model": {"a": torch.ones(9)}}, {"step": step}, 1)
for name, patch in json.loads(sys.argv[2]).items():
    save(f"{sys.argv[1]}/{name}", 1)
    if os.fork() == 0:
        exec(patch)
        save(f"{sys.argv[1]}/{name}", 2)
        os._exit(0)
    assert os.WTERMSIG(os.wait()[1]) == signal.SIGKILL, name
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path), json.dumps(KILL | KILL_LATER)], check=True, timeout=120)
    for name in KILL:
        folder = tmp_path / name
        assert sorted(p.name for p in folder.iterdir()) == [".step-000002.partial", "step-000001"], name
        assert [p.name for p in state.whole(folder)] == ["step-000001"], name
        assert state.torn(folder) == {}, name
        state.remove_leftovers(folder)
        assert [p.name for p in folder.iterdir()] == ["step-000001"], name
    for name in KILL_LATER:
        folder = tmp_path / name
        assert state.whole(folder)[-1].name == "step-000002", name
        assert state.torn(folder) == {}, name
        state.remove_leftovers(folder)
        assert not list(folder.glob(".*")), name


def test_disk_full_is_one_line_and_older_checkpoints_stay(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    with full_disk(10_000), pytest.raises(CheckpointError, match="step-000002 can't be written: File too large; older checkpoints are untouched"):
        save(tmp_path, 2, size=100_000)
    assert state.whole(tmp_path) == [good]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="step-000001 can't be written: Not a directory"):
        save(tmp_path / "file" / "checkpoints", 1)


def identity(**changes: Any) -> dict[str, Any]:
    config = {"model": {"path": "m"}, "cache": "c", "recipe": "attn_qat", "optimizer": {"lr": 0.1}, "train": {"steps": 5, "seed": 0}}
    whole = {"config": config, "recipe": {"name": "attn_qat", "pv": "nvfp4"}, "model_fingerprint": "f" * 64, "cache_fingerprint": "c" * 64}
    copy: dict[str, Any] = json.loads(json.dumps(whole))
    for key, value in changes.items():
        *parents, last = key.split("__")
        target = copy
        for parent in parents:
            target = target[parent]
        target[last] = json.loads(json.dumps(value))
    return copy


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": {"name": "mine", "pv": "bf16"}}, r"recipe 'attn_qat', not 'mine' \(.*pv='nvfp4' not 'bf16'\)"),
        ({"model_fingerprint": "e" * 64}, r"model m \(ffffffffffff\), not m \(eeeeeeeeeeee\)"),
        ({"cache_fingerprint": "d" * 64, "config__cache": "other"}, r"cache c \(cccccccccccc\), not other \(dddddddddddd\)"),
        ({"config__optimizer__lr": 0.2}, r"optimizer.lr=0.1, not 0.2"),
        ({"config__train__seed": 1}, r"train.seed=0, not 1"),
        ({"config__optimizer__eps": 1e-8}, r"optimizer.eps=None, not 1e-08"),
    ],
)
def test_resuming_another_training_is_refused_and_both_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"^step-1 was trained with another setting.*{named}"):
        state.check_resumable(Path("step-1"), identity(), identity(**changes))


def test_all_that_does_not_decide_the_numbers_may_change() -> None:
    """Every setting of training is here: one that is added must be put on one side or the other."""
    whole = identity(config=to_dict(TrainConfig(cache="c", out="o")))
    assert whole["config"]["parallel"] != {}
    free = {"model.path", "cache", "out", "recipe"} | {
        f"train.{key}"
        for key in (
            *("steps", "log_every", "save_every", "keep_last", "health_every", "profile_every", "resume"),
            *("async_save", "activation_checkpointing", "offload_block_inputs", "compile"),
        )
    }
    for key, value in state.flat(whole["config"]):
        changed = identity(config=whole["config"], **{"config__" + key.replace(".", "__"): [value]})
        if key in free or key.startswith(("parallel.", "validation.", "runtime.")):
            state.check_resumable(Path("step-1"), whole, changed)
        else:
            with pytest.raises(CheckpointError, match=f"it has {re.escape(f'{key}={value!r}, not')}"):
                state.check_resumable(Path("step-1"), whole, changed)


def test_another_number_of_ranks_must_not_change_the_global_batch() -> None:
    was, wants = (identity(config__train__global_batch_size=size) for size in (4, 2))
    cure = r"train.global_batch_size=4, not 2 \(0 stands for train.batch_size on each data-parallel rank, .* train.global_batch_size=4 continues"
    with pytest.raises(CheckpointError, match=cure):
        state.check_resumable(Path("step-1"), was, wants)


def test_a_checkpoint_of_an_earlier_version_is_refused_as_such() -> None:
    was = identity(config__train={"steps": 5, "seed": 0, "accumulation": 2, "autocast": "none"})
    expected = r"^step-1 was written by another version .* \(train.accumulation=2, train.autocast='none'\), and can't be resumed; .* or export it"
    with pytest.raises(CheckpointError, match=expected):
        state.check_resumable(Path("step-1"), was, identity())


def test_the_marker_lists_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    listed = json.loads((path / "COMMITTED").read_text())["files"]
    assert set(listed) == {p.name for p in path.iterdir()} - {"COMMITTED"}
    copied = tmp_path / "step-000009"
    shutil.copytree(path, copied)
    assert state.problem(copied) is None
