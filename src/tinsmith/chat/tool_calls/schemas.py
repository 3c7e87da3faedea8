"""Values of parameters that a call holds as plain text, by the tool's JSON schema.

The text `5` is a number where the schema has one and text where it has text. A schema allows alternatives (`type` with
several names, `anyOf`, `oneOf`, `enum`, `const`, `nullable`); the text becomes the first that it fits: null, a value of
an enum, an array or object, then the others in the order of the schema. Text that fits none stays text.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.chat.strict_json import json_text, parse_json

MAX_SCHEMAS = 200
"""Parts of a parameter's schema that are read; references may repeat a part without end."""

_PYTHON_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}
_INTEGER = re.compile(r"[+-]?\d+(?:\.0*)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_PYTHON_TOKEN = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|\b(?:True|False|None)\b|[()]|,(?=\s*[\])}])""")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]", ",": ""}


@dataclass(frozen=True, slots=True)
class _Alternative:
    """Values that a schema allows: of these types, of these values; None allows all."""

    types: tuple[str, ...] | None = None
    values: tuple[Any, ...] | None = None

    def narrowed_by(self, other: _Alternative) -> _Alternative:
        """The values that this and another alternative allow."""
        return _Alternative(_common(self.types, other.types), _common(self.values, other.values))


class ParameterTypes:
    """The parameters of one tool, from its JSON schema."""

    def __init__(self, schema: Any) -> None:
        self._root = schema if isinstance(schema, Mapping) else {}
        self._properties: dict[str, tuple[_Alternative, ...]] = {}

    def value(self, name: str, text: str) -> Any:
        """The value of a parameter from its text."""
        if name not in self._properties:
            schema = _Alternatives(self._root).property_of(self._root, name)
            self._properties[name] = tuple(_Alternatives(self._root).of(schema))
        return _value(text, self._properties[name])


class _Alternatives:
    """Reads the alternatives of a schema; references point into `root`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, MAX_SCHEMAS

    def property_of(self, schema: Any, name: str) -> Any:
        """The schema of a property, in this schema or in those that it refers to; None if there is none."""
        waiting = deque([schema])
        while waiting and self._left > 0:
            schema, self._left = waiting.popleft(), self._left - 1
            if not isinstance(schema, Mapping):
                continue
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return properties[name]
            waiting += [_resolve(self._root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
            waiting += [part for key in ("allOf", "anyOf", "oneOf") for part in _parts(schema, key)]
        return None

    def of(self, schema: Any, references: frozenset[str] = frozenset()) -> list[_Alternative]:
        """The alternatives that a schema allows; one that cannot be read allows all."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return [_Alternative()]
        allowed = [_own(schema)]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference in references:
                return []  # a schema that is itself allows nothing more
            allowed = _each(allowed, self.of(_resolve(self._root, reference), references | {reference}))
        for key in ("anyOf", "oneOf"):
            if parts := _parts(schema, key):
                allowed = _each(allowed, [allows for part in parts for allows in self.of(part, references)])
        for part in _parts(schema, "allOf"):
            allowed = _each(allowed, self.of(part, references))
        if schema.get("nullable") is True:
            allowed = [*allowed, _Alternative(types=("null",))]
        return allowed[:MAX_SCHEMAS]


def _own(schema: Mapping[str, Any]) -> _Alternative:
    """What a schema itself allows, without its parts."""
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else kind if isinstance(kind, Sequence) else []
    types = [_PYTHON_NAMES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)]
    if not types and ("properties" in schema or "items" in schema):
        types = ["object" if "properties" in schema else "array"]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return _Alternative(tuple(types) or None, tuple(values) if isinstance(values, list | tuple) and values else None)


def _parts(schema: Mapping[str, Any], key: str) -> list[Any]:
    return parts if isinstance(parts := schema.get(key), list) else []


def _each(left: Sequence[_Alternative], right: Sequence[_Alternative]) -> list[_Alternative]:
    return [first.narrowed_by(second) for first in left for second in right][:MAX_SCHEMAS]


def _common(left: tuple[Any, ...] | None, right: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if left is None or right is None:
        return right if left is None else left
    if "integer" in (*left, *right):  # which is a number too
        left, right = (tuple("integer" if item == "number" else item for item in side) for side in (left, right))
    return tuple(dict.fromkeys(item for item in left if item in right)) if left or right else ()


def _resolve(root: Any, reference: str) -> Any:
    """The part of `root` that a JSON pointer such as `#/$defs/Name` names; None if there is none."""
    if not reference.startswith("#"):
        return None
    for key in reference.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping):
            root = root.get(key)
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def _value(text: str, alternatives: Sequence[_Alternative]) -> Any:
    for rank in (_null, _listed, _container, _scalar, _bit):
        for alternative in alternatives:
            for value in rank(text, alternative):
                return value
    return text


def _null(text: str, alternative: _Alternative) -> Iterator[Any]:
    is_allowed = "null" in (alternative.types or ()) and (alternative.values is None or None in alternative.values)
    if text.strip() in ("null", "None") and is_allowed:
        yield None


def _listed(text: str, alternative: _Alternative) -> Iterator[Any]:
    """The value of an enum that is written like this."""
    for value in alternative.values or ():
        if isinstance(value, str) and value == text:
            yield value
    for value in alternative.values or ():
        if not isinstance(value, str) and text.strip() in (_written(value), str(value)):
            yield value


def _container(text: str, alternative: _Alternative) -> Iterator[Any]:
    types = {"array": list, "object": dict}
    wanted = tuple(types[name] for name in alternative.types or () if name in types)
    if wanted and alternative.values is None:
        yield from (value for value in _structures(text) if isinstance(value, wanted))


def _scalar(text: str, alternative: _Alternative) -> Iterator[Any]:
    if alternative.values is not None:
        return
    if alternative.types is None:
        yield from _json(text)
    for name in alternative.types or ():
        if name == "string":
            yield text
        elif name == "boolean":
            yield from (word == "true" for word in (text.strip().lower(),) if word in ("true", "false"))
        elif name == "integer" and _INTEGER.fullmatch(text.strip()):
            yield from _json(text.strip().partition(".")[0].removeprefix("+"))
        elif name == "number" and _NUMBER.fullmatch(text.strip()):
            yield from _number(text.strip())


def _bit(text: str, alternative: _Alternative) -> Iterator[bool]:
    """0 and 1, where nothing but a boolean fits."""
    if "boolean" in (alternative.types or ()) and alternative.values is None and text.strip() in ("0", "1"):
        yield text.strip() == "1"


def _number(text: str) -> Iterator[float | int]:
    """A number as JSON writes it, or as Python does (`.5`, `+1`)."""
    for value in _json(text):
        yield value
        return
    if math.isfinite(value := float(text)):
        yield value


def _json(text: str) -> Iterator[Any]:
    try:
        yield parse_json(text)
    except ValueError:
        return


def _structures(text: str) -> Iterator[Any]:
    """The text as JSON, or as a literal of Python (`['a', True]`)."""
    yield from _json(text)
    try:
        yield parse_json(_PYTHON_TOKEN.sub(_json_token, text))
    except ValueError:
        return


def _json_token(match: re.Match[str]) -> str:
    """A token of a Python literal as JSON."""
    token = match[0]
    if token[0] != "'":
        return _PYTHON_WORDS.get(token, token)
    return '"' + token[1:-1].replace("\\'", "'").replace('\\"', '"').replace('"', '\\"') + '"'


def _written(value: Any) -> str:
    try:
        return json_text(value)
    except (TypeError, ValueError):
        return ""
