"""Wan 2.1 and 2.2 (arXiv 2503.20314) as diffusers has them: `WanPipeline` and `WanImageToVideoPipeline`, `WanTransformer3DModel`, `AutoencoderKLWan`.

attn1 is self-attention over video tokens and is what recipes quantise; attn2 is cross-attention to the text. A Wan 2.2 A14B folder holds two
transformers: `transformer` serves flow times t >= boundary_ratio (high noise), `transformer_2` the rest.

A first frame is given in one of two ways:

* Image-to-video transformers (2.1 and A14B) see 16 + 4 + 16 channels: the noisy latents; a mask that is 1 on the first latent frame, once for each
  of its 4 frames; and the latents of a video that has the image first and grey (0) behind it. In 2.1 attn2 attends to an embedding of the image, too.
* TI2V-5B (`expand_timesteps`) does with or without. Without, WanPipeline gives every token the same time, which is the same function as one time for
  each sample. With an image, its latents stand in the place of the first latent frame, whose tokens have time 0.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.family import BaseFamily, flow_matching, pictures
from videoqat.models.schedules import FlowMatching
from videoqat.models.spec import AttentionLayer, Condition, Geometry, read_model_json
from videoqat.models.wan_processor import IMAGE_MODEL_TEXT_TOKENS, WanProcessor
from videoqat.parallel.sharding import compute_dtype
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import AttentionRecipe

TIME_SCALE = 1000  # the transformer's timestep at flow time 1
TEXT_TOKENS = 512  # zeros behind a prompt included: cross-attention has no mask, so their number is part of the model's input
TIMED_PATCH = (1, 2, 2)  # latents of a token, where diffusers' pipelines give tokens times of their own
PIXEL_MULTIPLE = 16  # WanPipeline refuses other heights and widths, whatever the VAE


class WanFamily(BaseFamily):
    """`videoqat.models.spec.ModelFamily` for Wan; the methods are documented there."""

    name = "wan"
    pipeline_classes = ("WanPipeline", "WanImageToVideoPipeline")
    transformer_classes = ("WanTransformer3DModel",)
    image_pipeline_class = "WanImageToVideoPipeline"

    def components(self, folder: str | Path) -> tuple[str, ...]:
        """("transformer",), or ("transformer", "transformer_2") where a boundary_ratio splits the times between them."""
        index = read_model_json(folder, "model_index.json")
        present = tuple(name for name in ("transformer", "transformer_2") if (index.get(name) or [None])[0] is not None)
        if "transformer" not in present:
            raise CheckpointError(f"{folder}: model_index.json names no transformer")
        if (len(present) == 2) != (index.get("boundary_ratio") is not None):
            raise CheckpointError(f"{folder}: boundary_ratio={index.get('boundary_ratio')} doesn't go with the transformers {', '.join(present)}")
        return present

    def geometry(self, folder: str | Path, component: str = "transformer") -> Geometry:
        """Sizes from transformer and VAE configuration."""
        self._require_component(folder, component)
        transformer, vae = read_model_json(folder, f"{component}/config.json"), read_model_json(folder, "vae/config.json")
        try:
            geometry = Geometry(
                in_channels=int(vae["z_dim"]),
                # Configurations from before Wan 2.2 don't say; these are AutoencoderKLWan's defaults.
                vae_spatial=int(vae.get("scale_factor_spatial", 8)),
                vae_temporal=int(vae.get("scale_factor_temporal", 4)),
                patch=tuple(int(p) for p in transformer["patch_size"]),  # type: ignore[arg-type]
                num_heads=int(transformer["num_attention_heads"]),
                head_dim=int(transformer["attention_head_dim"]),
                num_layers=int(transformer["num_layers"]),
                text_dim=int(transformer["text_dim"]),
                pixel_multiple=PIXEL_MULTIPLE,
            )
            in_channels = int(transformer["in_channels"])
            channels = (in_channels, int(transformer["out_channels"] or in_channels), geometry.in_channels)
        except KeyError as error:
            raise CheckpointError(f"{folder}: the configuration of {component} or vae lacks {error.args[0]!r}") from error
        takes_image = self.takes_image(folder)
        image_channels = geometry.vae_temporal + geometry.in_channels if takes_image == "required" else 0
        if channels != (geometry.in_channels + image_channels, geometry.in_channels, geometry.in_channels):
            numbers = "in_channels={}, out_channels={}, the VAE's z_dim={}".format(*channels)
            kind, rule = ("image", f"the first must be {image_channels} more than the others") if image_channels else ("text", "must be equal")
            raise CheckpointError(f"{folder}: {component} is no {kind}-to-video transformer for this VAE: {numbers} {rule}")
        self._check_image_parts(folder, component, transformer)
        if takes_image == "optional" and geometry.patch != TIMED_PATCH:
            raise CheckpointError(f"{folder}: expand_timesteps goes with patch_size {TIMED_PATCH} alone, and {component} has {geometry.patch}")
        return geometry

    def _check_image_parts(self, folder: str | Path, component: str, transformer: dict[str, Any]) -> None:
        """Requires that an embedding of the image is made where, and as, the transformer takes one."""
        if transformer.get("pos_embed_seq_len") is not None:
            raise CheckpointError(f"{folder}: {component} wants a first and a last frame; supported: transformers that want a first frame alone")
        width = transformer.get("image_dim")
        if width is None:
            return
        if self.takes_image(folder) != "required" or not (read_model_json(folder, "model_index.json").get("image_encoder") or [None])[0]:
            raise CheckpointError(
                f"{folder}: {component} takes an embedding of an image (image_dim={width}), and the folder has no image_encoder for it"
            )
        made = read_model_json(folder, "image_encoder/config.json").get("hidden_size")
        if made != width:
            raise CheckpointError(f"{folder}: {component} takes an embedding of an image of width {width}, and its image_encoder makes one of {made}")

    def _pipeline(self, folder: str | Path, device: str | torch.device, dtype: torch.dtype, **parts: nn.Module | None) -> Any:
        from diffusers import WanImageToVideoPipeline, WanPipeline

        # The VAE stays in float32: its causal convolutions lose visible quality in 16 bits, and it is a small part of the time.
        # So does the small image encoder, as in the examples of diffusers' own documentation.
        dtypes = {"vae": torch.float32, "image_encoder": torch.float32, "default": dtype}
        pipeline_class = WanImageToVideoPipeline if self.takes_image(folder) == "required" else WanPipeline
        if pipeline_class is WanImageToVideoPipeline and read_model_json(folder, "transformer/config.json").get("image_dim") is None:
            parts |= {"image_encoder": None, "image_processor": None}  # nobody would ask it
        pipeline = pipeline_class.from_pretrained(folder, dtype=dtypes, local_files_only=True, **parts)
        return pipeline.to(device)

    @torch.no_grad()
    def encode_prompts(self, encoders: Any, prompts: list[str], max_tokens: int) -> list[Condition]:
        """Last hidden states (L_i, D) of the UMT5 encoder, each cut to its prompt's tokens, the end mark included."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        padded_BLD, _ = encoders.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=max_tokens)
        tokens = encoders.tokenizer([prompt_clean(prompt) for prompt in prompts], max_length=max_tokens, truncation=True)
        return [{"text": text_LD[: len(ids)].clone()} for text_LD, ids in zip(padded_BLD, tokens.input_ids, strict=True)]

    def count_tokens(self, encoders: Any, prompts: list[str]) -> list[int]:
        """As the tokenizer counts what the pipeline's cleaning leaves, the end mark included."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return [len(ids) for ids in encoders.tokenizer([prompt_clean(prompt) for prompt in prompts]).input_ids]

    def text_tokens(self, folder: str | Path, wanted: int = 0, key: str = "max_text_tokens") -> int:
        """512 by default, as WanPipeline; any other number is as good, as long as training and generation have the same.

        Where the transformer also takes an embedding of an image, it must be 512: its cross-attention counts the text's tokens from the end.
        """
        if wanted not in (0, IMAGE_MODEL_TEXT_TOKENS) and read_model_json(folder, "transformer/config.json").get("image_dim") is not None:
            raise ConfigError(
                f"{key}={wanted} is not legal for {folder}, whose transformer takes its context's last {IMAGE_MODEL_TEXT_TOKENS} tokens for text and "
                f"others for an image; legal: {IMAGE_MODEL_TEXT_TOKENS}, or 0 for that"
            )
        return wanted or TEXT_TOKENS

    def takes_image(self, folder: str | Path) -> str:
        """`optional` for expand_timesteps; else `required` where the folder's pipeline is the one for images."""
        return "optional" if read_model_json(folder, "model_index.json").get("expand_timesteps") else super().takes_image(folder)

    @torch.no_grad()
    def encode_image(self, encoders: Any, image_BCHW: Tensor, num_frames: int) -> list[Condition]:
        """`image_frame` (C, 1, H, W) for TI2V; else `image_latents` (C, F, H, W) and, where the transformer takes it, `image_embedding` (L, D)."""
        video_BCFHW = image_BCHW.unsqueeze(2)
        if encoders.config.expand_timesteps:
            return [{"image_frame": latents_CFHW} for latents_CFHW in self.encode_video(encoders, video_BCFHW)]
        grey_BCFHW = video_BCFHW.new_zeros(()).expand(*video_BCFHW.shape[:2], num_frames - 1, *video_BCFHW.shape[3:])
        conditions = [{"image_latents": latents} for latents in self.encode_video(encoders, torch.cat([video_BCFHW, grey_BCFHW], dim=2))]
        if encoders.image_encoder is not None:
            embedding_BLD = encoders.encode_image(pictures(image_BCHW))
            for condition, embedding_LD in zip(conditions, embedding_BLD, strict=True):
                condition["image_embedding"] = embedding_LD
        return conditions

    def image_pipeline(self, pipeline: Any) -> Any:
        """For TI2V, whose `pipeline` is a WanPipeline: a `WanImageToVideoPipeline` of the same modules."""
        from diffusers import WanImageToVideoPipeline

        if isinstance(pipeline, WanImageToVideoPipeline):
            return pipeline
        return WanImageToVideoPipeline(**pipeline.components, boundary_ratio=pipeline.config.boundary_ratio, expand_timesteps=True)

    def condition_shapes(
        self, folder: str | Path, size: tuple[int, int, int], text_tokens: int, *, image: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Text, and what `encode_image` makes of a first frame."""
        geometry, takes_image = self.geometry(folder), self.takes_image(folder)
        shapes: dict[str, tuple[int, ...]] = {"text": (text_tokens, geometry.text_dim)}
        channels, _, *spatial = shape = geometry.latent_shape(*size)
        if takes_image == "required":
            shapes["image_latents"] = shape
        elif takes_image == "optional" and image:
            shapes["image_frame"] = (channels, 1, *spatial)
        if read_model_json(folder, "transformer/config.json").get("image_dim") is not None:
            encoder = read_model_json(folder, "image_encoder/config.json")
            shapes["image_embedding"] = (1 + (encoder["image_size"] // encoder["patch_size"]) ** 2, encoder["hidden_size"])
        return shapes

    def given_frames(self, condition: Condition) -> int:
        """1 where TI2V has an image, whose latents are the first frame's."""
        return 1 if "image_frame" in condition else 0

    @torch.no_grad()
    def encode_video(self, encoders: Any, video_BCFHW: Tensor) -> Tensor:
        """(mode - latents_mean) / latents_std, which the pipeline undoes before it decodes."""
        vae = encoders.vae
        latents_BCFHW = vae.encode(video_BCFHW.to(vae.device, vae.dtype)).latent_dist.mode().float()
        mean, std = (torch.tensor(values, device=vae.device).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
        return (latents_BCFHW - mean) / std

    def noise_schedule(self, folder: str | Path) -> FlowMatching:
        """With the flow shift of the folder's scheduler; 1 (none) where that has none."""
        scheduler = read_model_json(folder, "scheduler/scheduler_config.json")
        return flow_matching(folder, scheduler.get("flow_shift", scheduler.get("shift", 1.0)))

    def forward(self, transformer: nn.Module, x_BCFHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        """The velocity noise - data, in the dtype of the transformer's arithmetic."""
        dtype = compute_dtype(transformer)
        times = t_B.float() * TIME_SCALE
        if "image_latents" in condition:
            x_BCFHW = _with_image(x_BCFHW, condition["image_latents"], transformer.config.in_channels)  # type: ignore[union-attr, arg-type]
        elif "image_frame" in condition:
            x_BCFHW = torch.cat([condition["image_frame"], x_BCFHW[:, :, 1:]], dim=2)
            times = _times_of_tokens(times, x_BCFHW.shape[2:])
        embedding_BLD = condition.get("image_embedding")
        image = None if embedding_BLD is None else embedding_BLD.to(dtype)
        return transformer(x_BCFHW.to(dtype), times, condition["text"].to(dtype), image, return_dict=False)[0]

    def flow_time_range(self, folder: str | Path, component: str) -> tuple[float, float]:
        """(0, 1), or the part that boundary_ratio gives to this transformer."""
        self._require_component(folder, component)
        steps = read_model_json(folder, "scheduler/scheduler_config.json").get("num_train_timesteps", TIME_SCALE)
        if steps != TIME_SCALE:
            raise CheckpointError(f"{folder}: the scheduler's num_train_timesteps={steps}, but Wan transformers count time to {TIME_SCALE}")
        boundary = read_model_json(folder, "model_index.json").get("boundary_ratio")
        if boundary is None:
            return (0.0, 1.0)
        return (float(boundary), 1.0) if component == "transformer" else (0.0, float(boundary))

    def attention_layers(self, transformer: nn.Module) -> list[AttentionLayer]:
        """attn1 and attn2 of every block."""
        return [
            AttentionLayer.of(f"blocks.{index}.{part}", index, kind, getattr(block, part))
            for index, block in enumerate(transformer.blocks)  # type: ignore[arg-type]
            for part, kind in (("attn1", "self"), ("attn2", "cross"))
        ]

    def make_processor(self, layer: AttentionLayer, recipe: AttentionRecipe, kernel: str) -> WanProcessor:
        """A `WanProcessor`."""
        return WanProcessor(layer, recipe, kernel)

    def blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """The transformer blocks, in order of execution."""
        return list(transformer.blocks)  # type: ignore[arg-type]

    def shard_sequence(self, transformer: nn.Module, ulysses: Ulysses) -> list[RemovableHandle]:
        """Tokens are divided as soon as they exist, after patch_embedding, and gathered after proj_out; diffusers folds them back into a video.

        Rotary tables, which come first and tell how many tokens there will be, and times that differ from token to token (TI2V), before they
        are embedded, are divided in the same way.
        """

        def rotary_tables(module: nn.Module, args: tuple[Any, ...], tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            ulysses.num_tokens = tables[0].shape[1]
            return tuple(ulysses.shard(table_1N1D, 1) for table_1N1D in tables)

        def tokens(module: nn.Module, args: tuple[Any, ...], patches_BCFHW: Tensor) -> Tensor:
            return ulysses.shard(patches_BCFHW.flatten(2), 2)[..., None, None]  # what diffusers does next is flatten(2)

        def times(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            num_tokens = kwargs["timestep_seq_len"]
            if num_tokens is None:
                return None
            times_Bn = ulysses.shard(args[0].unflatten(0, (-1, num_tokens)), 1)
            return (times_Bn.flatten(), *args[1:]), kwargs | {"timestep_seq_len": times_Bn.shape[1]}

        def gather(module: nn.Module, args: tuple[Any, ...], out_BnC: Tensor) -> Tensor:
            return ulysses.gather(out_BnC, 1)

        model: Any = transformer
        return [
            model.rope.register_forward_hook(rotary_tables),
            model.patch_embedding.register_forward_hook(tokens),
            model.condition_embedder.register_forward_pre_hook(times, with_kwargs=True),
            model.proj_out.register_forward_hook(gather),
        ]


def _with_image(x_BCFHW: Tensor, image_BCFHW: Tensor, num_channels: int) -> Tensor:
    """Noisy latents, mask (1 on the first frame) and the latents of an image, channels behind each other: `num_channels` in all."""
    mask_BCFHW = torch.zeros_like(x_BCFHW[:, :1]).repeat(1, num_channels - x_BCFHW.shape[1] - image_BCFHW.shape[1], 1, 1, 1)
    mask_BCFHW[:, :, 0] = 1
    return torch.cat([x_BCFHW, mask_BCFHW, image_BCFHW], dim=1)


def _times_of_tokens(times_B: Tensor, latent_size: torch.Size) -> Tensor:
    """The time of each token (B, N) of a video of `latent_size` (F, H, W) whose first frame is given: 0 for the tokens of that one."""
    frames, height, width = (size // part for size, part in zip(latent_size, TIMED_PATCH, strict=True))
    times_BFn = times_B.view(-1, 1, 1).repeat(1, frames, height * width)
    times_BFn[:, 0] = 0
    return times_BFn.flatten(1)


FAMILY = WanFamily()
