"""The kernel `triton`: Attn-QAT's forward and backward in Triton, for training and for generating on any NVIDIA GPU from sm_80 on.

The arithmetic of 4 bits is emulated: operands hold exactly what the formats can say, products are bf16 with fp32 accumulators. Kept for the
backward are the codes of q, k and v (4.5 bits a number, where their format has codes) and the output, which the next layer holds anyway. SageBwd's
INT8 products are real ones; it keeps the codes of q and k, v itself, and the output.

On the CPU it runs only under Triton's interpreter, for tests, and only when asked for by name.
"""

import importlib.util

import torch
from torch import Tensor

from videoqat.errors import AttentionError
from videoqat.recipes import AttentionRecipe

BY_NAME_ONLY = ("cpu",)


@torch.compiler.assume_constant_result  # torch.compile must not trace into Triton and the driver
def _missing(device: str) -> str | None:
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("videoqat_kernels") is None:
        return "triton or videoqat_kernels is not installed"
    if device == "cpu":
        import triton

        if not triton.knobs.runtime.interpret:
            return "it runs on NVIDIA GPUs"
    elif not device.startswith("cuda") or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "it runs on NVIDIA GPUs from sm_80 on"
    return None


def describe(recipe: AttentionRecipe, device_type: str) -> tuple[bool, str]:
    """Whether its arithmetic is native, and why one would choose it."""
    if recipe.qk == "int8" and device_type == "cuda":
        return True, "Triton on an NVIDIA GPU: INT8 products, but for dP, which the recipe wants in 16 bits"
    return False, "Triton on an NVIDIA GPU: emulates the quantised arithmetic with bf16 products"


def why_not(recipe: AttentionRecipe, device: str, dtype: torch.dtype, head_dim: int, training: bool) -> str | None:
    """Quantised recipes up to head_dim 128; in training those without smooth_q and two_level_p, which serve models as they are."""
    if not recipe.is_quantised:
        return "it serves quantised recipes"
    missing = _missing(device)
    if missing:
        return missing
    if head_dim > 128:
        return f"head_dim={head_dim} is more than 128"
    if head_dim <= 16 and recipe.qk.startswith("mxfp") != recipe.pv.startswith("mxfp"):
        return f"head_dim={head_dim} is less than a block of 32, and it pads q and k to that, but not v"
    if recipe.twice:
        return f"it multiplies each operand once, not twice={','.join(recipe.twice)}"
    if training and (recipe.smooth_q or recipe.two_level_p):
        return "it has no backward for smooth_q and two_level_p"
    return None


def keeps(recipe: AttentionRecipe) -> tuple[bool, bool, bool, bool]:
    """Which of q, k, v and out the backward needs besides `kept`."""
    from videoqat_kernels.triton_ops.attention import coded_operands

    if recipe.qk == "int8":  # v itself, because dP is of the V that isn't quantised
        return False, False, True, True
    q, k, v = coded_operands(recipe)
    return not q, not k, not v, True


def empty_kept(q_BNHd: Tensor, k_BNHd: Tensor, recipe: AttentionRecipe) -> list[Tensor]:
    """Tensors like `forward`'s kept ones, with nothing in them."""
    from videoqat_kernels.triton_ops import sagebwd
    from videoqat_kernels.triton_ops.attention import empty_codes

    if recipe.qk == "int8":
        return sagebwd.empty_codes(q_BNHd, k_BNHd)
    return empty_codes(q_BNHd, k_BNHd, recipe)


def forward(
    q_BNHd: Tensor, k_BNHd: Tensor, v_BNHd: Tensor, kv_len_B: Tensor | None, recipe: AttentionRecipe, scale: float, causal: bool, training: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """out (B, Nq, H, d) in q's dtype; lse, m and l (B, H, Nq) fp32; in training the codes of q, k and v."""
    from videoqat_kernels.triton_ops import attention, sagebwd

    if not scale > 0:
        raise AttentionError(f"scale={scale} must be positive for kernel 'triton'; 'torch' takes any")
    run = sagebwd.forward if recipe.qk == "int8" else attention.forward
    result = run(q_BNHd, k_BNHd, v_BNHd, kv_len_B, recipe, scale, causal, keep_codes=training)
    return result.out, result.lse, result.m, result.l, result.codes


def encode(x_BNHd: Tensor, lengths_B: Tensor | None, format: str, along_tokens: bool, divisors: tuple[float, ...]) -> list[Tensor]:
    """Codes and scales of x, in the layout of `coded.py`."""
    from videoqat_kernels.triton_ops import attention

    return attention.encode(x_BNHd, lengths_B, format, along_tokens, divisors)


def forward_coded(
    codes: list[Tensor],
    v_BNHd: Tensor | None,
    kv_len_B: Tensor | None,
    head_dim: int,
    dtype: torch.dtype,
    recipe: AttentionRecipe,
    scale: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """`forward` from codes of q and k, and of v or v itself; in training with v's codes if they were made here."""
    from videoqat_kernels.triton_ops import attention

    result = attention.forward_coded(codes, v_BNHd, kv_len_B, head_dim, dtype, recipe, scale, keep_codes=training)
    return result.out, result.lse, result.m, result.l, result.codes


def backward(
    grad_out_BNHd: Tensor,
    q_BNHd: Tensor | None,
    k_BNHd: Tensor | None,
    v_BNHd: Tensor | None,
    out_BNHd: Tensor | None,
    m_BHN: Tensor,
    l_BHN: Tensor,
    kept: list[Tensor],
    kv_len_B: Tensor | None,
    num_keys: int,
    recipe: AttentionRecipe,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the dtype of q, k, v."""
    from videoqat_kernels.triton_ops import attention, sagebwd

    assert out_BNHd is not None
    if recipe.qk == "int8":
        assert v_BNHd is not None
        return sagebwd.backward(grad_out_BNHd, v_BNHd, out_BNHd, m_BHN, l_BHN, kept, kv_len_B, scale, causal)
    originals = (q_BNHd, k_BNHd, v_BNHd)
    return attention.backward(grad_out_BNHd, out_BNHd, m_BHN, l_BHN, kept, originals, kv_len_B, num_keys, recipe, scale, causal)
