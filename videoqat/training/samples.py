"""Sample videos of a model in training, by the recipe's own kernel.

The sampler is that of `videoqat generate`, around the transformer as it lies in memory, sharded or not. Prompts are encoded once, on rank 0, before
the transformer is loaded, and the text encoder is given up; the VAE waits in the host's memory and comes to the GPU to decode. Ranks of different
data-parallel positions render different prompts at the same time. Sharded weights are gathered by all ranks together, so all of them do the same
number of denoising steps: where prompts don't divide evenly, some ranks render one that another writes.

    samples/step-000500/prompt-00.mp4    fps, size and steps as in validation.sampling
                        prompt-00.json   prompt, seed, recipe, which kernels ran, timings
"""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from videoqat.config import RuntimeConfig, SamplingConfig, require, to_dict
from videoqat.data.video_io import write_video
from videoqat.files import write_json
from videoqat.generation.engine import Engine, check_sampling
from videoqat.generation.images import check_image, read_image
from videoqat.models.spec import Condition
from videoqat.parallel.mesh import Mesh
from videoqat.parallel.sharding import compute_dtype
from videoqat.training.agreement import Faults
from videoqat.training.job import Job
from videoqat.training.runlog import disk_errors

STRIP_FRAMES = 6  # of each video in TensorBoard


def check_samples(job: Job) -> None:
    """Requires that samples of `validation.prompts` can be rendered with what a training has in memory.

    Raises:
        ConfigError: a size that the model can't do, a first frame too many or too few, or a model whose other transformer would be needed.
    """
    config = job.config
    if not config.validation.every or not config.validation.prompts:
        return
    check_sampling(config.model.path, config.validation.sampling)
    for image in config.validation.images or [""]:
        check_image(config.model.path, image, "validation.images")
    job.recipe.check_steps(config.validation.sampling.num_inference_steps)
    components = job.family.components(config.model.path)
    legal = f"none: samples need {' and '.join(components)}, and training holds {config.model.component} alone"
    require(len(components) == 1, "validation.prompts", config.validation.prompts, legal)


@contextlib.contextmanager
def _takes_what_pipelines_give(transformer: nn.Module) -> Iterator[None]:
    """A pipeline makes its tensors of the dtype that weights have, fp32 in training; a sharded transformer wants them in its compute dtype."""

    def cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = compute_dtype(transformer)
        floats = [name for name, value in kwargs.items() if ("hidden_states" in name or name == "pooled_projections") and value is not None]
        return args, kwargs | {name: kwargs[name].to(dtype) for name in floats}

    handle = transformer.register_forward_pre_hook(cast, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def strip(frames_FHWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Frames spread evenly over a video, first and last among them, side by side: (H, W * count, 3)."""
    picks = np.linspace(0, len(frames_FHWC) - 1, min(STRIP_FRAMES, len(frames_FHWC))).round().astype(int)
    return np.concatenate(list(frames_FHWC[picks]), axis=1)


def _moved(condition: Condition, device: str | torch.device) -> Condition:
    return {part: tensor.to(device) for part, tensor in condition.items()}


class Prompts:
    """`validation.prompts` as conditions, batches of one on the CPU, on every rank, each with that of the negative prompt. Collective."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        config = job.config.validation
        tokens = config.sampling.max_text_tokens or int(job.cache.settings["max_text_tokens"])
        self.sampling: SamplingConfig = dataclasses.replace(config.sampling, max_text_tokens=tokens)

        def encode() -> list[Condition]:
            dtype = torch.float32 if mesh.device.type == "cpu" else torch.bfloat16
            encoders = job.family.load_encoders(job.config.model.path, device=mesh.device, dtype=dtype)
            encoded = job.family.encode_prompts(encoders, [*config.prompts, self.sampling.negative_prompt], tokens)
            return [_moved(job.family.batch_conditions([condition], tokens), "cpu") for condition in encoded]

        conditions = mesh.on_rank_zero(encode)
        gc.collect()
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(mesh.device)  # the text encoder's share was no training's
        *prompts, negative = conditions
        self.conditions: list[tuple[Condition, Condition]] = [(prompt, negative) for prompt in prompts]


class Sampler:
    """Renders a run's prompts. Loads a VAE, into the host's memory.

    Args:
        job, mesh: of the run.
        transformer: in training, the recipe in it.
        prompts: encoded.
    """

    def __init__(self, job: Job, mesh: Mesh, transformer: nn.Module, prompts: Prompts) -> None:
        from accelerate import cpu_offload_with_hook

        config = job.config
        self._job, self._mesh, self._transformer, self._prompts = job, mesh, transformer, prompts
        pipeline = job.family.load_encoders(config.model.path, device="cpu", dtype=torch.float32, text_encoder=False)
        pipeline.register_modules(**{config.model.component: transformer})
        encoder = getattr(pipeline, "image_encoder", None)  # of first frames; it gives way to the VAE, which comes next
        self._encoder_hook = None if encoder is None else cpu_offload_with_hook(encoder, mesh.device)[1]
        _, self._vae_hook = cpu_offload_with_hook(pipeline.vae, mesh.device, prev_module_hook=self._encoder_hook)
        self._images = [read_image(path, "validation.images")[0] for path in config.validation.images]
        self._engine = Engine(config.model.path, RuntimeConfig(str(mesh.device), kernel=config.runtime.kernel), pipeline)

    def render(self, step: int, faults: Faults, before_step: Callable[[], None]) -> dict[str, NDArray[np.uint8]]:
        """Writes the videos of `step`. Collective.

        Args:
            step: of the training.
            faults: where errors of writing go.
            before_step: called after each denoising step; what it raises (on all ranks together) ends the call.

        Returns:
            Name -> `strip` of each video, on every rank.

        Raises:
            NonFiniteVideo: on all ranks.
        """
        config, count = self._job.config, len(self._prompts.conditions)
        folder = Path(config.out) / "samples" / f"step-{step:06d}"
        strips: dict[str, NDArray[np.uint8]] = {}
        for at in range(0, count, self._mesh.layout.dp):
            index = at + self._mesh.dp_rank
            number = min(index, count - 1)
            prompt, negative = self._prompts.conditions[number]
            with torch.no_grad(), _takes_what_pipelines_give(self._transformer):
                result = self._engine.generate(
                    config.validation.prompts[number],
                    number,  # the seed: the same noise at every step, so that videos of two steps can be compared
                    self._prompts.sampling,
                    self._job.recipe,
                    image=self._images[number] if self._images else None,
                    on_step=lambda *_: before_step(),
                    condition=(_moved(prompt, self._mesh.device), _moved(negative, self._mesh.device)),
                    agree=self._mesh.any,
                )
            self._vae_hook.offload()
            if index >= count or self._mesh.sp_rank != 0:
                continue
            name = f"prompt-{index:02d}"
            strips[name] = strip(result.frames)
            record = {
                "step": step,
                "prompt": config.validation.prompts[index],
                "image": config.validation.images[index] if config.validation.images else None,
                "seed": index,
                "sampling": to_dict(self._prompts.sampling),
                "recipe": result.recipe.to_dict(),
                "receipts": result.receipts,
                "timings": result.timings,
                "warnings": result.warnings,
            }
            with faults.noted(), disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                write_video(folder / f"{name}.mp4", result.frames, self._prompts.sampling.fps)
                write_json(folder / f"{name}.json", record)
        shown: dict[str, NDArray[np.uint8]] = {}
        for mine in self._mesh.gather_objects(strips):
            shown |= mine
        return dict(sorted(shown.items()))
