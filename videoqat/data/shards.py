"""Where precomputed samples lie: safetensors files of some dozens of samples each, addressed by what they were made from.

A sample's key is a hash of its source, caption, settings and encoders, so a sample that is there is right, and nothing needs to be compared.
A shard appears under its name only when it is whole (written aside, flushed, renamed): after a kill at any moment the shards that are there
can be used, and only what had not been written is made again.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from videoqat.console import say
from videoqat.errors import DataError
from videoqat.files import atomic_path

FOLDER = "shards"


class ShardStore:
    """The shards of the cache folder `root`: what is there, and what is added.

    Attributes:
        shard_of: sample key -> name of the shard that holds it (relative to `root`); only whole shards count.
        bucket_of: sample key -> its bucket, such as `17x64x64`, for all keys, whether written yet or waiting.
    """

    def __init__(self, root: Path, shard_samples: int) -> None:
        self.root = root
        self.shard_samples = shard_samples
        self.shard_of: dict[str, str] = {}
        self.bucket_of: dict[str, str] = {}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        folder = root / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("[!.]*.safetensors")):
            self._register(path)

    @staticmethod
    def clean(root: Path) -> None:
        """Removes what killed runs left half-written in the cache folder `root`. Nobody may be writing there."""
        for left_over in (root / FOLDER).glob(".*.partial.safetensors"):
            left_over.unlink()

    def _register(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as handle:  # compares the file's length with its header
                buckets: dict[str, str] = json.loads(handle.metadata()["buckets"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            say(f"WARNING: {path} is damaged ({error}); its samples are made again")
            path.unlink(missing_ok=True)  # each of several processes sees it
            return
        name = f"{FOLDER}/{path.name}"
        self.shard_of |= dict.fromkeys(buckets, name)
        self.bucket_of |= buckets

    def add(self, key: str, bucket: str, tensors: dict[str, Tensor]) -> None:
        """Takes a sample's tensors; each full shard is written at once."""
        self._waiting[key] = tensors
        self.bucket_of[key] = bucket
        if len(self._waiting) >= self.shard_samples:
            self.flush()

    def flush(self) -> None:
        """Writes what is waiting as a shard of its own.

        Raises:
            DataError: it can't be written (disk full, say); the shards that are there can be used.
        """
        if not self._waiting:
            return
        buckets = {key: self.bucket_of[key] for key in self._waiting}
        name = f"{FOLDER}/{hashlib.sha256(' '.join(buckets).encode()).hexdigest()[:20]}.safetensors"
        # Cloned: clips with the same caption share their embedding, and safetensors refuses tensors that share memory.
        tensors = {
            f"{key}.{part}": tensor.clone(memory_format=torch.contiguous_format)
            for key, parts in self._waiting.items()
            for part, tensor in parts.items()
        }
        try:
            with atomic_path(self.root / name) as aside:
                aside.touch()
                mode = aside.stat().st_mode
                save_file(tensors, aside, metadata={"buckets": json.dumps(buckets)})
                aside.chmod(mode)  # safetensors makes its files readable by their owner only; a cache is for the group's other members too
        except (OSError, SafetensorError) as error:
            raise DataError(f"shard {str(self.root / name)!r} can't be written: {error}; the same command goes on from the others") from error
        self.shard_of |= dict.fromkeys(buckets, name)
        self._waiting.clear()

    def sizes(self, keys: set[str]) -> dict[str, int]:
        """Size in bytes of every shard that holds one of `keys`."""
        return {name: (self.root / name).stat().st_size for name in sorted({self.shard_of[key] for key in keys})}

    def drop_others(self, keep: dict[str, int]) -> int:
        """Removes the shards that are not in `keep`; returns how many."""
        stale = set(self.shard_of.values()) - set(keep)
        for name in stale:
            (self.root / name).unlink(missing_ok=True)
        return len(stale)


def all_finite(tensors: dict[str, Tensor]) -> bool:
    """Whether no tensor holds NaN or inf."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
