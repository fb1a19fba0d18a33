"""`videoqat convert`: a transformer in one .safetensors file, as its authors or other tools publish it, becomes part of a pipeline's folder.

Afterwards everything takes the folder as any other, checked to the last name and shape.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videoqat.config import ConvertConfig, choice
from videoqat.console import say
from videoqat.errors import CheckpointError
from videoqat.files import atomic_folder, check_writable, writable_folder, write_json
from videoqat.models.hub import ORIGIN, check_weights, origin
from videoqat.models.spec import family_of
from videoqat.models.weights import compare, refuse_integers, shapes_in
from videoqat.provenance import provenance


def plan(config: ConvertConfig) -> dict[str, Any]:
    """What `convert(config)` would make, checked as far as it goes without reading weights.

    Raises:
        UserError: whatever `convert` would refuse before it reads weights.
    """
    check_writable("out", Path(config.out).parent)
    family, names = family_of(config.model), shapes_in(Path(config.transformer_file))
    choice("component", config.component, family.components(config.model))
    transformer = family.build(config.model, config.component)
    own = _is_diffusers(names, transformer)
    if not own:
        _mapping(transformer, config.transformer_file)
    check_weights(config.model, without=(config.component,))
    return {"out": config.out, "transformer": type(transformer).__name__, "names": "diffusers" if own else "original", "tensors": len(names)}


def convert(config: ConvertConfig) -> dict[str, Any]:
    """Writes the folder `config.out`: the pipeline `config.model` with the weights of `config.transformer_file` as its `config.component`.

    Returns:
        `plan`'s, and `parameters`, `dtypes` of what was written, `origin`: what stands in the folder's videoqat_origin.json.

    Raises:
        CheckpointError: a file that is torn, or that diffusers can't read for this transformer, or weights of another model; nothing is written.
    """
    from safetensors.torch import load_file

    planned = plan(config)
    writable_folder("out", Path(config.out).parent)
    source, file = Path(config.model), Path(config.transformer_file)
    transformer = family_of(source).build(source, config.component)
    weights: dict[str, Tensor] = load_file(file)
    if planned["names"] == "original":
        try:
            weights = _mapping(transformer, file)(checkpoint=weights, config=dict(transformer.config))  # type: ignore[arg-type]
        except (KeyError, RuntimeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{file} is no {planned['transformer']} as its authors name the weights: {type(error).__name__}: {said}") from error
    expected = {name: tensor.shape for name, tensor in transformer.state_dict().items()}
    ignored = tuple(getattr(transformer, "_keys_to_ignore_on_load_unexpected", None) or ())
    compare(file, {name: tensor.shape for name, tensor in weights.items()}, expected, ignored)
    refuse_integers(file, {name: str(weights[name].dtype) for name in expected if not weights[name].is_floating_point()})
    transformer.load_state_dict({name: weights[name] for name in expected}, assign=True)
    record = {"base": origin(source), "file": str(file.absolute()), "component": config.component, "provenance": provenance("cpu")}
    with atomic_folder(config.out) as aside:
        # A record of training tells of the weights that are left behind.
        left = {str(source): {config.component, "videoqat.json"}}
        shutil.copytree(source, aside, dirs_exist_ok=True, ignore=lambda folder, _: left.get(str(folder), set()))
        transformer.save_pretrained(aside / config.component, max_shard_size="5GB")  # type: ignore[operator]
        write_json(aside / ORIGIN, record)
    parameters = sum(p.numel() for p in transformer.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in transformer.parameters()})
    say(f"{config.out}: {config.component} with {parameters:,} weights ({', '.join(dtypes)}) from {file}")
    return planned | {"parameters": parameters, "dtypes": dtypes, "origin": record}


def _is_diffusers(names: dict[str, torch.Size], transformer: nn.Module) -> bool:
    """Whether the names are diffusers' own, most of them: if some are wrong, an error should tell which."""
    own = transformer.state_dict().keys()
    return len(own & names.keys()) > len(own) / 2


def _mapping(transformer: nn.Module, file: object) -> Any:
    """diffusers' function from original names to its own.

    Raises:
        CheckpointError: it has none for this class.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    known = SINGLE_FILE_LOADABLE_CLASSES.get(type(transformer).__name__)
    if known is None:
        raise CheckpointError(
            f"{file} doesn't have diffusers' names of a {type(transformer).__name__}'s weights, and diffusers knows no others for this class; "
            "legal: a file with its names, or a folder that was converted by diffusers' own scripts"
        )
    return known["checkpoint_mapping_fn"]
