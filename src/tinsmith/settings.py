"""The strict ground of every configuration, and how a file becomes one.

A settings class is frozen and forbids what it does not know; the docstring under a field is its help. `read` takes a
YAML or TOML file, resolves `${oc.env:NAME,default}`, lays `key=value` overrides on top and answers a misspelt key with
the file, the key and the nearest right one.

Example:

    class RunConfig(Settings):
        steps: int = 10
        \"\"\"Optimizer steps to take.\"\"\"

    read(RunConfig, Path("run.yaml"), ["steps=20"])
"""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tinsmith.errors import ConfigError


class Settings(BaseModel):
    """Frozen, strict about names, documented field by field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


S = TypeVar("S", bound=Settings)


def read(kind: type[S], file: Path | None = None, overrides: Sequence[str] = ()) -> S:
    """A validated configuration. Raises ConfigError that names the file (or the override), the key and the cure."""
    place = str(file) if file else "the command line"
    return build(kind, raw(file, overrides), place)


def raw(file: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The file's mapping with overrides laid on and `${…}` resolved, not yet validated."""
    place = str(file) if file else "the command line"
    try:
        tree = OmegaConf.merge(OmegaConf.create(_parse(file) if file else {}), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{place}: {error}".strip(), "Set the variable or give a default: ${oc.env:NAME,default}."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{place} holds a {type(values).__name__}, not keys and values.", "Write key: value lines.")
    return typing.cast(dict[str, Any], values)


def build(kind: type[S], values: Mapping[str, Any], place: str) -> S:
    """`kind` from plain values; every fault found is told, a line each."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = [_sentence(kind, fault) for fault in error.errors()]
        raise ConfigError(f"{place}: " + "\n".join(faults)) from error


def _parse(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"There is no file {file}.", "Check the path.")
    try:
        if file.suffix == ".toml":
            return tomllib.loads(file.read_text())
        return typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))
    except Exception as error:  # each parser has its own tree; all mean: not readable
        raise ConfigError(f"{file} cannot be read: {error}", "Mend the file; .toml is TOML, all else YAML.") from error


def _sentence(kind: type[BaseModel], fault: ErrorDetails) -> str:
    path = [str(part) for part in fault["loc"]]
    key = ".".join(path)
    if fault["type"] != "extra_forbidden":
        return (
            f"'{key}': {fault['msg']} (got {fault['input']!r})."
            if fault["type"] != "missing"
            else f"'{key}' is missing."
        )
    known = list(_fields_at(kind, path[:-1]))
    near = get_close_matches(path[-1], known, n=1)
    cure = f"Did you mean '{near[0]}'?" if near else f"Known here: {', '.join(sorted(known))}."
    return f"there is no key '{key}'. {cure}"


def _fields_at(kind: type[BaseModel], path: Sequence[str]) -> dict[str, Any]:
    """The fields known at a place in the tree; a union's members are told apart by the path pydantic gives."""
    kinds: list[type[BaseModel]] = [kind]
    for part in path:
        found = [
            _models_in(field.annotation) for one in kinds for name, field in one.model_fields.items() if name == part
        ]
        if found:
            kinds = [model for models in found for model in models]
        else:  # a list index, or the tag of a union member
            kinds = [one for one in kinds if part in (_tag(one), one.__name__)] or kinds
    return {name: field for one in kinds for name, field in one.model_fields.items()}


def _tag(kind: type[BaseModel]) -> str:
    field = kind.model_fields.get("type")
    return str(field.default) if field else ""


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]
