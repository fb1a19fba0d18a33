"""Attention of diffusers transformers that are of no family here (Mochi, Flux, LTX-Video, SD3.5, Wan VACE): for inference under any recipe.

A family knows a whole model; here all that is known is what a *stock processor* of diffusers computes. `videoqat.install(transformer, recipe)`
puts one of ours in the place of each, if it knows every one of them. The order of operations and every rounding outside attention follow
diffusers 0.42: with the bf16 recipe the transformer computes what it did, bit for bit.

Blocks are counted (`keep_layers`) in the order in which the transformer holds them: Flux's 19 joint blocks are 0 to 18, its 38 single ones 19 to 56.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from videoqat.attention.functional import attention
from videoqat.errors import AttentionError, CheckpointError
from videoqat.models.processor import Processor, in_low_precision
from videoqat.models.spec import AttentionLayer
from videoqat.models.wan_processor import WanProcessor
from videoqat.parallel.ulysses import Ulysses
from videoqat.recipes import AttentionRecipe


class _OtherProcessor(Processor):
    """What the processors here share: attention itself. `ulysses` stays None: `OtherTransformers.shard_sequence` refuses to divide a sequence."""

    def _attend(self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> Tensor:
        """(B, N, H, D) in q's dtype."""
        dtype = q_BNHD.dtype
        q_BNHD, k_BNHD, v_BNHD = in_low_precision(q_BNHD, k_BNHD, v_BNHD)
        if self.observer is not None:
            self.observer(self.layer, q_BNHD, k_BNHD, v_BNHD)
        return attention(q_BNHD, k_BNHD, v_BNHD, self.recipe, kernel=self.kernel).to(dtype)

    def _refuse_mask(self, mask: Tensor | None) -> None:
        if mask is not None:
            raise AttentionError(f"{self.layer}: {type(self).__name__} takes no attention mask; got one of shape {tuple(mask.shape)}")


class FluxProcessor(_OtherProcessor):
    """Joint attention of Flux, text first; in its single blocks text and image come as one sequence. For `FluxAttnProcessor`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Image (B, N, dim) and text (B, L, dim) of the same shapes; the one sequence (B, L + N, heads * head_dim) where no text is given."""
        from diffusers.models.embeddings import apply_rotary_emb

        self._refuse_mask(attention_mask)
        names = ("to_qkv",) if attn.fused_projections else ("to_q", "to_k", "to_v")
        q, k, v = _project(attn, names, hidden_states)
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            names = ("to_added_qkv",) if attn.fused_projections else ("add_q_proj", "add_k_proj", "add_v_proj")
            q_text, k_text, v_text = _project(attn, names, encoder_hidden_states)
            q_text, k_text = attn.norm_added_q(q_text), attn.norm_added_k(k_text)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((q_text, q), (k_text, k), (v_text, v)))
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))  # type: ignore[misc]
        out = self._attend(q, k, v).flatten(2, 3)
        if encoder_hidden_states is None:
            return out
        text, image = out.split((encoder_hidden_states.shape[1], hidden_states.shape[1]), dim=1)
        return attn.to_out[1](attn.to_out[0](image.contiguous())), attn.to_add_out(text.contiguous())


class MochiProcessor(_OtherProcessor):
    """Joint attention of Mochi, video first, over each sample's own text tokens. For `MochiAttnProcessor2_0`.

    As there, a sample attends by itself, without the tokens that the mask leaves out: they are in no block of P, V or smoothed Q, any mask is as good
    as one of trailing padding, and a sample's video doesn't depend on what else is in its batch.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video (B, N, dim) and text (B, L, dim_text). `attention_mask` (B, L) isn't 0 where a text token is real; the others come out as zeros."""
        q, k, v = _project(attn, ("to_q", "to_k", "to_v"), hidden_states)
        q, k = attn.norm_q(q), attn.norm_k(k)
        q_text, k_text, v_text = _project(attn, ("add_q_proj", "add_k_proj", "add_v_proj"), encoder_hidden_states)
        q_text, k_text = attn.norm_added_q(q_text), attn.norm_added_k(k_text)
        if image_rotary_emb is not None:
            q, k = (_rotate_heads(x, *image_rotary_emb) for x in (q, k))

        num_video, num_text = hidden_states.shape[1], encoder_hidden_states.shape[1]
        pairs = [(x.transpose(1, 2), x_text.transpose(1, 2)) for x, x_text in ((q, q_text), (k, k_text), (v, v_text))]
        samples = []  # taken apart heads first: the gradients of norms are sums over tokens in this order
        for i, mask_L in enumerate(attention_mask):
            real = mask_L.nonzero().flatten()
            joint = (torch.cat((x[i : i + 1], x_text[i : i + 1, :, real]), dim=2).transpose(1, 2) for x, x_text in pairs)
            samples.append(F.pad(self._attend(*joint), (0, 0, 0, 0, 0, num_text - len(real))))
        video, text = torch.cat(samples).flatten(2, 3).split((num_video, num_text), dim=1)
        video = attn.to_out[1](attn.to_out[0](video))
        return video, attn.to_add_out(text) if hasattr(attn, "to_add_out") else text


class LTXVideoProcessor(_OtherProcessor):
    """Self- or cross-attention of LTX-Video. For `LTXVideoAttnProcessor`.

    Its cross-attention masks the text's padding, by -10000 on the logits: that is computed as it stands, in 16 bits, and can't be quantised.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """(B, N, dim) of the same shape; text (B, L, dim_text) makes it cross-attention, and `attention_mask` (B, 1, L) is added to its logits."""
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        if (encoder_hidden_states is not None) != (self.kind == "cross"):
            raise AttentionError(f"{self.layer}: its name says {self.kind}-attention, but that is not how the transformer calls it")
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context)), attn.to_v(context)
        if image_rotary_emb is not None:  # over all heads together
            q, k = (apply_rotary_emb(x, image_rotary_emb) for x in (q, k))
        q_BNHD, k_BNHD, v_BNHD = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        if attention_mask is None:
            out = self._attend(q_BNHD, k_BNHD, v_BNHD)
        else:
            out = self._attend_masked(q_BNHD, k_BNHD, v_BNHD, attention_mask)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))  # type: ignore[no-any-return]

    def _attend_masked(self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, bias_B1L: Tensor) -> Tensor:
        if self.recipe.is_quantised:
            raise AttentionError(
                f"{self.layer}: recipe {self.recipe.name!r} covers this cross-attention, which is masked, and masks can't be quantised here; "
                "legal: attention_kinds without cross"
            )
        # Masks of one row for all queries, with a head axis, as diffusers hands them to SDPA.
        bias_BHNL = bias_B1L.unsqueeze(1).expand(-1, q_BNHD.shape[2], -1, -1)
        q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BNHD, v_BNHD))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BHNL).transpose(1, 2).to(q_BNHD.dtype)


class SD3Processor(_OtherProcessor):
    """Joint attention of Stable Diffusion 3 and 3.5, image first, and self-attention in blocks of 3.5 that have both. For `JointAttnProcessor2_0`."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Image (B, N, dim) and text (B, L, dim) of the same shapes; the image alone where no text is given."""
        self._refuse_mask(attention_mask)
        q, k, v = _project(attn, ("to_q", "to_k", "to_v"), hidden_states)
        q, k = _norm(attn.norm_q, q), _norm(attn.norm_k, k)
        if encoder_hidden_states is not None:
            q_text, k_text, v_text = _project(attn, ("add_q_proj", "add_k_proj", "add_v_proj"), encoder_hidden_states)
            q_text, k_text = _norm(attn.norm_added_q, q_text), _norm(attn.norm_added_k, k_text)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((q, q_text), (k, k_text), (v, v_text)))
        out = self._attend(q, k, v).flatten(2, 3)
        num_image = hidden_states.shape[1]
        image = attn.to_out[1](attn.to_out[0](out[:, :num_image]))
        if encoder_hidden_states is None:
            return image  # type: ignore[no-any-return]
        text = out[:, num_image:]
        return image, text if attn.context_pre_only else attn.to_add_out(text)


def _project(attn: Any, names: tuple[str, ...], x_BND: Tensor) -> list[Tensor]:
    """Q, K, V (B, N, H, D), by one projection or three."""
    projected = [getattr(attn, name)(x_BND) for name in names]
    return [y.unflatten(2, (attn.heads, -1)) for y in (projected if len(names) == 3 else projected[0].chunk(3, dim=-1))]


def _norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _rotate_heads(x_BNHD: Tensor, cos_NHd: Tensor, sin_NHd: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs in fp32, by angles of their own for each head; d is D / 2."""
    even, odd = x_BNHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos_NHd - odd * sin_NHd, even * sin_NHd + odd * cos_NHd), dim=-1)
    return rotated.to(x_BNHD.dtype).flatten(-2)


@dataclass(frozen=True)
class _Known:
    """A stock processor of diffusers that we know.

    Attributes:
        kind: of a module's attention (`AttentionLayer.kind`), from its path and itself.
        ours: the class that computes the same by a recipe.
    """

    kind: Callable[[str, Any], str]
    ours: type[Processor]


def _joint(path: str, module: Any) -> str:
    return "joint"


def _joint_where_text_is_projected(path: str, module: Any) -> str:
    return "self" if module.added_kv_proj_dim is None else "joint"


def _cross_where_second(path: str, module: Any) -> str:
    kinds = {"attn1": "self", "attn2": "cross"}
    name = path.rpartition(".")[2]
    if name not in kinds:
        raise CheckpointError(
            f"{path} with {type(module.processor).__name__}: whether it is self- or cross-attention is known of attn1 and attn2 alone"
        )
    return kinds[name]


# Where a class is defined is part of what is known: somebody else's of the same name may compute something else.
KNOWN: dict[str, _Known] = {
    "diffusers.models.attention_processor.JointAttnProcessor2_0": _Known(_joint_where_text_is_projected, SD3Processor),
    "diffusers.models.attention_processor.MochiAttnProcessor2_0": _Known(_joint, MochiProcessor),
    "diffusers.models.transformers.transformer_flux.FluxAttnProcessor": _Known(_joint, FluxProcessor),
    "diffusers.models.transformers.transformer_ltx.LTXVideoAttnProcessor": _Known(_cross_where_second, LTXVideoProcessor),
    "diffusers.models.transformers.transformer_wan.WanAttnProcessor": _Known(_cross_where_second, WanProcessor),
}


def _known(processor: Any) -> _Known | None:
    stock = f"{type(processor).__module__}.{type(processor).__name__}"
    return KNOWN.get(stock) or next((known for known in KNOWN.values() if type(processor) is known.ours), None)


class OtherTransformers:
    """What `install` asks of a family, for transformers of none."""

    name = "other"

    def attention_layers(self, transformer: nn.Module) -> list[AttentionLayer]:
        """Every module with an attention processor, in the order in which the transformer holds them.

        Raises:
            CheckpointError: there is none, or one with a processor that isn't known; names it.
        """
        layers: list[AttentionLayer] = []
        blocks: dict[str, int] = {}  # path -> number
        for path, module in transformer.named_modules():
            processor: Any = getattr(module, "processor", None)
            if processor is None:
                continue
            known = _known(processor)
            if known is None:
                fused = "; undo fuse_qkv_projections() first" if type(processor).__name__.startswith("Fused") else ""
                what = f"{type(transformer).__name__}'s {path} has the attention processor {type(processor).__name__}, which is not known"
                raise CheckpointError(f"{what}; known: {_known_names()}{fused}")
            block = re.match(r"(.*?\.)?\d+(?=\.|$)", path)
            index = blocks.setdefault(block[0] if block else path, len(blocks))
            layers.append(AttentionLayer.of(path, index, known.kind(path, module), module))
        if not layers:
            raise CheckpointError(f"{type(transformer).__name__} is of no known family and has no attention processors; known: {_known_names()}")
        return layers

    def make_processor(self, layer: AttentionLayer, recipe: AttentionRecipe, kernel: str) -> Any:
        """One of ours in the place of the layer's stock processor."""
        known = _known(layer.module.processor)
        assert known is not None
        return known.ours(layer, recipe, kernel)

    def shard_sequence(self, transformer: nn.Module, ulysses: Ulysses) -> list[RemovableHandle]:
        """Refused: how the tokens of an unknown transformer are made and put together again isn't known."""
        raise CheckpointError(f"{type(transformer).__name__} is of no known family: its sequence can't be divided among ranks (parallel.sp)")


@functools.cache
def _known_names() -> str:
    return ", ".join(name.rpartition(".")[2] for name in KNOWN)


OTHER = OtherTransformers()
