"""Forward and backward on the host's side: quantise, choose tiles, launch.

`recipe` is any object with the fields of videoqat's AttentionRecipe. Its arithmetic is emulated: the operands hold exactly the values that
the formats can say, the products are bf16 with fp32 accumulators.
"""

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from videoqat_kernels.triton_ops.attn_backward import attn_backward_dkdv_kernel, attn_backward_dq_kernel, prepare_gradient_kernel
from videoqat_kernels.triton_ops.attn_forward import attn_forward_kernel
from videoqat_kernels.triton_ops.quantize import BLOCK_FORMATS, code_buffers, dequantize, quantize
from videoqat_kernels.triton_ops.smoothing import SMOOTH_Q_TOKENS, biases, mean_over_blocks, mean_over_tokens

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 128


class Recipe(Protocol):
    """What is quantised and how; see videoqat/recipes.py."""

    qk: str
    pv: str
    p_gain_log2: int
    scale_divisors: tuple[float, ...]
    v_blocks: str
    normalizer: str
    grad_p: str
    smooth_q: bool
    smooth_k: bool
    two_level_p: bool
    delta: str
    dv_p: str


class Tile(NamedTuple):
    """Rows and columns of the score tile, warps of a program, and how many tiles ahead memory is fetched."""

    queries: int
    keys: int
    warps: int
    stages: int


class ForwardResult(NamedTuple):
    """out (B, Nq, H, d) in q's dtype; lse, m, l (B, H, Nq) fp32; codes: q, k, v codes and scales in that order, those that were asked for."""

    out: Tensor
    lse: Tensor
    m: Tensor
    l: Tensor
    codes: list[Tensor]


class QuantisedOperands(NamedTuple):
    """What the forward multiplies, and what smoothing took out: mean_q (B, H, blocks of 128, d), mean_k (B, H_kv, 1, d), fp32; or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    codes: list[Tensor]
    mean_q: Tensor | None
    mean_k: Tensor | None


def products(recipe: Recipe) -> tuple[int, int]:
    """How many N x N x d matrix products the kernels run in the forward and in the backward. (Attention itself is 2 and 5.)

    The forward's third finds the maximum first. The backward computes S and dP in both of its kernels, and D by B = P K'.
    """
    return 2 + _maximum_first(recipe), 7 + _finds_d(recipe)


def coded_operands(recipe: Recipe) -> tuple[bool, bool, bool]:
    """Whether q, k, v have codes that can stand for them in the backward; those that haven't must be kept themselves."""
    qk, pv = recipe.qk in BLOCK_FORMATS, recipe.pv in BLOCK_FORMATS
    return qk, qk, pv


def empty_codes(q_BNHd: Tensor, k_BNHd: Tensor, recipe: Recipe) -> list[Tensor]:
    """Uninitialised tensors of the shapes of `ForwardResult.codes` for q and k (and v, which has k's shape)."""
    codes: list[Tensor] = []
    for x, format, along_tokens in ((q_BNHd, recipe.qk, False), (k_BNHd, recipe.qk, False), (k_BNHd, recipe.pv, _v_along_tokens(recipe))):
        if format in BLOCK_FORMATS:
            codes += code_buffers(x, format, along_tokens)
    return codes


def forward(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, kv_len_B: Tensor | None, recipe: Recipe, scale: float, causal: bool, keep_codes: bool
) -> ForwardResult:
    """Attention of q (B, Nq, H, d) over k, v (B, Nk, H_kv, d), of any strides (channels side by side, or they are copied), none changed.

    Args:
        kv_len_B: (B,) integers: how many keys of each sample are real; None: all.
        scale: factor on the logits, > 0.
        causal: query i sees keys j <= i + kv_len - Nq.
        keep_codes: return the codes that `backward` needs.
    """
    Nk = k_BNHd.shape[1]
    kv_len = _lengths(kv_len_B, q_BNHd.shape[0], Nk, q_BNHd.device)
    operands = quantise_operands(q_BNHd, k_BNHd, v_BNHd, kv_len, recipe, scale, keep_codes)
    with _on(q_BNHd):
        parts: Iterable[tuple[int, Tensor | None]] = [(0, None)]
        if operands.mean_q is not None:
            parts = biases(operands.mean_q, _channels_side_by_side(k_BNHd), operands.mean_k, kv_len, LOG2_E * scale)
        result = _attend(operands, parts, kv_len, tuple(q_BNHd.shape), Nk, q_BNHd.dtype, recipe, scale, causal)
        if operands.mean_k is not None:  # what smoothing took from every logit of the row
            mean_of_head = operands.mean_k.repeat_interleave(q_BNHd.shape[2] // k_BNHd.shape[2], dim=1).squeeze(2)
            result.lse.add_(scale * torch.einsum("bnhd,bhd->bhn", q_BNHd.float(), mean_of_head))
    return result


def encode(x_BNHd: Tensor, lengths_B: Tensor | None, format: str, along_tokens: bool, divisors: tuple[float, ...]) -> list[Tensor]:
    """[codes, scales] of x alone, as `forward` would keep them; tokens from `lengths_B` on count as zeros."""
    lengths = _lengths(lengths_B, x_BNHd.shape[0], x_BNHd.shape[1], x_BNHd.device)
    with _on(x_BNHd):
        _, codes = quantize(_channels_side_by_side(x_BNHd), format, along_tokens=along_tokens, lengths_B=lengths, divisors=divisors,
                            store_codes=True, store_operand=False)  # fmt: skip
    return codes


def forward_coded(
    codes: list[Tensor], v_BNHd: Tensor | None, kv_len_B: Tensor | None, head_dim: int, dtype: torch.dtype, recipe: Recipe, scale: float,
    keep_codes: bool,
) -> ForwardResult:  # fmt: skip
    """`forward` from what it would have kept: [codes, scales] of q, of k, and of v, or v itself. Recipes without smoothing.

    Args:
        codes: layouts as in quantize.py; those of q and k (and v) have no tokens that count behind `kv_len_B`.
        v_BNHd: None where codes hold it; quantised here otherwise, and its codes are in the result with `keep_codes`.
        head_dim: d.
        dtype: of the output.
    """
    B, H, Nq = codes[0].shape[:3]
    Nk = codes[2].shape[2]
    kv_len = _lengths(kv_len_B, B, Nk, codes[0].device)
    with _on(codes[0]):
        q, k = _decoded_qk(codes, recipe, Nq, Nk, head_dim)
        v_codes: list[Tensor] = []
        if v_BNHd is None:
            v = _decoded_v(codes[4:], recipe, Nk, head_dim)
        else:
            v, v_codes = _quantised_v(_channels_side_by_side(v_BNHd), kv_len, recipe, keep_codes)
        operands = QuantisedOperands(q, k, v, v_codes, None, None)
        return _attend(operands, [(0, None)], kv_len, (B, Nq, H, head_dim), Nk, dtype, recipe, scale, causal=False)


def _attend(
    operands: QuantisedOperands, parts: Iterable[tuple[int, Tensor | None]], kv_len: Tensor, shape: tuple[int, ...], Nk: int, dtype: torch.dtype,
    recipe: Recipe, scale: float, causal: bool,
) -> ForwardResult:  # fmt: skip
    """The attention kernel on queries of `shape` (B, Nq, H, d), in `parts` from query block i on with that bias."""
    q, k, v = operands[:3]
    B, Nq, H, d = shape
    out = torch.empty(shape, dtype=dtype, device=q.device)
    lse, m, l = (torch.empty((B, H, Nq), dtype=torch.float32, device=q.device) for _ in range(3))
    tile = _forward_tile(q.shape[3], recipe)
    descriptors = _rows(q, tile.queries), _rows(k, tile.keys), _rows(v, tile.keys)
    for first_block, bias in parts:
        first = first_block * SMOOTH_Q_TOKENS
        queries = Nq if bias is None else min(Nq - first, bias.shape[2] * SMOOTH_Q_TOKENS)
        attn_forward_kernel[(triton.cdiv(queries, tile.queries), B * H)](
            *descriptors, bias, out, m, l, lse, kv_len,
            *out.stride()[:3], first, Nq, Nk, q.shape[2], k.shape[2], H, k.shape[1], 0 if bias is None else bias.shape[2],
            LOG2_E * scale, float(recipe.p_gain_log2),
            D=d, DP=q.shape[3], BLOCK_M=tile.queries, BLOCK_N=tile.keys, GROUP=_p_group(recipe), CAUSAL=causal, P_FORMAT=recipe.pv,
            QUANTISED_SUM=recipe.normalizer == "quantised", TWO_LEVEL=recipe.two_level_p, HAS_BIAS=bias is not None,
            MAXIMUM_FIRST=_maximum_first(recipe),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return ForwardResult(out, lse, m, l, operands.codes)


def quantise_operands(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, kv_len_B: Tensor | None, recipe: Recipe, scale: float, keep_codes: bool
) -> QuantisedOperands:
    """All that comes before the attention kernel: smoothing, if the recipe wants it, and quantising. Arguments as for `forward`."""
    kv_len = _lengths(kv_len_B, k_BNHd.shape[0], k_BNHd.shape[1], k_BNHd.device)
    q_BNHd, k_BNHd, v_BNHd = (_channels_side_by_side(x) for x in (q_BNHd, k_BNHd, v_BNHd))
    with _on(q_BNHd):
        mean_q = mean_k = None
        if recipe.smooth_k:
            mean_k = mean_over_tokens(k_BNHd, kv_len)
        if recipe.smooth_q:
            mean_q = mean_over_blocks(q_BNHd)
        q, q_codes = _quantised_q(q_BNHd, recipe, keep_codes, mean_q)
        k, k_codes = _quantised_k(k_BNHd, kv_len, recipe, keep_codes, mean_k)
        v, v_codes = _quantised_v(v_BNHd, kv_len, recipe, keep_codes)
    return QuantisedOperands(q, k, v, [*q_codes, *k_codes, *v_codes], mean_q, mean_k)


def backward(
    grad_out_BNHd: Tensor,
    out_BNHd: Tensor,
    m_BHN: Tensor,
    l_BHN: Tensor,
    codes: list[Tensor],
    originals: tuple[Tensor | None, ...],
    kv_len_B: Tensor | None,
    num_keys: int,
    recipe: Recipe,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV, contiguous, in the dtype of `grad_out`, from what `forward` returned with `keep_codes`.

    Args:
        originals: q, k, v where `coded_operands` says that they have no codes.
    """
    B, Nq, H, d = grad_out_BNHd.shape
    device = grad_out_BNHd.device
    kv_len = _lengths(kv_len_B, B, num_keys, device)
    grad_out, out_BNHd = _channels_side_by_side(grad_out_BNHd), _channels_side_by_side(out_BNHd)
    originals = tuple(None if x is None else _channels_side_by_side(x) for x in originals)
    group = _p_group(recipe)
    with _on(grad_out):
        if recipe.qk in BLOCK_FORMATS:
            q, k = _decoded_qk(codes, recipe, Nq, num_keys, d)
        else:
            assert originals[0] is not None
            assert originals[1] is not None
            mean_k = mean_over_tokens(originals[1], kv_len) if recipe.smooth_k else None
            q, _ = _quantised_q(originals[0], recipe, False, None)
            k, _ = _quantised_k(originals[1], kv_len, recipe, False, mean_k)
        if recipe.pv in BLOCK_FORMATS:
            v = _decoded_v(codes[-2:], recipe, num_keys, d)
        else:
            assert originals[2] is not None
            v, _ = _quantised_v(originals[2], kv_len, recipe, False)
        H_kv, Nq_padded, Nk_padded, DP = k.shape[1], q.shape[2], k.shape[2], q.shape[3]

        do_c = torch.empty_like(q)
        shift, c, d_c = (torch.empty((B, H, Nq_padded), dtype=torch.float32, device=device) for _ in range(3))
        prepare_gradient_kernel[(Nq_padded // 64, B * H)](
            grad_out, out_BNHd, m_BHN, l_BHN, do_c, shift, c, d_c, *grad_out.stride()[:3], *out_BNHd.stride()[:3],
            Nq, Nq_padded, H, float(recipe.p_gain_log2), D=d, DP=DP, TILE=64,
        )  # fmt: skip

        dq = torch.empty((B, Nq, H, d), dtype=grad_out.dtype, device=device)
        dk, dv = (torch.empty((B, num_keys, H_kv, d), dtype=grad_out.dtype, device=device) for _ in range(2))
        p_in_ds = recipe.pv if recipe.grad_p == "quantised" else "exact"
        shared = {"D": d, "DP": DP, "GROUP": group, "CAUSAL": causal, "P_IN_DS": p_in_ds}
        tile = _dq_tile(DP, recipe)
        attn_backward_dq_kernel[(triton.cdiv(Nq, tile.queries), B * H)](
            _rows(q, tile.queries), _rows(do_c, tile.queries), _rows(k, tile.keys), _rows(v, tile.keys), dq, shift, c, d_c, kv_len,
            *dq.stride()[:3], Nq, Nq_padded, Nk_padded, H, H_kv, LOG2_E * scale, scale,
            BLOCK_M=tile.queries, BLOCK_N=tile.keys, FIND_D=_finds_d(recipe), num_warps=tile.warps, num_stages=tile.stages, **shared,
        )  # fmt: skip
        tile = _dkdv_tile(DP, recipe, device)
        attn_backward_dkdv_kernel[(triton.cdiv(num_keys, tile.keys), B * H_kv)](
            _rows(q, tile.queries), _rows(do_c, tile.queries), _rows(k, tile.keys), _rows(v, tile.keys), dk, dv, shift, d_c, kv_len,
            *dk.stride()[:3], Nq, num_keys, Nq_padded, Nk_padded, H, H_kv, LOG2_E * scale, scale,
            BLOCK_M=tile.queries, BLOCK_N=tile.keys, P_IN_DV=recipe.pv if recipe.dv_p == "quantised" else "exact",
            num_warps=tile.warps, num_stages=tile.stages, **shared,
        )  # fmt: skip
    return dq, dk, dv


def _maximum_first(recipe: Recipe) -> bool:
    """Whether rescaling by a running maximum could change codes of P that matter: when its NVFP4 scales start low in E4M3's range."""
    return recipe.pv in ("nvfp4", "fp8") and recipe.p_gain_log2 < 8 and not recipe.two_level_p


def _finds_d(recipe: Recipe) -> bool:
    """The ablation that takes D from O has it already. (So has grad_p="quantised", but for O's rounding to 16 bits: too much for dQ.)"""
    return recipe.delta == "high_precision_output" or recipe.grad_p == "quantised"


def _p_group(recipe: Recipe) -> int:
    """Keys of a block of P: what the rows of K and V are permuted for."""
    return 32 if recipe.pv in ("mxfp4", "mxfp8") else 16


def _forward_tile(channels: int, recipe: Recipe) -> Tile:
    """Fastest measured on an H200. Blocks of 32 and two_level_p need 128 keys in a tile."""
    if _p_group(recipe) == 32 or recipe.two_level_p:
        return Tile(64, 128, 4, 2)
    return Tile(128, 64, 4, 2 if channels > 64 else 3)


def _dq_tile(channels: int, recipe: Recipe) -> Tile:
    if _p_group(recipe) == 32:
        return Tile(64, 128, 8, 2)
    return Tile(64, 64, 4, 2 if channels > 64 else 3)


def _dkdv_tile(channels: int, recipe: Recipe, device: torch.device) -> Tile:
    if _p_group(recipe) == 32:
        return Tile(64, 128, 8, 2 if _roomy(device) else 1)
    return Tile(64, 64, 4, 3 if channels <= 64 else 2 if _roomy(device) else 1)


def _roomy(device: torch.device) -> bool:
    """Whether a program can have the 112 KB of shared memory that two stages take (data-centre GPUs: yes; consumer cards: 99 KB)."""
    return device.type != "cuda" or torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 128 * 1024


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _channels_side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(operand: Tensor, rows: int) -> TensorDescriptor:
    """All heads' rows as one matrix, read `rows` at a time by the copy engine."""
    matrix = operand.view(-1, operand.shape[3])
    if matrix.shape[0] >= 2**31:
        raise ValueError(f"{matrix.shape[0]} rows of tokens and heads are more than the copy engine can count (2^31)")
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, matrix.shape[1]])


def _lengths(kv_len_B: Tensor | None, batch: int, tokens: int, device: torch.device) -> Tensor:
    """As kernels read them: int32, side by side (a slice or an expanded number isn't)."""
    return torch.full((batch,), tokens, dtype=torch.int32, device=device) if kv_len_B is None else kv_len_B.to(torch.int32).contiguous()


def _quantised_q(q_BNHd: Tensor, recipe: Recipe, keep_codes: bool, mean: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    lengths = _lengths(None, q_BNHd.shape[0], q_BNHd.shape[1], q_BNHd.device)
    return quantize(q_BNHd, recipe.qk, along_tokens=False, lengths_B=lengths, divisors=recipe.scale_divisors, store_codes=keep_codes, mean=mean,
                    mean_tokens=SMOOTH_Q_TOKENS)  # fmt: skip


def _quantised_k(k_BNHd: Tensor, kv_len: Tensor, recipe: Recipe, keep_codes: bool, mean: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    return quantize(k_BNHd, recipe.qk, along_tokens=False, lengths_B=kv_len, divisors=recipe.scale_divisors, store_codes=keep_codes, mean=mean,
                    mean_tokens=1, permute=_p_group(recipe))  # fmt: skip


def _v_along_tokens(recipe: Recipe) -> bool:
    """If not, they run along channels, as K's do. Either way the operand that is multiplied holds exactly what the codes say."""
    return recipe.v_blocks == "tokens"


def _quantised_v(v_BNHd: Tensor, kv_len: Tensor, recipe: Recipe, keep_codes: bool) -> tuple[Tensor, list[Tensor]]:
    return quantize(v_BNHd, recipe.pv, along_tokens=_v_along_tokens(recipe), lengths_B=kv_len, divisors=recipe.scale_divisors,
                    store_codes=keep_codes, permute=_p_group(recipe))  # fmt: skip


def _decoded_qk(codes: list[Tensor], recipe: Recipe, num_queries: int, num_keys: int, channels: int) -> tuple[Tensor, Tensor]:
    q = dequantize(*codes[:2], recipe.qk, along_tokens=False, tokens=num_queries, channels=channels)
    return q, dequantize(*codes[2:4], recipe.qk, along_tokens=False, tokens=num_keys, channels=channels, permute=_p_group(recipe))


def _decoded_v(codes: list[Tensor], recipe: Recipe, num_keys: int, channels: int) -> Tensor:
    return dequantize(*codes, recipe.pv, along_tokens=_v_along_tokens(recipe), tokens=num_keys, channels=channels, permute=_p_group(recipe))
