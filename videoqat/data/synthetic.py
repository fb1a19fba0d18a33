"""A cache of noise, in the format that `precompute` writes: for benchmarks, where only the sizes of samples matter."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from videoqat.data.dataset import INDEX, INDEX_FORMAT
from videoqat.data.precompute import encoder_fingerprint
from videoqat.data.shards import ShardStore
from videoqat.files import write_json
from videoqat.models.spec import family_of


def write_cache(out: Path, model: Path, bucket: tuple[int, int, int], samples: int, text_tokens: int, seed: int = 0) -> None:
    """Writes the folder `out`: `samples` of standard normal latents and conditions, of the sizes that a video of `bucket` has in `model`.

    Args:
        out: a folder that is not there yet.
        model: a pipeline folder; its encoders' fingerprint goes into the cache, none of them is run.
        bucket: frames, height, width.
        samples: how many.
        text_tokens: the length of every text.
        seed: of the noise.
    """
    family = family_of(model)
    geometry = family.geometry(model)
    geometry.check_size("size", *bucket)
    name = "x".join(map(str, bucket))
    generator = torch.Generator().manual_seed(seed)
    store = ShardStore(out, shard_samples=8)

    shapes = family.condition_shapes(model, bucket, text_tokens)

    def condition() -> dict[str, torch.Tensor]:
        return {part: torch.randn(shape, generator=generator).to(torch.bfloat16) for part, shape in shapes.items()}

    store.add("null", "", {part: tensor for part, tensor in condition().items() if not part.startswith("image_")})
    entries: list[dict[str, Any]] = []
    for i in range(samples):
        key = f"noise{i}"
        store.add(key, name, {"latents": torch.randn(geometry.latent_shape(*bucket), generator=generator), **condition()})
        entries.append({"id": f"noise {i}", "bucket": name, "caption": "", "source": "", "key": key})
    store.flush()
    settings: dict[str, Any] = {"max_text_tokens": text_tokens, "encoder_fingerprint": encoder_fingerprint(model), "synthetic_seed": seed}
    settings["settings_key"] = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()
    index = {
        "format": INDEX_FORMAT,
        "settings": settings,
        "geometry": dataclasses.asdict(geometry),
        "null_condition": {"key": "null", "shard": store.shard_of["null"]},
        "shards": store.sizes({"null", *(entry["key"] for entry in entries)}),
        "samples": [entry | {"shard": store.shard_of[entry["key"]]} for entry in entries],
    }
    write_json(out / INDEX, index)
