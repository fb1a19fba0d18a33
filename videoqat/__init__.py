"""videoqat: train, prove and serve video diffusion models with 4-bit attention.

`import videoqat` is light; torch is loaded when one of these is first used, or a submodule that needs it:

* `videoqat.install(transformer, recipe)`: has a diffusers transformer compute attention by a recipe (`videoqat.models.install`),
* `videoqat.uninstall(transformer)`: takes it out again.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {"install": "videoqat.models.install", "uninstall": "videoqat.models.install"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'videoqat' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
