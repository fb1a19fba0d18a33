"""A training job, checked: everything that can go wrong before weights are loaded goes wrong here.

`train` and `train --dry-run` begin with the same `check`. What a job will take is told by `memory.py` and `throughput.py`.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from videoqat.attention.backends import Receipt, resolve
from videoqat.attention.coded import packed_obstacle
from videoqat.config import LoopConfig, TrainConfig, parse_bucket, require, to_dict
from videoqat.data.dataset import BatchOrder, CachedVideos, check_images
from videoqat.data.precompute import encoder_fingerprint
from videoqat.errors import CheckpointError, ConfigError, DataError
from videoqat.models.install import check_cut, check_policy
from videoqat.models.schedules import NoiseSchedule
from videoqat.models.spec import Geometry, ModelFamily, family_of
from videoqat.parallel.mesh import Layout, divisors, resolve_layout, world_size_from_launcher
from videoqat.recipes import AttentionRecipe, get_recipe
from videoqat.training.objective import resolve as resolve_objective
from videoqat.training.objective import time_quantiles


@dataclass(frozen=True)
class Job:
    """A configuration that fits its model, its cache and this machine. Nothing is loaded yet.

    Attributes:
        config: as given, with what the objective leaves to the model filled in.
        recipe: what attention is trained for.
        family, geometry, schedule: of the model.
        time_range: flow times that the component serves.
        cache, order: the samples, and which of them each batch holds.
        layout: of the processes.
        accumulation: micro-batches of `train.batch_size` samples that each data-parallel rank adds up in a step.
        device: where it runs.
        receipt: the kernel that the quantised layers will get.
        model_fingerprint: of the transformer that training starts from (`transformer_fingerprint`).
    """

    config: TrainConfig
    recipe: AttentionRecipe
    family: ModelFamily
    geometry: Geometry
    schedule: NoiseSchedule
    time_range: tuple[float, float]
    cache: CachedVideos
    order: BatchOrder
    layout: Layout
    accumulation: int
    device: torch.device
    receipt: Receipt
    model_fingerprint: str

    @property
    def samples_per_step(self) -> int:
        """Over all ranks: `train.global_batch_size`, resolved."""
        return self.config.train.batch_size * self.accumulation * self.layout.dp

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint records, and what a resuming run must have equal (`state.check_resumable`)."""
        config = to_dict(self.config)
        config["train"]["global_batch_size"] = self.samples_per_step  # 0 would stand for another number in another layout
        return {
            "config": config,
            "recipe": self.recipe.to_dict(),
            "model_fingerprint": self.model_fingerprint,
            "cache_fingerprint": self.cache.fingerprint,
        }


def transformer_fingerprint(folder: str | Path, component: str, *, weights: bool) -> str:
    """sha256 over the component's config.json and, with `weights`, the header of each of its safetensors files and the first 16 KiB of each tensor.

    Weights of many GB are told apart in milliseconds: a tensor that was trained differs in nearly every byte.

    Raises:
        CheckpointError: a file that is no safetensors file.
    """
    digest = hashlib.sha256((Path(folder) / component / "config.json").read_bytes())
    for path in sorted((Path(folder) / component).glob("*.safetensors")) if weights else ():
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            try:
                header = file.read(int.from_bytes(file.read(8), "little"))
                spans = sorted(tensor["data_offsets"] for name, tensor in json.loads(header).items() if name != "__metadata__")
            except (ValueError, OverflowError, MemoryError, AttributeError, TypeError, KeyError) as error:
                raise CheckpointError(f"{path} is no safetensors file: its header can't be read") from error
            digest.update(header)
            for start, end in spans:
                file.seek(8 + len(header) + start)
                digest.update(file.read(min(16384, end - start)))
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
    check_images(cache, config.model.path)


def _layout(config: TrainConfig, world_size: int | None, num_heads: int, recipe: AttentionRecipe) -> Layout:
    """The layout of `world_size` processes, or of those that torchrun started, if that is how many `parallel.world_size` wants."""
    parallel = config.parallel
    if world_size is None:
        world_size = world_size_from_launcher()
        legal = f"0, or {world_size}: as many as torchrun started (it is told by --nproc-per-node and --nnodes)"
        require(parallel.world_size in (0, world_size), "parallel.world_size", parallel.world_size, legal)
    layout = resolve_layout(parallel, world_size, num_heads)
    obstacle = packed_obstacle(recipe)
    if parallel.ulysses_wire == "packed" and obstacle is not None:
        raise ConfigError(f"parallel.ulysses_wire=packed is not possible with recipe {recipe.name!r}: {obstacle}; legal: auto, bf16")
    return layout


def _accumulation(loop: LoopConfig, layout: Layout) -> int:
    """Micro-batches of each data-parallel rank in a step."""
    together = loop.batch_size * layout.dp
    accumulation, over = divmod(loop.global_batch_size or together, together)
    if over or accumulation == 0:
        above = (accumulation + 1) * together
        near = f"{above - together} or {above}" if accumulation else str(above)
        fitting = ", ".join(map(str, divisors(loop.global_batch_size // loop.batch_size)))
        raise ConfigError(
            f"train.global_batch_size={loop.global_batch_size} = train.batch_size {loop.batch_size} * data-parallel positions {layout.dp} * "
            f"accumulation does not hold; legal: a multiple of {together}, such as {near}, or dp_replicate * dp_shard one of {fitting} ({layout})"
        )
    return accumulation


def check(config: TrainConfig, world_size: int | None = None) -> Job:
    """Checks `config` against model, cache and machine, without loading weights.

    Args:
        config: the job.
        world_size: number of processes to check for, wherever this runs; None: those that torchrun started.

    Raises:
        UserError: what doesn't fit, with the legal values.
    """
    loop = config.train
    require(config.optimizer.warmup_steps <= loop.steps, "optimizer.warmup_steps", config.optimizer.warmup_steps, f"at most train.steps={loop.steps}")
    legal = "auto or float32: the master weights are fp32; train.compute_dtype chooses the arithmetic"
    require(config.runtime.dtype in ("auto", "float32"), "runtime.dtype", config.runtime.dtype, legal)
    folder, component = config.model.path, config.model.component
    family = family_of(folder)
    geometry = family.geometry(folder, component)
    time_range = family.flow_time_range(folder, component)
    schedule = family.noise_schedule(folder)
    config = replace(config, objective=resolve_objective(config.objective, schedule))
    time_quantiles(config.objective, time_range)
    recipe, (device, _) = get_recipe(config.recipe), config.runtime.resolve()
    check_policy(recipe, folder)
    if component in recipe.keep_components:
        what = f"recipe {recipe.name!r} keeps all of model.component={component!r} in bf16"
        raise ConfigError(f"{what}, and nothing of it would be trained for {recipe.qk}; legal: another component, or recipe=bf16")
    layout = _layout(config, world_size, geometry.num_heads, recipe)
    if layout.sp > 1:
        check_cut(recipe, family.attention_layers(family.build(folder, component)), layout.sp, component)
    accumulation = _accumulation(loop, layout)
    receipt = resolve(recipe, device, getattr(torch, loop.compute_dtype), geometry.head_dim, config.runtime.kernel, training=True)
    cache = CachedVideos(config.cache)
    _check_cache(config, cache, geometry)
    family.text_tokens(folder, int(cache.settings["max_text_tokens"]), f"cache={config.cache!r}: max_text_tokens")
    order = BatchOrder(cache, loop.batch_size, loop.seed)
    samples, wanted = order.batches_per_epoch * loop.batch_size, accumulation * layout.dp * loop.batch_size
    if samples < wanted:
        raise DataError(
            f"cache={config.cache!r} is too small for one step: its {len(cache)} samples fill {order.batches_per_epoch} batches of "
            f"train.batch_size={loop.batch_size} ({samples} samples), train.global_batch_size={wanted} takes {wanted}"
        )
    return Job(
        config=config,
        recipe=recipe,
        family=family,
        geometry=geometry,
        schedule=schedule,
        time_range=time_range,
        cache=cache,
        order=order,
        layout=layout,
        accumulation=accumulation,
        device=device,
        receipt=receipt,
        model_fingerprint=transformer_fingerprint(folder, component, weights=not config.from_scratch),
    )
