"""Wan 2.1 and 2.2 (arXiv 2503.20314) as diffusers has them: `WanPipeline` with `WanTransformer3DModel` and `AutoencoderKLWan`.

attn1 is self-attention over video tokens and is what recipes quantise; attn2 is cross-attention to the text, and in image-to-video
transformers also to 257 image tokens. A Wan 2.2 A14B folder holds two transformers: `transformer` serves flow times t >= boundary_ratio (high
noise), `transformer_2` the rest.

The 5B TI2V model (`expand_timesteps`) is handled as text-to-video: WanPipeline gives it the same time for every token there, which is the
same function as one time for each sample. Its image-conditioned mode, where the first frame's tokens have time 0, belongs to another pipeline.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.errors import AttentionError, CheckpointError, ConfigError
from videoqat.models import loading
from videoqat.models.schedules import FlowMatching
from videoqat.models.spec import AttentionLayer, Geometry, read_model_json
from videoqat.parallel.sharding import compute_dtype
from videoqat.parallel.ulysses import Ulysses, attend
from videoqat.recipes import AttentionRecipe

if TYPE_CHECKING:
    from videoqat.models.install import Observer

TIME_SCALE = 1000  # the transformer's timestep at flow time 1
IMAGE_MODEL_TEXT_TOKENS = 512  # in image-to-video transformers whatever stands before the last 512 context tokens is image
TEXT_TOKENS = 512
PIXEL_MULTIPLE = 16  # WanPipeline refuses other heights and widths, whatever the VAE


class WanProcessor:
    """Attention of one `WanAttention` module by a recipe; with the bf16 recipe bitwise diffusers' `WanAttnProcessor`.

    The order of operations and every rounding outside `attention()` follow diffusers 0.42: RMS norm over all heads together, then rotary
    embedding with fp32 angles (self-attention only).
    """

    def __init__(self, layer: str, recipe: AttentionRecipe, kernel: str) -> None:
        self.layer = layer
        self.recipe = recipe
        self.kernel = kernel
        self.observer: Observer | None = None
        self.ulysses: Ulysses | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """(B, N, heads * head_dim) from hidden states of the same shape; context (B, L, dim) makes it cross-attention."""
        if attention_mask is not None:
            raise AttentionError(f"{self.layer}: Wan's attention takes no mask")
        image_context = None
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if attn.add_k_proj is not None:
            num_image_tokens = context.shape[1] - IMAGE_MODEL_TEXT_TOKENS
            image_context, context = context[:, :num_image_tokens], context[:, num_image_tokens:]

        q, k, v = _project(attn, hidden_states, context)
        q_BNHD = attn.norm_q(q).unflatten(2, (attn.heads, -1))
        k_BNHD = attn.norm_k(k).unflatten(2, (attn.heads, -1))
        v_BNHD = v.unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            q_BNHD = _rotate(q_BNHD, *rotary_emb)
            k_BNHD = _rotate(k_BNHD, *rotary_emb)

        image_out = None
        if image_context is not None:
            k_image, v_image = _project_image(attn, image_context)
            k_image, v_image = attn.norm_added_k(k_image).unflatten(2, (attn.heads, -1)), v_image.unflatten(2, (attn.heads, -1))
            image_out = self._attend(q_BNHD, k_image, v_image, None)
        # Each query looks at the text by itself, and every rank holds the text whole: nothing to exchange.
        out = self._attend(q_BNHD, k_BNHD, v_BNHD, self.ulysses if encoder_hidden_states is None else None)
        if image_out is not None:
            out = out + image_out
        return attn.to_out[1](attn.to_out[0](out))

    def _attend(self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, ulysses: Ulysses | None) -> Tensor:
        """(B, N, heads * head_dim) in q's dtype."""
        dtype = q_BNHD.dtype
        if torch.is_autocast_enabled(q_BNHD.device.type):
            # Norms leave q and k in float32 there, v is 16-bit; SDPA would cast all three, and what is quantised must be the same numbers.
            low = torch.get_autocast_dtype(q_BNHD.device.type)
            q_BNHD, k_BNHD, v_BNHD = q_BNHD.to(low), k_BNHD.to(low), v_BNHD.to(low)
        observer = None if self.observer is None else functools.partial(self.observer, self.layer)
        out = attend(q_BNHD, k_BNHD, v_BNHD, self.recipe, kernel=self.kernel, ulysses=ulysses, observer=observer)
        return out.flatten(2, 3).to(dtype)


def _project(attn: Any, hidden_states: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K, V (B, N, heads * head_dim), from fused projections where `fuse_qkv_projections()` made them."""
    if not attn.fused_projections:
        return attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
    if not attn.is_cross_attention:
        q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        return q, k, v
    k, v = attn.to_kv(context).chunk(2, dim=-1)
    return attn.to_q(hidden_states), k, v


def _project_image(attn: Any, image_context: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the image tokens, which attn2 of an image-to-video transformer projects by weights of their own."""
    if not attn.fused_projections:
        return attn.add_k_proj(image_context), attn.add_v_proj(image_context)
    k, v = attn.to_added_kv(image_context).chunk(2, dim=-1)
    return k, v


class _Rotation(torch.autograd.Function):
    """Rotary embedding whose gradient is rotated back: half the passes over memory that autograd would take through slices and products."""

    @staticmethod
    def forward(x_BNHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _turned(x_BNHD, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_BNHD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turned(grad_BNHD, cos, -sin), None, None


def _rotate(x_BNHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs; cos and sin are (1, N, 1, head_dim) with every angle twice, and get no gradient."""
    rotated: Tensor = _Rotation.apply(x_BNHD, cos, sin)
    return rotated


def _turned(x_BNHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x_BNHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out_BNHD = torch.empty_like(x_BNHD)
    out_BNHD[..., 0::2] = even * cos - odd * sin
    out_BNHD[..., 1::2] = even * sin + odd * cos
    return out_BNHD


class WanFamily:
    """`videoqat.models.spec.ModelFamily` for Wan; the methods are documented there."""

    name = "wan"
    pipeline_classes = ("WanPipeline",)
    transformer_classes = ("WanTransformer3DModel",)
    has_dynamic_guidance = False

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
                in_channels=int(transformer["in_channels"]),
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
            channels = (geometry.in_channels, int(transformer["out_channels"] or geometry.in_channels), int(vae["z_dim"]))
        except KeyError as error:
            raise CheckpointError(f"{folder}: the configuration of {component} or vae lacks {error.args[0]!r}") from error
        if len(set(channels)) != 1:
            numbers = "in_channels={}, out_channels={}, the VAE's z_dim={}".format(*channels)
            raise CheckpointError(f"{folder}: {component} is no text-to-video transformer for this VAE: {numbers} must be equal")
        return geometry

    def load_transformer(self, folder: str | Path, component: str, *, dtype: torch.dtype, from_scratch: bool = False, seed: int = 0) -> nn.Module:
        """`WanTransformer3DModel` on the CPU; diffusers keeps time embedding, norms and modulation in float32 whatever `dtype`."""
        from diffusers import WanTransformer3DModel

        self._require_component(folder, component)
        return loading.load_transformer(WanTransformer3DModel, folder, component, dtype=dtype, from_scratch=from_scratch, seed=seed)

    def build(self, folder: str | Path, component: str) -> nn.Module:
        """`WanTransformer3DModel` from its configuration."""
        from diffusers import WanTransformer3DModel

        self._require_component(folder, component)
        return loading.build(WanTransformer3DModel, folder, component)

    def load_encoders(self, folder: str | Path, *, device: str | torch.device, dtype: torch.dtype, text_encoder: bool = True) -> Any:
        """The `WanPipeline` without its transformers: what encodes is then exactly what will generate."""
        left_out = {"transformer": None, "transformer_2": None} | ({} if text_encoder else {"text_encoder": None})
        return self._pipeline(folder, device, dtype, **left_out)

    def load_pipeline(self, folder: str | Path, *, device: str | torch.device, dtype: torch.dtype) -> Any:
        """The whole `WanPipeline`, its transformers loaded strictly."""
        components = self.components(folder)
        transformers = {name: self.load_transformer(folder, name, dtype=dtype) for name in components}
        return self._pipeline(folder, device, dtype, **transformers)

    def _pipeline(self, folder: str | Path, device: str | torch.device, dtype: torch.dtype, **parts: nn.Module | None) -> Any:
        from diffusers import WanPipeline

        # The VAE stays in float32: its causal convolutions lose visible quality in 16 bits, and it is a small part of the time.
        dtypes = {"vae": torch.float32, "default": dtype}
        pipeline = WanPipeline.from_pretrained(folder, dtype=dtypes, local_files_only=True, **parts)
        return pipeline.to(device)

    @torch.no_grad()
    def encode_prompts(self, encoders: Any, prompts: list[str], max_tokens: int) -> list[Tensor]:
        """Last hidden states (L_i, D) of the UMT5 encoder, each cut to its prompt's tokens, the end mark included."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        padded_BLD, _ = encoders.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=max_tokens)
        tokens = encoders.tokenizer([prompt_clean(prompt) for prompt in prompts], max_length=max_tokens, truncation=True)
        return [text_LD[: len(ids)].clone() for text_LD, ids in zip(padded_BLD, tokens.input_ids, strict=True)]

    def count_tokens(self, encoders: Any, prompts: list[str]) -> list[int]:
        """As the tokenizer counts what the pipeline's cleaning leaves, the end mark included."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return [len(ids) for ids in encoders.tokenizer([prompt_clean(prompt) for prompt in prompts]).input_ids]

    def text_tokens(self, folder: str | Path, wanted: int = 0, key: str = "max_text_tokens") -> int:
        """512 by default, as WanPipeline; any other number is as good, as long as training and generation have the same."""
        return wanted or TEXT_TOKENS

    def pad_text(self, texts: list[Tensor], max_tokens: int) -> Tensor:
        """Zeros after each text: Wan's cross-attention has no mask, so the number of zeros is part of the model's input."""
        longest = max(text.shape[0] for text in texts)
        if longest > max_tokens:
            raise ConfigError(f"a text embedding of {longest} tokens doesn't fit into max_text_tokens={max_tokens}")
        return torch.stack([nn.functional.pad(text_LD, (0, 0, 0, max_tokens - text_LD.shape[0])) for text_LD in texts])

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
        shift = scheduler.get("flow_shift", scheduler.get("shift", 1.0))
        if not isinstance(shift, int | float) or not shift > 0:
            raise CheckpointError(f"{folder}: the scheduler's flow shift is {shift!r}, which is no positive number")
        return FlowMatching(float(shift))

    def forward(self, transformer: nn.Module, x_BCFHW: Tensor, t_B: Tensor, text_BLD: Tensor) -> Tensor:
        """The velocity noise - data, in the dtype of the transformer's arithmetic."""
        dtype = compute_dtype(transformer)
        timestep_B = t_B.float() * TIME_SCALE
        return transformer(x_BCFHW.to(dtype), timestep_B, text_BLD.to(dtype), return_dict=False)[0]

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
        layers = []
        for index, block in enumerate(transformer.blocks):  # type: ignore[arg-type]
            for part, kind in (("attn1", "self"), ("attn2", "cross")):
                module = getattr(block, part)
                layers.append(AttentionLayer(f"blocks.{index}.{part}", index, kind, module, module.heads, module.inner_dim // module.heads))
        return layers

    def make_processor(self, layer: AttentionLayer, recipe: AttentionRecipe, kernel: str) -> WanProcessor:
        """A `WanProcessor`."""
        return WanProcessor(layer.name, recipe, kernel)

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

    def _require_component(self, folder: str | Path, component: str) -> None:
        present = self.components(folder)
        if component not in present:
            raise CheckpointError(f"{folder} has no {component!r}; it has: {', '.join(present)}")


FAMILY = WanFamily()
