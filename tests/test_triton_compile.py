"""The kernels compile for GPUs that aren't here, to the instructions they are meant to use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")
ROOT = Path(__file__).parents[1]


def ptx(capability: int, kernel: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT / "kernels")}
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "cross_compile.py"), str(capability), kernel]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_hopper(kernel):
    code = ptx(90, kernel)
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in code
    assert "e2m1" not in code
    # Row sums and maxima may cross threads, blocks of P may not: they would take two shuffles for each of 32 elements, twice.
    assert code.count("shfl.sync") <= 16


INT8_PRODUCT = {90: "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8", 100: "mma.sync.aligned.m16n8k32", 120: "mma.sync.aligned.m16n8k32"}
BF16_PRODUCT = {90: "m64n64k16.f32.bf16.bf16", 100: "tcgen05.mma.cta_group::1.kind::f16", 120: "m16n8k16.row.col.f32.bf16.bf16.f32"}


@pytest.mark.parametrize(
    ("capability", "kernel"), [(90, "int8_forward"), (90, "int8_dq"), (90, "int8_dkdv"), (100, "int8_dq"), (100, "int8_dkdv"), (120, "int8_forward")]
)
def test_sagebwd_multiplies_integers(capability, kernel):
    """All products but dP, which only the backward has."""
    code = ptx(capability, kernel)
    assert INT8_PRODUCT[capability] in code
    assert (BF16_PRODUCT[capability] in code) == (kernel != "int8_forward")


@pytest.mark.parametrize("capability", [100, 120])
@pytest.mark.parametrize("kernel", ["quantize", "forward"])
def test_blackwell_converts_in_hardware(capability, kernel):
    code = ptx(capability, kernel)
    assert "cvt.rn.satfinite.e2m1x2.f32" in code
    assert "cvt.rn.f16x2.e2m1x2" in code
    if kernel == "forward":
        assert ("tcgen05.mma" if capability == 100 else "mma.sync") in code


@pytest.mark.parametrize("kernel", ["quantize", "encode"])
def test_codes_alone_write_no_operand(kernel):
    """What sequence parallelism sends is made without the copy that attention multiplies: the second parameter is never read."""
    assert ("[_quantize_kernel_param_1]" in ptx(90, kernel)) == (kernel == "quantize")
