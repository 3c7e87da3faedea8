"""Tables of settings classes: each class stands once, and every key that takes it links to it by name.

A run file's reference has a page for each section, named by its path in docs/reference: run-file/model.md.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tinsmith.rl.algorithms.config import PRESETS
from tinsmith.rl.config import RunConfig
from tinsmith.rl.plugins import CustomPart
from tinsmith.service.config import ServeConfig
from tinsmith.settings import Settings, field_docs

Kind = type[Settings]

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_SCALARS = {int: "integer", float: "number", str: "text", bool: "true or false"}
ALGORITHM_PAGE = "algorithms.md"
RUN_FILE_PAGE = "run-file.md"


def run_file() -> str:
    """The keys at the top of a run file."""
    return _table(RunConfig, _places(RunConfig), RUN_FILE_PAGE, RunConfig.model_fields)


def run_file_sections() -> dict[str, Callable[[], str]]:
    """Block -> its text, for each key at the top of a run file that takes settings classes, but `algorithm`."""
    places = _places(RunConfig)
    keys = [key for key in RunConfig.model_fields if key != "algorithm" and _classes_of(key, places)]
    return {f"run-file-{key}": partial(_classes, key) for key in keys}


def algorithm() -> str:
    """The settings classes of `algorithm`."""
    return _classes("algorithm")


def _classes(key: str) -> str:
    """The settings classes of one key at the top of a run file."""
    places = _places(RunConfig)
    return _sections(_classes_of(key, places), places, _page(key))


def _page(key: str) -> str:
    """The page of the classes of a key at the top, from docs/reference."""
    return ALGORITHM_PAGE if key == "algorithm" else f"run-file/{key}.md"


def serve() -> str:
    """The settings of the service, with those of nested sections under dotted names."""
    lines = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *_serve_rows(ServeConfig, "")])


def presets() -> str:
    """The parts that each name of `algorithm.type` stands for."""
    lines = ["| `type` | `advantage` | `loss` | `kl` | `aggregate` |", "| --- | --- | --- | --- | --- |"]
    for name, parts in PRESETS.items():
        kl = parts["kl"]
        divergence = f"`{kl['type']}`, coef {kl['coef']}" if kl.get("coef") else "none"
        cells = (name, _part(parts["advantage"]), _part(parts["loss"]), divergence, f"`{parts['aggregate']}`")
        lines.append("| `{}` | {} | {} | {} | {} |".format(*cells))
    return "\n".join(lines)


def _part(values: Mapping[str, Any]) -> str:
    options = {key: value for key, value in values.items() if key != "type"}
    return f"`{values['type']}`" + (f" with `{json.dumps(options)}`" if options else "")


def members(annotation: Any) -> list[Kind]:
    """The settings classes in a field's type."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, Settings) else []
    return list(dict.fromkeys(kind for part in typing.get_args(annotation) for kind in members(part)))


def tag_of(kind: Kind) -> str:
    """The value of `type` that selects this class among others, or an empty string."""
    tag = kind.model_fields.get("type")
    return str(tag.default) if tag is not None and len(typing.get_args(tag.annotation)) == 1 else ""


def _places(root: Kind) -> dict[Kind, list[str]]:
    """Class -> the dotted keys that take it, shortest first; a class is entered once."""
    places: dict[Kind, list[str]] = {}
    level = [(root, "")]
    while level:
        following = []
        for kind, prefix in level:
            for name, field in kind.model_fields.items():
                for member in members(field.annotation):
                    if member not in places:
                        following.append((member, f"{prefix}{name}."))
                    places.setdefault(member, []).append(f"{prefix}{name}")
        level = following
    return {kind: list(dict.fromkeys(keys)) for kind, keys in places.items()}


def _classes_of(key: str, places: Mapping[Kind, list[str]]) -> list[Kind]:
    return [kind for kind, keys in places.items() if keys[0].partition(".")[0] == key]


def _sections(kinds: list[Kind], places: Mapping[Kind, list[str]], page: str) -> str:
    """A section for each class; a base class with keys that several share stands before the first of them."""
    ordered = dict.fromkeys(part for kind in kinds for part in (*_bases(kind)[::-1], kind))
    ordered = [kind for kind in ordered if kind in kinds or kind not in places]  # else its section is under another key
    return "\n\n".join(_section(kind, kinds, places, page) for kind in ordered)


def _bases(kind: Kind) -> list[Kind]:
    """Base classes with keys of their own, the nearest first."""
    parents = [base for base in kind.__mro__[1:] if issubclass(base, Settings)]
    parents = [base for base in parents if base not in (Settings, CustomPart)]  # whose keys each of its heirs lists
    return [base for base in parents if _adds_keys(base) and not base.__name__.startswith("_")]


def _adds_keys(kind: Kind) -> bool:
    """Whether the class has keys that its base class does not have."""
    return any(name in vars(kind).get("__annotations__", {}) for name in kind.model_fields)


def _section(kind: Kind, kinds: list[Kind], places: Mapping[Kind, list[str]], page: str) -> str:
    if kind in places:
        choice = f", with `type: {tag_of(kind)}`" if tag_of(kind) else ""
        where = f"At {', '.join(f'`{key}`' for key in places[kind])}{choice}."
    else:
        where = f"Keys of {', '.join(_link(heir, places, page) for heir in kinds if issubclass(heir, kind))}."
    about = " ".join((inspect.getdoc(kind) or "").partition("\n\nExample:")[0].split())
    shared = " and ".join(f"[{heading(base)}]({_target(base, places, page)})" for base in _bases(kind))
    also = f"Also the keys of {shared}." if shared else ""
    table = _table(kind, places, page, _own_fields(kind))
    return "\n\n".join(filter(None, [f"### {heading(kind)}", where, about, table, also]))


def _own_fields(kind: Kind) -> dict[str, FieldInfo]:
    """The fields that no base class has, or has with another default or meaning."""
    bases, docs = list(reversed(_bases(kind))), field_docs(kind)
    inherited = {name: field for base in bases for name, field in base.model_fields.items()}
    base_docs = {name: text for base in bases for name, text in field_docs(base).items()}

    def is_same(name: str, field: FieldInfo) -> bool:
        base = inherited.get(name)
        return base is not None and (base.default, base_docs.get(name)) == (field.default, docs.get(name))

    return {name: field for name, field in kind.model_fields.items() if not is_same(name, field)}


def heading(kind: Kind) -> str:
    """The name of a class on its page. If two classes share it, with their module."""
    module = kind.__module__.rpartition(".")[2]
    return f"{kind.__name__} ({module})" if kind.__name__ in _AMBIGUOUS else kind.__name__


def _link(kind: Kind, places: Mapping[Kind, list[str]], page: str) -> str:
    return f"[{tag_of(kind) or kind.__name__}]({_target(kind, places, page)})"


def _target(kind: Kind, places: Mapping[Kind, list[str]], page: str) -> str:
    """The class's section, from `page`. A base class that no key takes stands beside its heirs."""
    own = _page(places[kind][0].partition(".")[0]) if kind in places else page
    path = "" if own == page else posixpath.relpath(own, posixpath.dirname(page))
    return f"{path}#{_anchor(kind)}"


def _anchor(kind: Kind) -> str:
    return "".join(letter for letter in heading(kind).lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def _table(kind: Kind, places: Mapping[Kind, list[str]], page: str, own: Mapping[str, FieldInfo]) -> str:
    fields = {name: field for name, field in own.items() if name != "type" or not tag_of(kind)}
    if not fields:
        return ""
    lines = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        kinds = members(field.annotation)
        values = " · ".join(_link(member, places, page) for member in kinds) if kinds else values_of(field)
        lines.append(_row(name, values, _default(field, kinds), _meaning(field_docs(kind).get(name), kinds)))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| `{}` | {} | {} | {} |".format(*(cell.replace("|", "\\|") for cell in cells))


def _meaning(docs: str | None, kinds: list[Kind]) -> str:
    own = docs or ((inspect.getdoc(kinds[0]) or "").partition("\n\n")[0] if len(kinds) == 1 else "")
    return " ".join(own.split())


def values_of(field: FieldInfo) -> str:
    """What a plain key takes, with its bounds."""
    bounds = [
        f"{word} {value:,}" if isinstance(value, int) else f"{word} {value}"
        for constraint in field.metadata
        for name, word in _BOUNDS.items()
        if (value := vars_of(constraint).get(name)) is not None
    ]
    return ", ".join([_values(field.annotation), *bounds])


def vars_of(constraint: Any) -> Mapping[str, Any]:
    """The attributes of a constraint of annotated_types, whose classes have slots."""
    return {name: getattr(constraint, name) for name in _BOUNDS if name in dir(constraint)}


def _values(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " · ".join(f"`{value}`" if value != "" else "empty" for value in args)
    if origin is typing.Annotated:
        return _values(args[0])
    if origin in (list, tuple):
        return f"list: {_values(args[0])}"
    if origin is dict or annotation is dict or origin is Mapping:
        return "mapping"
    if args:
        return " or ".join(dict.fromkeys(_values(part) for part in args if part is not type(None)))
    return _SCALARS.get(annotation, "path" if getattr(annotation, "__name__", "") == "Path" else "any")


def _default(field: FieldInfo, kinds: list[Kind]) -> str:
    if field.is_required():
        return "required"
    default = field.default_factory() if field.default is PydanticUndefined else field.default  # type: ignore[call-arg]
    if default is None or default in ("", (), {}, []):
        return ""
    if isinstance(default, Settings):
        return f"`type: {tag_of(type(default))}`" if len(kinds) > 1 and tag_of(type(default)) else ""
    if kinds and not isinstance(default, str):
        return ", ".join(f"`{tag_of(type(part))}`" for part in default)
    return f"`{json.dumps(default) if isinstance(default, bool | int | float) else _text(default)}`"


def _text(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple | list) else str(default)


def _serve_rows(kind: Kind, prefix: str) -> list[str]:
    rows = []
    for name, field in kind.model_fields.items():
        if isinstance(field.default, Settings):
            rows += _serve_rows(type(field.default), f"{prefix}{name}.")
            continue
        default = "`~/.tinsmith`" if name == "data" else _default(field, [])
        rows.append(_row(f"{prefix}{name}", values_of(field), default, _meaning(field_docs(kind).get(name), [])))
    return rows


_NAMES = [kind.__name__ for kind in _places(RunConfig)]
_AMBIGUOUS = {name for name in _NAMES if _NAMES.count(name) > 1}
