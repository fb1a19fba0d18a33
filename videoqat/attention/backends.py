"""Which kernel serves a call, why, and what really ran.

A kernel is a module (or an object) with `describe(recipe, device_type)` (whether its arithmetic is native, and why one would choose it: for
the receipt), `BY_NAME_ONLY` (device types on which `auto` passes it by), `why_not(recipe, device, dtype, head_dim, training)` (None, or why
it can't serve), `forward` and `backward`, and `keeps` and `empty_kept` (what the one leaves for the other); those that quantise also `encode` and
`forward_coded` (`coded.py`). A new one is its file and one line in `KERNELS`, which is in order of preference.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

import torch

from videoqat.attention import cuda_backend, sdpa_backend, torch_backend, triton_backend
from videoqat.errors import AttentionError
from videoqat.recipes import AttentionRecipe, get_recipe

KERNELS: dict[str, ModuleType | cuda_backend.CudaKernel] = {
    "sdpa": sdpa_backend,
    "cuda_nvfp4": cuda_backend.NATIVE,
    "cuda_nvfp4_emulated": cuda_backend.EMULATED,
    "triton": triton_backend,
    "torch": torch_backend,
}


@dataclass(frozen=True)
class Receipt:
    """What serves, or served, attention.

    Attributes:
        kernel: key of `KERNELS`.
        native: True if the hardware computes in the recipe's formats; False if they are emulated.
        reason: why this kernel.
        device: such as `cpu` or `cuda:0`.
        recipe: the recipe's name.
        calls: how often it ran while being recorded; 0 for a receipt that was resolved and not run.
    """

    kernel: str
    native: bool
    reason: str
    device: str
    recipe: str
    calls: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for reports."""
        return asdict(self)


def resolve(
    recipe: AttentionRecipe | str, device: torch.device | str, dtype: torch.dtype, head_dim: int, kernel: str = "auto", training: bool = False
) -> Receipt:
    """The kernel that `attention` will use for such a call.

    Args:
        kernel: `auto` takes the first of `KERNELS` that can serve; a name insists on that one.
        training: whether a backward will follow.

    Raises:
        AttentionError: no such kernel, or it can't serve this call; says why, and which can.
    """
    recipe, device = get_recipe(recipe), str(device)
    if kernel not in ("auto", *KERNELS):
        raise AttentionError(f"kernel={kernel!r} does not exist; legal: auto, {', '.join(KERNELS)}")
    device_type = device.split(":")[0]
    obstacles = {name: module.why_not(recipe, device, dtype, head_dim, training) for name, module in KERNELS.items()}
    for name, module in KERNELS.items():
        if obstacles[name] is None and name != kernel and device_type in module.BY_NAME_ONLY:
            obstacles[name] = f"on {device_type} it serves only when asked for by name"
    able = [name for name, obstacle in obstacles.items() if obstacle is None]
    if not able:
        raise AttentionError(f"no kernel serves recipe {recipe.name!r} on {device}: {'; '.join(f'{k}: {why}' for k, why in obstacles.items())}")
    passed_by = ""
    if kernel == "auto":
        chosen, asked = able[0], ""
        if chosen == "triton" and device_type == "cuda" and not training and cuda_backend.gpu_has_fp4(device):
            passed_by = f"; cuda_nvfp4 doesn't serve here: {obstacles['cuda_nvfp4']}"
        if chosen == "torch" and device_type != "cpu" and obstacles["triton"] is not None:  # slow there: say why the fast one doesn't serve
            passed_by = f"; triton doesn't serve here: {obstacles['triton']}"
    elif kernel in able:
        chosen, asked = kernel, "asked for by name; "
    else:
        raise AttentionError(f"kernel={kernel!r} can't serve recipe {recipe.name!r} on {device}: {obstacles[kernel]}; would work: {', '.join(able)}")
    native, reason = KERNELS[chosen].describe(recipe, device_type)
    return Receipt(chosen, native, asked + reason + passed_by, device, recipe.name)


_recorders: list[list[Receipt]] = []
_recorders_lock = threading.Lock()


@contextlib.contextmanager
def record_receipts() -> Iterator[list[Receipt]]:
    """Yields a list that fills with a receipt for each kernel, device and recipe that attention really runs with, in any thread, meanwhile.

    They are written where the kernel is run: by the operator's implementation, also in compiled graphs; for `sdpa`, which is no operator of
    ours, by the call, and in a compiled graph once when it is traced. Forward passes only; a recomputed one counts again.
    """
    receipts: list[Receipt] = []
    with _recorders_lock:
        _recorders.append(receipts)
    try:
        yield receipts
    finally:
        with _recorders_lock:
            _recorders[:] = [other for other in _recorders if other is not receipts]


def record(receipt: Receipt) -> None:
    """Adds one call to every open `record_receipts`."""
    if not _recorders:
        return
    with _recorders_lock:
        for receipts in _recorders:
            for i, known in enumerate(receipts):
                if replace(known, calls=0) == receipt:
                    receipts[i] = replace(known, calls=known.calls + 1)
                    break
            else:
                receipts.append(replace(receipt, calls=1))
