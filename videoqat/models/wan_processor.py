"""Attention of a Wan transformer by a recipe: what sits in each of its `WanAttention` modules.

attn1 is self-attention over video tokens; attn2 is cross-attention to the text and, in image-to-video transformers with an image encoder, to the
image's tokens, with projections of their own.
"""

from typing import Any

import torch
from torch import Tensor

from videoqat.errors import AttentionError
from videoqat.models.processor import Processor, in_low_precision
from videoqat.parallel.ulysses import Ulysses, attend

IMAGE_MODEL_TEXT_TOKENS = 512  # in image-to-video transformers whatever stands before the last 512 context tokens is image


class WanProcessor(Processor):
    """Attention of one `WanAttention` module by a recipe; with the bf16 recipe bitwise diffusers' `WanAttnProcessor`.

    The order of operations and every rounding outside `attention()` follow diffusers 0.42: RMS norm over all heads together, then rotary
    embedding with fp32 angles (self-attention only).
    """

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
        q_BNHD, k_BNHD, v_BNHD = in_low_precision(q_BNHD, k_BNHD, v_BNHD)
        out = attend(q_BNHD, k_BNHD, v_BNHD, self.recipe, kernel=self.kernel, ulysses=ulysses, observer=self._observe())
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
    # Written without assigning to slices: those, the compiler fuses with the RMS norm before them into one slow kernel a block.
    pairs = x_BNHD.unflatten(-1, (-1, 2))
    signed = torch.stack([-sin[..., 0::2], sin[..., 1::2]], dim=-1)
    return (x_BNHD * cos + (pairs.flip(-1) * signed).flatten(-2)).to(x_BNHD.dtype)
