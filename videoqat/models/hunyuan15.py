"""HunyuanVideo 1.5 (arXiv 2511.18870), text to video and image to video, as diffusers has it: `HunyuanVideo15Pipeline` and
`HunyuanVideo15ImageToVideoPipeline` with `HunyuanVideo15Transformer3DModel`.

All attention is joint: video tokens, then text. A prompt is told twice: Qwen2.5-VL reads all of it, behind a template of 108 tokens that is cropped
away, and ByT5 reads, letter by letter, what stands in quotation marks, to be drawn as writing (`glyph`; most prompts have none). In image to video
the transformer also gets SigLIP's embedding of the first frame, and that frame's latents beside the noisy ones. All that is padding is masked, so
it has no influence on the video, however long it is (`hunyuan15_transformer`).

diffusers' pipelines hand the transformer its time in the dtype of its weights. In bf16 that is a multiple of 4 from 512 on. Training does the same.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.family import BaseFamily, flow_matching, padded, pictures
from videoqat.models.hunyuan15_transformer import HunyuanVideo15Processor, sort_on_the_device
from videoqat.models.hunyuan_processor import RefinerProcessor, attention_layers, divide_video
from videoqat.models.schedules import FlowMatching
from videoqat.models.spec import AttentionLayer, Condition, Geometry, read_model_json
from videoqat.parallel.sharding import compute_dtype
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import AttentionRecipe

TIME_SCALE = 1000  # the transformer's timestep at flow time 1
TEXT_TOKENS = 1000
GLYPH_TOKENS = 256  # the pipeline cuts quoted text there
TEMPLATE_TOKENS = 108  # that the pipeline crops away, whatever the tokenizer made of its template
IMAGE_PIPELINE = "HunyuanVideo15ImageToVideoPipeline"


class HunyuanVideo15Family(BaseFamily):
    """`videoqat.models.spec.ModelFamily` for HunyuanVideo 1.5; the methods are documented there."""

    name = "hunyuan15"
    pipeline_classes = ("HunyuanVideo15Pipeline", IMAGE_PIPELINE)
    transformer_classes = ("HunyuanVideo15Transformer3DModel",)
    text_encoders = ("text_encoder", "text_encoder_2")
    image_pipeline_class = IMAGE_PIPELINE

    def geometry(self, folder: str | Path, component: str = "transformer") -> Geometry:
        """Sizes from transformer and VAE configuration; MeanFlow models (step-distilled, super-resolution) are refused."""
        self._require_component(folder, component)
        transformer, vae = read_model_json(folder, f"{component}/config.json"), read_model_json(folder, "vae/config.json")
        if transformer.get("use_meanflow"):
            why = "use_meanflow: it is told two times, that of its input and that of its output, and predicts their mean velocity"
            raise CheckpointError(f"{folder}: {component} is a MeanFlow model ({why}); legal for HunyuanVideo 1.5: use_meanflow=false")
        try:
            patch, channels = int(transformer["patch_size"]), int(vae["latent_channels"])
            geometry = Geometry(
                in_channels=channels,
                vae_spatial=int(vae["spatial_compression_ratio"]),
                vae_temporal=int(vae["temporal_compression_ratio"]),
                patch=(int(transformer["patch_size_t"]), patch, patch),
                num_heads=int(transformer["num_attention_heads"]),
                head_dim=int(transformer["attention_head_dim"]),
                num_layers=int(transformer["num_layers"]),
                text_dim=int(transformer["text_embed_dim"]),
            )
            sizes = (int(transformer["in_channels"]), int(transformer["out_channels"] or transformer["in_channels"]))
        except KeyError as error:
            raise CheckpointError(f"{folder}: the configuration of {component} or vae lacks {error.args[0]!r}") from error
        if sizes != (2 * channels + 1, channels):
            numbers = "in_channels={}, out_channels={}".format(*sizes)
            wanted = f"in_channels={2 * channels + 1} (noisy latents, first frame, mask) and out_channels={channels}"
            raise CheckpointError(f"{folder}: {component} is not for this VAE, whose latent_channels={channels}: {numbers}; legal: {wanted}")
        return geometry

    def load_transformer(self, folder: str | Path, component: str, *, dtype: torch.dtype, from_scratch: bool = False, seed: int = 0) -> nn.Module:
        """`HunyuanVideo15Transformer3DModel` on the CPU, with the forward of `hunyuan15_transformer`."""
        return sort_on_the_device(super().load_transformer(folder, component, dtype=dtype, from_scratch=from_scratch, seed=seed))

    def build(self, folder: str | Path, component: str) -> nn.Module:
        """`HunyuanVideo15Transformer3DModel` from its configuration, with the forward of `hunyuan15_transformer`."""
        return sort_on_the_device(super().build(folder, component))

    def _pipeline(self, folder: str | Path, device: str | torch.device, dtype: torch.dtype, **parts: nn.Module | None) -> Any:
        from videoqat.models.hunyuan15_pipeline import ImageToVideo, TextToVideo

        dtypes = {"vae": torch.float32, "default": dtype}
        pipeline_class: Any = ImageToVideo if self.takes_image(folder) == "required" else TextToVideo
        pipeline = pipeline_class.from_pretrained(folder, dtype=dtypes, local_files_only=True, **parts)
        if pipeline.tokenizer.padding_side != "right":  # the template is cropped at the left
            raise CheckpointError(
                f"{folder}: the tokenizer's padding_side is {pipeline.tokenizer.padding_side!r}; legal for HunyuanVideo 1.5: 'right'"
            )
        # The VAE attends by a mask of all its latents by all, 9.7 GB at 121x480x848; in tiles, as in diffusers' examples, of 256x256 pixels at most.
        pipeline.vae.enable_tiling()
        pipeline.vae.enable_slicing()  # one video of a batch at a time: diffusers makes that mask for one
        pipeline.vision_num_semantic_tokens = 0  # without a first frame, instead of 729 tokens of zeros that are masked
        return pipeline.to(device)

    @torch.no_grad()
    def encode_prompts(self, encoders: Any, prompts: list[str], max_tokens: int) -> list[Condition]:
        """`text` (L_i, D): Qwen2.5-VL's third hidden states from the end; `glyph` (G_i, D2): ByT5's last, G_i = 0 where nothing is quoted."""
        encoders.tokenizer_max_length = max_tokens
        text_BLD, real_BL, glyph_BGD, real_BG = encoders.encode_prompt(prompts, batch_size=len(prompts))
        return [
            {"text": text_LD[real_L.bool()], "glyph": glyph_GD[real_G.bool()]}
            for text_LD, real_L, glyph_GD, real_G in zip(text_BLD, real_BL, glyph_BGD, real_BG, strict=True)
        ]

    def count_tokens(self, encoders: Any, prompts: list[str]) -> list[int]:
        """As Qwen's tokenizer counts, the marks behind the prompt included and the template before it not."""
        return encoders.count_tokens(prompts)  # type: ignore[no-any-return]

    def text_tokens(self, folder: str | Path, wanted: int = 0, key: str = "max_text_tokens") -> int:
        """1000 by default, as the pipeline, or as many as the text encoder has positions for; any other number of those is as good, since padding is
        masked."""
        most = None
        if (Path(folder) / "text_encoder/config.json").is_file():  # a folder made for its sizes has none
            positions = read_model_json(folder, "text_encoder/config.json").get("max_position_embeddings")
            most = None if positions is None else int(positions) - TEMPLATE_TOKENS
        own = TEXT_TOKENS if most is None else min(most, TEXT_TOKENS)
        if most is not None and wanted > most:
            what = f"{key}={wanted} is more than the text encoder of {folder} takes behind its template"
            raise ConfigError(f"{what}; legal: up to {most}, or 0 for {own}")
        return wanted or own

    @torch.no_grad()
    def encode_image(self, encoders: Any, image_BCHW: Tensor, num_frames: int) -> list[Condition]:
        """`image_latents` (C, 1, H, W), the posterior's mode, scaled; `image_embedding` (L, D), SigLIP's last hidden states."""
        conditions = [{"image_latents": latents_CFHW} for latents_CFHW in self.encode_video(encoders, image_BCHW.unsqueeze(2))]
        for condition, image in zip(conditions, pictures(image_BCHW), strict=True):
            encoder = encoders.image_encoder
            condition["image_embedding"] = encoders.encode_image(image, batch_size=1, device=encoder.device, dtype=encoder.dtype)[0]
        return conditions

    def condition_shapes(
        self, folder: str | Path, size: tuple[int, int, int], text_tokens: int, *, image: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """`text`, `glyph` at its longest and, for an image-to-video model, `image_latents` and `image_embedding`."""
        transformer, geometry = read_model_json(folder, "transformer/config.json"), self.geometry(folder)
        shapes: dict[str, tuple[int, ...]] = {
            "text": (text_tokens, geometry.text_dim),
            "glyph": (GLYPH_TOKENS, int(transformer["text_embed_2_dim"])),
        }
        if self.takes_image(folder) == "required":
            channels, _, *spatial = geometry.latent_shape(*size)
            encoder = read_model_json(folder, "image_encoder/config.json")
            shapes["image_latents"] = (channels, 1, *spatial)
            shapes["image_embedding"] = ((int(encoder["image_size"]) // int(encoder["patch_size"])) ** 2, int(transformer["image_embed_dim"]))
        return shapes

    def batch_conditions(self, conditions: list[Condition], max_tokens: int) -> Condition:
        """Zeros behind each text and glyph, `text_len` and `glyph_len` (B,) int64; glyphs are padded to the longest, to one token at least."""
        texts, glyphs = ([condition[part] for condition in conditions] for part in ("text", "glyph"))
        batch = super().batch_conditions([{part: condition[part] for part in condition if part != "glyph"} for condition in conditions], max_tokens)
        batch["glyph"] = padded(glyphs, max(1, *(len(glyph_GD) for glyph_GD in glyphs)))
        for part, tensors in (("text", texts), ("glyph", glyphs)):
            batch[f"{part}_len"] = torch.tensor([len(x) for x in tensors], device=tensors[0].device)
        return batch

    def prompt_arguments(self, condition: Condition, negative: Condition | None) -> dict[str, Any]:
        """Embeddings of both encoders, and their masks."""
        arguments = {}
        for prefix, given in (("", condition), ("negative_", negative)):
            for part, suffix in (("text", ""), ("glyph", "_2")):
                if given is not None:
                    arguments[f"{prefix}prompt_embeds{suffix}"] = given[part]
                    arguments[f"{prefix}prompt_embeds_mask{suffix}"] = _mask(given, part)
        return arguments

    def noise_schedule(self, folder: str | Path) -> FlowMatching:
        """With the shift of the folder's scheduler: the pipeline gives it times from 1 to 0, evenly spaced, to be shifted."""
        scheduler = read_model_json(folder, "scheduler/scheduler_config.json")
        wanted = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": TIME_SCALE, "use_dynamic_shifting": False}
        for key, value in wanted.items():
            if scheduler.get(key, value) != value:
                raise CheckpointError(f"{folder}: the scheduler's {key}={scheduler[key]!r}; legal for HunyuanVideo 1.5: {value!r}")
        return flow_matching(folder, scheduler.get("shift", 1.0))

    def forward(self, transformer: nn.Module, x_BCFHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        """The velocity noise - data, in the dtype of the transformer's arithmetic."""
        dtype, given_BCFHW = compute_dtype(transformer), torch.zeros_like(x_BCFHW)
        mask_BCFHW = torch.zeros_like(x_BCFHW[:, :1])
        config: Any = transformer.config
        embedding_BLD = x_BCFHW.new_zeros(len(x_BCFHW), 0, config.image_embed_dim)
        if "image_latents" in condition:
            given_BCFHW[:, :, :1], mask_BCFHW[:, :, 0], embedding_BLD = condition["image_latents"], 1, condition["image_embedding"]
        prediction: Tensor = transformer(
            torch.cat([x_BCFHW, given_BCFHW, mask_BCFHW], dim=1).to(dtype),
            (t_B.float() * TIME_SCALE).to(dtype),
            condition["text"].to(dtype),
            _mask(condition, "text"),
            encoder_hidden_states_2=condition["glyph"].to(dtype),
            encoder_attention_mask_2=_mask(condition, "glyph"),
            image_embeds=embedding_BLD.to(dtype),
            return_dict=False,
        )[0]
        return prediction

    def attention_layers(self, transformer: nn.Module) -> list[AttentionLayer]:
        """The refiner's, in which the prompt attends to itself, then those of the blocks; the refiner, before block 0, has negative numbers."""
        return attention_layers(transformer, "transformer_blocks")

    def make_processor(self, layer: AttentionLayer, recipe: AttentionRecipe, kernel: str) -> HunyuanVideo15Processor | RefinerProcessor:
        """A `HunyuanVideo15Processor`, or in the refiner HunyuanVideo's `RefinerProcessor`."""
        return (RefinerProcessor if layer.kind == "refiner" else HunyuanVideo15Processor)(layer, recipe, kernel)

    def shard_sequence(self, transformer: nn.Module, ulysses: Ulysses) -> list[RemovableHandle]:
        """`divide_video`."""
        return divide_video(transformer, ulysses)


def _mask(condition: Condition, part: str) -> Tensor:
    """(B, L) int64: 1 where a token is real, 0 in the padding."""
    return (torch.arange(condition[part].shape[1], device=condition[part].device) < condition[f"{part}_len"].unsqueeze(1)).long()


FAMILY = HunyuanVideo15Family()
