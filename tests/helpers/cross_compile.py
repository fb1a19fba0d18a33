"""Compiles the Triton kernels for a GPU that isn't here: `python cross_compile.py CAPABILITY KERNEL` prints the PTX.

A program of its own, because Triton decides when it is imported whether it interprets.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from videoqat_kernels.triton_ops.attn_backward import attn_backward_dkdv_kernel, attn_backward_dq_kernel, prepare_gradient_kernel
from videoqat_kernels.triton_ops.attn_forward import attn_forward_kernel
from videoqat_kernels.triton_ops.quantize import _dequantize_kernel, _quantize_kernel
from videoqat_kernels.triton_ops.sagebwd_kernels import int8_dkdv_kernel, int8_dq_kernel, int8_forward_kernel

QUANTIZE = {"DP": 128, "TILE": 32, "BLOCK": 16, "FORMAT": "nvfp4", "PERMUTE": 16}
BOTH = {"STORE_CODES": True, "STORE_OPERAND": True}
ATTENTION = {"D": 128, "DP": 128, "BLOCK_M": 64, "BLOCK_N": 64, "GROUP": 16, "CAUSAL": True}
INT8 = {"D": 128, "DP": 128, "CAUSAL": True}
FORWARD = {"P_FORMAT": "nvfp4", "QUANTISED_SUM": False, "TWO_LEVEL": False, "HAS_BIAS": False, "MAXIMUM_FIRST": False}
KERNELS = {
    "quantize": (_quantize_kernel, QUANTIZE | BOTH | {"ALONG_TOKENS": False, "INVERSE_DIVISORS": (1 / 6, 1 / 4), "SUBTRACT_MEAN": 0}),
    "encode": (
        _quantize_kernel,
        QUANTIZE | {"ALONG_TOKENS": True, "INVERSE_DIVISORS": (1 / 6,), "SUBTRACT_MEAN": 0, "STORE_CODES": True, "STORE_OPERAND": False},
    ),
    "dequantize": (_dequantize_kernel, QUANTIZE | {"ALONG_TOKENS": True}),
    "forward": (attn_forward_kernel, ATTENTION | FORWARD),
    "prepare_gradient": (prepare_gradient_kernel, {"D": 128, "DP": 128, "TILE": 64}),
    "dq": (attn_backward_dq_kernel, ATTENTION | {"FIND_D": True, "P_IN_DS": "exact"}),
    "dkdv": (attn_backward_dkdv_kernel, ATTENTION | {"P_IN_DV": "nvfp4", "P_IN_DS": "exact"}),
    "int8_forward": (int8_forward_kernel, INT8 | {"BLOCK_M": 128}),
    "int8_dq": (int8_dq_kernel, INT8),
    "int8_dkdv": (int8_dkdv_kernel, INT8),
}
BF16 = ("X", "OPERAND", "O", "DO", "DO_C", "DQ", "DK", "DV", "V")
FP32 = ("M", "L", "LSE", "SHIFT", "C", "D_C", "MEAN", "BIAS", "Q_SCALES", "K_SCALES", "V_SCALES", "DO_SCALES", "LOG2_SUM", "DELTA")
FP32_SCALARS = ("log2_scale", "softmax_scale", "gain")


class NoGpu(DriverBase):
    """What asks for the current GPU while compiling hears of the target."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> None:
        return None

    def get_benchmarker(self) -> None:
        return None


def argument_type(name: str, constants: dict, int8: bool) -> str:
    """Triton's name for the type of a kernel's argument."""
    if name in constants:
        return "constexpr"
    if name.startswith("desc_"):
        rows = constants.get("BLOCK_M" if name in ("desc_q", "desc_do") else "BLOCK_N", 64)
        return f"tensordesc<{'i8' if int8 else 'bf16'}[{rows}, {constants['DP']}]>"
    if name in ("CODES", "SCALES"):
        return "*u8"
    if name in ("LENGTHS", "KV_LEN"):
        return "*i32"
    return "*bf16" if name in BF16 else "*fp32" if name in FP32 else "fp32" if name in FP32_SCALARS else "i32"


def compile_for(capability: int, kernel: str) -> str:
    """PTX of `kernel` for compute capability `capability` (90, 100, 120)."""
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(NoGpu(target))
    function, constants = KERNELS[kernel]
    names = function.arg_names
    signature = {name: argument_type(name, constants, kernel.startswith("int8")) for name in names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()}, divisible)
    return triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 2}).asm["ptx"]


if __name__ == "__main__":
    print(compile_for(int(sys.argv[1]), sys.argv[2]))
