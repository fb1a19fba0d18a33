"""The kernels `cuda_nvfp4` and `cuda_nvfp4_emulated`: NVFP4 attention in CUDA C++, for inference.

The first multiplies with the FP4 tensor cores of sm_120a and sm_121a (RTX 50 series, RTX PRO Blackwell, DGX Spark). The second is the same source
with that one instruction emulated, on any NVIDIA GPU from sm_80 on: slow, there to prove the first right, and never taken unless asked for by
name.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from videoqat.errors import AttentionError
from videoqat.recipes import AttentionRecipe

MAX_DIVISORS = 8


@torch.compiler.assume_constant_result  # torch.compile must not trace into the driver and ctypes
def _missing(product: str, device: str) -> str | None:
    if not device.startswith("cuda") or torch.version.hip is not None:
        return "it runs on NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if product == "native" and not has_fp4(capability):
        return f"it needs the FP4 tensor cores of sm_120 or sm_121, and this GPU is sm_{capability[0]}{capability[1]}"
    if capability < (8, 0):
        return "it runs on NVIDIA GPUs from sm_80 on"
    try:
        from videoqat_kernels.cuda.library import LibraryError, load
    except ImportError:
        return "videoqat_kernels is not installed"
    try:
        load(product)
    except LibraryError as error:
        return str(error)
    return None


def has_fp4(capability: tuple[int, int]) -> bool:
    """Whether GPUs of this compute capability multiply NVFP4 as the native kernel does (sm_100 and its kin do it in another way)."""
    return capability in ((12, 0), (12, 1))


@torch.compiler.assume_constant_result
def gpu_has_fp4(device: str) -> bool:
    """Whether the GPU `device` is one that `cuda_nvfp4` is made for, whether it is built or not."""
    return torch.version.hip is None and torch.cuda.is_available() and has_fp4(torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class CudaKernel:
    """One of the two, with the functions that `backends.KERNELS` asks for.

    Attributes:
        product: `native` or `emulated`: which of the libraries.
        BY_NAME_ONLY: device types on which `auto` passes it by.
    """

    product: str
    BY_NAME_ONLY: tuple[str, ...]

    def describe(self, recipe: AttentionRecipe, device_type: str) -> tuple[bool, str]:
        """Whether its arithmetic is native, and why one would choose it."""
        if self.product == "native":
            return True, "CUDA: NVFP4 products on the GPU's FP4 tensor cores"
        return False, "CUDA, with the FP4 tensor core's product emulated by INT8 products"

    def why_not(self, recipe: AttentionRecipe, device: str, dtype: torch.dtype, head_dim: int, training: bool) -> str | None:
        """Inference with recipes that are NVFP4 throughout, in bf16 or fp16, with head_dim 64 or 128."""
        if training:
            return "it serves inference only"
        if (recipe.qk, recipe.pv) != ("nvfp4", "nvfp4"):
            return f"it multiplies nvfp4, not qk={recipe.qk} and pv={recipe.pv}"
        if recipe.v_blocks != "tokens":
            return f"its FP4 products take V in blocks along tokens alone, not v_blocks={recipe.v_blocks}"
        if recipe.twice:
            return f"it multiplies each operand once, not twice={','.join(recipe.twice)}"
        if recipe.two_level_p:
            return "it has no two_level_p"
        if len(recipe.scale_divisors) > MAX_DIVISORS:
            return f"it tries at most {MAX_DIVISORS} scale divisors, not {len(recipe.scale_divisors)}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bf16 and fp16, not {dtype}"
        if head_dim not in (64, 128):
            return f"head_dim={head_dim} is not 64 or 128"
        return _missing(self.product, device)

    def forward(
        self,
        q_BNHd: Tensor,
        k_BNHd: Tensor,
        v_BNHd: Tensor,
        kv_len_B: Tensor | None,
        recipe: AttentionRecipe,
        scale: float,
        causal: bool,
        training: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """out (B, Nq, H, d) in q's dtype; lse, m and l (B, H, Nq) fp32; nothing for a backward."""
        from videoqat_kernels.cuda.attention import forward

        self._check_scale(scale)
        return *forward(self.product, q_BNHd, k_BNHd, v_BNHd, kv_len_B, recipe, scale, causal), []

    def encode(self, x_BNHd: Tensor, lengths_B: Tensor | None, format: str, along_tokens: bool, divisors: tuple[float, ...]) -> list[Tensor]:
        """Codes and scales of x, in the layout of `coded.py`."""
        from videoqat_kernels.cuda.attention import encode

        return encode(self.product, x_BNHd, lengths_B, along_tokens, divisors)

    def forward_coded(
        self,
        codes: list[Tensor],
        v_BNHd: Tensor | None,
        kv_len_B: Tensor | None,
        head_dim: int,
        dtype: torch.dtype,
        recipe: AttentionRecipe,
        scale: float,
        training: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """`forward` from codes of q and k, and of v or v itself."""
        from videoqat_kernels.cuda.attention import forward_coded

        self._check_scale(scale)
        return *forward_coded(self.product, codes, v_BNHd, kv_len_B, head_dim, dtype, recipe, scale), []

    def _check_scale(self, scale: float) -> None:
        if not scale > 0:
            raise AttentionError(f"scale={scale} must be positive for the CUDA kernels; kernel 'torch' takes any")


NATIVE = CudaKernel("native", ())
EMULATED = CudaKernel("emulated", ("cpu", "cuda"))
