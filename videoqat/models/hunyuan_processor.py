"""Attention of HunyuanVideo by a recipe: in its blocks, of video and text together, and in its token refiner, of the text. Where these sit, and how
video tokens are divided among ranks, is the same in HunyuanVideo 1.5, which has blocks of its own.

Text is padded behind its tokens, and padding is masked. That comes to a number of keys for each sample, and to no mask over pairs of tokens: padding
tokens are queries whose results nobody reads, and never keys.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.hooks import RemovableHandle

from videoqat.errors import AttentionError
from videoqat.models.processor import Processor, in_low_precision
from videoqat.models.spec import AttentionLayer
from videoqat.parallel.ulysses import Ulysses, attend, attend_joint
from videoqat.recipes import AttentionRecipe


class HunyuanProcessor(Processor):
    """Joint attention of one dual or single block by a recipe; with the bf16 recipe bitwise diffusers' `HunyuanVideoAttnProcessor2_0`.

    The order of operations and every rounding outside attention follow diffusers 0.42: RMS norm of each head, then rotary embedding of the video
    tokens in fp32. Single blocks project video and text together.
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
        are of the same tokens. Text is whole on every rank. The mask (B, 1, 1, n + L) is True for keys that are no padding.
        """
        lengths = (hidden_states.shape[1], encoder_hidden_states.shape[1])
        has_own_text_weights = attn.add_q_proj is not None
        tokens = hidden_states if has_own_text_weights else torch.cat([hidden_states, encoder_hidden_states], dim=1)
        q, k, v = _heads(attn, tokens, attn.to_q, attn.to_k, attn.to_v)
        q, k = _normed(q, attn.norm_q), _normed(k, attn.norm_k)
        if has_own_text_weights:
            q, k = (self._rotate(x, image_rotary_emb) for x in (q, k))
            q_text, k_text, v_text = _heads(attn, encoder_hidden_states, attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            q_text, k_text = _normed(q_text, attn.norm_added_q), _normed(k_text, attn.norm_added_k)
        else:
            (q, q_text), (k, k_text), (v, v_text) = (x.split(lengths, dim=1) for x in (q, k, v))
            q, k = (self._rotate(x, image_rotary_emb) for x in (q, k))

        text_len = None if attention_mask is None else self._text_lengths(attention_mask, *lengths)
        q_text = silenced(q_text, text_len, self.recipe)
        num_video = lengths[0] if self.ulysses is None else self.ulysses.num_tokens
        dtype = q.dtype
        q, k, v, q_text, k_text, v_text = in_low_precision(q, k, v, q_text, k_text, v_text)
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
            kv_len=None if text_len is None else text_len + num_video,
            observer=self._observe(),
        )
        video, text = (x.flatten(2, 3).to(dtype) for x in (out_BnHD, out_text_BLHD))
        if attn.to_out is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        return video, text if attn.to_add_out is None else attn.to_add_out(text)

    def _text_lengths(self, mask: Tensor, num_video: int, num_text: int) -> Tensor:
        """(B,) how many text tokens are no padding. That they are the first ones is seen to where masks come in, in the refiner."""
        if mask.ndim != 4 or mask.shape[1:] != (1, 1, num_video + num_text) or mask.dtype != torch.bool:
            legal = f"(batch, 1, 1, {num_video + num_text}) of bool, one for each key"
            raise AttentionError(f"{self.layer}: the mask is {tuple(mask.shape)} of {mask.dtype}; legal: {legal}")
        return mask[:, 0, 0, num_video:].sum(dim=1)


class RefinerProcessor(Processor):
    """Self-attention of the text by a recipe, in one block of the token refiner, where the text's mask comes in.

    With the bf16 recipe the rows of real tokens are bitwise those of diffusers' `AttnProcessor2_0`. A padding token attends to all real tokens
    here, and to the first one there; both are the same to the rest of the model, in which padding tokens are queries and never keys. Text is whole
    on every rank: with `ulysses`, too, there is nothing to exchange.
    """

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """(B, L, dim) from hidden states of the same shape. The mask (B, 1, L, L) is the refiner's: True where query and key are both real, and
        for the first key."""
        if encoder_hidden_states is not None:
            raise AttentionError(f"{self.layer}: the refiner's attention is self-attention")
        q, k, v = _heads(attn, hidden_states, attn.to_q, attn.to_k, attn.to_v)
        kv_len = None if attention_mask is None else self._lengths(attention_mask)
        dtype = q.dtype
        q, k, v = in_low_precision(silenced(q, kv_len, self.recipe), k, v)
        out = attend(q, k, v, self.recipe, kernel=self.kernel, ulysses=None, kv_len=kv_len, observer=self._observe())
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).to(dtype)))  # type: ignore[no-any-return]

    def _lengths(self, mask_B1LL: Tensor) -> Tensor:
        """(B,) how many tokens are real.

        Raises:
            AttentionError: padding stands before text. The first layer looks, once a forward: on a GPU that makes the host wait for it.
        """
        seen_BL, real_BL = mask_B1LL[:, 0, 0], mask_B1LL[:, 0].diagonal(dim1=1, dim2=2)  # by the first token, which is taken for real; by themselves
        looks = self.layer.endswith("blocks.0.attn") and not torch.compiler.is_compiling() and not isinstance(mask_B1LL, FakeTensor)
        if looks:
            wrong_B = (seen_BL != real_BL).any(dim=1) | (real_BL[:, 1:] > real_BL[:, :-1]).any(dim=1)
            if wrong_B.any():
                raise AttentionError(
                    f"the text mask of sample {int(wrong_B.nonzero()[0])} of {len(wrong_B)} has padding before text; legal: text first, padding "
                    "behind it (of a tokenizer with padding_side=right)"
                )
        return real_BL.sum(dim=1)


def _heads(attn: Any, tokens: Tensor, *projections: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, H, D) by each of three projections. Fused ones, which diffusers' own processor doesn't use either, are left aside."""
    q, k, v = (projection(tokens).unflatten(2, (attn.heads, -1)) for projection in projections)
    return q, k, v


def _normed(x_BNHD: Tensor, norm: Any) -> Tensor:
    return x_BNHD if norm is None else norm(x_BNHD)


def silenced(q_BLHD: Tensor, len_B: Tensor | None, recipe: AttentionRecipe) -> Tensor:
    """Queries of text. Those of padding are zero where the recipe looks at many queries at once: they must have no say in what is made of others."""
    if len_B is None or not (recipe.smooth_q or recipe.qk == "int8"):
        return q_BLHD
    padding_BL = torch.arange(q_BLHD.shape[1], device=q_BLHD.device) >= len_B.unsqueeze(1)
    return q_BLHD.masked_fill(padding_BL[:, :, None, None], 0.0)


def attention_layers(transformer: nn.Module, *paths: str) -> list[AttentionLayer]:
    """The refiner's, then those of the blocks at `paths`. Blocks are numbered through; the refiner, before block 0, has negative numbers."""
    model: Any = transformer
    refiner = "context_embedder.token_refiner.refiner_blocks"
    attentions = [
        (f"{path}.{i}.attn", "refiner" if path == refiner else "joint", block.attn)
        for path in (refiner, *paths)
        for i, block in enumerate(model.get_submodule(path))
    ]
    first = -sum(kind == "refiner" for _, kind, _ in attentions)
    return [AttentionLayer.of(name, index, kind, module) for index, (name, kind, module) in enumerate(attentions, first)]


def divide_video(transformer: nn.Module, ulysses: Ulysses) -> list[RemovableHandle]:
    """`ModelFamily.shard_sequence`: video tokens and their rotary tables, which come first and tell how many tokens there will be, are divided as
    soon as they exist, and tokens gathered after proj_out. All else (text and its refiner, an image's tokens, time) stays whole on every rank."""

    def rotary_tables(module: nn.Module, args: tuple[Any, ...], tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        ulysses.num_tokens = tables[0].shape[0]
        return tuple(ulysses.shard(table_ND, 0) for table_ND in tables)

    def tokens(module: nn.Module, args: tuple[Any, ...], video_BND: Tensor) -> Tensor:
        return ulysses.shard(video_BND, 1)

    def gather(module: nn.Module, args: tuple[Any, ...], out_BnC: Tensor) -> Tensor:
        return ulysses.gather(out_BnC, 1)

    model: Any = transformer
    return [
        model.rope.register_forward_hook(rotary_tables),
        model.x_embedder.register_forward_hook(tokens),
        model.proj_out.register_forward_hook(gather),
    ]
