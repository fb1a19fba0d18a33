"""Models by name from the Hugging Face hub: `org/name`, or `org/name@REVISION`, wherever a setting takes a model's folder.

A name becomes a folder once, before anything else happens (`commands.execute`): the snapshot in huggingface_hub's own cache. What is there whole is
taken as it is, without a word to the network; name a revision (a commit, a tag) to get another. Only what a pipeline of that model needs is fetched:
no other precisions, no formats of other tools. The cache's layout tells where a folder came from, so results can say so (`origin`).
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, TypeVar

from videoqat.config import hub_name
from videoqat.console import say
from videoqat.errors import CheckpointError
from videoqat.models.spec import read_model_json
from videoqat.models.weights import NOT_OURS, check_complete, parts_of, shards_of, stem_of

T = TypeVar("T")
ORIGIN = "videoqat_origin.json"  # in a folder that `convert` wrote: what it was made from


def resolve_models(config: T, *, weights: bool = True) -> T:
    """`config` (a dataclass of settings) with every model that is a hub's name replaced by its folder; see `config.model_setting`.

    Args:
        weights: False: configurations and tokenizers are enough.

    Raises:
        CheckpointError: as `resolve`.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if field.metadata.get("model"):
            changes[field.name] = resolve(value, weights=weights and field.metadata["weights"])
        elif dataclasses.is_dataclass(value):
            changes[field.name] = resolve_models(value, weights=weights)
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            changes[field.name] = [resolve_models(one, weights=weights) for one in value]
    changes = {name: value for name, value in changes.items() if value != getattr(config, name)}
    return dataclasses.replace(config, **changes) if changes else config  # type: ignore[type-var]


def resolve(reference: str, *, weights: bool = True) -> str:
    """The folder that `reference` means: itself, unless it is a name of the hub and no folder here.

    Raises:
        CheckpointError: the hub has no such repository or revision, keeps it behind an agreement, can't be reached, or has it in another form.
    """
    named = hub_name(reference)
    if Path(reference).exists() or named is None:
        return reference
    name, revision = named
    folder = _cached(name, revision)
    if folder is None or _problem(folder, weights) is not None:
        say(f"{reference}: fetching {'what it needs' if weights else 'its configurations'} from the hub")
        folder = _fetch(reference, name, revision, weights)
        problem = _problem(folder, weights)
        if problem is not None:
            raise CheckpointError(f"{reference}: {problem}")
    say(f"{reference}: {folder}")
    return str(folder)


def check_weights(folder: str | Path, *, without: tuple[str, ...] = ()) -> None:
    """`check_complete`, for plans: a hub's snapshot may lack weights, which are fetched before a command runs.

    Raises:
        CheckpointError: as there.
    """
    if "hub" not in origin(folder):
        check_complete(folder, without=without)


def origin(folder: str | Path) -> dict[str, Any]:
    """Where a model's folder came from: `folder`; for a snapshot in a hub's cache `hub` and `commit`; for a converted one what ORIGIN says."""
    path = Path(folder).absolute()
    found: dict[str, Any] = {"folder": str(folder)}
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        found |= {"hub": path.parent.parent.name.removeprefix("models--").replace("--", "/"), "commit": path.name}
    if (path / ORIGIN).is_file():
        found["converted_from"] = read_model_json(path, ORIGIN)
    return found


def _cached(name: str, revision: str) -> Path | None:
    """The snapshot's folder in the cache, whole or not."""
    from huggingface_hub import constants, try_to_load_from_cache

    index = try_to_load_from_cache(name, "model_index.json", cache_dir=constants.HF_HUB_CACHE, revision=revision)
    return Path(index).parent if isinstance(index, str) else None


def _problem(folder: Path, weights: bool) -> str | None:
    """What the folder lacks; None if nothing."""
    try:
        if weights:
            check_complete(folder)
        else:
            for part, (library, _) in parts_of(folder).items():
                if stem_of(part, library) is not None:
                    read_model_json(folder, f"{part}/config.json")
    except CheckpointError as error:
        return str(error)
    return None


def _fetch(reference: str, name: str, revision: str, weights: bool) -> Path:
    """Downloads first the small files, which say what else is needed, then that."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub

    try:
        listed = [sibling.rfilename for sibling in HfApi().model_info(name, revision=revision).siblings or []]
        if "model_index.json" not in listed:
            raise CheckpointError(f"{reference} is no diffusers pipeline: the repository has no model_index.json; its names often end in -Diffusers")
        small = [path for path in listed if Path(path).suffix not in (".safetensors", *NOT_OURS)]
        wanted = [path for path in small if path.count("/") == 1 or path in ("model_index.json", "videoqat.json", ORIGIN)]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
        if weights:
            needed = _weights_wanted(reference, folder, listed)
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=needed)) if needed else folder
        return folder
    except hub.GatedRepoError as error:
        raise CheckpointError(
            f"{reference}: the repository is gated; accept its terms at https://huggingface.co/{name}, then hf auth login"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(f"{reference}: the hub has {name}, but no revision {revision!r}") from error
    except hub.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{reference} is neither a folder here nor a repository of the hub (or a private one: then hf auth login); legal: a diffusers folder, "
            "org/name, org/name@REVISION"
        ) from error
    except hub.OfflineModeIsEnabled as error:
        raise CheckpointError(f"{reference} is not whole in the cache, and the hub may not be asked: HF_HUB_OFFLINE is set") from error
    except (OSError, hub.HTTPError) as error:  # type: ignore[attr-defined]
        said = re.sub(r"\s+", " ", str(error))[:200]
        raise CheckpointError(
            f"{reference} is neither a folder here nor whole in the cache, and the hub can't be reached: {type(error).__name__}: {said}"
        ) from error


def _weights_wanted(reference: str, folder: Path, listed: list[str]) -> list[str]:
    """Which of the repository's weight files the pipeline needs.

    Raises:
        CheckpointError: a part has none that can be read, or a shard isn't in the repository.
    """
    wanted = []
    for part, (library, _) in parts_of(folder).items():
        stem = stem_of(part, library)
        if stem is None:
            continue
        index = f"{part}/{stem}.safetensors.index.json"
        names = [f"{part}/{name}" for name in shards_of(read_model_json(folder, index), index)] if index in listed else [f"{part}/{stem}.safetensors"]
        absent = [name for name in names if name not in listed]
        if absent:
            others = [name for name in listed if name.startswith(f"{part}/") and Path(name).suffix in NOT_OURS]
            only = f"; it has {others[0]}, a format that isn't read because such a file can run any program" if others else ""
            raise CheckpointError(f"{reference}: the repository has no {absent[0]}{only}")
        wanted += names
    return wanted
