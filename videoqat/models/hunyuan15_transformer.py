"""HunyuanVideo 1.5's transformer: the attention of its blocks by a recipe, and a forward that tells them how long each text is.

Attention is joint: video tokens, then image tokens (image to video), the glyphs' tokens and the prompt's, those of padding last. diffusers' own
forward sorts them so by boolean indices, one sample after another, which makes the GPU wait for the host several times a sample, and its
processor makes of the mask (B, L) a dense one (B, 1, N, N) in every block: 2.6 GB at 480x848x121. `forward` here sorts on the device, and
`HunyuanVideo15Processor` needs one number a sample.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from videoqat.errors import AttentionError
from videoqat.models.hunyuan_processor import silenced
from videoqat.models.processor import Processor, in_low_precision
from videoqat.parallel.ulysses import attend_joint


class HunyuanVideo15Processor(Processor):
    """Joint attention of one block by a recipe.

    With the bf16 recipe, all that can reach the model's output is bitwise what diffusers' `HunyuanVideo15AttnProcessor2_0` computes. Rows of
    padded text can't: no key of theirs is ever seen, and the last block's text is dropped. In diffusers such rows see nothing and come out as
    zeros; here they see all real keys, like any other row.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Video (B, n, dim) and text (B, L, dim), from `hidden_states` and `encoder_hidden_states` of the same shapes.

        n are this rank's video tokens under sequence parallelism, all of them without; the rotary tables, cos and sin (n, head_dim) in float32,
        are of the same tokens. Text is whole on every rank. `attention_mask` is (B,) int64, how many text tokens are real, or, as diffusers' own
        forward has it, (B, L), true where they are.

        Raises:
            AttentionError: a mask of another shape, or one whose padding is not at the tail; rotary tables that aren't float32.
        """
        q, k, v = (project(hidden_states).unflatten(2, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v))
        q, k = (self._rotate(x, image_rotary_emb) for x in (attn.norm_q(q), attn.norm_k(k)))
        projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        q_text, k_text, v_text = (project(encoder_hidden_states).unflatten(2, (attn.heads, -1)) for project in projections)
        q_text, k_text = attn.norm_added_q(q_text), attn.norm_added_k(k_text)
        dtype = q.dtype
        length_B = self._text_lengths(attention_mask, q_text.shape[1])
        q, k, v, q_text, k_text, v_text = in_low_precision(q, k, v, silenced(q_text, length_B, self.recipe), k_text, v_text)
        num_video = q.shape[1] if self.ulysses is None else self.ulysses.num_tokens
        out_BnHD, out_text_BLHD = attend_joint(
            q,
            k,
            v,
            q_text,
            k_text,
            v_text,
            self.recipe,
            text_first=False,
            kernel=self.kernel,
            ulysses=self.ulysses,
            kv_len=num_video + length_B,
            observer=self._observe(),
        )
        video, text = (out.flatten(2, 3).to(dtype) for out in (out_BnHD, out_text_BLHD))
        return attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)

    def _text_lengths(self, mask: Tensor, num_text: int) -> Tensor:
        """(B,) int64."""
        if mask.ndim == 1 and not mask.is_floating_point() and mask.dtype != torch.bool:
            return mask
        if mask.ndim != 2 or mask.shape[1] != num_text:
            raise AttentionError(f"{self.layer}: a text mask must be (batch, {num_text}), got {tuple(mask.shape)}")
        real_BL = mask.bool()
        if not torch.compiler.is_compiling() and bool((real_BL[:, 1:] > real_BL[:, :-1]).any()):
            raise AttentionError(f"{self.layer}: a text mask must have its padding at the tail: real tokens first, then none")
        return real_BL.sum(1)


def sort_on_the_device(transformer: nn.Module) -> nn.Module:
    """Gives a `HunyuanVideo15Transformer3DModel` the forward below, in place, and returns it."""
    transformer.forward = functools.partial(forward, transformer)  # type: ignore[method-assign]
    return transformer


def forward(
    model: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    timestep_r: Tensor | None = None,
    encoder_hidden_states_2: Tensor | None = None,
    encoder_attention_mask_2: Tensor | None = None,
    image_embeds: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    return_dict: bool = True,
) -> Any:
    """What `HunyuanVideo15Transformer3DModel.forward` computes, bit for bit, without the host waiting for numbers from the device.

    Args:
        model: the transformer; under sequence parallelism, hooks on its parts divide the video's tokens.
        hidden_states: (B, 2 C + 1, F, H, W): noisy latents, those of the first frame, and 1 where they are given.
        timestep: (B,), 0 to 1000, in the dtype of the weights, as all floating inputs.
        encoder_hidden_states, encoder_attention_mask: the prompt's embedding (B, L, D) and where it is real, (B, L).
        timestep_r: of MeanFlow models.
        encoder_hidden_states_2, encoder_attention_mask_2: the same of the glyphs, (B, G, D2).
        image_embeds: (B, I, D3) of the first frame; I = 0, or nothing but zeros, for text to video.
        attention_kwargs: what diffusers uses for LoRA; not known here.
        return_dict: as in diffusers.

    Returns:
        (B, C, F, H, W), as diffusers wraps it.

    Raises:
        AttentionError: attention_kwargs, or a missing embedding of glyphs or image.
    """
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    if attention_kwargs or encoder_hidden_states_2 is None or encoder_attention_mask_2 is None or image_embeds is None:
        raise AttentionError("HunyuanVideo 1.5 takes glyphs and an image (of zeros, if there is none), and no attention_kwargs")
    tables = model.rope(hidden_states)
    temb = model.time_embed(timestep, timestep_r=timestep_r)
    video_BND = model.x_embedder(hidden_states)

    prompts_BLD = model.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask)
    # Kind in cond_type_embed, tokens, which of them are real.
    parts = [(1, model.context_embedder_2(encoder_hidden_states_2), encoder_attention_mask_2.bool()), (0, prompts_BLD, encoder_attention_mask.bool())]
    if image_embeds.shape[1] > 0:
        is_given = (image_embeds != 0).any()
        parts.insert(0, (2, model.image_embedder(image_embeds), is_given.expand(image_embeds.shape[:2])))
    kind_BL = torch.cat([torch.full_like(real_BL, kind, dtype=torch.long) for kind, _, real_BL in parts], dim=1)
    real_BL = torch.cat([real_BL for _, _, real_BL in parts], dim=1)
    text_BLD = torch.cat([tokens for _, tokens, _ in parts], dim=1) + model.cond_type_embed(kind_BL)
    # A stable sort: real tokens keep their order, and so does padding, which is nothing but zeros.
    order_BL1 = real_BL.int().argsort(dim=1, descending=True, stable=True).unsqueeze(2)
    text_BLD = torch.where(real_BL.unsqueeze(2), text_BLD, 0).gather(1, order_BL1.expand_as(text_BLD))
    length_B = real_BL.sum(1)
    mask_BL = torch.arange(real_BL.shape[1], device=real_BL.device) < length_B.unsqueeze(1)

    for block in model.transformer_blocks:
        is_ours = isinstance(block.attn.processor, HunyuanVideo15Processor)
        video_BND, text_BLD = block(video_BND, text_BLD, temb, length_B if is_ours else mask_BL, tables)

    patches_BNP = model.proj_out(model.norm_out(video_BND, temb))
    config = model.config
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    grid = [size // part for size, part in zip(hidden_states.shape[2:], patch, strict=True)]
    # (B, f, h, w, C, pt, ph, pw) -> (B, C, f pt, h ph, w pw)
    patches = patches_BNP.unflatten(2, (-1, *patch)).unflatten(1, grid).permute(0, 4, 1, 5, 2, 6, 3, 7)
    prediction_BCFHW = patches.flatten(6, 7).flatten(4, 5).flatten(2, 3)
    return Transformer2DModelOutput(sample=prediction_BCFHW) if return_dict else (prediction_BCFHW,)
