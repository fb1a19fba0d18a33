"""What the rest of videoqat needs to know about a model family, and nothing more.

A family is one file beside this one that ends in `FAMILY = SomeFamily()`, and one line in `FAMILIES`; what most families answer alike it has from
`family.BaseFamily`. Everything that depends on how a model was built (latent layout, text padding, time scale, where its attention sits) stays
behind `ModelFamily`; training, data and generation only see tensors: latents_BCFHW, flow time t in [0, 1], and a `Condition`.
"""

import importlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.schedules import NoiseSchedule
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import AttentionRecipe, recipe_from_dict

# What a transformer is told beside noisy latents and time: `text` always, (L, D) of one sample or (B, L, D) of a batch, and what else its family
# needs, such as `pooled` (P,), `image_latents` (C, F, H, W), or in a batch `text_len` (B,): how many text tokens of each sample are no padding. What
# comes of a first frame, and that alone, has a name that begins with `image_`.
Condition = dict[str, Tensor]

# Family name -> module that holds it as FAMILY.
FAMILIES: dict[str, str] = {
    "wan": "videoqat.models.wan",
    "cogvideox": "videoqat.models.cogvideox",
    "hunyuanvideo": "videoqat.models.hunyuan",
    "hunyuan15": "videoqat.models.hunyuan15",
}


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module of a transformer.

    Attributes:
        name: module path, such as `blocks.3.attn1`.
        index: number of the transformer block it sits in; what `AttentionRecipe.keep_layers` counts. Negative in a refiner, before block 0.
        kind: `self` (video tokens only), `joint` (text and video), `cross` (video to text) or `refiner` (text only, before the blocks).
        module: the module whose processor is exchanged.
        num_heads, head_dim: of its queries.
    """

    name: str
    index: int
    kind: str
    module: nn.Module
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, name: str, index: int, kind: str, module: Any) -> "AttentionLayer":
        """With the sizes of diffusers' attention `module`."""
        return cls(name, index, kind, module, module.heads, module.inner_dim // module.heads)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model, read from its JSON files.

    Attributes:
        in_channels: latent channels C.
        vae_spatial, vae_temporal: pixels per latent along height and width, and frames per latent after the first.
        patch: (frames, height, width) of latents that make one token.
        num_heads, head_dim, num_layers: of the transformer.
        text_dim: width of a text embedding.
        pixel_multiple: what height and width must be multiples of for the pipeline's own sake, whatever VAE and patch ask.
        frame_multiple: likewise for the frames after the first.
        max_size: the largest (height, width) in pixels that the transformer has positions for; None where there is no limit.
        only_size: whether it has positions for no other (height, width).
    """

    in_channels: int
    vae_spatial: int
    vae_temporal: int
    patch: tuple[int, int, int]
    num_heads: int
    head_dim: int
    num_layers: int
    text_dim: int
    pixel_multiple: int = 1
    frame_multiple: int = 1
    max_size: tuple[int, int] | None = None
    only_size: bool = False

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of a video of that size in pixels, filled up at the front where tokens span several latent frames."""
        frames = (num_frames - 1) // self.vae_temporal + 1
        return (self.in_channels, frames + -frames % self.patch[0], height // self.vae_spatial, width // self.vae_spatial)

    def num_tokens(self, num_frames: int, height: int, width: int) -> int:
        """Video tokens that self-attention sees."""
        return math.prod(size // part for size, part in zip(self.latent_shape(num_frames, height, width)[1:], self.patch, strict=True))

    def check_size(self, key: str, num_frames: int, height: int, width: int) -> None:
        """Requires a video size that VAE, patches and pipeline take without cutting.

        Raises:
            ConfigError: names `key`, the axis, its value and the legal values on both sides of it.
        """
        frame_step = math.lcm(self.vae_temporal, self.frame_multiple)
        if num_frames < 1 or (num_frames - 1) % frame_step:
            below = 1 + max(0, (num_frames - 1) // frame_step) * frame_step
            raise ConfigError(f"{key}: {num_frames} frames don't fit this model; legal: {frame_step}n+1, such as {below} or {below + frame_step}")
        if self.max_size is not None and self.only_size and (height, width) != self.max_size:
            only = "x".join(map(str, self.max_size))
            raise ConfigError(f"{key}: {height}x{width} is not the one height x width that this model has positions for; legal: {only}")
        largest_height, largest_width = self.max_size or (math.inf, math.inf)
        for axis, size, part, largest in (("height", height, self.patch[1], largest_height), ("width", width, self.patch[2], largest_width)):
            step = math.lcm(self.vae_spatial * part, self.pixel_multiple)
            if size > largest:
                raise ConfigError(f"{key}: {axis} {size} is more than this model has positions for; legal: multiples of {step} up to {largest}")
            if size < step or size % step:
                below = max(step, size // step * step)
                raise ConfigError(f"{key}: {axis} {size} doesn't fit this model; legal: multiples of {step}, such as {below} or {below + step}")


class ModelFamily(Protocol):
    """What a family must be able to do. B batch, C channels, F frames, H height, W width, L text tokens, D text width."""

    name: str
    pipeline_classes: tuple[str, ...]  # values of _class_name in model_index.json
    transformer_classes: tuple[str, ...]  # class names of transformers whose attention it knows
    has_dynamic_guidance: bool  # whether its pipeline can change the guidance from step to step (use_dynamic_cfg)
    has_true_cfg: bool  # whether guidance_scale is told to the model, and its pipeline guides by the negative prompt with true_cfg_scale only

    def components(self, folder: str | Path) -> tuple[str, ...]:
        """Names of the folder's transformers, the one for high noise first."""
        ...

    def geometry(self, folder: str | Path, component: str = "transformer") -> Geometry:
        """Sizes from the config.json files alone; no weights are touched."""
        ...

    def load_transformer(self, folder: str | Path, component: str, *, dtype: torch.dtype, from_scratch: bool = False, seed: int = 0) -> nn.Module:
        """The transformer on the CPU, in eval mode; every weight found and of the right shape, or CheckpointError. From scratch: no weights read."""
        ...

    def build(self, folder: str | Path, component: str) -> nn.Module:
        """The transformer in eval mode without numbers: parameters on the meta device, fp32, and buffers on the CPU. No weights are touched."""
        ...

    def load_encoders(self, folder: str | Path, *, device: str | torch.device, dtype: torch.dtype, text_encoder: bool = True) -> Any:
        """The pipeline without transformers: .vae (float32), .text_encoder (`dtype`; None if not wanted: no weights of it are read), .tokenizer."""
        ...

    def text_tokens(self, folder: str | Path, wanted: int = 0, key: str = "max_text_tokens") -> int:
        """To how many tokens text is padded: `wanted`, or the model's own number for 0; ConfigError that names `key` if it can't be `wanted`."""
        ...

    def count_tokens(self, encoders: Any, prompts: list[str]) -> list[int]:
        """How many tokens each prompt has, the end mark included and nothing cut off."""
        ...

    def encode_prompts(self, encoders: Any, prompts: list[str], max_tokens: int) -> list[Condition]:
        """All of each sample's condition that depends on its prompt, as the pipeline computes it. `text` is (L_i, D) with L_i <= max_tokens: without
        padding, unless padding is encoded, too."""
        ...

    def takes_image(self, folder: str | Path) -> str:
        """Whether the model is given a video's first frame: `no`, `optional` or `required`."""
        ...

    def encode_image(self, encoders: Any, image_BCHW: Tensor, num_frames: int) -> list[Condition]:
        """All of each sample's condition that depends on its first frame, an image in [-1, 1], as training gives it; for models that take one."""
        ...

    def image_pipeline(self, pipeline: Any) -> Any:
        """The pipeline whose call takes `image`: `pipeline`, as it was loaded, or another around the same modules; for models that take one."""
        ...

    def condition_shapes(
        self, folder: str | Path, size: tuple[int, int, int], text_tokens: int, *, image: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of one sample's condition: a video of `size` (frames, height, width), `text_tokens` of text, with a first frame given or not (a
        model that requires one has it in any case). Configuration files alone are read."""
        ...

    def batch_conditions(self, conditions: list[Condition], max_tokens: int) -> Condition:
        """The condition of a batch: `text` padded to L = max_tokens as the pipeline pads, the others stacked."""
        ...

    def prompt_arguments(self, condition: Condition, negative: Condition | None) -> dict[str, Any]:
        """What the pipeline's call takes instead of prompt and negative prompt, which were encoded before; batches of one."""
        ...

    def given_frames(self, condition: Condition) -> int:
        """How many latent frames at the beginning are given, not denoised: the loss leaves them out."""
        ...

    def encode_video(self, encoders: Any, video_BCFHW: Tensor) -> Tensor:
        """latents_BCFHW float32 of a video in [-1, 1]: the posterior's mode, normalised as the pipeline expects."""
        ...

    def noise_schedule(self, folder: str | Path) -> NoiseSchedule:
        """How data and noise are mixed at flow time t (0 data, 1 noise), and what is predicted; from the folder's scheduler."""
        ...

    def forward(self, transformer: nn.Module, x_BCFHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        """The prediction (B, C, F, H, W) for noisy latents x at flow time t, under the batch's condition."""
        ...

    def flow_time_range(self, folder: str | Path, component: str) -> tuple[float, float]:
        """Flow times (low, high) this transformer serves: low <= t < high, where 1 belongs to the last."""
        ...

    def attention_layers(self, transformer: nn.Module) -> list[AttentionLayer]:
        """Every attention module, in order of execution."""
        ...

    def make_processor(self, layer: AttentionLayer, recipe: AttentionRecipe, kernel: str) -> Any:
        """A processor with attributes layer (its name), recipe, kernel, observer (None) and ulysses (None); it attends by `parallel.ulysses`."""
        ...

    def blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """The blocks that hold nearly all weights and work, in order of execution: what is sharded, checkpointed and compiled one by one."""
        ...

    def shard_sequence(self, transformer: nn.Module, ulysses: Ulysses) -> list[RemovableHandle]:
        """Hooks that set `ulysses.num_tokens`, divide video tokens (and all that goes with each) before the first block, and gather the output."""
        ...

    def load_pipeline(self, folder: str | Path, *, device: str | torch.device, dtype: torch.dtype) -> Any:
        """The diffusers pipeline; its VAE in float32."""
        ...


def families() -> list[ModelFamily]:
    """Every family, in the order of `FAMILIES`."""
    return [importlib.import_module(module).FAMILY for module in FAMILIES.values()]


def family_of(folder: str | Path) -> ModelFamily:
    """The family of a diffusers pipeline folder, by `_class_name` in its model_index.json.

    Raises:
        CheckpointError: no such folder, not a pipeline's folder, or a pipeline of no family here; the supported ones are named.
    """
    if (Path(folder) / "config.json").is_file() and not (Path(folder) / "model_index.json").is_file():
        part = read_model_json(folder, "config.json").get("_class_name")
        raise CheckpointError(
            f"{folder} holds a part of a pipeline alone, a {part}; a model is the folder with model_index.json, in which each part has a folder: "
            "put this one in the place of the transformer there"
        )
    pipeline_class = read_model_json(folder, "model_index.json").get("_class_name")
    for family in families():
        if pipeline_class in family.pipeline_classes:
            return family
    supported = ", ".join(name for family in families() for name in family.pipeline_classes)
    what = f"{folder} holds a {pipeline_class}, which is not supported{' yet' if 'ImageToVideo' in str(pipeline_class) else ''}"
    raise CheckpointError(f"{what}; supported: {supported}")


def family_of_transformer(transformer: nn.Module) -> ModelFamily:
    """The family that knows this transformer's attention, by class name.

    Raises:
        CheckpointError: none does; the supported classes are named.
    """
    for family in families():
        if type(transformer).__name__ in family.transformer_classes:
            return family
    supported = ", ".join(name for family in families() for name in family.transformer_classes)
    raise CheckpointError(f"attention of {type(transformer).__name__} is not known; known transformers: {supported}")


def read_model_json(folder: str | Path, name: str) -> dict[str, Any]:
    """The mapping in FOLDER/NAME, such as `transformer/config.json`.

    Raises:
        CheckpointError: not there, or not a JSON mapping.
    """
    path = Path(folder) / name
    if not path.is_file():
        what = "is not a diffusers pipeline's folder" if name == "model_index.json" else "is no complete pipeline's folder"
        raise CheckpointError(f"{folder} {what}: it has no {name}")
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a mapping")
    return data


def read_recipe(folder: str | Path) -> AttentionRecipe | None:
    """The recipe that the folder's weights were trained for, from its videoqat.json; None where there is no such file.

    Raises:
        CheckpointError: the file is there but holds no legal recipe.
    """
    path = Path(folder) / "videoqat.json"
    if not path.is_file():
        return None
    fields = read_model_json(folder, "videoqat.json").get("recipe")
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds no recipe")
    try:
        return recipe_from_dict(fields, str(path))
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
