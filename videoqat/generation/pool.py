"""Several checkpoints served from one device: kept as long as they fit, set aside in the host's memory when they don't, dropped when that is full."""

import contextlib
import dataclasses
import gc
from collections import OrderedDict
from pathlib import Path

import torch
from PIL import Image

from videoqat.config import GenerationRuntimeConfig, SamplingConfig
from videoqat.errors import CheckpointError, GenerationCancelled
from videoqat.generation.division import Division
from videoqat.generation.engine import Engine, choose_recipe
from videoqat.generation.meter import total_memory
from videoqat.models.weights import num_weights, parts_of, stem_of

GIB = 2**30
DEVICE_SHARE = 0.6  # of its memory, where no budget is given: the rest is for activations


def weights_bytes(folder: str | Path, dtype: torch.dtype) -> int:
    """How much memory the weights of a pipeline's folder take when they are loaded in `dtype`, from the files' headers alone.

    VAE and image encoder are loaded in float32.

    Raises:
        CheckpointError: a part's are missing, or one of its files is torn.
    """
    stems = {part: stem_of(part, library) for part, (library, _) in parts_of(folder).items()}
    widths = dict.fromkeys(stems, dtype.itemsize) | dict.fromkeys(("vae", "image_encoder"), 4)
    return sum(widths[part] * num_weights(Path(folder) / part, stem) for part, stem in stems.items() if stem is not None)


def warm_up(engine: Engine, sampling: SamplingConfig, recipes: list[str]) -> None:
    """A video of one step, then under each of `recipes` as many as it takes until one is quantised, so that no later video of that size pays for
    compiling or allocating."""
    needs_image = engine.family.takes_image(engine.folder) == "required"
    image = Image.new("RGB", (sampling.width, sampling.height)) if needs_image else None
    engine.generate("warm-up", 0, dataclasses.replace(sampling, num_inference_steps=1), "bf16", image=image)
    for recipe in recipes:
        kept = choose_recipe(engine.folder, recipe)[0].keep_first_steps

        def enough(done: int, _: int, kept: int = kept) -> None:
            if done > kept:
                raise GenerationCancelled

        with contextlib.suppress(GenerationCancelled):
            engine.generate("warm-up", 0, sampling, recipe, image=image, on_step=enough)


class EnginePool:
    """Engines by folder, at most as many on the device as a budget for weights allows; the one used longest ago goes first.

    Args:
        runtime: device, dtype and kernel of all of them.
        device_gib: budget for weights on the device, or with `runtime.offload` in the host's memory, where they live then; in GiB. 0: 60 % of that
            memory, and a model that needs more is tried on its own.
        host_gib: budget for weights set aside in the host's memory, from where they come back sooner than from disk. On a CPU, and with
            `runtime.offload`, nothing is set aside: there is nowhere else to put it.

    Raises:
        ConfigError: a device that isn't there.
    """

    def __init__(self, runtime: GenerationRuntimeConfig, device_gib: float = 0.0, host_gib: float = 0.0, division: Division | None = None) -> None:
        self.runtime = runtime
        self.division = division
        self.device, self.dtype = runtime.resolve()
        self.strict = device_gib > 0
        home = self.device if runtime.offload == "none" else torch.device("cpu")
        self.device_budget = int(device_gib * GIB) or int(DEVICE_SHARE * total_memory(home))
        self.host_budget = int(host_gib * GIB) if home.type != "cpu" else 0
        self._on_device: OrderedDict[str, Engine] = OrderedDict()  # the one used longest ago first
        self._aside: OrderedDict[str, Engine] = OrderedDict()
        self._bytes: dict[str, int] = {}

    @property
    def resident(self) -> list[str]:
        """Folders whose models are on the device now."""
        return list(self._on_device)

    @property
    def set_aside(self) -> list[str]:
        """Folders whose models wait in the host's memory."""
        return list(self._aside)

    def get(self, folder: str | Path) -> Engine:
        """The engine of `folder`, on the device: as it is, brought back, or loaded. Others make room for it first.

        Raises:
            CheckpointError: the folder can't be loaded, or its weights alone are more than a budget that was given.
        """
        key = str(folder)
        if key not in self._on_device:
            needed = self._bytes.setdefault(key, weights_bytes(folder, self.dtype))
            if self.strict and needed > self.device_budget:
                have = f"memory.device_gib={self.device_budget / GIB:.3g}"
                raise CheckpointError(f"{folder} needs {needed / GIB:.3g} GiB for its weights, which is more than {have} allows")
            waiting = self._aside.pop(key, None)  # before others take its place there
            while self._on_device and self._sum(self._on_device) + needed > self.device_budget:
                self._put_aside()
            if waiting is not None:
                waiting.pipeline.to(self.device)
            self._on_device[key] = waiting or Engine(folder, self.runtime, division=self.division)
        self._on_device.move_to_end(key)
        return self._on_device[key]

    def _sum(self, engines: "OrderedDict[str, Engine]") -> int:
        return sum(self._bytes[key] for key in engines)

    def _put_aside(self) -> None:
        """The engine used longest ago leaves the device: into the host's memory, where others make room, or for good."""
        key, engine = self._on_device.popitem(last=False)
        if self._bytes[key] <= self.host_budget:
            while self._sum(self._aside) + self._bytes[key] > self.host_budget:
                self._aside.popitem(last=False)
            engine.pipeline.to("cpu")
            self._aside[key] = engine
        del engine
        gc.collect()  # a pipeline's parts know each other, so that only the collector frees them
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
