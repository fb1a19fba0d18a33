"""A family's transformer from its folder: whole and checked, from scratch, or as a shape without numbers."""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from videoqat.models.spec import read_model_json
from videoqat.models.weights import check_weights


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
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in model_class.from_config(config).state_dict().items()}
    check_weights(Path(folder) / component, shapes, tuple(model_class._keys_to_ignore_on_load_unexpected or ()))
    return model_class.from_pretrained(folder, subfolder=component, dtype=dtype, local_files_only=True).eval()


def build(model_class: Any, folder: str | Path, component: str) -> nn.Module:
    """`ModelFamily.build` for a diffusers class: what its configuration says, without numbers. Buffers, which no file holds, are real ones."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model: nn.Module = model_class.from_config(read_model_json(folder, f"{component}/config.json"))
    return model.eval()
