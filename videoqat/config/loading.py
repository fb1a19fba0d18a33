"""From a YAML file and `key=value` settings to a checked configuration."""

import dataclasses
import difflib
import math
import re
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from videoqat.config.checks import require
from videoqat.errors import ConfigError
from videoqat.files import shipped

T = TypeVar("T")


def _read(path: Path, seen: tuple[Path, ...] = ()) -> DictConfig:
    """`path` with what it includes, not yet checked against a schema."""
    if path in seen:
        raise ConfigError(f"{path} includes itself")
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:  # YAML's own errors carry line and column
        raise ConfigError(f"{path} can't be read as YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} must hold a mapping")
    includes = loaded.pop("include", [])
    includes = [includes] if isinstance(includes, str) else includes
    if not isinstance(includes, list | ListConfig) or not all(isinstance(include, str) for include in includes):
        raise ConfigError(f"{path}: include={includes!r} must be a file or a list of files")
    merged = OmegaConf.create({})
    for include in includes:
        target = path.parent / include
        found = target if target.is_file() else shipped(include)
        if found is None:
            raise ConfigError(f"{path}: include {include!r} is not a file beside it nor in configs/")
        merged = typing.cast(DictConfig, OmegaConf.merge(merged, _read(found.resolve(), (*seen, path))))
    return typing.cast(DictConfig, OmegaConf.merge(merged, loaded))


def _check_keys(schema: type, given: DictConfig, prefix: str = "") -> None:
    """Raises ConfigError for the first key that `schema` lacks, with the legal keys and the nearest one."""
    fields = {f.name: f for f in dataclasses.fields(schema)}
    hints = typing.get_type_hints(schema)
    for key in map(str, given):
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f" (did you mean {prefix}{near[0]}?)" if near else ""
            raise ConfigError(f"unknown key {prefix}{key}{hint}; legal keys here: {', '.join(prefix + f for f in fields)}")
        kind = hints[key]
        child = given._get_node(key)
        if dataclasses.is_dataclass(kind):
            keys = ", ".join(f"{prefix}{key}.{f.name}" for f in dataclasses.fields(kind))
            if not isinstance(child, DictConfig) or child._is_none():
                raise ConfigError(f"{prefix}{key}={given[key]!r} is no value but a group; legal keys: {keys}")
            _check_keys(typing.cast(type, kind), child, f"{prefix}{key}.")
        part = next(iter(typing.get_args(kind)), None)  # of a list
        if dataclasses.is_dataclass(part) and isinstance(child, ListConfig) and not child._is_none():
            for i, entry in enumerate(child._iter_ex(resolve=False)):
                if isinstance(entry, DictConfig) and not entry._is_none():
                    _check_keys(typing.cast(type, part), entry, f"{prefix}{key}[{i}].")


def _check_finite(tree: dict[str, Any], prefix: str = "") -> None:
    """Requires every number to be finite."""
    for key, value in tree.items():
        if isinstance(value, dict):
            _check_finite(value, f"{prefix}{key}.")
        require(not isinstance(value, float) or math.isfinite(value), prefix + key, value, "a finite number")


def _check_given(config: Any, prefix: str = "") -> None:
    """Requires that what must be given isn't empty: `out=$OUT`, where OUT isn't set, does not mean the folder in which one happens to be."""
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        require(value != "" or field.default != MISSING, key, value, "a name or a path (the folder that you are in is `.`)")
        parts = [(f"{key}[{i}].", part) for i, part in enumerate(value)] if isinstance(value, list) else [(f"{key}.", value)]
        for inner, part in parts:
            if dataclasses.is_dataclass(part):
                _check_given(part, inner)


def _kind(schema: Any, key: str) -> Any:
    """The annotated type of the setting `key` (dotted) of `schema`; None if there is no such setting."""
    for part in key.split("."):
        schema = typing.get_type_hints(schema).get(part) if dataclasses.is_dataclass(schema) else None
    return schema


def _parse_overrides(schema: type, overrides: list[str]) -> DictConfig:
    """`key=value` settings as a tree. Text is taken as it is typed (a prompt may hold `: ` or `[`); anything else is read as YAML."""
    given = OmegaConf.create({})
    for override in overrides:
        key, equals, value = override.partition("=")
        if not key or not equals:
            raise ConfigError(f"{override!r} is not KEY=VALUE")
        try:
            # OmegaConf would look up ${...}; a backslash before it, and each that stands there already, says no.
            parsed = re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if _kind(schema, key) is str else yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{override!r} can't be read as YAML: {error}") from error
        OmegaConf.update(given, key, parsed)
    return given


def load(schema: type[T], file: str | None, overrides: list[str]) -> T:
    """The configuration of type `schema` from `file` (a path, or a name below configs/) and `key=value` overrides, validated.

    Raises:
        ConfigError: file not found, unknown key, wrong type, missing or illegal value.
    """
    given = OmegaConf.create({})
    if file is not None:
        path = Path(file) if Path(file).is_file() else shipped(file)
        if path is None:
            raise ConfigError(f"configuration file {file!r} does not exist (neither as a path nor below configs/)")
        given = _read(path.resolve())
    try:
        given = typing.cast(DictConfig, OmegaConf.merge(given, _parse_overrides(schema, overrides)))
        _check_keys(schema, given)
        merged = OmegaConf.merge(OmegaConf.structured(schema), given)
        missing = OmegaConf.missing_keys(merged)
        if missing:
            raise ConfigError(f"missing {', '.join(sorted(missing))}: give it in the file or as KEY=VALUE")
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    _check_finite(to_dict(config))
    _check_given(config)
    config.validate()
    return typing.cast(T, config)


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved configuration as plain data, to be printed and saved with every result."""
    return dataclasses.asdict(config)


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))
