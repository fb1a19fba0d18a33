"""The packed wire: tokens are exchanged for heads as 4-bit codes and scales, 4.5 bits a number instead of 16.

Each rank quantises its own tokens before they travel, and the attention kernel starts from the codes. They are those of the whole sequence, bit
for bit: blocks of q and k run along head_dim, and parts of the sequence begin where blocks of v do. In joint attention the text shifts v's blocks
against the parts of the video, so that there v travels as it is, beside the codes.

Gradients of q, k and v go straight through the quantisers, and back in the dtype of the activations.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from videoqat.attention import backends
from videoqat.attention.coded import attention_forward_coded, code_shapes, encode, layout
from videoqat.attention.functional import attention_backward, check_tensors
from videoqat.formats import FORMATS
from videoqat.recipes import AttentionRecipe

if TYPE_CHECKING:
    from videoqat.parallel.ulysses import Ulysses


def attend_packed(
    video: list[Tensor],
    text: list[Tensor],
    recipe: AttentionRecipe,
    *,
    text_first: bool,
    kernel: str,
    ulysses: "Ulysses",
    kv_len: Tensor | None,
) -> Tensor:
    """Attention of the whole sequence, (B, N, h, D), or (B, L + N, h, D) with text in its place; differentiable.

    Args:
        video: q, k, v (B, n, H, D) of this rank's tokens.
        text: q, k, v (B, L, h, D) of this rank's heads; empty where there is no text.
        kv_len: as for `attend_joint`.
    """
    ulysses.check_parts(*video)
    for q, k, v in (video, text) if text else (video,):
        check_tensors(q, k, v, kv_len)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (*video, *text))
    no_text: list[Tensor | None] = [None, None, None]
    out: Tensor = _AttendPacked.apply(*video, *(text or no_text), kv_len, recipe, text_first, kernel, ulysses, training)
    return out


class _AttendPacked(torch.autograd.Function):
    """Quantise, exchange, attend; and back with the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BnHD: Tensor,
        k_BnHD: Tensor,
        v_BnHD: Tensor,
        q_text_BLhD: Tensor | None,
        k_text_BLhD: Tensor | None,
        v_text_BLhD: Tensor | None,
        kv_len: Tensor | None,
        recipe: AttentionRecipe,
        text_first: bool,
        kernel: str,
        ulysses: "Ulysses",
        training: bool,
    ) -> Tensor:
        B, n, _, D = q_BnHD.shape
        num_tokens, num_text = ulysses.num_tokens, 0 if q_text_BLhD is None else q_text_BLhD.shape[1]
        choice = (recipe.as_json, kernel, training)
        lengths = torch.full((B,), num_tokens + num_text, device=q_BnHD.device) if kv_len is None else kv_len
        video_starts, text_starts = (num_text, 0) if text_first else (0, num_tokens)
        own_length = ((lengths - video_starts).clamp(0, num_tokens) - ulysses.rank * n).clamp(0, n)

        parts = [*encode(q_BnHD, None, False, *choice), *encode(k_BnHD, own_length, False, *choice)]
        rows = [num_tokens] * 4
        v_coded = recipe.pv in FORMATS and num_text == 0
        if v_coded:
            parts += encode(v_BnHD, own_length, True, *choice)
            rows += [shape[2] for shape in code_shapes((B, num_tokens, 1, D), *layout(recipe, is_v=True))]
        else:
            parts.append(v_BnHD.transpose(1, 2))
            rows.append(num_tokens)
        codes = _exchange(parts, rows, ulysses)
        v_BNhD = None if v_coded else codes.pop().transpose(1, 2)

        if q_text_BLhD is not None and k_text_BLhD is not None and v_text_BLhD is not None and v_BNhD is not None:
            text_length = (lengths - text_starts).clamp(0, num_text)
            text = [*encode(q_text_BLhD, None, False, *choice), *encode(k_text_BLhD, text_length, False, *choice)]
            codes = [torch.cat((y, x) if text_first else (x, y), dim=2) for x, y in zip(codes, text, strict=True)]
            v_BNhD = torch.cat((v_text_BLhD, v_BNhD) if text_first else (v_BNhD, v_text_BLhD), dim=1)
        scale = D**-0.5
        out, _, m, l_BhN, kept = attention_forward_coded(codes, v_BNhD, kv_len, D, q_BnHD.dtype, recipe.as_json, scale, kernel, training)
        if training:
            module: Any = backends.KERNELS[backends.resolve(recipe, q_BnHD.device, q_BnHD.dtype, D, kernel, training).kernel]
            _, _, keeps_v, keeps_out = module.keeps(recipe)
            ctx.save_for_backward(v_BNhD if keeps_v else None, out if keeps_out else None, m, l_BhN, kv_len, *codes, *kept)
            ctx.sizes = num_tokens, num_text, text_first, codes[2].shape[1]
            ctx.choice, ctx.ulysses = (recipe.as_json, scale, False, kernel), ulysses
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        v_BNhD, out, m, l_BhN, kv_len, *kept = ctx.saved_tensors
        num_tokens, num_text, text_first, num_kv_heads = ctx.sizes
        gradients = attention_backward(grads[0], None, None, v_BNhD, out, m, l_BhN, kept, kv_len, num_tokens + num_text, num_kv_heads, *ctx.choice)
        first, second = zip(*(x.split((num_text, num_tokens) if text_first else (num_tokens, num_text), dim=1) for x in gradients), strict=True)
        video, text = (second, first) if text_first else (first, second)
        return *ctx.ulysses.to_tokens(*video), *(text if num_text else (None,) * 3), *(None,) * 6


def _exchange(parts: list[Tensor], rows: list[int], ulysses: "Ulysses") -> list[Tensor]:
    """(B, H, part's rows, width) each, of any dtypes, -> (B, h, the first `rows` of the whole sequence's, width), contiguous, in one exchange."""
    send = [x.unflatten(1, (ulysses.degree, -1)).transpose(0, 1).contiguous() for x in parts]
    bytes_Px = [x.view(torch.uint8).flatten(1) for x in send]
    received = ulysses.exchange(torch.cat(bytes_Px, dim=1), ulysses.group_name).split([x.shape[1] for x in bytes_Px], dim=1)
    whole = []
    for x, sent, length in zip(received, send, rows, strict=True):
        # Bytes in the middle of a row needn't lie where wider numbers may: those are copied first.
        x = (x.contiguous().view(sent.dtype) if sent.dtype != torch.uint8 else x).unflatten(1, sent.shape[1:])
        whole.append(x.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].contiguous())
    return whole
