"""HunyuanVideo (arXiv 2412.03603), text to video, as diffusers has it: `HunyuanVideoPipeline` with `HunyuanVideoTransformer3DModel`.

Attention is joint: video tokens first, then text, in one sequence. Dual blocks project the two by weights of their own, single blocks by the same;
video tokens' queries and keys are rotated. Text is padded to a common length behind it, and the padding is masked: that comes to a number of keys
for each sample, and to no mask over pairs of tokens. So padding tokens are queries whose results nobody reads, and never keys: whatever stands in
them, the video is the same. Before the blocks a refiner has the text attend to itself; its attention is of the
kind `refiner`, which no recipe quantises unless asked to.

Two encoders read a prompt: Llama inside a template that asks for a description (its first 95 tokens are cropped away), and CLIP, of which one
pooled vector is used. Guidance is distilled into the model, which is told its scale (`guidance_scale`); guidance by a negative prompt comes on
top where `true_cfg_scale` is more than 1.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.family import BaseFamily, flow_matching
from videoqat.models.hunyuan_processor import HunyuanProcessor, RefinerProcessor, attention_layers, divide_video
from videoqat.models.schedules import FlowMatching
from videoqat.models.spec import AttentionLayer, Condition, Geometry, read_model_json
from videoqat.parallel.sharding import compute_dtype
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import AttentionRecipe

TIME_SCALE = 1000  # the transformer's timestep at flow time 1, and the number it is told for guidance 1
TEXT_TOKENS = 256
PIXEL_MULTIPLE = 16  # the pipeline refuses other heights and widths, whatever the VAE
# The guidance that a transformer is told in training. It was distilled to give, for a scale of 1 to 8, what guidance of that scale made of two
# predictions; noise - data is what it should predict unguided, at 1. Told 6 while it learns that, it would unlearn to guide.
TRAINING_GUIDANCE = 1.0


class HunyuanFamily(BaseFamily):
    """`videoqat.models.spec.ModelFamily` for HunyuanVideo; the methods are documented there."""

    name = "hunyuanvideo"
    pipeline_classes = ("HunyuanVideoPipeline",)
    transformer_classes = ("HunyuanVideoTransformer3DModel",)
    has_true_cfg = True
    text_encoders = ("text_encoder", "text_encoder_2")

    def geometry(self, folder: str | Path, component: str = "transformer") -> Geometry:
        """Sizes from transformer and VAE configuration; dual and single blocks are counted together. Image-to-video transformers are refused."""
        self._require_component(folder, component)
        transformer, vae = read_model_json(folder, f"{component}/config.json"), read_model_json(folder, "vae/config.json")
        if transformer.get("image_condition_type") is not None:
            why = f"image_condition_type={transformer['image_condition_type']}"
            raise CheckpointError(f"{folder}: {component} is an image-to-video transformer ({why}); only text-to-video is supported for HunyuanVideo")
        try:
            patch = int(transformer["patch_size"])
            geometry = Geometry(
                in_channels=int(transformer["in_channels"]),
                # Older configurations don't say; these are AutoencoderKLHunyuanVideo's defaults.
                vae_spatial=int(vae.get("spatial_compression_ratio", 8)),
                vae_temporal=int(vae.get("temporal_compression_ratio", 4)),
                patch=(int(transformer["patch_size_t"]), patch, patch),
                num_heads=int(transformer["num_attention_heads"]),
                head_dim=int(transformer["attention_head_dim"]),
                num_layers=int(transformer["num_layers"]) + int(transformer["num_single_layers"]),
                text_dim=int(transformer["text_embed_dim"]),
                pixel_multiple=PIXEL_MULTIPLE,
            )
            channels = (geometry.in_channels, int(transformer["out_channels"] or geometry.in_channels), int(vae["latent_channels"]))
        except KeyError as error:
            raise CheckpointError(f"{folder}: the configuration of {component} or vae lacks {error.args[0]!r}") from error
        if len(set(channels)) != 1:
            numbers = "in_channels={}, out_channels={}, the VAE's latent_channels={}".format(*channels)
            raise CheckpointError(f"{folder}: {component} is no text-to-video transformer for this VAE: {numbers} must be equal")
        return geometry

    def _pipeline(self, folder: str | Path, device: str | torch.device, dtype: torch.dtype, **parts: nn.Module | None) -> Any:
        from diffusers import HunyuanVideoPipeline
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizer", local_files_only=True)
        if tokenizer.padding_side != "right":
            raise CheckpointError(f"{folder}: the tokenizer's padding_side is {tokenizer.padding_side}; legal for HunyuanVideo: right")
        dtypes = {"vae": torch.float32, "default": dtype}
        pipeline = HunyuanVideoPipeline.from_pretrained(folder, dtype=dtypes, local_files_only=True, tokenizer=tokenizer, **parts)
        return pipeline.to(device)

    @torch.no_grad()
    def encode_prompts(self, encoders: Any, prompts: list[str], max_tokens: int) -> list[Condition]:
        """`text`, of Llama's third hidden states from the end what stands behind the template's beginning, without padding; `pooled` (P,) of CLIP."""
        padded_BLD, pooled_BP, mask_BL = encoders.encode_prompt(prompts, max_sequence_length=max_tokens)
        lengths = mask_BL.sum(dim=1).tolist()
        return [
            {"text": text_LD[:length].clone(), "pooled": pooled_P.clone()}
            for text_LD, pooled_P, length in zip(padded_BLD, pooled_BP, lengths, strict=True)
        ]

    def count_tokens(self, encoders: Any, prompts: list[str]) -> list[int]:
        """As Llama's tokenizer counts, the mark at the template's end included and its beginning not. (CLIP sees the first 77 of its own.)"""
        template = _template()
        filled = [template["template"].format(prompt) for prompt in prompts]
        return [len(ids) - template["crop_start"] for ids in encoders.tokenizer(filled).input_ids]

    def text_tokens(self, folder: str | Path, wanted: int = 0, key: str = "max_text_tokens") -> int:
        """256 by default, as HunyuanVideoPipeline; any other number that Llama has positions for is as good, since padding is masked."""
        if wanted and (Path(folder) / "text_encoder/config.json").is_file():  # a folder made for its sizes has none
            positions = int(read_model_json(folder, "text_encoder/config.json").get("max_position_embeddings", wanted))
            most = positions - int(_template()["crop_start"])
            if wanted > most:
                raise ConfigError(
                    f"{key}={wanted} is more than the text encoder of {folder} takes behind its template; legal: up to {most}, or 0 for 256"
                )
        return wanted or TEXT_TOKENS

    def encode_image(self, encoders: Any, image_BCHW: Tensor, num_frames: int) -> list[Condition]:
        """Nothing."""
        return [{} for _ in image_BCHW]

    def condition_shapes(
        self, folder: str | Path, size: tuple[int, int, int], text_tokens: int, *, image: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """`text`, and `pooled` of CLIP."""
        transformer = read_model_json(folder, "transformer/config.json")
        return {"text": (text_tokens, int(transformer["text_embed_dim"])), "pooled": (int(transformer["pooled_projection_dim"]),)}

    def batch_conditions(self, conditions: list[Condition], max_tokens: int) -> Condition:
        """`text` with zeros behind it, `text_len` (B,) int64, and `pooled` (B, P)."""
        batch = super().batch_conditions(conditions, max_tokens)
        return batch | {"text_len": torch.tensor([len(condition["text"]) for condition in conditions], device=batch["text"].device)}

    def prompt_arguments(self, condition: Condition, negative: Condition | None) -> dict[str, Any]:
        """Embeddings, pooled ones, and masks."""
        arguments: dict[str, Any] = {}
        for prefix, given in (("", condition), ("negative_", negative)):
            if given is not None:
                arguments |= {f"{prefix}prompt_embeds": given["text"], f"{prefix}prompt_attention_mask": _mask(given)}
                arguments[f"{prefix}pooled_prompt_embeds"] = given["pooled"]
        return arguments

    def noise_schedule(self, folder: str | Path) -> FlowMatching:
        """With the flow shift of the folder's scheduler."""
        scheduler = read_model_json(folder, "scheduler/scheduler_config.json")
        is_euler = scheduler.get("_class_name") == "FlowMatchEulerDiscreteScheduler"
        if not is_euler and not scheduler.get("use_flow_sigmas"):
            what = f"the scheduler is a {scheduler.get('_class_name')}"
            raise CheckpointError(f"{folder}: {what}; legal for HunyuanVideo: FlowMatchEulerDiscreteScheduler, or one with use_flow_sigmas")
        for key, value in (("num_train_timesteps", TIME_SCALE), ("use_dynamic_shifting", False)):
            if scheduler.get(key, value) != value:
                raise CheckpointError(f"{folder}: the scheduler's {key}={scheduler[key]!r}; legal for HunyuanVideo: {value!r}")
        return flow_matching(folder, scheduler.get("shift" if is_euler else "flow_shift", 1.0))

    def forward(self, transformer: nn.Module, x_BCFHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        """The velocity noise - data, unguided (`TRAINING_GUIDANCE`), in the dtype of the transformer's arithmetic."""
        dtype = compute_dtype(transformer)
        guidance_B = torch.full_like(t_B, TRAINING_GUIDANCE, dtype=dtype) * TIME_SCALE
        text, pooled, mask = condition["text"].to(dtype), condition["pooled"].to(dtype), _mask(condition)
        return transformer(x_BCFHW.to(dtype), t_B.float() * TIME_SCALE, text, mask, pooled, guidance_B, return_dict=False)[0]

    def attention_layers(self, transformer: nn.Module) -> list[AttentionLayer]:
        """The refiner's, then those of dual and single blocks. Blocks are numbered through; the refiner, before block 0, has negative numbers."""
        return attention_layers(transformer, "transformer_blocks", "single_transformer_blocks")

    def make_processor(self, layer: AttentionLayer, recipe: AttentionRecipe, kernel: str) -> HunyuanProcessor | RefinerProcessor:
        """A `HunyuanProcessor`, or in the refiner a `RefinerProcessor`."""
        return (RefinerProcessor if layer.kind == "refiner" else HunyuanProcessor)(layer, recipe, kernel)

    def blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """Dual blocks, then single ones."""
        return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]  # type: ignore[misc]

    def shard_sequence(self, transformer: nn.Module, ulysses: Ulysses) -> list[RemovableHandle]:
        """`divide_video`."""
        return divide_video(transformer, ulysses)


def _template() -> dict[str, Any]:
    """In which the pipeline has Llama read a prompt, and how many of its first tokens are cropped."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    return DEFAULT_PROMPT_TEMPLATE


def _mask(condition: Condition) -> Tensor:
    """(B, L), 1 for the text tokens of a batch that are no padding, in the text's dtype: so the pipeline has it."""
    text_BLD = condition["text"]
    return (torch.arange(text_BLD.shape[1], device=text_BLD.device) < condition["text_len"].unsqueeze(1)).to(text_BLD.dtype)


FAMILY = HunyuanFamily()
