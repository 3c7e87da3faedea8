"""Overrides of the settings in a file: the `key=value` words of a command line.

A key is dotted, and reaches into lists by index: `rewards.0.weight` or `rewards[0].weight`. A value is YAML. Where a
setting is a text, the value is that text as it stands, or what is between its quotes: `name=007` is the text 007.

Example: apply_overrides({"steps": 3}, ["steps=20", "rewards=[{type: number}]"], RunConfig)
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import YAMLError

from tinsmith.errors import ConfigError

COMMAND_LINE = "the command line"

Form = Literal["text", "number", "bool", "null", "list", "texts", "numbers", "mapping", "any"]
"""A kind of value that a setting takes; `texts` and `numbers` are lists whose entries may be such values."""

_FORMS: Mapping[Any, Form] = {str: "text", bool: "bool", int: "number", float: "number", dict: "mapping", list: "list"}
_NULL = ("null", "Null", "NULL", "~")
_NOT_YAML = (YAMLError, OmegaConfBaseException, ValueError, RecursionError)


def override_key(override: str) -> str:
    """The dotted key of an override; an index may be written as [0] or .0."""
    return _dotted(override.partition("=")[0])


def apply_overrides(
    values: Mapping[str, Any], overrides: Sequence[str], kind: type[BaseModel] | None = None
) -> dict[str, Any]:
    """`values` with overrides applied; `${…}` stays unresolved.

    `kind` says which settings are texts and which are lists. Raises ConfigError that quotes the override.
    """
    tree = plain_copy(values)
    for override in overrides:
        key, path, text = _parsed(override)
        forms = forms_at(kind, path, tree) if kind else frozenset[Form]()
        set_value(tree, path, read_value(key, text, forms), kind)
    return tree


def read_value(key: str, text: str, forms: Iterable[Form] = (), parse: Callable[[str], Any] | None = None) -> Any:
    """The value that `text` stands for in a setting of these forms. Raises ConfigError if it is neither YAML nor a
    text where a text is meant. `parse` reads another syntax than YAML."""
    forms, takes_text = frozenset(forms), bool({"text", "texts"} & set(forms))
    try:
        text.encode()
        value = (parse or _parse_yaml)(text)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{COMMAND_LINE}: the value of '{key}' is not valid UTF-8.", "Check its characters."
        ) from error
    except _NOT_YAML as error:
        if takes_text and not isinstance(error, OmegaConfBaseException) and not _is_list_text(text, forms):
            return text
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{COMMAND_LINE}: the value of '{key}' is not YAML: {_problem(error)} (got {text!r}).",
            _fix(key, text, error),
        ) from error
    if parse and isinstance(value, str):
        return value
    return _chosen(value, text, forms)


def _chosen(value: Any, text: str, forms: frozenset[Form]) -> Any:
    """The parsed value, or the text as it stands where the setting takes texts and not such values."""
    if not forms or "any" in forms:
        return value
    if not {"text", "texts"} & forms:
        return text if isinstance(value, bool) and "bool" not in forms else value
    if isinstance(value, str):
        return value if text.lstrip()[:1] in ("'", '"') else text
    if value is None and not text.strip(" "):
        return None if "null" in forms and "text" not in forms else text
    if value is None:
        return None if text.strip() in _NULL else text  # not a comment, such as ###
    form = next((form for kind, form in _FORMS.items() if type(value) is kind), None)
    return value if form in forms or f"{form}s" in forms else text


def list_notes(overrides: Iterable[str]) -> tuple[str, ...]:
    """Notes on stops that look like a model's markers, such as [/INST]: brackets are a list."""
    return tuple(
        f"{key}: {text} is a list of one text; for the text with its brackets: \"{key}=['{text}']\"."
        for key, _, text in (override.partition("=") for override in overrides)
        if key.rpartition(".")[2] == "stop" and re.fullmatch(r"\[/?[A-Z_]+\]", text)
    )


def _is_list_text(text: str, forms: frozenset[Form]) -> bool:
    """Whether a text that is not YAML was meant as a list of texts, as in [Question:, Answer:]."""
    return "list" in forms and "text" not in forms and text.lstrip()[:1] == "[" and text.rstrip()[-1:] == "]"


def _parse_yaml(text: str) -> Any:
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return typing.cast(dict[str, Any], value)["value"]


def _problem(error: BaseException) -> str:
    """The sentence of a parser about its input, without the place in it."""
    lines = [line.strip() for line in str(error).splitlines()]
    return [line for line in lines if line and not line.startswith(('in "', "full_key", "object_type", "^"))][-1]


def _fix(key: str, text: str, error: BaseException) -> str:
    if isinstance(error, OmegaConfBaseException):
        return "Close the reference ${…}, or write \\${ for these two characters."
    quoted = text.replace("'", "''")
    return f"Close its quotes and brackets, or put quotes around a text, for the shell as well: \"{key}='{quoted}'\"."


def _parsed(override: str) -> tuple[str, list[str], str]:
    """Key, path and text of an override."""
    key, equals, text = override.partition("=")
    if not (key.strip() and equals):
        raise ConfigError(f"{COMMAND_LINE}: '{override}' is not an override.", "Write key=value, as in steps=20.")
    text = text.lstrip() if key != key.rstrip() else text
    path = _dotted(key).split(".")
    if not all(path):
        raise ConfigError(f"{COMMAND_LINE}: '{key.strip()}' is not a key.", "Write a.b.c, or a.b[0].c for a list.")
    return _dotted(key), path, text


def _dotted(key: str) -> str:
    return re.sub(r"\[(\w+)\]", r".\1", key.strip())


def plain_copy(value: Any) -> Any:
    """A copy of nested dictionaries and lists; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: plain_copy(part) for key, part in value.items()}
    return [plain_copy(part) for part in value] if isinstance(value, list | tuple) else value


def set_value(tree: dict[str, Any], path: Sequence[str], value: Any, kind: type[BaseModel] | None = None) -> None:
    """Set the value at `path` in nested dictionaries and lists; sections that are missing are added.

    The index after a list's last entry adds one. Raises ConfigError that names the key.
    """

    def changed(below: Any, at: int) -> Any:
        """`below`, which stands at path[:at], with the value."""
        if at == len(path):
            return value
        part = path[at]
        match [] if below is None and _is_new_list(kind, path[:at], part, tree) else below:
            case list(entries):
                index = _index(entries, path, at)
                entry = changed(entries[index] if index < len(entries) else None, at + 1)
                return [*entries[:index], entry, *entries[index + 1 :]]
            case None:
                return {part: changed(None, at + 1)}
            case dict(section):
                return {**section, part: changed(section.get(part), at + 1)}
            case other:
                place = ".".join(path[:at])
                raise ConfigError(
                    f"{COMMAND_LINE}: '{'.'.join(path)}' cannot be set: '{place}' is {other!r}, which has no keys.",
                    f"Set '{place}' as a whole.",
                )

    tree[path[0]] = changed(tree.get(path[0]), 1)


def _is_new_list(kind: type[BaseModel] | None, path: Sequence[str], below: str, root: Any) -> bool:
    """Whether the missing section at `path` is a list: `below` is the index of an entry."""
    return _is_index(below) and kind is not None and "list" in forms_at(kind, path, root)


def _index(entries: list[Any], path: Sequence[str], at: int) -> int:
    part, key = path[at], ".".join(path)
    if _is_index(part) and int(part) <= len(entries):
        return int(part)
    problem = (
        "is beyond the end of its list, whose first entry is 0" if _is_index(part) else f"has no index, but '{part}'"
    )
    raise ConfigError(
        f"{COMMAND_LINE}: '{key}' {problem}.",
        f"Name an entry that is there, or give the whole list: '{'.'.join(path[:at])}=[…]'.",
    )


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit()


def forms_at(kind: type[BaseModel], path: Sequence[str], values: Any = None) -> frozenset[Form]:
    """The forms of value that the setting at `path` takes; empty for an unknown key. `values` give the types of
    sections that have one."""
    if path[0] == "stages" and len(path) > 2 and (matches := forms_at(kind, path[2:])):
        return matches  # a stage has keys of the file
    return frozenset(
        form for annotation in _annotations(kind, path, values, kind) for form in annotation_forms(annotation)
    )


def _annotations(annotation: Any, path: Sequence[str], values: Any, root: type[BaseModel]) -> list[Any]:
    """The annotations of the setting at `path` below a value of this annotation."""
    if not path:
        return [annotation]
    head, *rest = path
    arms = _arms(annotation)
    models = [arm for arm in arms if isinstance(arm, type) and not typing.get_args(arm) and issubclass(arm, BaseModel)]
    tag = values.get("type") if isinstance(values, Mapping) else None
    matches: list[Any] = []
    below = values.get(head) if isinstance(values, Mapping) else _entry(values, head)
    for arm in [arm for arm in models if tag is not None and _tag(arm) == tag] or models:
        fields = {**arm.model_fields, **{str(field.alias): field for field in arm.model_fields.values() if field.alias}}
        if head in fields:
            matches += _annotations(fields[head].annotation, rest, below, root)
    for arm in arms:
        origin, arguments = typing.get_origin(arm), typing.get_args(arm)
        if arm is Any or arm is dict:
            matches.append(Any)
        elif _is_list(origin) and _is_index(head):
            entries = [argument for argument in arguments if argument is not Ellipsis] or [Any]
            matches += _annotations(entries[min(int(head), len(entries) - 1)], rest, below, root)
        elif _is_mapping(origin):
            matches += _annotations(arguments[1], rest, below, root)
    return matches


def _entry(values: Any, head: str) -> Any:
    return values[int(head)] if isinstance(values, list) and _is_index(head) and int(head) < len(values) else None


def _tag(kind: type[BaseModel]) -> Any:
    field = kind.model_fields.get("type")
    return field.default if field else None


def _arms(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without their metadata."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _arms(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [arm for argument in arguments for arm in _arms(argument)]
    return [annotation]


def annotation_forms(annotation: Any) -> set[Form]:
    """The forms of value that a setting of this annotation takes."""
    return {form for arm in _arms(annotation) for form in _arm_forms(arm)}


def section_forms(annotation: Any) -> set[str]:
    """How the sections of this annotation stand under its key: directly (mapping), in a list, or under names."""
    matches: set[str] = set()
    for arm in _arms(annotation):
        origin = typing.get_origin(arm)
        if _is_mapping(origin):
            matches.add("named")
        elif origin is not None or (isinstance(arm, type) and issubclass(arm, BaseModel)):
            matches |= {form for form in _arm_forms(arm) if form in ("mapping", "list")}
    return matches


def _arm_forms(arm: Any) -> set[Form]:
    origin = typing.get_origin(arm)
    if origin is Literal:
        return {_FORMS.get(type(value), "null") for value in typing.get_args(arm)}
    if _is_list(origin) or arm in (tuple, list):
        entries = {
            form for argument in typing.get_args(arm) if argument is not Ellipsis for form in annotation_forms(argument)
        }
        lists: Mapping[Form, Form] = {"text": "texts", "number": "numbers"}
        return {"list", *(several for single, several in lists.items() if single in entries)}
    if _is_mapping(origin) or arm is dict:
        return {"mapping"}
    if arm in (None, type(None)):
        return {"null"}
    if not isinstance(arm, type) or origin is not None:
        return {"any"}
    if issubclass(arm, BaseModel):
        return {"mapping"}
    if issubclass(arm, PurePath):
        return {"text"}
    kinds = [kind for kind in _FORMS if issubclass(arm, kind)]
    return {_FORMS[kinds[0]]} if kinds else {"any"}


def _is_list(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Sequence | frozenset | set)


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)
