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

import tempfile
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tinsmith.errors import ConfigError

COMMAND_LINE = "the command line"

SINGLE_TAG, SEVERAL_TAG = "(one)", "(several)"
"""Tags of the two forms of a key that takes one thing or several; no part of the key's name."""


class Settings(BaseModel):
    """Frozen, strict about names, documented field by field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


S = TypeVar("S", bound=BaseModel)


def changed_keys(settings: BaseModel) -> tuple[str, ...]:
    """The keys that say something other than their defaults."""
    fields = type(settings).model_fields
    return tuple(name for name, value in settings if value != fields[name].get_default(call_default_factory=True))


def unread(settings: BaseModel, *names: str, without: str) -> None:
    """For a check of a settings class: raises ValueError if one of these keys says something other than its default.

    They are read with `without` alone, which is not there.
    """
    if given := [name for name in changed_keys(settings) if name in names]:
        raise ValueError(f"{given[0]} means nothing without {without}; give both, or leave it out")


def read(kind: type[S], file: Path | None = None, overrides: Sequence[str] = ()) -> S:
    """A validated configuration. Raises ConfigError that names the file (or the override), the key and the cure."""
    return build(kind, read_values(file, overrides), str(file) if file else COMMAND_LINE, overrides)


def read_values(file: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The file's mapping with overrides laid on and `${…}` resolved, not yet validated."""
    place = str(file) if file else COMMAND_LINE
    return resolve_interpolations(apply_overrides(parse_file(file) if file else {}, overrides), place)


def parse_file(file: Path) -> dict[str, Any]:
    """The file's mapping as it is written."""
    values = _parse(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}, not keys and values.", "Write key: value lines.")
    return values


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The same with `key=value` words laid on; `${…}` stays as it is."""
    if not overrides:
        return dict(values)
    tree = OmegaConf.create(dict(values))
    for override in overrides:
        _lay(tree, override)
    return typing.cast(dict[str, Any], OmegaConf.to_container(tree))


def resolve_interpolations(
    values: Mapping[str, Any], place: str, beneath: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The same with `${…}` put in; what they name may stand in `beneath` only, which adds nothing else."""
    tree = OmegaConf.create(dict(values))
    whole = OmegaConf.merge(OmegaConf.create(dict(beneath)), tree) if beneath else tree
    try:
        found = typing.cast(dict[str, Any], OmegaConf.to_container(whole, resolve=True))
    except OmegaConfBaseException as error:
        fault = str(error).splitlines()[0].rpartition("interpolation: ")[2]
        raise ConfigError(
            f"{place}: {fault}.", "Set the variable or give a default: ${oc.env:NAME,default}."
        ) from error
    return _only(found, values) if beneath else found


def _only(found: Any, written: Any) -> Any:
    """What of `found` stands at a place that `written` has."""
    if not (isinstance(found, dict) and isinstance(written, dict)):
        return found
    return {key: _only(found[key], value) for key, value in written.items()}


def build(kind: type[S], values: Mapping[str, Any], place: str, overrides: Sequence[str] = ()) -> S:
    """`kind` from plain values; every fault found is told, a line each, at the place where it was written."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        given = [override.partition("=")[0] for override in overrides]
        lines = []
        for fault in error.errors():
            key, sentence = _sentence(kind, fault)
            lines.append(f"{COMMAND_LINE if _within(key, given) else place}: {sentence}")
        raise ConfigError("\n".join(lines)) from error


def explicit_values(value: Any) -> Any:
    """Plain values as somebody would write these settings: the keys that were set, and what tells types apart."""
    if isinstance(value, BaseModel):
        names = value.model_fields_set | ({"type"} & type(value).model_fields.keys())
        return {name: explicit_values(part) for name, part in value if name in names}
    if isinstance(value, Mapping):
        return {name: explicit_values(part) for name, part in value.items()}
    return [explicit_values(part) for part in value] if isinstance(value, list | tuple) else value


def writable_folder(folder: Path, key: str) -> Path:
    """The folder that a setting names: there, and written to. Raises ConfigError that says why it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"The folder {folder} cannot be written: {error.strerror}.", f"Give another {key}."
        ) from error
    return folder


def _parse(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"There is no file {file}.", "Check the path.")
    try:
        if file.suffix == ".toml":
            return tomllib.loads(file.read_text())
        return OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # each parser has its own tree; all mean: not readable
        raise ConfigError(f"{file} cannot be read: {error}", "Mend the file; .toml is TOML, all else YAML.") from error


def _lay(tree: DictConfig, override: str) -> None:
    key, equals, _ = override.partition("=")
    if not (key and equals):
        raise ConfigError(f"{COMMAND_LINE}: '{override}' is no override.", "Write key=value, as in steps=20.")
    try:
        value = OmegaConf.from_dotlist([f"value={override.partition('=')[2]}"])["value"]
        OmegaConf.update(tree, key, value, force_add=True)
    except (OmegaConfBaseException, TypeError, ValueError, IndexError) as error:
        fault = str(error).splitlines()[0]
        raise ConfigError(f"{COMMAND_LINE}: '{override}' cannot be laid on: {fault}.", "Check the key.") from error


def _within(key: str, given: Sequence[str]) -> bool:
    """Whether the value at `key` came from one of the overrides."""
    return any(key == one or key.startswith(f"{one}.") or one.startswith(f"{key}.") for one in given)


def _sentence(kind: type[BaseModel], fault: ErrorDetails) -> tuple[str, str]:
    """The key at fault as one would write it, and what is wrong with it."""
    parts, parents = _walk(kind, [str(part) for part in fault["loc"]])
    key = ".".join(parts)
    match fault["type"]:
        case "missing":
            return key, f"'{key}' is missing."
        case "extra_forbidden":
            return key, f"there is no key '{key}'. {_cure(kind, parts, parents)}"
        case "union_tag_not_found":
            choices = [model for one in parents for model in _models_under(one, parts[-1])] or parents
            return key, f"'{key}' has no type. Add type: one of {', '.join(_tag(one) for one in choices)}."
        case "union_tag_invalid":
            return key, _no_such_type(key, fault)
        case "value_error":  # a check of ours: it speaks for itself, and the input may hold a key
            return key, (f"'{key}': " if key else "") + fault["msg"].removeprefix("Value error, ") + "."
        case _:
            return key, f"'{key}': {fault['msg']} (got {fault['input']!r})."


def _no_such_type(key: str, fault: ErrorDetails) -> str:
    context = fault.get("ctx", {})
    known = [tag.strip(" '") for tag in str(context.get("expected_tags", "")).split(",")]
    near = get_close_matches(str(context.get("tag")), known, n=1)
    cure = f"Did you mean '{near[0]}'?" if near else f"Known here: {', '.join(known)}."
    return f"'{key}' has no type '{context.get('tag')}'. {cure}"


def _cure(kind: type[BaseModel], parts: Sequence[str], parents: Sequence[type[BaseModel]]) -> str:
    """The nearest name beside the misspelt one; else the nearest at another place; else all that is known."""
    known = sorted({name for one in parents for name in one.model_fields})
    near = get_close_matches(parts[-1], known, n=1)
    if near:
        return f"Did you mean '{'.'.join([*parts[:-1], near[0]])}'?"
    known_paths = list(paths(kind))
    if ".".join(parts) in known_paths:
        return f"It belongs to another type; this one knows: {', '.join(known)}."
    elsewhere = {path.rpartition(".")[2]: path for path in sorted(known_paths, key=lambda path: path.count("."))[::-1]}
    if far := get_close_matches(parts[-1], elsewhere, n=1, cutoff=0.8):
        return f"Did you mean '{elsewhere[far[0]]}'?"
    return f"Known here: {', '.join(known)}."


def _walk(kind: type[BaseModel], path: Sequence[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The path without the union tags that pydantic puts in, and the models that own its last key."""
    models, parts = [kind], []
    path = [part for part in path if part not in (SINGLE_TAG, SEVERAL_TAG)]
    for index, part in enumerate(path):
        last = index == len(path) - 1
        found = [model for one in models for model in _models_under(one, part)]
        tagged = [one for one in models if part == _tag(one)]
        if any(part in one.model_fields for one in models) or last or not tagged:
            parts.append(part)
        if not last:
            models = found or tagged or models
    return parts, models


def paths(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a settings class, sections included."""
    for name in kind.model_fields:
        yield prefix + name
        for model in _models_under(kind, name):
            yield from paths(model, f"{prefix}{name}.")


def _models_under(kind: type[BaseModel], name: str) -> list[type[BaseModel]]:
    field = kind.model_fields.get(name)
    return _models_in(field.annotation) if field else []


def _tag(kind: type[BaseModel]) -> str:
    field = kind.model_fields.get("type")
    return str(field.default) if field else ""


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]
