"""Reading what `precompute` wrote, in an order that anybody can work out again.

Which samples form batch number i is a pure function of (seed, i), and what chance decides for a sample in an epoch is a pure function of
(seed, epoch, sample): so a resumed run, a run with another batch layout and a run on more machines all see the same data. Everything is
derived by hashing (BLAKE2), because hashes, unlike the shuffles of numerical libraries, stay the same from one version to the next.
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from videoqat.config import parse_bucket, require
from videoqat.console import say
from videoqat.errors import DataError
from videoqat.models.spec import family_of

INDEX = "index.json"
INDEX_FORMAT = 2


@dataclass(frozen=True)
class SampleInfo:
    """One cached sample.

    Attributes:
        id: the clip's path as its folder listed it.
        bucket: such as `17x64x64` (frames, height, width).
        caption, source: its words, and the file it was made from.
        key: hash of everything it was made from; equal keys are equal tensors.
        shard: file below the cache that holds it.
    """

    id: str
    bucket: str
    caption: str
    source: str
    key: str
    shard: str


class CachedVideos:
    """The samples of a cache folder. Tensors are read from the memory-mapped shards when they are asked for.

    Attributes:
        samples: list of SampleInfo, in the order of the clips' folder.
        settings: what the cache was made with: family, fps, buckets, max_text_tokens, dtype, encoder_fingerprint, ...
        geometry: the model's sizes, as `Geometry`'s fields.
        fingerprint: hash of all samples and settings; two caches with the same one hold the same data in the same order.
    """

    def __init__(self, folder: str | Path) -> None:
        """Reads the index and checks that every shard is there and whole.

        Raises:
            DataError: no cache, an unknown format, or a shard that is missing or torn; it is named.
        """
        self.folder = Path(folder)
        index = _read_index(self.folder)
        self.settings: dict[str, Any] = index["settings"]
        self.geometry: dict[str, Any] = index["geometry"]
        self.samples = [SampleInfo(**sample) for sample in index["samples"]]
        self._null_condition = index["null_condition"]
        self._open: dict[str, Any] = {}
        self._parts: dict[str, dict[str, list[str]]] = {}  # shard -> sample key -> names of its tensors
        for name, size in index["shards"].items():
            path = self.folder / name
            if not path.is_file():
                raise DataError(f"cache {str(self.folder)!r} lacks its shard {name}; run preprocess again to make it anew")
            if path.stat().st_size != size:
                raise DataError(f"shard {str(path)!r} is torn: {path.stat().st_size} bytes, not {size}; remove it and run preprocess again")
        content = [self.settings["settings_key"], *(f"{s.id} {s.bucket} {s.key}" for s in self.samples)]
        self.fingerprint = hashlib.sha256("\n".join(content).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def null_condition(self) -> dict[str, Tensor]:
        """What the empty caption makes of a condition: all that depends on the caption, `text` (L, D) among it."""
        return self._tensors(**self._null_condition)

    def load(self, index: int) -> dict[str, Tensor]:
        """`latents` (C, F, H, W) float32, and the sample's condition (`models.spec.Condition`), such as `text` (L, D) in the encoder's dtype."""
        return self._tensors(self.samples[index].key, self.samples[index].shard)

    def _tensors(self, key: str, shard: str) -> dict[str, Tensor]:
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(self.folder / shard, framework="pt")
                parts: dict[str, list[str]] = {}
                for name in self._open[shard].keys():  # noqa: SIM118 - safe_open is no mapping
                    owner, _, part = name.partition(".")
                    parts.setdefault(owner, []).append(part)
                self._parts[shard] = parts
            return {part: self._open[shard].get_tensor(f"{key}.{part}") for part in self._parts[shard].get(key, ["latents"])}
        except (OSError, SafetensorError) as error:
            raise DataError(f"shard {str(self.folder / shard)!r} can't be read: {error}") from error


def check_images(cache: CachedVideos, model: str | Path, key: str = "cache") -> None:
    """Requires that samples of `cache` hold what `model` is told of their first frames, and nothing that it isn't; one of each bucket is read.

    Raises:
        DataError: they don't; `key` names the cache.
    """
    family = family_of(model)
    for bucket, index in {sample.bucket: index for index, sample in enumerate(cache.samples)}.items():
        size = parse_bucket("bucket", bucket)
        expected = family.condition_shapes(model, size, cache.settings["max_text_tokens"], image=cache.settings.get("image_to_video", False))
        sample = {part: tuple(tensor.shape) for part, tensor in cache.load(index).items()}
        holds, needs = ({part: shape for part, shape in parts.items() if part.startswith("image_")} for parts in (sample, expected))
        if holds != needs:
            found = f"of its first frame sample {cache.samples[index].id} holds {holds or 'nothing'}, and the model is told {needs or 'nothing'}"
            raise DataError(f"{key}={str(cache.folder)!r} does not fit {model}: {found}; run preprocess with this model")


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise DataError(f"{str(folder)!r} is no finished cache: it has no {INDEX}; preprocess writes it")
    try:
        index = json.loads(path.read_text())
        found = index["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{str(path)!r} can't be read: {error}") from error
    if found != INDEX_FORMAT:
        raise DataError(f"{str(path)!r} has format {found!r}; legal: {INDEX_FORMAT}. Run preprocess again")
    return dict(index)


def _digest(*parts: object) -> bytes:
    """128 bits that depend on every part. Parts are joined by a byte that no number and no stream's name holds."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


class BatchOrder:
    """Which samples form which batch.

    In each epoch every bucket's samples are shuffled and cut into batches, so a batch holds one bucket only and can be stacked; the batches
    of all buckets are then shuffled among one another. What doesn't fill a bucket's last batch is left out of that epoch; the next epoch
    leaves out others.
    """

    def __init__(self, cache: CachedVideos, batch_size: int, seed: int) -> None:
        """Raises DataError if no bucket holds `batch_size` samples; the counts are named."""
        require(batch_size >= 1, "batch_size", batch_size, "at least 1")
        self.batch_size = batch_size
        self.seed = seed
        self._buckets: dict[str, list[int]] = {}
        for index, sample in enumerate(cache.samples):
            self._buckets.setdefault(sample.bucket, []).append(index)
        counts = {bucket: len(indices) for bucket, indices in sorted(self._buckets.items())}
        self.batches_per_epoch = sum(count // batch_size for count in counts.values())
        listed = ", ".join(f"{bucket}: {count}" for bucket, count in counts.items())
        if self.batches_per_epoch == 0:
            raise DataError(f"batch_size={batch_size} is more than any bucket of {str(cache.folder)!r} holds ({listed or 'no samples'})")
        unused = {bucket: count for bucket, count in counts.items() if count < batch_size}
        if unused:
            say(f"WARNING: batch_size={batch_size} leaves buckets unused that hold fewer samples: {unused}")
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, index: int) -> tuple[int, list[int]]:
        """(epoch, sample indices) of batch number `index`, counted over all epochs from 0."""
        if index < 0:
            raise IndexError(f"batch {index}")
        epoch, place = divmod(index, self.batches_per_epoch)
        return epoch, list(self._epoch(epoch)[place])

    def _make_epoch(self, epoch: int) -> list[list[int]]:
        batches = []
        for indices in self._buckets.values():
            shuffled = sorted(indices, key=lambda index: _digest("order", self.seed, epoch, index))
            full = len(shuffled) // self.batch_size * self.batch_size
            batches += [shuffled[start : start + self.batch_size] for start in range(0, full, self.batch_size)]
        return sorted(batches, key=lambda batch: _digest("batch order", self.seed, epoch, batch[0]))


def sample_generator(seed: int, epoch: int, sample_index: int, stream: str) -> torch.Generator:
    """A CPU generator for what chance decides about one sample in one epoch; `stream` names the decision (noise, time, ...).

    A pure function of its arguments. torch's CPU generator keeps 32 bits of a seed: two of a thousand generators are alike with a
    probability of 1e-4, and then two unrelated samples share their noise, which harms nothing.
    """
    return torch.Generator().manual_seed(int.from_bytes(_digest("sample", seed, epoch, sample_index, stream)[:4], "big"))
