"""Base class of all configuration, and how a YAML or TOML file becomes one.

A settings class is frozen and rejects unknown keys. The docstring under a field is its help text; `Needs` on a field
names the setting without which the field has no effect. `read` parses a file, resolves `${oc.env:NAME,default}` and
applies `key=value` overrides. Errors name the file, the key and the nearest existing key.

Example:

    class RunConfig(Settings):
        steps: int = 10
        \"\"\"Optimizer steps.\"\"\"

    read(RunConfig, Path("run.yaml"), ["steps=20"])
"""

from __future__ import annotations

import tempfile
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tinsmith.errors import ConfigError

COMMAND_LINE = "the command line"

SINGLE_TAG, SEVERAL_TAG = "(one)", "(several)"
"""Union tags of a key that takes one value or several; they are not part of the key's name."""

_OFF = (None, False, "none", "")


@dataclass(frozen=True, slots=True)
class Needs:
    """Declares that a settings field has an effect only together with another setting.

    A value other than the default is an error without that setting. `setting` is an attribute of the same settings
    class, dots select nested ones; it must have one of `values`, none of `unless`, or, without both, any value but
    null, false, 0, "none" and empty.

    Example: tau: Annotated[float, Needs("baseline", ("logavgexp",))] = 1.0
    """

    setting: str
    values: tuple[Any, ...] = ()
    unless: tuple[Any, ...] = ()
    key: str = ""
    """Key inside the field's value that needs the setting; empty: the whole value."""
    reason: str = ""
    """Replaces "with SETTING: VALUE" in the message; "{0}" is the settings object."""
    hint: str = ""
    """Replaces "set SETTING" in the message."""

    def fault(self, settings: BaseModel, field: str) -> str:
        """Message about `field` of `settings` if the other setting is missing, else empty."""
        *parents, name = [field, *self.key.split(".")] if self.key else [field]
        owner = attrgetter(".".join(parents))(settings) if parents else settings
        value = attrgetter(self.setting)(settings)
        if name not in changed_keys(owner) or self._fits(value):
            return ""
        key = ".".join([*parents, name])
        present = (value not in _OFF[:3] and bool(value)) or value == "none"
        condition = f"with {self.setting}: {_shown(value)}" if present or value is False else f"without {self.setting}"
        values = f" to {' or '.join(map(_shown, self.values))}" if self.values else ""
        fix = self.hint or f"set {self.setting}{values}, or leave out {key}"
        return f"{key} is not used {self.reason.format(settings) or condition}; {fix}"

    def _fits(self, value: Any) -> bool:
        if self.values or self.unless:
            return (not self.values or value in self.values) and value not in self.unless
        return bool(value) and value != "none"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Settings(BaseModel):
    """A frozen configuration section that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    def checks_needs(self) -> bool:
        """Whether fields marked with `Needs` are checked."""
        return True

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        for name, field in type(self).model_fields.items() if self.checks_needs() else ():
            for needs in field.metadata:
                if isinstance(needs, Needs) and (fault := needs.fault(self, name)):
                    raise ValueError(fault)
        return self


S = TypeVar("S", bound=BaseModel)


def changed_keys(settings: BaseModel) -> tuple[str, ...]:
    """The keys whose values are not the defaults."""
    fields = type(settings).model_fields
    return tuple(name for name, value in settings if value != fields[name].get_default(call_default_factory=True))


def nearest_name(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of `names`; empty if none is similar."""
    return next(iter(get_close_matches(name, list(names), n=1, cutoff=cutoff)), "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question "Did you mean 'x'?" with the most similar of `names`; empty if none is similar."""
    nearest = nearest_name(name, names)
    return f"Did you mean '{nearest}'?" if nearest else ""


def read(kind: type[S], file: Path | None = None, overrides: Sequence[str] = ()) -> S:
    """Read and validate a configuration. Raises ConfigError that names the file or override, the key and a fix."""
    return build(kind, read_values(file, overrides), str(file) if file else COMMAND_LINE, overrides)


def read_values(file: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The file's values with overrides applied and `${…}` resolved, not validated."""
    place = str(file) if file else COMMAND_LINE
    return resolve_interpolations(apply_overrides(parse_file(file) if file else {}, overrides), place)


def parse_file(file: Path) -> dict[str, Any]:
    """The values of a YAML or TOML file as written."""
    values = _parse(file)
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file} contains a {type(values).__name__} instead of keys and values.", "Write `key: value` lines."
        )
    return values


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values` with `key=value` overrides applied; `${…}` stays unresolved."""
    if not overrides:
        return dict(values)
    tree = OmegaConf.create(dict(values))
    for override in overrides:
        _apply_override(tree, override)
    return typing.cast(dict[str, Any], OmegaConf.to_container(tree))


def resolve_interpolations(
    values: Mapping[str, Any], place: str, defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`values` with `${…}` resolved. References may name keys of `defaults`, which are not part of the result."""
    tree = OmegaConf.create(dict(values))
    merged = OmegaConf.merge(OmegaConf.create(dict(defaults)), tree) if defaults else tree
    try:
        resolved = typing.cast(dict[str, Any], OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        fault = str(error).splitlines()[0].rpartition("interpolation: ")[2]
        raise ConfigError(
            f"{place}: {fault}.", "Set the variable or give a default: ${oc.env:NAME,default}."
        ) from error
    return _restrict(resolved, values) if defaults else resolved


def _restrict(values: Any, shape: Any) -> Any:
    """`values` without the keys that `shape` does not have."""
    if not (isinstance(values, dict) and isinstance(shape, dict)):
        return values
    return {key: _restrict(values[key], value) for key, value in shape.items()}


def build(kind: type[S], values: Mapping[str, Any], place: str, overrides: Sequence[str] = ()) -> S:
    """Validate plain values as `kind`. Raises ConfigError with one line for each fault, at the place of its key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        overridden = [override.partition("=")[0] for override in overrides]
        lines = []
        for fault in error.errors():
            key, sentence = _sentence(kind, fault)
            lines.append(f"{COMMAND_LINE if _within(key, overridden) else place}: {sentence}")
        raise ConfigError("\n".join(lines)) from error


def explicit_values(value: Any) -> Any:
    """Settings as plain values: only the keys that were set, and `type` tags."""
    if isinstance(value, BaseModel):
        names = value.model_fields_set | ({"type"} & type(value).model_fields.keys())
        return {name: explicit_values(part) for name, part in value if name in names}
    if isinstance(value, Mapping):
        return {name: explicit_values(part) for name, part in value.items()}
    return [explicit_values(part) for part in value] if isinstance(value, list | tuple) else value


def writable_folder(folder: Path, key: str) -> Path:
    """Create the folder that the setting `key` names. Raises ConfigError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"The folder {folder} cannot be written: {error.strerror}.", f"Set {key} to another folder."
        ) from error
    return folder


def _parse(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"There is no file {file}.", "Check the path.")
    try:
        if file.suffix == ".toml":
            return tomllib.loads(file.read_text())
        return OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # each parser has its own exception types
        raise ConfigError(
            f"{file} cannot be read: {error}", "Fix the file. Files ending in .toml are read as TOML, others as YAML."
        ) from error


def _apply_override(tree: DictConfig, override: str) -> None:
    key, equals, _ = override.partition("=")
    if not (key and equals):
        raise ConfigError(f"{COMMAND_LINE}: '{override}' is not an override.", "Write key=value, as in steps=20.")
    try:
        value = OmegaConf.from_dotlist([f"value={override.partition('=')[2]}"])["value"]
        OmegaConf.update(tree, key, value, force_add=True)
    except IndexError as error:
        raise ConfigError(
            f"{COMMAND_LINE}: '{override}' is beyond the end of its list, whose first entry is 0.",
            'Change an entry that is there, or give the whole list, as in "rewards=[{type: closeness}]".',
        ) from error
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        fault = str(error).splitlines()[0]
        raise ConfigError(f"{COMMAND_LINE}: '{override}' cannot be applied: {fault}.", "Check the key.") from error


def _within(key: str, overridden: Sequence[str]) -> bool:
    """Whether the value at `key` comes from an override of one of these keys."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in overridden)


def _sentence(kind: type[BaseModel], fault: ErrorDetails) -> tuple[str, str]:
    """The faulty key as the user writes it, and a sentence about the fault."""
    parts, parents = _walk(kind, [str(part) for part in fault["loc"]])
    key = ".".join(parts)
    match fault["type"]:
        case "missing":
            return key, f"'{key}' is missing."
        case "extra_forbidden":
            return key, f"there is no key '{key}'. {_fix(kind, parts, parents)}"
        case "union_tag_not_found":
            choices = [model for parent in parents for model in _models_under(parent, parts[-1])] or parents
            return key, f"'{key}' has no type. Add type: one of {', '.join(map(_tag, choices))}."
        case "union_tag_invalid":
            return key, _no_such_type(key, fault)
        case "value_error":  # raised by a validator here: the message is complete, and the input may hold a secret
            return key, (f"'{key}': " if key else "") + fault["msg"].removeprefix("Value error, ") + "."
        case _:
            return key, f"'{key}': {fault['msg']} (got {fault['input']!r})."


def _no_such_type(key: str, fault: ErrorDetails) -> str:
    context = fault.get("ctx", {})
    tags = [tag.strip(" '") for tag in str(context.get("expected_tags", "")).split(",")]
    fix = did_you_mean(str(context.get("tag")), tags) or f"Known here: {', '.join(tags)}."
    return f"'{key}' has no type '{context.get('tag')}'. {fix}"


def _fix(kind: type[BaseModel], parts: Sequence[str], parents: Sequence[type[BaseModel]]) -> str:
    """The nearest key of the same section, else the nearest of another section, else all keys of the section."""
    names = sorted({name for parent in parents for name in parent.model_fields})
    if near := nearest_name(parts[-1], names):
        return f"Did you mean '{'.'.join([*parts[:-1], near])}'?"
    all_paths = list(paths(kind))
    if ".".join(parts) in all_paths:
        return f"It belongs to another type; this type has: {', '.join(names)}."
    elsewhere = {path.rpartition(".")[2]: path for path in sorted(all_paths, key=lambda path: path.count("."))[::-1]}
    if far := nearest_name(parts[-1], elsewhere, cutoff=0.8):
        return f"Did you mean '{elsewhere[far]}'?"
    return f"Known here: {', '.join(names)}."


def _walk(kind: type[BaseModel], path: Sequence[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The path without pydantic's union tags, and the models that own its last key."""
    models, parts = [kind], []
    path = [part for part in path if part not in (SINGLE_TAG, SEVERAL_TAG)]
    for index, part in enumerate(path):
        last = index == len(path) - 1
        below = [child for model in models for child in _models_under(model, part)]
        tagged = [model for model in models if part == _tag(model)]
        if any(part in model.model_fields for model in models) or last or not tagged:
            parts.append(part)
        if not last:
            models = below or tagged or models
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
