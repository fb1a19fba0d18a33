"""CogVideoX (arXiv 2408.06072): 2B, 5B and 1.5, text to video and image to video, as diffusers has them: `CogVideoXPipeline` and
`CogVideoXImageToVideoPipeline` with `CogVideoXTransformer3DModel`.

Attention is joint: text tokens first, then video tokens, in one sequence, and nothing is masked. That is why texts are always padded to the
length the model was trained with (226 tokens; 224 in 1.5): the padding is attended to, and the T5 encoder sees it, too. 2B adds absolute
positions to the tokens; 5B and 1.5 rotate the video tokens' queries and keys. Models predict v (`schedules.VPrediction`).

diffusers lays latents out as (B, F, C, H, W); here, as everywhere in videoqat, they are (B, C, F, H, W) until `forward` turns them round.
CogVideoX 1.5 makes a token of two latent frames. An odd number of them is filled up at the front, as its pipeline does, which drops that first
frame after denoising; in training the fill is a copy of the first latent frame, as in CogVideoX's own fine-tuning.

Image-to-video transformers see the noisy latents and, in as many channels more, the latents of an image in the very first frame (that of the fill,
where there is one) and zeros in the others. Those of 5B add learned positions to the tokens, which fit one size of video; those of 1.5 are told a
constant beside the time. In CogVideoX's own fine-tuning the image gets a little noise before it is encoded, and so it does here (`encode_image`).
"""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.errors import AttentionError, CheckpointError, ConfigError
from videoqat.models.family import BaseFamily
from videoqat.models.processor import Processor, in_low_precision
from videoqat.models.schedules import TRAIN_TIMESTEPS, VPrediction, timestep
from videoqat.models.spec import AttentionLayer, Condition, Geometry, read_model_json
from videoqat.parallel.sharding import compute_dtype
from videoqat.parallel.ulysses import Ulysses, attend_joint
from videoqat.recipes import AttentionRecipe

FRAME_MULTIPLE = 8  # the VAE decodes latent frames by pairs; an odd one, the first, alone, to one frame
IMAGE_NOISE = (-3.0, 0.5)  # of the logarithm of the deviation of a training image's noise: mean and deviation
IMAGE_CONSTANT = 2.0  # what 1.5 is told beside the time (`ofs`)
SCHEDULERS = ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler")


class CogVideoXProcessor(Processor):
    """Joint attention of one CogVideoX block by a recipe; with the bf16 recipe bitwise diffusers' `CogVideoXAttnProcessor2_0`.

    The order of operations and every rounding outside attention follow diffusers 0.42: layer norm of each head, then rotary embedding of the
    video tokens in fp32, where the model has one.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video (B, n, dim) and text (B, L, dim), from `hidden_states` and `encoder_hidden_states` of the same shapes.

        n are this rank's video tokens under sequence parallelism, all of them without; the rotary tables, cos and sin (n, head_dim) in float32,
        are of the same tokens. Text is whole on every rank.
        """
        if attention_mask is not None:
            raise AttentionError(f"{self.layer}: CogVideoX's attention takes no mask")
        lengths = (encoder_hidden_states.shape[1], hidden_states.shape[1])
        q_BNHD, k_BNHD, v_BNHD = _project(attn, torch.cat([encoder_hidden_states, hidden_states], dim=1))
        if attn.norm_q is not None:  # head by head: the gradients of its weights are sums over tokens in this order
            q_BNHD = attn.norm_q(q_BNHD.transpose(1, 2)).transpose(1, 2)
            k_BNHD = attn.norm_k(k_BNHD.transpose(1, 2)).transpose(1, 2)
        (q_text, q), (k_text, k), (v_text, v) = (x.split(lengths, dim=1) for x in (q_BNHD, k_BNHD, v_BNHD))
        q, k = (self._rotate(x, image_rotary_emb) for x in (q, k))
        q, k, v, q_text, k_text, v_text = in_low_precision(q, k, v, q_text, k_text, v_text)
        out_BnHD, out_text_BLHD = attend_joint(
            q, k, v, q_text, k_text, v_text, self.recipe, text_first=True, kernel=self.kernel, ulysses=self.ulysses, observer=self._observe()
        )
        out = torch.cat([out_text_BLHD, out_BnHD], dim=1).flatten(2, 3)
        text, video = attn.to_out[1](attn.to_out[0](out)).split(lengths, dim=1)
        return video, text


def _project(attn: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K, V (B, N, H, D), from fused projections where `fuse_qkv_projections()` made them."""
    if attn.fused_projections:
        projected = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        projected = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in projected)
    return q, k, v


class CogVideoXFamily(BaseFamily):
    """`videoqat.models.spec.ModelFamily` for CogVideoX; the methods are documented there."""

    name = "cogvideox"
    pipeline_classes = ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline")
    transformer_classes = ("CogVideoXTransformer3DModel",)
    has_dynamic_guidance = True
    image_pipeline_class = "CogVideoXImageToVideoPipeline"

    def geometry(self, folder: str | Path, component: str = "transformer") -> Geometry:
        """Sizes from transformer and VAE configuration."""
        self._require_component(folder, component)
        transformer, vae = read_model_json(folder, f"{component}/config.json"), read_model_json(folder, "vae/config.json")
        try:
            patch, patch_frames = int(transformer["patch_size"]), transformer.get("patch_size_t")
            channels = (int(transformer["in_channels"]), int(transformer["out_channels"]), int(vae["latent_channels"]))
            vae_spatial = 2 ** (len(vae["block_out_channels"]) - 1)
            sample_size = (int(transformer["sample_height"]) * vae_spatial, int(transformer["sample_width"]) * vae_spatial)
            learned = bool(transformer.get("use_learned_positional_embeddings"))
            geometry = Geometry(
                in_channels=channels[2],
                vae_spatial=vae_spatial,
                vae_temporal=int(vae["temporal_compression_ratio"]),
                patch=(int(patch_frames or 1), patch, patch),
                num_heads=int(transformer["num_attention_heads"]),
                head_dim=int(transformer["attention_head_dim"]),
                num_layers=int(transformer["num_layers"]),
                text_dim=int(transformer["text_embed_dim"]),
                frame_multiple=FRAME_MULTIPLE,
                # Rotary tables of 1.5 are cut from one of the size it was trained at; those of 5B are stretched, and 2B's positions, too.
                max_size=sample_size if patch_frames or learned else None,
                only_size=learned,
            )
        except KeyError as error:
            raise CheckpointError(f"{folder}: the configuration of {component} or vae lacks {error.args[0]!r}") from error
        numbers = "in_channels={}, out_channels={}, the VAE's latent_channels={}".format(*channels)
        if self.takes_image(folder) == "required":
            if channels != (2 * channels[2], channels[2], channels[2]):
                rule = "the first must be twice the others"
                raise CheckpointError(f"{folder}: {component} is no image-to-video transformer for this VAE: {numbers}; {rule}")
            return geometry
        for_images = [key for key in ("ofs_embed_dim", "use_learned_positional_embeddings") if transformer.get(key)]
        if channels[0] == 2 * channels[2] or for_images:
            why = for_images[0] if for_images else f"in_channels={channels[0]}, twice the VAE's latent_channels"
            raise CheckpointError(f"{folder}: {component} is an image-to-video transformer ({why}), and the folder holds a text-to-video pipeline")
        if len(set(channels)) != 1:
            raise CheckpointError(f"{folder}: {component} is no text-to-video transformer for this VAE: {numbers} must be equal")
        return geometry

    def _pipeline(self, folder: str | Path, device: str | torch.device, dtype: torch.dtype, **parts: nn.Module | None) -> Any:
        from diffusers import CogVideoXImageToVideoPipeline, CogVideoXPipeline

        pipeline_class = CogVideoXImageToVideoPipeline if self.takes_image(folder) == "required" else CogVideoXPipeline
        dtypes = {"vae": torch.float32, "default": dtype}
        pipeline = pipeline_class.from_pretrained(folder, dtype=dtypes, local_files_only=True, **parts)
        # These pipelines hand their VAE latents and images in the transformer's dtype, whatever the VAE's own.
        for half in (pipeline.vae.encoder, pipeline.vae.decoder):
            half.register_forward_pre_hook(lambda module, args: (args[0].float(), *args[1:]))
        pipeline.frames_per_token = self.geometry(folder).patch[0]  # for `encode_video`
        return pipeline.to(device)

    @torch.no_grad()
    def encode_prompts(self, encoders: Any, prompts: list[str], max_tokens: int) -> list[Condition]:
        """Last hidden states (max_tokens, D) of the T5 encoder. The padding stays: the encoder saw it, and the transformer was trained on it."""
        padded_BLD, _ = encoders.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=max_tokens)
        return [{"text": text_LD.clone()} for text_LD in padded_BLD]

    def count_tokens(self, encoders: Any, prompts: list[str]) -> list[int]:
        """As the tokenizer counts, the end mark included."""
        return [len(ids) for ids in encoders.tokenizer(prompts).input_ids]

    def text_tokens(self, folder: str | Path, wanted: int = 0, key: str = "max_text_tokens") -> int:
        """The transformer's max_text_seq_length by default; with absolute or learned positions no other, since they begin behind that many."""
        config = read_model_json(folder, "transformer/config.json")
        own = int(config.get("max_text_seq_length", 226))
        added = config.get("use_learned_positional_embeddings") or not config.get("use_rotary_positional_embeddings", False)
        if wanted not in (0, own) and added:
            raise ConfigError(
                f"{key}={wanted} is not legal for {folder}, whose positions are made for {own} text tokens; legal: {own}, or 0 for that"
            )
        return wanted or own

    @torch.no_grad()
    def encode_image(self, encoders: Any, image_BCHW: Tensor, num_frames: int) -> list[Condition]:
        """`image_latents` (C, 1, H, W): the posterior's mode, scaled as the pipeline scales it, of the image with a training's noise.

        Clips' frames differ from the images that people bring; the noise is to bridge that. It is a function of the image.
        """
        vae = encoders.vae
        scale = 1 / vae.config.scaling_factor if vae.config.invert_scale_latents else vae.config.scaling_factor
        noisy_BCFHW = torch.stack([_with_noise(image_CHW) for image_CHW in image_BCHW]).unsqueeze(2)
        latents_BCFHW: Tensor = vae.encode(noisy_BCFHW.to(vae.device, vae.dtype)).latent_dist.mode().float() * scale
        return [{"image_latents": latents_CFHW} for latents_CFHW in latents_BCFHW]

    def condition_shapes(
        self, folder: str | Path, size: tuple[int, int, int], text_tokens: int, *, image: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """Text and, for an image-to-video model, the image's latents."""
        geometry = self.geometry(folder)
        shapes: dict[str, tuple[int, ...]] = {"text": (text_tokens, geometry.text_dim)}
        if self.takes_image(folder) == "required":
            channels, _, *spatial = geometry.latent_shape(*size)
            shapes["image_latents"] = (channels, 1, *spatial)
        return shapes

    def batch_conditions(self, conditions: list[Condition], max_tokens: int) -> Condition:
        """Nothing to add: texts come padded, and zeros would be something else than an encoded padding token."""
        texts = [condition["text"] for condition in conditions]
        other = [text.shape[0] for text in texts if text.shape[0] != max_tokens]
        if other:
            raise ConfigError(f"a text embedding of {other[0]} tokens is not the max_text_tokens={max_tokens} that CogVideoX texts are encoded to")
        return {part: torch.stack([condition[part] for condition in conditions]) for part in conditions[0]}

    @torch.no_grad()
    def encode_video(self, encoders: Any, video_BCFHW: Tensor) -> Tensor:
        """mode * scaling_factor, which the pipeline undoes before it decodes; for 1.5 filled up to whole tokens with the first frame."""
        latents_BCFHW = super().encode_video(encoders, video_BCFHW)
        missing = -latents_BCFHW.shape[2] % encoders.frames_per_token
        return torch.cat([latents_BCFHW[:, :, :1]] * missing + [latents_BCFHW], dim=2)

    def noise_schedule(self, folder: str | Path) -> VPrediction:
        """Of the folder's scheduler, which differs between models: 2B shifts its signal-to-noise ratio, 5B and 1.5 don't."""
        import diffusers

        config = read_model_json(folder, "scheduler/scheduler_config.json")
        wanted = {"prediction_type": "v_prediction", "num_train_timesteps": TRAIN_TIMESTEPS}
        for key, value in wanted.items():
            if config.get(key) != value:
                raise CheckpointError(f"{folder}: the scheduler's {key}={config.get(key)!r}, but CogVideoX is trained with {value!r}")
        if config.get("_class_name") not in SCHEDULERS:
            raise CheckpointError(f"{folder}: the scheduler is a {config.get('_class_name')}; legal for CogVideoX: {', '.join(SCHEDULERS)}")
        return VPrediction(getattr(diffusers, config["_class_name"]).from_config(config).alphas_cumprod)

    def forward(self, transformer: nn.Module, x_BCFHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        """v, in the dtype of the transformer's arithmetic, at the discrete time of t (`schedules.timestep`)."""
        from diffusers import CogVideoXPipeline

        config, dtype = transformer.config, compute_dtype(transformer)
        rotary = None
        if config.use_rotary_positional_embeddings:  # type: ignore[union-attr]
            # The pipeline's own method, so that training sees the tables that generation will. Height and width are those of latents already.
            stand_in: Any = SimpleNamespace(transformer=transformer, vae_scale_factor_spatial=1)
            frames, height, width = x_BCFHW.shape[2:]
            rotary = CogVideoXPipeline._prepare_rotary_positional_embeddings(stand_in, height, width, frames, x_BCFHW.device)
        if "image_latents" in condition:
            padding = (0, 0, 0, 0, 0, x_BCFHW.shape[2] - condition["image_latents"].shape[2])
            x_BCFHW = torch.cat([x_BCFHW, nn.functional.pad(condition["image_latents"], padding)], dim=1)
        x_BFCHW = x_BCFHW.transpose(1, 2).to(dtype)
        ofs = None if config.ofs_embed_dim is None else x_BFCHW.new_full((1,), IMAGE_CONSTANT)  # type: ignore[union-attr]
        text_BLD = condition["text"].to(dtype)
        prediction_BFCHW = transformer(x_BFCHW, text_BLD, timestep(t_B), ofs=ofs, image_rotary_emb=rotary, return_dict=False)[0]
        return prediction_BFCHW.transpose(1, 2)  # type: ignore[no-any-return]

    def attention_layers(self, transformer: nn.Module) -> list[AttentionLayer]:
        """attn1 of every block."""
        blocks: Any = transformer.transformer_blocks
        return [AttentionLayer.of(f"transformer_blocks.{index}.attn1", index, "joint", block.attn1) for index, block in enumerate(blocks)]

    def make_processor(self, layer: AttentionLayer, recipe: AttentionRecipe, kernel: str) -> CogVideoXProcessor:
        """A `CogVideoXProcessor`."""
        return CogVideoXProcessor(layer, recipe, kernel)

    def shard_sequence(self, transformer: nn.Module, ulysses: Ulysses) -> list[RemovableHandle]:
        """Video tokens are divided as soon as they exist, behind the text in patch_embed's output, and gathered after proj_out.

        Absolute positions (2B) are in them by then. Rotary tables are divided as they come into the transformer. Text and time embedding stay whole.
        """

        def rotary_tables(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            tables = kwargs.get("image_rotary_emb")
            if tables is None:
                return None
            ulysses.num_tokens = tables[0].shape[0]
            return args, kwargs | {"image_rotary_emb": tuple(ulysses.shard(table_ND, 0) for table_ND in tables)}

        def tokens(module: nn.Module, args: tuple[Any, ...], embedded_BND: Tensor) -> Tensor:
            num_text = args[0].shape[1]
            text_BLD, video_BND = embedded_BND.tensor_split((num_text,), dim=1)
            ulysses.num_tokens = video_BND.shape[1]
            return torch.cat([text_BLD, ulysses.shard(video_BND, 1)], dim=1)

        def gather(module: nn.Module, args: tuple[Any, ...], out_BnC: Tensor) -> Tensor:
            return ulysses.gather(out_BnC, 1)

        model: Any = transformer
        return [
            model.register_forward_pre_hook(rotary_tables, with_kwargs=True),
            model.patch_embed.register_forward_hook(tokens),
            model.proj_out.register_forward_hook(gather),
        ]


def _with_noise(image_CHW: Tensor) -> Tensor:
    """An image in [-1, 1] with noise of a deviation that is drawn, too; both are functions of the image."""
    digest = hashlib.blake2b(image_CHW.float().cpu().contiguous().numpy().tobytes(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    mean, deviation = IMAGE_NOISE
    sigma = (mean + deviation * torch.randn((), generator=generator)).exp()
    return image_CHW + (sigma * torch.randn(image_CHW.shape, generator=generator)).to(image_CHW)


FAMILY = CogVideoXFamily()
