"""Anybody's folder of clips: which clips it holds with which captions, and each of them as frames of the size and rate that are wanted.

A folder tells its captions in one of three ways.

* `metadata.jsonl`: one JSON object a line; the clip stands in `file` (or `file_name`, `video`, `path`), the words in `caption` (or `text`, `prompt`).
* `metadata.csv`: the same as columns.
* Neither: `clip.txt` beside `clip.mp4`, in any depth of folders.

Paths in the metadata are relative to the folder, so that it can be moved; absolute ones are taken as they are. What can't be used is never
an exception here but a `problem`, a line whose part before the colon is the reason it is counted by.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from videoqat.data.video_io import Frame, VideoReadError, iterate_frames, read_video, write_video
from videoqat.errors import DataError

__all__ = ["ClipEntry", "ClipProblem", "decode_clip", "decode_to_bucket", "find_clips", "read_video", "reason", "write_video"]

SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".mpeg", ".mpg", ".m4v", ".ogg", ".ogv")
FILE_KEYS = ("file", "file_name", "video", "path")
CAPTION_KEYS = ("caption", "text", "prompt")
# Containers round time stamps (Matroska to milliseconds); a frame that much late still counts as on time.
TIME_TOLERANCE = 1e-3

Bucket = tuple[int, int, int]  # frames, height, width


@dataclass(frozen=True)
class ClipEntry:
    """A clip as its folder lists it.

    Attributes:
        id: its path as listed (relative to the folder, `/` between the parts), or the metadata line where there is no path.
        path: the file; None where the metadata names none.
        caption: without white space around it; empty if there is a problem with it.
        problem: why it can't be used, `REASON` or `REASON: DETAIL`; None if nothing speaks against it so far.
    """

    id: str
    path: Path | None
    caption: str
    problem: str | None = None


class ClipProblem(DataError):
    """A clip that can't be decoded to what is wanted; `str(error)` is `REASON: DETAIL`."""


def reason(problem: str) -> str:
    """The part of a problem that it is counted by."""
    return problem.split(":", 1)[0]


def find_clips(source: str | Path) -> list[ClipEntry]:
    """Every clip of the folder `source`, usable or not, without decoding any: in the metadata's order, or sorted by path.

    Video files that the metadata doesn't name are listed too, as clips without a caption.

    Raises:
        DataError: two metadata files, or a metadata file that lacks the columns or can't be read at all.
    """
    source = Path(source)
    tables = [source / name for name in ("metadata.jsonl", "metadata.csv") if (source / name).is_file()]
    if len(tables) > 1:
        raise DataError(f"{source} holds metadata.jsonl and metadata.csv; legal: one of them")
    files = {
        _shown(path.relative_to(source).as_posix()): path
        for path in sorted(source.rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file() and not any(part.startswith(".") for part in path.relative_to(source).parts)
    }
    if not tables:
        return [_with_text_beside(id, path) for id, path in files.items()]
    entries = list(_from_table(source, tables[0]))
    named = {entry.path.resolve() for entry in entries if entry.path is not None}
    unnamed = [ClipEntry(id, path, "", f"no caption: {tables[0].name} doesn't name it") for id, path in files.items() if path.resolve() not in named]
    return entries + unnamed


def _shown(name: str) -> str:
    """`name` as index and report, which are UTF-8, can hold it: bytes of a file's name that aren't UTF-8 are written as escapes."""
    return name.encode(errors="backslashreplace").decode()


def _is_text(text: str) -> bool:
    """Whether it is whole Unicode: not a file's name in another encoding, nor a caption that was cut in the middle of an emoji."""
    return _shown(text) == text


def _with_text_beside(id: str, path: Path) -> ClipEntry:
    if not _is_text(str(path)):
        return ClipEntry(id, path, "", "bad name: it is not UTF-8")
    text = path.with_suffix(".txt")
    if not text.is_file():
        return ClipEntry(id, path, "", f"no caption: {text.name} is not beside it")
    try:
        caption = text.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return ClipEntry(id, path, "", f"no caption: {text.name} can't be read: {error}")
    return _checked(id, path, caption)


def _checked(id: str, path: Path, caption: str) -> ClipEntry:
    """The entry, with the problems that can be seen without decoding."""
    caption = caption.strip()
    try:
        problem = None if caption else "empty caption"
        problem = "empty file" if path.stat().st_size == 0 else problem
        problem = problem if path.is_file() else "missing file: it is a folder"
    except OSError as error:
        problem = f"missing file: {error.strerror}"
    return ClipEntry(id, path, caption, problem)


def _from_table(source: Path, table: Path) -> Iterator[ClipEntry]:
    first_line: dict[Path, int] = {}
    for line, row in _jsonl_rows(table) if table.suffix == ".jsonl" else _csv_rows(table):
        place = f"{table.name} line {line}"
        if isinstance(row, str):
            yield ClipEntry(place, None, "", f"bad metadata line: line {line}: {row}")
            continue
        file = next((row[key] for key in FILE_KEYS if row.get(key) not in (None, "")), None)
        caption = next((row[key] for key in CAPTION_KEYS if row.get(key) is not None), None)
        if not isinstance(file, str) or "\0" in file or not _is_text(str(source / file)):
            yield ClipEntry(place, None, "", f"bad metadata line: line {line}: no path under {', '.join(FILE_KEYS)}")
            continue
        path = source / file
        if path.resolve() in first_line:
            yield ClipEntry(file, path, "", f"duplicate: {place} names the clip of line {first_line[path.resolve()]} again")
            continue
        first_line[path.resolve()] = line
        if caption is None:
            yield ClipEntry(file, path, "", f"no caption: {place} has none under {', '.join(CAPTION_KEYS)}")
        elif not isinstance(caption, str) or not _is_text(caption):
            yield ClipEntry(file, path, "", f"bad metadata line: line {line}: the caption is no text")
        else:
            yield _checked(file, path, caption)


def _jsonl_rows(table: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(line number, the object, or what is wrong with the line). Blank lines are passed over."""
    for line, raw in enumerate(table.read_bytes().splitlines(), start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8-sig"))
        except ValueError as error:
            yield line, str(error)
            continue
        yield line, row if isinstance(row, dict) else "not a JSON object"


def _csv_rows(table: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """As `_jsonl_rows`; the first line names the columns. A quote that isn't closed swallows what follows, so it ends the reading."""
    line = 1
    try:
        with open(table, encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle, strict=True)
            columns = reader.fieldnames or []
            for keys in (FILE_KEYS, CAPTION_KEYS):
                if not set(keys) & set(columns):
                    raise DataError(f"{table} has columns {list(columns)}; it needs one of {', '.join(keys)}")
            for row in reader:
                line = reader.line_num
                wrong = None in row or None in row.values()
                yield line, "another number of columns than the first line" if wrong else row
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} can't be read as CSV in UTF-8 after line {line}: {error}") from error


def resample(frames: Iterable[Frame], fps: float, limit: int) -> Iterator[Frame]:
    """At most `limit` frames at a constant `fps` from frames that come whenever they like.

    Frame n is what a viewer sees at n / fps seconds after the first frame: the latest frame whose time has come. The clip ends when its last
    frame's duration is over (where the container gives none: the distance to the frame before it).
    """
    count = 0
    shown: Frame | None = None
    end = 0.0
    for frame in frames:
        while shown is not None and count < limit and count / fps + TIME_TOLERANCE < frame.time:
            yield shown
            count += 1
        if count == limit:
            return
        end = frame.time + (frame.duration or frame.time - (shown.time if shown else 0.0))
        shown = frame
    # A lone frame without a duration is a still: it lasts for one frame.
    end = end or 1 / fps
    while shown is not None and count < limit and count / fps + TIME_TOLERANCE < end:
        yield shown
        count += 1


def crop_resize(image: NDArray[np.uint8], height: int, width: int, pixel_aspect: float = 1.0) -> NDArray[np.uint8]:
    """The middle of `image` (H, W, 3) in the shape of `height` x `width`, resized to it with square pixels (bicubic, antialiased)."""
    rows, columns = image.shape[:2]
    scale = max(height / rows, width / (columns * pixel_aspect))
    crop_h, crop_w = min(rows, max(1, round(height / scale))), min(columns, max(1, round(width / scale / pixel_aspect)))
    top, left = (rows - crop_h) // 2, (columns - crop_w) // 2
    cropped = np.array(image[top : top + crop_h, left : left + crop_w])
    if cropped.shape[:2] == (height, width):
        return cropped
    pixels = torch.from_numpy(cropped).permute(2, 0, 1)[None]
    resized = F.interpolate(pixels, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    return resized[0].permute(1, 2, 0).contiguous().numpy()


def rank_buckets(buckets: Sequence[Bucket], height: float, width: float) -> list[Bucket]:
    """The buckets whose aspect ratio is nearest to a clip of `height` x `width` square pixels, best first.

    Longer ones come first; of equal length the largest that needn't enlarge the clip, then the smallest.
    """
    distance = {bucket: abs(math.log(bucket[2] / bucket[1]) - math.log(width / height)) for bucket in buckets}
    nearest = min(distance.values())
    alike = [bucket for bucket in buckets if distance[bucket] <= nearest + 1e-9]

    def order(bucket: Bucket) -> tuple[int, bool, int]:
        enlarges = bucket[1] > height or bucket[2] > width
        area = bucket[1] * bucket[2]
        return (-bucket[0], enlarges, area if enlarges else -area)

    return sorted(alike, key=order)


def decode_to_bucket(path: str | Path, buckets: Sequence[Bucket], fps: float, engine: str | None = None) -> tuple[Bucket, NDArray[np.uint8]]:
    """The beginning of a clip in the bucket that suits it best (`rank_buckets`; the longest it can fill), and that bucket.

    Args:
        path: the video file.
        buckets: (frames, height, width) to choose from.
        fps: frames a second; see `resample`.
        engine: `pyav` or `ffmpeg`; None takes the one that is installed.

    Returns:
        The bucket, and its frames uint8 (frames, height, width, 3).

    Raises:
        ClipProblem: `cannot decode: ...` or `too short: ...`.
    """
    ranked: list[Bucket] = []
    kept: dict[tuple[int, int], list[NDArray[np.uint8]]] = {}
    last: Frame | None = None
    longest = max(bucket[0] for bucket in buckets)
    try:
        for frame in resample(iterate_frames(path, engine, longest / fps), fps, longest):
            if not ranked:
                ranked = rank_buckets(buckets, frame.image.shape[0], frame.image.shape[1] * frame.pixel_aspect)
                kept = {bucket[1:]: [] for bucket in ranked}
            for size, frames in kept.items():
                frames.append(frames[-1] if frame is last else crop_resize(frame.image, *size, frame.pixel_aspect))
            last = frame
            if len(frames) == ranked[0][0]:
                break
    except VideoReadError as error:
        raise ClipProblem(f"cannot decode: {error}") from error
    count = len(next(iter(kept.values())))
    for bucket in ranked:
        if bucket[0] <= count:
            return bucket, np.stack(kept[bucket[1:]][: bucket[0]])
    shortest = min(bucket[0] for bucket in ranked)
    raise ClipProblem(f"too short: {count} frames at {fps:g} fps ({count / fps:.2f} s), needs {shortest} ({shortest / fps:.2f} s)")


def decode_clip(path: str | Path, num_frames: int, fps: float, height: int, width: int, engine: str | None = None) -> NDArray[np.uint8]:
    """The first `num_frames` frames of a clip at `fps`, cropped in the middle and resized: uint8 (num_frames, height, width, 3).

    Raises:
        ClipProblem: `cannot decode: ...` or `too short: ...`.
    """
    return decode_to_bucket(path, [(num_frames, height, width)], fps, engine)[1]
