"""Files are whole or not there: under exceptions, under a kill, and when a reader looks in between."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from videoqat.errors import UserError
from videoqat.files import atomic_folder, atomic_path, writable_folder, write_json


def test_atomic_path_puts_the_file_in_place_at_the_end(tmp_path: Path):
    target = tmp_path / "new" / "a.mp4"
    with atomic_path(target) as aside:
        aside.write_text("whole")
        assert aside.suffix == ".mp4"  # encoders choose the container by it
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_atomic_path_keeps_the_old_file_when_writing_fails(tmp_path: Path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="midway"), atomic_path(target) as aside:
        aside.write_text("half")
        raise RuntimeError("midway")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_atomic_path_under_a_kill(tmp_path: Path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    program = f"""
import os, signal
from videoqat.files import atomic_path
with atomic_path({str(target)!r}) as aside:
    aside.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", program], check=False)
    assert result.returncode == -signal.SIGKILL
    assert target.read_text() == "old"
    left = [path.name for path in tmp_path.iterdir() if path != target]
    assert len(left) == 1
    assert left[0].startswith(".")  # hidden and named for what it is, so that nobody takes it for a file of the set
    assert ".partial" in left[0]


def test_atomic_folder_appears_whole(tmp_path: Path):
    target = tmp_path / "model"
    with atomic_folder(target) as aside:
        (aside / "weights").write_text("1")
        assert not target.exists()
    assert (target / "weights").read_text() == "1"
    assert list(tmp_path.iterdir()) == [target]


def test_atomic_folder_leaves_nothing_when_writing_fails(tmp_path: Path):
    with pytest.raises(RuntimeError, match="midway"), atomic_folder(tmp_path / "model") as aside:
        (aside / "weights").write_text("1")
        raise RuntimeError("midway")
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_removes_what_killed_writers_left_and_nothing_of_living_ones(tmp_path: Path):
    target = tmp_path / "model[1]"  # no pattern
    program = f"""
import sys
from videoqat.files import atomic_folder
with atomic_folder({str(target)!r}) as aside:
    (aside / "weights").write_text("half")
    print(aside.name, flush=True)
    sys.stdin.read()
"""
    writers = [subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        killed, living = (writer.stdout.readline().strip() for writer in writers)
        writers[0].kill()
        writers[0].wait()
        start = killed.removesuffix(f"{writers[0].pid}.partial")
        others = [
            killed.replace("model[1]", "model1"),
            killed.replace(os.uname().nodename, "elsewhere"),  # whose processes can't be asked after from here
            f"{start}1.partial",  # lives, though another user's
            f"{start}{10**30}.partial",
            f"{start}5.{writers[0].pid}.partial",
        ]
        for name in others:
            (tmp_path / name).mkdir()
        assert (tmp_path / killed / "weights").exists()
        with atomic_folder(target):
            pass
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([target.name, living, *others])
        assert (tmp_path / living / "weights").read_text() == "half"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_atomic_folder_does_not_replace_a_folder_that_holds_something(tmp_path: Path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "precious").write_text("old")
    with pytest.raises(OSError, match="not empty"), atomic_folder(target) as aside:
        (aside / "weights").write_text("new")
    assert [p.name for p in target.iterdir()] == ["precious"]
    assert list(tmp_path.iterdir()) == [target]


def test_writable_folder_is_made(tmp_path: Path):
    folder = writable_folder("out", tmp_path / "a" / "b")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_writable_folder_below_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"^out='.*file.*' can't be written: ") as caught:
            writable_folder("out", path)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_writable_folder_without_permission(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        writable_folder("out", tmp_path / "new")


def test_write_json_is_json(tmp_path: Path):
    file = tmp_path / "a.json"
    write_json(file, {"prompt": "größer", "loss": 0.5})
    assert json.loads(file.read_text(encoding="utf-8")) == {"prompt": "größer", "loss": 0.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(file, {"loss": float("nan")})
    assert json.loads(file.read_text(encoding="utf-8"))["loss"] == 0.5


def test_files_of_a_folder_are_as_readable_as_the_folder(tmp_path: Path):
    with atomic_folder(tmp_path / "new") as aside:
        (aside / "inner").mkdir()
        for name in ("a", "inner/b"):
            (aside / name).touch(mode=0o600)
        aside.chmod(0o750)
    assert [stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) for name in ("a", "inner/b")] == [0o640, 0o640]
