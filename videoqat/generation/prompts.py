"""Files of prompts, and what the videos made from them are called and seeded."""

import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videoqat.config import GenerateConfig, SamplingConfig
from videoqat.errors import DataError, UserError
from videoqat.generation.images import check_image

SETTINGS: dict[str, type] = {
    "seed": int,
    "num_frames": int,
    "height": int,
    "width": int,
    "fps": int,
    "num_inference_steps": int,
    "guidance_scale": float,
    "negative_prompt": str,
    "flow_shift": float,
    "image": str,
}
STEM_BYTES = 180  # a file name has 255, of which index, suffix and the marks of a file in the making want some
SEEDS = 2**63


@dataclass(frozen=True)
class Line:
    """One prompt of a file: the number of its line there (from 1), and the settings given with it (keys of `SETTINGS`)."""

    number: int
    prompt: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Video:
    """One video to be made.

    Attributes:
        name: of its file, without suffix.
        line: of its prompt in the file, from 1.
        number: of its prompt among the prompts, from 0.
        index: among the videos of its line, from 0.
        prompt, seed, sampling: what is in it.
        image, image_sha256: path of its first frame and that file's hash; both empty where it has none.
    """

    name: str
    line: int
    number: int
    index: int
    prompt: str
    seed: int
    sampling: SamplingConfig
    image: str = ""
    image_sha256: str = ""


def read_prompts(path: str | Path) -> list[str]:
    """The prompts in a text file: one a line, `#` starts a comment line; empty lines, and prompts that were there before, don't count.

    Raises:
        UserError: not a text file in UTF-8, or no prompt in it.
    """
    return list(dict.fromkeys(line.prompt for line in _some(path, _text_lines(_text(path)))))


def read_prompts_with_images(path: str | Path) -> list[tuple[str, str]]:
    """(prompt, path of its first frame or nothing) of each line of a .csv or .jsonl file; of prompts alone (`read_prompts`) in any other.

    Raises:
        UserError: as in `read_prompts` and `read_lines`; or a line sets something else.
    """
    if Path(path).suffix.lower() not in (".csv", ".jsonl"):
        return [(prompt, "") for prompt in read_prompts(path)]
    lines = read_lines(path)
    for line in lines:
        for key in line.settings.keys() - {"image"}:
            raise DataError(f"prompts={str(path)!r}, line {line.number}: {key} can't be set here, where all videos are sampled alike; legal: image")
    return list(dict.fromkeys((line.prompt, _image_of(path, line.settings)) for line in lines))


def _image_of(path: str | Path, settings: dict[str, Any]) -> str:
    """A line's image as seen from the folder of its file, or nothing; taken out of the line's settings."""
    image = settings.pop("image", "")
    return str(Path(path).parent / image) if image else ""


def read_lines(path: str | Path) -> list[Line]:
    """The prompts of a .txt, .csv or .jsonl file with their settings, in its order.

    Raises:
        UserError: not UTF-8, no prompt in it, or a line (named) with an unknown key, no prompt, or a value of the wrong kind.
    """
    readers = {".txt": _text_lines, ".csv": _csv_lines, ".jsonl": _jsonl_lines}
    with _in(path):
        lines = list(readers[Path(path).suffix.lower()](_text(path)))
    return _some(path, lines)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={str(path)!r} can't be read as UTF-8 text: {error}") from error


def _some(path: str | Path, lines: Iterator[Line] | list[Line]) -> list[Line]:
    found = list(lines)
    if not found:
        raise UserError(f"prompts={str(path)!r} holds no prompt; legal: one prompt a line, # starts a comment in a .txt file")
    return found


@contextlib.contextmanager
def _in(path: str | Path) -> Iterator[None]:
    """Errors of a line (`_at`) in the block get the file's name."""
    try:
        yield
    except DataError as error:
        raise DataError(f"prompts={str(path)!r}, {error}") from error


@contextlib.contextmanager
def _at(number: int) -> Iterator[None]:
    """Errors in the block get the number of the line."""
    try:
        yield
    except UserError as error:
        raise DataError(f"line {number}: {error}") from error


def _text_lines(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.strip().startswith("#"):
            yield Line(number, line.strip(), {})


def _csv_lines(text: str) -> Iterator[Line]:
    rows = csv.reader(io.StringIO(text), strict=True)
    header: list[str] = []
    try:
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            with _at(rows.line_num):
                if not header:
                    header = [cell.strip() for cell in cells]
                    _check_keys(header, "column")
                elif len(cells) != len(header):
                    raise UserError(f"{len(cells)} cells where the header has {len(header)}; a cell with a comma in it wants quotes")
                else:
                    yield _line(rows.line_num, {key: cell for key, cell in zip(header, cells, strict=True) if cell.strip()}, typed=False)
    except csv.Error as error:
        raise DataError(f"line {rows.line_num}: not CSV: {error}") from error


def _jsonl_lines(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        with _at(number):
            try:
                data = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"not JSON: {error}") from error
            if not isinstance(data, dict):
                raise UserError('not an object such as {"prompt": "a cat", "seed": 1}')
            _check_keys(list(data), "key")
            yield _line(number, {key: value for key, value in data.items() if value is not None}, typed=True)


def _check_keys(keys: list[str], what: str) -> None:
    unknown = [key for key in keys if key != "prompt" and key not in SETTINGS]
    if unknown:
        raise UserError(f"unknown {what} {unknown[0]!r}; legal: prompt, {', '.join(SETTINGS)}")
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise UserError(f"{what} {twice[0]!r} is there twice")
    if "prompt" not in keys:
        raise UserError(f"there is no {what} 'prompt'")


def _line(number: int, values: dict[str, Any], *, typed: bool) -> Line:
    """A checked line. `typed`: values have types of their own (JSON); else all are text."""
    settings = {key: _value(key, value, kind, typed) for key, value in values.items() for kind in [SETTINGS.get(key, str)]}
    prompt = settings.pop("prompt", "").strip()
    if not prompt:
        raise UserError("the prompt is empty")
    return Line(number, prompt, settings)


def _value(key: str, value: Any, kind: type, typed: bool) -> Any:
    names = {int: "an integer", float: "a finite number", str: "text"}
    wrong = UserError(f"{key}={value!r} is not legal; legal: {names[kind]}")
    if typed and type(value) not in ((int, float) if kind is float else (kind,)):
        raise wrong
    try:
        result = kind(value)
        if kind is str:
            result.encode()  # JSON can hold halves of characters, which files can't
    except (ValueError, OverflowError) as error:
        raise wrong from error
    if kind is float and not math.isfinite(result):
        raise wrong
    return result


def _cut(text: str, num_bytes: int) -> str:
    """The start of `text`, at most `num_bytes` of UTF-8."""
    return text.encode()[:num_bytes].decode(errors="ignore").rstrip()


def _stem(prompt: str, *, tell_apart: bool = False) -> str:
    """`prompt` as (part of) a file name on any system; with `tell_apart`, or where it is too long, its hash follows."""
    safe = re.sub(r'[\x00-\x1f\x7f-\x9f\u2028\u2029/\\:*?"<>|]', "_", prompt)
    safe = re.sub(r"^\.", "_", safe)  # else it would be hidden
    if not tell_apart and len(safe.encode()) <= STEM_BYTES:
        return safe
    return f"{_cut(safe, STEM_BYTES - 9)}~{hashlib.sha256(prompt.encode()).hexdigest()[:8]}"


def videos(config: GenerateConfig) -> list[Video]:
    """What `generate` with `prompts` is to make, in order: names as VBench expects them ({prompt}-{index}) and seeds.

    Where two prompts would have files of one name (on any file system), the later one's has its hash in it. Where a prompt comes again in a later
    line, its indices go on there.

    Raises:
        UserError: as in `read_lines`; or a line's settings can't be; or its image is missing, can't be read, or is not for this model.
    """
    lines = read_lines(config.prompts)
    found: list[Video] = []
    stems: dict[str, str] = {}
    taken: dict[str, str] = {}  # a stem as the least exact file system sees it -> the prompt whose it is
    count: Counter[str] = Counter()
    hash_of = functools.cache(functools.partial(check_image, config.model))
    with _in(config.prompts):
        for number, line in enumerate(lines):
            settings = dict(line.settings)
            with _at(line.number):
                first = settings.pop("seed", config.seed + number * config.samples)
                if not 0 <= first <= SEEDS - config.samples:
                    raise UserError(f"seed={first} is not legal; legal: 0 to {SEEDS - config.samples}")
                image = _image_of(config.prompts, settings)
                sampling = dataclasses.replace(config.sampling, **settings)
                sampling.validate()
                image_sha256 = hash_of(image)
                if line.prompt not in stems:
                    stems[line.prompt] = _exact_stem(line.prompt) if config.vbench else _free_stem(line.prompt, taken)
            for index in range(config.samples):
                name = f"{stems[line.prompt]}-{count[line.prompt]}"
                count[line.prompt] += 1
                found.append(Video(name, line.number, number, index, line.prompt, first + index, sampling, image, image_sha256))
    return found


def _free_stem(prompt: str, taken: dict[str, str]) -> str:
    names = [_stem(prompt), _stem(prompt, tell_apart=True)]
    for name in names:
        if taken.setdefault(_as_seen(name), prompt) == prompt:
            return name
    raise UserError(f"no file name is left for prompt {prompt!r}: {taken[_as_seen(names[-1])]!r} has {names[-1]!r}")


def _exact_stem(prompt: str) -> str:
    """`prompt` itself: VBench looks for files by its own prompts."""
    if "/" in prompt or "\0" in prompt or prompt.startswith(".") or len(prompt.encode()) > STEM_BYTES:
        legal = f"prompts without /, that begin with no dot, up to {STEM_BYTES} bytes"
        raise UserError(f"vbench=true names files by their prompts, which {prompt!r} can't be; legal: {legal}")
    return prompt


def _as_seen(name: str) -> str:
    """`name` as the least exact file systems see it: without case, and with one form for each accented letter."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
