"""A training job, checked: everything that can go wrong before weights are loaded goes wrong here.

`train` and `train --dry-run` begin with the same `check`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from videoqat.attention.backends import Receipt, resolve
from videoqat.config import TrainConfig, parse_bucket, require, to_dict
from videoqat.data.dataset import BatchOrder, CachedVideos
from videoqat.data.precompute import encoder_fingerprint
from videoqat.errors import DataError
from videoqat.models.install import install
from videoqat.models.spec import Geometry, ModelFamily, family_of
from videoqat.recipes import AttentionRecipe, get_recipe
from videoqat.training.objective import time_quantiles

# Bytes that a transformer block keeps for its backward, per token and unit of width: measured on Wan blocks with a feed-forward 4 times as wide
# (tests/test_training_job.py), with 4-bit attention or without.
ACTIVATION_BYTES = {"none": 120, "bfloat16": 84}


@dataclass(frozen=True)
class Job:
    """A configuration that fits its model, its cache and this machine. Nothing is loaded yet.

    Attributes:
        config: as given.
        recipe: what attention is trained for.
        family, geometry: of the model.
        time_range: flow times that the component serves.
        cache, order: the samples, and which of them each batch holds.
        device: where it runs.
        receipt: the kernel that the quantised layers will get.
        model_fingerprint: of the transformer that training starts from (`transformer_fingerprint`).
    """

    config: TrainConfig
    recipe: AttentionRecipe
    family: ModelFamily
    geometry: Geometry
    time_range: tuple[float, float]
    cache: CachedVideos
    order: BatchOrder
    device: torch.device
    receipt: Receipt
    model_fingerprint: str

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint records, and what a resuming run must have equal (`state.check_resumable`)."""
        return {
            "config": to_dict(self.config),
            "recipe": self.recipe.to_dict(),
            "model_fingerprint": self.model_fingerprint,
            "cache_fingerprint": self.cache.fingerprint,
        }


def transformer_fingerprint(folder: str | Path, component: str, *, weights: bool) -> str:
    """sha256 over the component's config.json and, with `weights`, the size and 64 evenly spread 16 KiB pieces of each of its safetensors files.

    Weights of many GB are told apart in milliseconds; a fine-tuned model differs from its base in nearly every byte.
    """
    digest = hashlib.sha256((Path(folder) / component / "config.json").read_bytes())
    for path in sorted((Path(folder) / component).glob("*.safetensors")) if weights else ():
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for i in range(64):
                file.seek(size * i // 64)
                digest.update(file.read(min(16384, -(-size // 64))))
    return digest.hexdigest()


def _check_cache(config: TrainConfig, cache: CachedVideos, geometry: Geometry) -> None:
    """Requires that this model's VAE and text encoder made the cache, and that its transformer can take it: a sample of each bucket is read."""
    fingerprint = encoder_fingerprint(config.model.path)
    if fingerprint != cache.settings["encoder_fingerprint"]:
        made_with = f"{cache.settings.get('model')} ({cache.settings['encoder_fingerprint'][:12]})"
        wanted = f"model.path={config.model.path!r} ({fingerprint[:12]})"
        raise DataError(
            f"cache={config.cache!r} was made with the VAE and text encoder of {made_with}, not of {wanted}; run preprocess with this model"
        )
    first_of = {sample.bucket: index for index, sample in reversed(list(enumerate(cache.samples)))}
    for bucket, index in first_of.items():
        size = parse_bucket("bucket", bucket)
        geometry.check_size(f"cache={config.cache!r}, bucket {bucket}", *size)
        sample = cache.load(index)
        expected = (*geometry.latent_shape(*size), geometry.text_dim)
        found = (*sample["latents"].shape, sample["text"].shape[1])
        if found != expected:
            holds = f"sample {cache.samples[index].id} has latents {found[:4]} and text of width {found[4]}"
            needs = f"takes {expected[:4]} and {expected[4]}"
            raise DataError(f"cache={config.cache!r} does not fit model.path={config.model.path!r}: {holds}, the model {needs}")


def check(config: TrainConfig) -> Job:
    """Checks `config` against model, cache and machine, without loading weights.

    Raises:
        UserError: what doesn't fit, with the legal values.
    """
    loop = config.train
    require(config.optimizer.warmup_steps <= loop.steps, "optimizer.warmup_steps", config.optimizer.warmup_steps, f"at most train.steps={loop.steps}")
    legal = "auto or float32: the master weights are fp32; train.autocast chooses the arithmetic"
    require(config.runtime.dtype in ("auto", "float32"), "runtime.dtype", config.runtime.dtype, legal)
    folder, component = config.model.path, config.model.component
    family = family_of(folder)
    geometry = family.geometry(folder, component)
    time_range = family.flow_time_range(folder, component)
    time_quantiles(config.objective, time_range)
    recipe, (device, _) = get_recipe(config.recipe), config.runtime.resolve()
    beyond = [index for index in recipe.keep_layers if not 0 <= index < geometry.num_layers]
    require(not beyond, f"recipe {recipe.name!r}: keep_layers", beyond, f"blocks 0 to {geometry.num_layers - 1}")
    dtype = torch.bfloat16 if loop.autocast == "bfloat16" else torch.float32
    receipt = resolve(recipe, device, dtype, geometry.head_dim, config.runtime.kernel, training=True)
    cache = CachedVideos(config.cache)
    _check_cache(config, cache, geometry)
    return Job(
        config=config,
        recipe=recipe,
        family=family,
        geometry=geometry,
        time_range=time_range,
        cache=cache,
        order=BatchOrder(cache, loop.batch_size, loop.seed),
        device=device,
        receipt=receipt,
        model_fingerprint=transformer_fingerprint(folder, component, weights=not config.from_scratch),
    )


def estimate(job: Job) -> dict[str, Any]:
    """What the job amounts to: parameters, tokens, steps and memory. The transformer is built on the meta device, without numbers."""
    config, loop = job.config, job.config.train
    with torch.device("meta"):
        transformer = job.family.load_transformer(config.model.path, config.model.component, dtype=torch.float32, from_scratch=True)
    num_parameters = sum(p.numel() for p in transformer.parameters())
    layers = install(transformer, job.recipe, kernel=config.runtime.kernel, family=job.family)
    tokens = {bucket: job.geometry.num_tokens(*parse_bucket("bucket", bucket)) for bucket in sorted({s.bucket for s in job.cache.samples})}
    steps_per_epoch = job.order.batches_per_epoch / loop.accumulation
    memory = memory_bytes(job, num_parameters, max(tokens.values()))
    return {
        "parameters": num_parameters,
        "quantised_layers": [layer.name for layer in layers],
        "recipe": job.recipe.name,
        "kernel": job.receipt.to_dict(),
        "device": str(job.device),
        "samples": len(job.cache),
        "tokens_per_sample": tokens,
        "samples_per_step": loop.batch_size * loop.accumulation,
        "steps_per_epoch": steps_per_epoch,
        "epochs": loop.steps / steps_per_epoch,
        "flow_time_range": list(job.time_range),
        "memory_bytes": memory | {"total": sum(memory.values())},
    }


def memory_bytes(job: Job, num_parameters: int, num_tokens: int) -> dict[str, int]:
    """Memory of one process, by what it is for; activations to within a factor of about 1.5.

    Weights, gradients, two moments and the EMA take 4 bytes a parameter each, autocast's copies 2. A block keeps `ACTIVATION_BYTES` per token and
    unit of width; with full activation checkpointing all blocks keep their input only (4 bytes), and one block at a time keeps everything.
    """
    loop = job.config.train
    extent = loop.batch_size * num_tokens * job.geometry.num_heads * job.geometry.head_dim
    block, blocks = ACTIVATION_BYTES[loop.autocast] * extent, job.geometry.num_layers
    return {
        "weights": 4 * num_parameters,
        "gradients": 4 * num_parameters,
        "moments": 8 * num_parameters,
        "ema": 4 * num_parameters if job.config.optimizer.ema_decay else 0,
        "autocast_copies": 2 * num_parameters if loop.autocast == "bfloat16" else 0,
        "activations": block * blocks if loop.activation_checkpointing == "none" else 4 * extent * blocks + block,
    }
