"""Folders of measurements that go on where they were interrupted: settings.json says what everything in them was made with."""

import json
from pathlib import Path
from typing import Any

from videoqat.errors import UserError

SETTINGS = "settings.json"


def first_difference(old: Any, new: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """(dotted key, old value, new value) of the first place where two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f"{key}.{k}" if key else k, old.get(k), new.get(k)) for k in [*new, *(k for k in old if k not in new)]]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{key}[{i}]", a, b) for i, (a, b) in enumerate(zip(old, new, strict=True))]
    else:
        return None if old == new else (key, old, new)
    return next((found for found in (first_difference(a, b, k) for k, a, b in pairs) if found), None)


def check_out(out: Path, settings: dict[str, Any], what: str) -> None:
    """Requires `out` to be new, empty, or of an earlier run with the same settings, a `what`, such as `comparison`.

    Raises:
        UserError: it is something else; names the first setting that differs.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"out={str(out)!r} is a file; legal: a new folder, or that of an earlier {what} with the same settings")
    record = out / SETTINGS
    if record.is_file():
        difference = first_difference(json.loads(record.read_text()), settings)
        if difference:
            key, old, new = difference
            raise UserError(f"out={str(out)!r} holds a {what} with {key}={old!r}, not {new!r}; choose another out")
    elif any(out.iterdir()):
        raise UserError(f"out={str(out)!r} is not empty and holds no {what}; choose another out")
