"""Writing so that nothing half-written is ever taken for whole: write aside, flush to disk, then rename. And where the shipped files are."""

import contextlib
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from videoqat.errors import UserError


def shipped(name: str) -> Path | None:
    """The file `configs/NAME` or `configs/NAME.yaml` of this distribution, or None."""
    package = Path(__file__).resolve().parent
    for root in (package / "configs", package.parent / "configs"):  # installed as a wheel, or a checkout
        for path in (root / name, root / f"{name}.yaml"):
            if path.is_file():
                return path
    return None


def writable_folder(key: str, folder: str | Path) -> Path:
    """`folder`, made if need be and shown to be writable.

    Raises:
        UserError: it can't be made or written to; `key` is named.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"{key}={str(folder)!r} can't be written: {error.strerror or error}") from error
    return path


def check_writable(key: str, folder: str | Path) -> None:
    """Requires that `writable_folder` could make or write `folder`, as far as that shows without writing: for plans, which change nothing.

    Raises:
        UserError: it couldn't; `key` is named.
    """
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "is no folder" if not there.is_dir() else "may not be written to"
        raise UserError(f"{key}={str(folder)!r} can't be written: {there} {reason}")


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to (same suffix); on success it is renamed to `path`, on failure removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield aside
        with open(aside, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yields a new folder beside `path`; on success it becomes `path` (which must not exist), on failure it is removed.

    Its files may be read by whoever may read the folder: safetensors writes for the owner alone, but who trains and who serves can be two.
    What killed writers of `path` on this machine left beside it is removed first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    start = f".{path.name}.{os.uname().nodename}."  # a file system may be several machines', whose processes can't be asked after from here
    for left_over in path.parent.glob(f"{glob.escape(start)}*.partial"):
        pid = left_over.name.removeprefix(start).removesuffix(".partial")
        if pid.isdecimal() and not _lives(int(pid)):
            shutil.rmtree(left_over, ignore_errors=True)
    aside = path.with_name(f"{start}{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in aside.rglob("*"):
            if file.is_file():
                file.chmod(file.stat().st_mode | (aside.stat().st_mode & 0o444))
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _lives(pid: int) -> bool:
    """Whether this machine has such a process, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; a number that is none of ours
        return True
    return True


def write_json(path: str | Path, data: Any) -> None:
    """`data` as indented JSON, atomically. NaN and inf are refused: they are no JSON."""
    with atomic_path(path) as aside:
        aside.write_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def file_stats(folder: str | Path) -> dict[str, list[int]]:
    """Size and modification time (ns) of every file in a folder: whether it is still the one that was used, without reading gigabytes of weights."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def sync_folder(path: str | Path) -> None:
    """Flushes a folder itself to disk: a rename, or a new file's name, is there only when its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
