"""Weights in files: which files a model's folder should have, and whether they hold what its configuration says. No weights are loaded here.

diffusers and transformers lay a pipeline out alike: `model_index.json` names the parts, each part has a folder with its configuration and, if it is
a model, one .safetensors file, or several with an index that says which tensor lies in which.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from videoqat.errors import CheckpointError
from videoqat.models.spec import read_model_json

DIFFUSERS, TRANSFORMERS = "diffusion_pytorch_model", "model"  # how their weight files begin
NOT_OURS = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf")  # weights in formats that are not read here
FUSED = ("to_qkv", "to_kv", "to_added_qkv", "to_added_kv")


def weight_files(folder: str | Path, stem: str = DIFFUSERS) -> list[Path]:
    """The safetensors files that hold a model's weights: those its index names or, without an index, the only one. Variants (.fp16) don't count.

    Raises:
        CheckpointError: none, or a shard that the index names is missing.
    """
    folder = Path(folder)
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        shards = shards_of(read_model_json(folder, index.name), index)
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {missing[0]} is missing (and {len(missing) - 1} more of {len(shards)} shards that {index.name} names)")
        return [folder / name for name in shards]
    if single.is_file():
        return [single]
    others = sorted(path.name for path in folder.glob("*") if path.suffix in NOT_OURS)
    if others:
        raise CheckpointError(
            f"{folder} has its weights in {others[0]} only, which isn't read: such a file can run any program when it is opened, or is in a format "
            f"of other tools; legal: {single.name}, or its shards (torch.load(..., weights_only=True) and safetensors.torch.save_file convert a .bin)"
        )
    raise CheckpointError(f"{folder} has no weights: {single.name}, or its shards and {index.name}, should be there")


def shards_of(index: dict[str, Any], where: object) -> list[str]:
    """File names, in order, that an index of weights names.

    Raises:
        CheckpointError: it names none, or one outside of its folder.
    """
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or any(not isinstance(name, str) or Path(name).name != name for name in names.values()):
        raise CheckpointError(f"{where} is no index of weights: weight_map must map the tensors' names to file names")
    return sorted(set(names.values()))


def shapes_in(file: str | Path) -> dict[str, torch.Size]:
    """Name -> shape of every tensor in a safetensors file, from its header.

    Raises:
        CheckpointError: it is torn, or none.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            return {name: torch.Size(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118 - safe_open is no mapping
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{file} is torn or no safetensors file: {error}") from error


def check_weights(folder: Path, expected: Mapping[str, torch.Size], ignored: tuple[str, ...] = ()) -> None:
    """Compares names, shapes and kinds of numbers in the headers of a diffusers model's files with what the model has.

    Args:
        folder: see `weight_files`.
        expected: the model's state dict, name to shape.
        ignored: parts of names that may be in the files and not in the model.

    Raises:
        CheckpointError: no weights, a torn file, or the first key that is missing, of another shape, unknown, or of integers, and how many there are.
    """
    found: dict[str, torch.Size] = {}
    integers: dict[str, str] = {}
    for file in weight_files(folder):
        found |= shapes_in(file)
        integers |= _integers_in(file)
    compare(folder, found, expected, ignored)
    refuse_integers(folder, {name: integers[name] for name in expected if name in integers})


def _integers_in(file: Path) -> dict[str, str]:
    """Name -> dtype of the tensors in a safetensors file that don't hold floating point numbers, from its header."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        dtypes = {name: handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118 - safe_open is no mapping
    return {name: dtype for name, dtype in dtypes.items() if not dtype.startswith(("F", "BF"))}


def refuse_integers(where: object, integers: Mapping[str, str]) -> None:
    """Raises CheckpointError where `integers` (name -> dtype) holds a weight of the files at `where`."""
    for name, dtype in integers.items():
        raise CheckpointError(
            f"{where}: {name} holds integers, {dtype} (and {len(integers) - 1} more); weights that another tool has quantised aren't read; legal: "
            "floating point numbers"
        )


def compare(where: object, found: Mapping[str, torch.Size], expected: Mapping[str, torch.Size], ignored: tuple[str, ...] = ()) -> None:
    """Requires that tensors `found` in the files at `where` are those that a model has; see `check_weights`."""
    missing = [key for key in expected if key not in found]
    unknown = [key for key in found if key not in expected and not any(part in key for part in ignored)]
    misshapen = [key for key in expected if key in found and found[key] != expected[key]]
    fused = [key for key in unknown if any(part in FUSED for part in key.split("."))]
    if fused:
        raise CheckpointError(
            f"{where}: {fused[0]} is a fused projection (and {len(fused) - 1} more); the weights are read as diffusers publishes them, with to_q, "
            "to_k and to_v: call unfuse_qkv_projections() before save_pretrained()"
        )
    if missing:
        raise CheckpointError(f"{where}: weights lack {missing[0]} (and {len(missing) - 1} more); they are of another model or incomplete")
    if misshapen:
        key = misshapen[0]
        shapes = f"{tuple(found[key])} where the configuration says {tuple(expected[key])}"
        raise CheckpointError(f"{where}: {key} has shape {shapes} (and {len(misshapen) - 1} more)")
    if unknown:
        raise CheckpointError(f"{where}: weights hold {unknown[0]} (and {len(unknown) - 1} more), which this model doesn't have")


def parts_of(folder: str | Path) -> dict[str, tuple[str, str]]:
    """Part of a pipeline -> (library, class), from model_index.json, without those that it leaves out."""
    index = read_model_json(folder, "model_index.json")
    return {name: (kind[0], kind[1]) for name, kind in index.items() if isinstance(kind, list) and len(kind) == 2 and kind[0] and kind[1]}


def stem_of(part: str, library: str) -> str | None:
    """How the weight files of a pipeline's part begin; None for a part that has none."""
    if part.startswith(("scheduler", "guider", "tokenizer", "processor", "feature_extractor", "image_processor")):
        return None
    return TRANSFORMERS if library == "transformers" else DIFFUSERS


def check_complete(folder: str | Path, *, without: tuple[str, ...] = ()) -> None:
    """Requires every part that model_index.json names to be there with its configuration and all its weight files; none is opened.

    Args:
        folder: a pipeline's.
        without: parts that won't be needed.

    Raises:
        CheckpointError: names the first file that is missing.
    """
    for part, (library, kind) in parts_of(folder).items():
        if part in without:
            continue
        if not (Path(folder) / part).is_dir() or not any((Path(folder) / part).iterdir()):
            raise CheckpointError(f"{folder} is no complete pipeline's folder: {part}/ ({kind}) is not there or empty")
        stem = stem_of(part, library)
        if stem is not None:
            read_model_json(folder, f"{part}/config.json")
            weight_files(Path(folder) / part, stem)


def num_weights(folder: str | Path, stem: str = DIFFUSERS) -> int:
    """How many numbers a model's files hold, from their headers.

    Raises:
        CheckpointError: as `weight_files`, or one of them is torn.
    """
    return sum(shape.numel() for file in weight_files(folder, stem) for shape in shapes_in(file).values())
