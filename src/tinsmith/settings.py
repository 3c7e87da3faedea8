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

import ast
import copy
import inspect
import re
import sys
import tempfile
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.overrides import COMMAND_LINE, annotation_forms, apply_overrides, override_key, section_forms
from tinsmith.plurals import counted

SINGLE_TAG, SEVERAL_TAG = "(one)", "(several)"
"""Union tags of a key that takes one value or several; they are not part of the key's name."""
ANY_NAME = "NAME"
"""Stands for a name of the user's own in a suggested key."""

_OFF = (None, False, "none", "")

_LIST, _KEYS = "a list, such as [a, b]", "keys with values, such as {a: 1}"
_EXPECTED = {
    "string_type": "a text: put quotes around it",
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _KEYS,
    "mapping_type": _KEYS,
    "model_type": _KEYS,
    "model_attributes_type": _KEYS,
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}
"""pydantic's type of a fault -> what the key takes."""
_BRANCHES = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
"""pydantic's name of a kind of value, where a key takes several kinds -> what it is."""
_ONE_OF = "one_of_several"


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
        if self._fits(value) or not is_changed(owner, name):
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

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_lone_entries(cls, values: Any) -> Any:
        """A lone text where a list of texts is meant is a list of one."""
        if not isinstance(values, Mapping):
            return values
        return {name: _listed(cls.model_fields.get(name), value) for name, value in values.items()}

    @classmethod
    def more_types(cls, values: Mapping[str, Any], key: str) -> Sequence[str]:
        """Types of the section at `key` beside those of its union, such as a user's own; `values`: of the file."""
        return ()

    @classmethod
    def origin_of_types(cls, values: Mapping[str, Any], key: str) -> str:
        """A sentence about where more types of the section at `key` come from; empty: there is nothing to add."""
        return ""

    @classmethod
    def suggestion(cls, key: str) -> str:
        """A sentence about an unknown key, before the nearest key is looked for; empty: none."""
        return ""

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


def _listed(field: FieldInfo | None, value: Any) -> Any:
    forms = annotation_forms(field.annotation) if field and isinstance(value, str | int) else ()
    form = "text" if isinstance(value, str) else "number"
    return (value,) if form not in forms and f"{form}s" in forms and not isinstance(value, bool) else value


S = TypeVar("S", bound=BaseModel)


def changed_keys(settings: BaseModel) -> tuple[str, ...]:
    """The keys whose values are not the defaults."""
    return tuple(name for name, _ in settings if is_changed(settings, name))


def is_changed(settings: BaseModel, key: str) -> bool:
    """Whether the value of a key is not the default."""
    return settings.__dict__[key] != type(settings).model_fields[key].get_default(call_default_factory=True)


def nearest_name(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of `names`; empty if none is similar."""
    return next(iter(get_close_matches(name, list(names), n=1, cutoff=cutoff)), "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question "Did you mean 'x'?" with the most similar of `names`; empty if none is similar."""
    nearest = nearest_name(name, names)
    return f"Did you mean '{nearest}'?" if nearest else ""


def read(kind: type[S], file: Path | None = None, overrides: Sequence[str] = ()) -> S:
    """Read and validate a configuration. Raises ConfigError that names the file or override, the key and a fix."""
    return build(kind, read_values(kind, file, overrides), str(file) if file else COMMAND_LINE, overrides)


def read_values(kind: type[BaseModel], file: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a file of this kind with overrides applied and `${…}` resolved, not validated."""
    place = str(file) if file else COMMAND_LINE
    values = apply_overrides(parse_file(file) if file else {}, overrides, kind)
    return resolve_interpolations(values, place, overridden=list(map(override_key, overrides)))


def parse_file(file: Path) -> dict[str, Any]:
    """The values of a YAML or TOML file as written."""
    values = _parse(file)
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file} contains a {type(values).__name__} instead of keys and values.", "Write `key: value` lines."
        )
    return values


def resolve_interpolations(
    values: Mapping[str, Any], place: str, defaults: Mapping[str, Any] | None = None, overridden: Sequence[str] = ()
) -> dict[str, Any]:
    """`values` with `${…}` resolved. References may name keys of `defaults`, which are not part of the result.

    Raises ConfigError at `place`, or at the command line for a reference in the value of an overridden key.
    """
    if _has_no_references(values):  # which OmegaConf would take tens of milliseconds to find out
        return copy.deepcopy(dict(values))
    try:
        tree = OmegaConf.create(dict(values))
        merged = OmegaConf.merge(OmegaConf.create(dict(defaults)), tree) if defaults else tree
        resolved = typing.cast(dict[str, Any], OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        fault = str(error).splitlines()[0].rpartition("interpolation: ")[2]
        where = COMMAND_LINE if _within(override_key(str(error.full_key or "")), overridden) else place
        raise ConfigError(
            f"{where}: {fault}.",
            "Set the variable or give a default: ${oc.env:NAME,default}; write \\${ for these two characters.",
        ) from error
    return _restrict(resolved, values) if defaults else resolved


def _has_no_references(values: Any) -> bool:
    """Whether values are plain ones without `${…}`."""
    match values:
        case str():
            return "${" not in values
        case dict():
            return all(isinstance(key, str) and _has_no_references(value) for key, value in values.items())
        case list():
            return all(map(_has_no_references, values))
    return values is None or isinstance(values, bool | int | float)


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
        overridden = [override_key(override) for override in overrides]
        faults = keyed_sentences(kind, error, values)
        lines = [f"{COMMAND_LINE if _within(key, overridden) else place}: {sentence}" for key, sentence in faults]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def sentences(kind: type[BaseModel], error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """A sentence about each fault of `values`, with its key."""
    return [sentence for _, sentence in keyed_sentences(kind, error, values)]


def keyed_sentences(kind: type[BaseModel], error: ValidationError, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The key of each fault of `values`, empty for one of several keys, and a sentence about it."""
    return [_sentence(kind, fault, values) for fault in _joined_branches(error.errors())]


def explicit_values(value: Any) -> Any:
    """Settings as plain values: only the keys that were set, and `type` tags."""
    if isinstance(value, BaseModel):
        names = value.model_fields_set | ({"type"} & type(value).model_fields.keys())
        return {name: explicit_values(part) for name, part in value if name in names}
    if isinstance(value, Mapping):
        return {name: explicit_values(part) for name, part in value.items()}
    return [explicit_values(part) for part in value] if isinstance(value, list | tuple) else value


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping with dotted keys, such as rewards.0.type; empty ones have no key."""
    pairs = enumerate(tree) if isinstance(tree, list | tuple) else tree.items() if isinstance(tree, Mapping) else None
    if pairs is None:
        return {prefix[:-1]: tree}
    return {key: value for name, part in pairs for key, value in flatten(part, f"{prefix}{name}.").items()}


class _Dumper(yaml.CSafeDumper):
    """Writes what OmegaConf reads: a text such as 1e5, which it would read as a number, gets quotes."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[\d._]+[eE][-+]?\d+$"), list("-+.0123456789")
)


def to_yaml(values: Mapping[str, Any]) -> str:
    """The values of settings as the text of a run file."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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


def _within(key: str, overridden: Sequence[str]) -> bool:
    """Whether the value at `key` comes from an override of one of these keys."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in overridden)


def _joined_branches(faults: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The faults, with one fault in place of those of a key that takes several kinds of value: a text or a number."""
    joined: dict[tuple[Any, ...], ErrorDetails] = {}
    unknown = {fault["loc"][:-1] for fault in faults if fault["type"] == "literal_error" and fault["loc"][-1] == "type"}
    for number, fault in enumerate(faults):
        if fault["type"] == "missing" and fault["loc"][:-1] in unknown:
            continue  # what a section of a wrong type lacks means nothing
        *place, branch = fault["loc"] or ("",)
        kinds = str(fault.get("ctx", {}).get("expected", "")) if str(branch).startswith("literal[") else ""
        kinds = kinds or _BRANCHES.get(str(branch), "")
        if not kinds or fault["type"] == "extra_forbidden":
            joined[(*fault["loc"], number)] = fault
            continue
        if any(other["loc"][: len(place)] == tuple(place) and len(other["loc"]) > len(place) + 1 for other in faults):
            continue
        if before := joined.get((*place, _ONE_OF)):
            kinds = f"{before['msg']} or {kinds}"
        joined[(*place, _ONE_OF)] = {**fault, "loc": tuple(place), "type": _ONE_OF, "msg": kinds}
    return list(joined.values())


def _sentence(kind: type[BaseModel], fault: ErrorDetails, values: Mapping[str, Any]) -> tuple[str, str]:
    """The faulty key as the user writes it, and a sentence about the fault."""
    parts, parents = _walk(kind, [str(part) for part in fault["loc"]])
    key, got = ".".join(parts), f"(got {fault['input']!r})."
    match fault["type"]:
        case "missing":
            return key, f"'{key}' is missing."
        case "extra_forbidden":
            return _unknown_key(kind, parts, parents, fault["input"])
        case "union_tag_not_found":
            choices = [model for parent in parents for model in _models_under(parent, parts[-1])] or parents
            return key, f"'{key}' has no type. Add type: one of {', '.join(dict.fromkeys(map(_tag, choices)))}."
        case "union_tag_invalid":
            return key, _no_such_type(key, fault, *_more_types(kind, values, key))
        case "value_error":  # raised by a validator here: the message is complete, and the input may hold a secret
            message = fault["msg"].removeprefix("Value error, ")
            return key, (f"'{key}': " if key else "") + message + ("" if message.endswith((".", "?")) else ".")
        case name if name in _EXPECTED:
            return key, f"'{key}' takes {_expected(kind, fault)} {got}"
        case "literal_error":
            return key, _no_such_literal(kind, parts, fault, values) or f"'{key}' takes {_literals(fault)} {got}"
        case name if name == _ONE_OF:
            return key, f"'{key}' takes {fault['msg']} {got}"
        case "too_short" | "too_long":
            context = fault.get("ctx", {})
            bounds = "at least" if "min_length" in context else "at most"
            number = counted(int(context.get("min_length", context.get("max_length", 0))), "entry")
            return key, f"'{key}' takes {bounds} {number} {got}"
        case _:
            return key, f"'{key}': {fault['msg']} {got}"


def _unknown_key(
    kind: type[BaseModel], parts: Sequence[str], parents: Sequence[type[BaseModel]], value: Any
) -> tuple[str, str]:
    """An unknown key, and a sentence about it; of an unknown section, the first key in it that has a suggestion."""
    for path in _leaves(value):
        key = ".".join([*parts, *path])
        if text := kind.suggestion(key) if issubclass(kind, Settings) else "":
            return key, f"there is no key '{key}'. {text}"
    key = ".".join(parts)
    return key, f"there is no key '{key}'. {_fix(kind, parts, parents, value)}"


def _leaves(value: Any) -> Iterator[list[str]]:
    """The path of each value in nested sections; none for a value alone."""
    for name, part in value.items() if isinstance(value, Mapping) else ():
        yield from ([str(name), *path] for path in (list(_leaves(part)) or [[]]))


def _has_type(kind: type[BaseModel], place: Sequence[Any]) -> bool:
    """Whether what stands at the place, or in a list there, are sections with a type."""
    path = [str(part) for part in place if not isinstance(part, int)]
    parts, parents = _walk(kind, path)
    return any("type" in model.model_fields for parent in parents for model in _models_under(parent, parts[-1]))


def _needed_key(kind: type[BaseModel], place: Sequence[Any]) -> str:
    """The one key of the section at a place that has no default; empty if there is none, or if there are several."""
    parts, parents = _walk(kind, [str(part) for part in place if not isinstance(part, int)])
    sections = {model for parent in parents for model in _models_under(parent, parts[-1])}
    needed = [name for model in sections for name, field in model.model_fields.items() if field.is_required()]
    return needed[0] if len(needed) == 1 else ""


def _expected(kind: type[BaseModel], fault: ErrorDetails) -> str:
    """What a key takes; of sections with a type, an example with the type that was given alone, and of others one with
    the key that is needed."""
    expected, name = _EXPECTED[fault["type"]], fault["input"]
    if not (isinstance(name, str) and name.isidentifier() and _has_type(kind, fault["loc"])):
        needed = _needed_key(kind, fault["loc"])
        return expected.replace("{a: 1}", f"{{{needed}: {name}}}") if needed and isinstance(name, str) else expected
    return expected.replace(_LIST, f"a list, such as [{{type: {name}}}]").replace("{a: 1}", f"{{type: {name}}}")


def _literals(fault: ErrorDetails) -> str:
    return str(fault.get("ctx", {}).get("expected"))


def _no_such_literal(
    kind: type[BaseModel], parts: Sequence[str], fault: ErrorDetails, values: Mapping[str, Any]
) -> str:
    """A sentence about an unknown type of a section whose only other types are a user's own; empty for other keys."""
    section = ".".join(parts[:-1])
    if parts[-1] != "type":
        return ""
    more, origin = _more_types(kind, values, section)
    context = {"tag": fault["input"], "expected_tags": _literals(fault).replace(" or ", ",")}
    return _no_such_type(section, {**fault, "ctx": context}, more, origin) if more or origin else ""


def _more_types(kind: type[BaseModel], values: Mapping[str, Any], key: str) -> tuple[Sequence[str], str]:
    """Types of a section beside those of its union, and a sentence about where more come from."""
    if not issubclass(kind, Settings):
        return (), ""
    return kind.more_types(values, key), kind.origin_of_types(values, key)


def _no_such_type(key: str, fault: ErrorDetails, more: Sequence[str], origin: str) -> str:
    context = fault.get("ctx", {})
    tags = [*more, *(tag.strip(" '") for tag in str(context.get("expected_tags", "")).split(","))]
    near = did_you_mean(str(context.get("tag")), tags)
    fix = near or " ".join(filter(None, (f"Known here: {', '.join(tags)}.", origin)))
    return f"'{key}' has no type '{context.get('tag')}'. {fix}"


def _fix(kind: type[BaseModel], parts: Sequence[str], parents: Sequence[type[BaseModel]], value: Any) -> str:
    """The nearest key of the same section (of those that are sections, if the value is), else the nearest of another
    section, else all keys of the section."""
    if issubclass(kind, Settings) and (text := kind.suggestion(".".join(parts))):
        return text
    names = sorted({name for parent in parents for name in parent.model_fields})
    sections = [name for name in names if any(_models_under(parent, name) for parent in parents)]
    near = nearest_name(parts[-1], sections) if isinstance(value, Mapping) else ""
    if near := near or nearest_name(parts[-1], names):
        return f"Did you mean '{'.'.join([*parts[:-1], near])}'?"
    all_paths = list(paths(kind))
    if without_entries(".".join(parts)) in map(without_entries, all_paths):
        return f"It belongs to another type; this type has: {', '.join(names)}."
    nearest_last = sorted(all_paths, key=lambda path: (path.partition(".")[0] != parts[0], path.count(".")))[::-1]
    elsewhere = {path.rpartition(".")[2]: path for path in nearest_last}
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
        tagged = [model for model in models if part == _tag(model) or re.search(rf"\b{model.__name__}\b", part)]
        if any(part in model.model_fields for model in models) or not tagged:
            parts.append(part)
        if not last:
            models = below or tagged or models
    return parts, models


@cache
def paths(kind: type[BaseModel]) -> tuple[str, ...]:
    """Every dotted key of a settings class, sections included; the first entry of a list, and NAME for any name."""
    return tuple(_paths(kind))


def _paths(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield prefix + name
        entry = _entry_of(field.annotation)
        for model in _models_under(kind, name):
            yield from _paths(model, f"{prefix}{name}{entry}.")


def _entry_of(annotation: Any) -> str:
    """What stands between a key of this annotation and the keys of its sections."""
    forms = section_forms(annotation)
    return "" if "mapping" in forms else f".{ANY_NAME}" if "named" in forms else ".0" if "list" in forms else ""


def without_entries(path: str) -> str:
    """The path without indices of lists and names of mappings."""
    return ".".join(part for part in path.split(".") if not part.isdigit() and part != ANY_NAME)


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


@cache
def field_docs(kind: type[BaseModel]) -> Mapping[str, str]:
    """The docstrings under the fields of a settings class and of those that it extends, by field.

    They are read from the sources here: pydantic would read them in each process, which takes most of a second.
    """
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            docs |= _own_docs(base)
    return {name: text for name, text in docs.items() if text}


def _own_docs(kind: type) -> dict[str, str]:
    """The docstrings of the fields that a class declares; empty texts for those without."""
    node = _classes(kind.__module__).get(kind.__qualname__)
    statements = node.body if node else []
    docs = {}
    for pair in zip(statements, [*statements[1:], None], strict=True) if statements else ():
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
            case ast.AnnAssign(target=ast.Name(id=name)), _:
                docs[name] = ""
    return docs


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """The classes in the source of a module by their qualified names; none if it has no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    return dict(_below(tree, ""))


def _below(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef():
                yield prefix + child.name, child
                yield from _below(child, f"{prefix}{child.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _below(child, f"{prefix}{child.name}.<locals>.")
            case ast.stmt():
                yield from _below(child, prefix)
