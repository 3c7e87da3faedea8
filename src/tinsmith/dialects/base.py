"""What every dialect is made of: sections of foreign keys, each key with its fate, and what becomes of a whole file.

A foreign file is read into a tree of `Section`s. Each of their fields says what becomes of its key:

    rank: Annotated[int, Copied("model.rank")] = 32             taken over as it is
    base_url: Annotated[str, Honoured("model.base_url")] = ""   taken over by code of the dialect
    gpu_per_node: Annotated[int, NoMeaning("…")] = 0            said once when the run starts, if a file sets it
    sync_timeout: Annotated[int, Refused("…", "…")] = 1200      refused with the cure, at any value but the default

So the classes are the table of keys, and no key can be without a fate. Leaves out the dialects themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from tinsmith.rl.plugins import Names


@dataclass(frozen=True, slots=True)
class Copied:
    """The value stands at this key of RunConfig, the default's too; null leaves our default."""

    to: str


@dataclass(frozen=True, slots=True)
class Honoured:
    """Code of the dialect makes something of it: which keys of RunConfig, and perhaps how."""

    by: str


@dataclass(frozen=True, slots=True)
class NoMeaning:
    """It says something about another system that is not so here; `why` is told once."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It would change the run, and is not done here."""

    reason: str
    cure: str


Fate = Copied | Honoured | NoMeaning | Refused


class Section(BaseModel):
    """Foreign keys: strict about names, lenient about numbers written as words."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A line of the table.

    Example: Key(path="model.tinker.rank", type="int", default=32, fate=Copied("model.rank"))
    """

    path: str
    """Dotted; [] stands for any place in a list, * for any name."""
    type: str
    default: Any
    fate: Fate


@dataclass(slots=True)
class Becoming:
    """A run in the making: settings of ours, and what is to be said about the file."""

    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Each a sentence on what is wrong, where, and what to do."""
    plugins: Names = frozenset()
    """What the run's folder of plugins marks."""

    def put(self, key: str, value: Any) -> None:
        """Sets a dotted key of RunConfig."""
        *parts, last = key.split(".")
        place = self.settings
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value

    def note(self, sentence: str) -> None:
        """Once, however often it is said."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def fault(self, key: str, what: str, cure: str) -> None:
        """Something that must be mended before a run."""
        self.faults.append(f"'{key}': {what} {cure}")


def keys(kind: type[Section], prefix: str = "") -> Iterator[Key]:
    """The whole table under `kind`. Raises TypeError at a field without a fate."""
    for name, info in kind.model_fields.items():
        if (below := _section(info)) is not None:
            yield from keys(below, f"{prefix}{name}{_plural(info)}.")
        else:
            yield Key(path=prefix + name, type=_word(info.annotation), default=_default(info), fate=_fate(kind, name))


def settle(section: Section, becoming: Becoming, prefix: str = "") -> None:
    """Does what needs no code of the dialect: copies, notes, refusals."""
    reasons: dict[str, list[str]] = {}
    _settle(section, becoming, prefix, reasons)
    for why, paths in reasons.items():
        becoming.note(f"{', '.join(paths)}: {why}")


def idle(section: Section | None, becoming: Becoming, prefix: str, why: str) -> None:
    """Notes that what a file sets under `section` does nothing in this run, though it would in another."""
    said = [] if section is None else list(_set(section, prefix))
    paths = [path for path, fate in said if isinstance(fate, Copied | Honoured)]
    if paths:
        becoming.note(f"{', '.join(paths)}: {why}")


def _set(section: Section, prefix: str) -> Iterator[tuple[str, Fate]]:
    for name, info in type(section).model_fields.items():
        for at, one in _below(section.__dict__[name]):
            yield from _set(one, f"{prefix}{name}{at}.")
        if _section(info) is None and name in section.model_fields_set and section.__dict__[name] is not None:
            yield prefix + name, _fate(type(section), name)


def _settle(section: Section, becoming: Becoming, prefix: str, reasons: dict[str, list[str]]) -> None:
    for name, info in type(section).model_fields.items():
        value = section.__dict__[name]
        for at, one in _below(value):
            _settle(one, becoming, f"{prefix}{name}{at}.", reasons)
        if _section(info) is not None:
            continue
        match _fate(type(section), name):
            case Copied(to) if value is not None:
                becoming.put(to, value)
            case NoMeaning(why) if name in section.model_fields_set and value is not None:
                reasons.setdefault(why, []).append(prefix + name)
            case Refused(reason, cure) if name in section.model_fields_set and value != _default(info):
                becoming.fault(prefix + name, reason, cure)
            case _:
                pass


def _below(value: Any) -> Iterator[tuple[str, Section]]:
    """Sections in a value, with how their place is written."""
    if isinstance(value, Section):
        yield "", value
    elif isinstance(value, list | tuple):
        yield from ((f"[{at}]", one) for at, one in enumerate(value) if isinstance(one, Section))
    elif isinstance(value, Mapping):
        yield from ((f".{at}", one) for at, one in value.items() if isinstance(one, Section))


def _section(info: FieldInfo) -> type[Section] | None:
    return next(iter(_sections(info.annotation)), None)


def _sections(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation] if issubclass(annotation, Section) else []
    return [one for part in get_args(annotation) for one in _sections(part)]


def _plural(info: FieldInfo) -> str:
    text = str(info.annotation)
    return "[]" if "tuple[" in text else ".*" if "dict[" in text else ""


def _fate(kind: type[Section], name: str) -> Fate:
    for one in kind.model_fields[name].metadata:
        if isinstance(one, Copied | Honoured | NoMeaning | Refused):
            return one
    raise TypeError(f"{kind.__name__}.{name} has no fate")


def _default(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True)


def _word(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return "null" if annotation is type(None) else annotation.__name__
    return str(annotation).replace("typing.", "").replace(" | None", "")
