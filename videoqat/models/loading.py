"""A family's transformer from its folder: whole and checked, from scratch, or as a shape without numbers."""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videoqat.models.spec import read_model_json
from videoqat.models.weights import check_weights, weight_files
from videoqat.parallel.sharding import kept_in_fp32


def load_transformer(model_class: Any, folder: str | Path, component: str, *, dtype: torch.dtype, from_scratch: bool, seed: int) -> nn.Module:
    """`ModelFamily.load_transformer` for a diffusers class; modules that diffusers keeps in float32 stay so whatever `dtype`.

    Raises:
        CheckpointError: no configuration, or weights that don't fit it to the last key and shape.
    """
    config = read_model_json(folder, f"{component}/config.json")
    if from_scratch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class.from_config(config)
        kept, stored = model._keep_in_fp32_modules or (), model.state_dict().keys()
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            # As `from_pretrained` does: what no file holds, such as rotary tables, stays as it was made.
            if name in stored and tensor.is_floating_point() and not any(part in name.split(".") for part in kept):
                tensor.data = tensor.data.to(dtype)
        return model.eval()
    model = build(model_class, folder, component)
    expected = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    check_weights(Path(folder) / component, shapes, tuple(model_class._keys_to_ignore_on_load_unexpected or ()))
    kept = kept_in_fp32(model)
    fp32 = {name for name, parameter in model.named_parameters() if parameter in kept}
    model.load_state_dict(_read(Path(folder) / component, {name: torch.float32 if name in fp32 else dtype for name in expected}), assign=True)
    return model


def _read(folder: Path, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """The tensors in a folder's weight files, those of floating point numbers in the dtypes wanted.

    Each is copied out of its file, which is closed before the next is opened: the host needs room for what is returned and one file. (diffusers'
    `from_pretrained` leaves tensors that need no other dtype in their files; a few small ones in each keep all files in memory, whole.)
    """
    from safetensors import safe_open

    found = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as handle:
            for name in dtypes.keys() & handle.keys():
                tensor = handle.get_tensor(name)
                found[name] = tensor.to(dtypes[name] if tensor.is_floating_point() else tensor.dtype, copy=True)
    return found


def build(model_class: Any, folder: str | Path, component: str) -> nn.Module:
    """`ModelFamily.build` for a diffusers class: what its configuration says, without numbers. Buffers, which no file holds, are real ones."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: nn.Module = model_class.from_config(read_model_json(folder, f"{component}/config.json"))
    return model.eval()
