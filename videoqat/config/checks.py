"""Checks that a setting passes, or a `ConfigError` that names its key, its value and what is legal."""

import re
from collections.abc import Iterable
from pathlib import Path

from videoqat.errors import ConfigError


def require(condition: bool, key: str, value: object, legal: str) -> None:
    """Raises ConfigError naming `key`, `value` and what is `legal` unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{key}={value!r} is not legal; legal: {legal}")


def choice(key: str, value: object, values: Iterable[str]) -> None:
    """Requires `value` to be one of `values`."""
    values = list(values)
    require(value in values, key, value, ", ".join(values))


def check_seeds(key: str, value: int | list[int], largest: int = 2**63 - 1) -> None:
    """Requires a seed, or each of several, to be one that torch's and numpy's generators take, with room for what is counted up from it."""
    seeds = value if isinstance(value, list) else [value]
    require(all(0 <= seed <= largest for seed in seeds), key, value, f"0 to {largest}")


def existing(key: str, value: str, *, folder: bool = False) -> None:
    """Requires `value` to be the path of a file (or, with `folder`, of a folder) that is there."""
    path = Path(value)
    require(path.is_dir() if folder else path.is_file(), key, value, f"an existing {'folder' if folder else 'file'}")


def check_st_lpips(value: str) -> None:
    """Requires what `evaluation.st_lpips` can go by."""
    legal = "auto (where its weights are installed), installed (an error where they are not), none, or a file with its weights"
    require(value in ("auto", "installed", "none") or Path(value).is_file(), "st_lpips", value, legal)


def hub_name(reference: str) -> tuple[str, str] | None:
    """`org/name@REVISION` -> (org/name, REVISION), `main` without one; None if `reference` can't be a name of the Hugging Face hub."""
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", reference)
    return (match[1], match[2] or "main") if match else None


def model_folder(key: str, value: str) -> None:
    """Requires `value` to be an existing folder, or to look like a hub's name (which `models.hub` then looks up)."""
    known = Path(value).is_dir() or (not Path(value).exists() and hub_name(value) is not None)
    require(known, key, value, "an existing folder, or a model of the hub as org/name or org/name@REVISION")


def parse_bucket(key: str, bucket: str) -> tuple[int, int, int]:
    """`"17x64x64"` -> (17, 64, 64): frames, height, width. Frames must be 4n+1: the VAEs keep the first frame and take the rest by fours."""
    parts = str(bucket).lower().split("x")
    if len(parts) != 3 or not all(p.isdecimal() for p in parts):
        raise ConfigError(f"{key}={bucket!r} is not FRAMESxHEIGHTxWIDTH, such as 17x64x64")
    frames, height, width = (int(p) for p in parts)
    check_frames(key, frames)
    require(height > 0 and width > 0, key, bucket, "positive height and width")
    return frames, height, width


def check_frames(key: str, num_frames: int) -> None:
    """Requires 4n+1 frames."""
    near = max(1, (num_frames - 1) // 4 * 4 + 1)
    require(num_frames >= 1 and num_frames % 4 == 1, key, num_frames, f"4n+1 frames, such as {near} or {near + 4}")
