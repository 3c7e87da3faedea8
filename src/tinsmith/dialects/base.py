"""Building blocks of a dialect: sections of foreign keys, the fate of each key, and the translation of a file.

A foreign file is parsed into a tree of `Section`s. The annotation of a field gives the fate of its key:

    rank: Annotated[int, Copied("model.rank")] = 32             copied to this key of RunConfig
    gpu_per_node: Annotated[int, Ignored("…")] = 0              noted once at the start, if the file sets it
    sync_timeout: Annotated[int, Refused("…", "…")] = 1200      an error, for any value but the default
    base_url: str = ""                                          translated by a function of the dialect

Such a function lists the keys it translates and what each becomes. It returns a `Translation`; translations add up:

    @translates(Tinker, base_url="model.base_url")
    def _server(tinker: Tinker) -> Translation:
        return settings({"model.base_url": tinker.base_url})

`keys` lists every key with its fate, and raises TypeError for a key without one. A `Dialect` puts all of it together,
and an entry point of the group `tinsmith.dialects` registers it (docs/code/packages.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from tinsmith.errors import ConfigError
from tinsmith.overrides import apply_overrides, override_key
from tinsmith.rl.plugins import Names
from tinsmith.settings import nearest_name

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Copied:
    """The value, or the default, is copied to this key of RunConfig. null leaves RunConfig's default."""

    to: str


@dataclass(frozen=True, slots=True)
class Translated:
    """A function of the dialect translates the key; `becomes` names the keys of RunConfig, and how."""

    becomes: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """The key has no meaning here; `why` is noted once."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The key would change the run in a way that is not supported."""

    reason: str
    fix: str


Fate = Copied | Translated | Ignored | Refused


class Section(BaseModel):
    """A section of foreign keys: strict about names, lenient about numbers written as strings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True, allow_inf_nan=False
    )
    __translated__: ClassVar[dict[str, str]] = {}
    """What the fields of this class become that functions translate; filled by `translates`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__translated__ = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A row of the table of keys.

    Example: Key(path="model.tinker.rank", type="int", default=32, fate=Translated("model.rank"))
    """

    path: str
    """Dotted; [] stands for any index of a list, * for any name."""
    type: str
    default: Any
    fate: Fate


@dataclass(frozen=True, slots=True)
class Translation:
    """What part of a foreign file becomes. `a + b` merges two; where both set a key, b wins."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Nested settings of RunConfig."""
    notes: tuple[str, ...] = ()
    """For the user: keys that have no effect, or another one than they suggest."""
    faults: tuple[str, ...] = ()
    """Errors in the file: each names the key, the problem and the fix."""

    def __add__(self, other: Translation) -> Translation:
        return Translation(
            _merged(self.settings, other.settings),
            tuple(dict.fromkeys((*self.notes, *other.notes))),
            tuple(dict.fromkeys((*self.faults, *other.faults))),
        )

    @property
    def messages(self) -> Translation:
        """The notes and faults, without the settings."""
        return Translation(notes=self.notes, faults=self.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A foreign kind of run file.

    Example: Dialect(name="Acme", guide="https://acme.example/tinsmith", schema=AcmeFile, recognizes=…, translate=…)
    """

    name: str
    guide: str
    """Page about the differences."""
    schema: type[Section]
    recognizes: Callable[[Mapping[str, Any]], bool]
    """Whether these are the values of a file of this kind. It is also called with one key of a file alone."""
    translate: Callable[[Mapping[str, Any], str, Names, Sequence[str]], Translation]
    """Arguments: the file's values, its place in messages, names of plugins, and the overrides that were applied."""
    stage_keys: tuple[str, ...] = ()
    """Keys of the schema that an entry of `stages` may have."""
    defaults: Callable[[], Mapping[str, Any]] = dict
    """The values that references in a file find where it does not set the key."""
    override_key: Callable[[str], str] = override_key
    """The dotted key of an override."""
    apply: Callable[[Mapping[str, Any], Sequence[str], type[Section]], dict[str, Any]] = apply_overrides
    """The values of a file with overrides of the keys of its schema."""
    is_own: Callable[[str], bool] = lambda _: False
    """Whether an override of a key that neither the dialect nor RunConfig has is the dialect's."""
    finish: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """The settings of the run from those of the translation, with overrides of RunConfig's keys."""
    plugin_imports: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the plugin files of any run file are imported: a stand-in for a package that they import."""
    api_key_env: str = ""
    """Environment variable with the API key in the system, which is used where the run's own is not set."""


NOTHING = Translation()


def settings(values: Mapping[str, Any]) -> Translation:
    """A translation that sets these dotted keys of RunConfig."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return Translation(nested)


def note(text: str) -> Translation:
    """A translation of one note."""
    return Translation(notes=(text,))


def fault(key: str, problem: str, fix: str) -> Translation:
    """A translation of one fault."""
    return Translation(faults=(f"'{key}': {problem} {fix}",))


def combine(parts: Iterable[Translation]) -> Translation:
    """The sum of translations; later settings win."""
    return sum(parts, NOTHING)


def check_faults(translation: Translation, place: str) -> Translation:
    """The translation. Raises ConfigError if it has faults."""
    if translation.faults:
        raise ConfigError("\n".join(f"{place}: {text}" for text in translation.faults))
    return translation


def did_you_mean(name: str, candidates: Iterable[Any]) -> str:
    """The fix for an unknown name: the nearest known one, or else all of them."""
    names = [str(candidate) for candidate in candidates]
    nearest = nearest_name(name, names)
    return f"Did you mean '{nearest}'?" if nearest else f"Known here: {', '.join(names) or 'none'}."


def translates(section: type[Section], **becomes: str) -> Callable[[F], F]:
    """Mark a function as the translator of these fields; each text says which keys of RunConfig the field becomes.

    Raises TypeError for an unknown field, or one that has a fate already.
    """

    def register(function: F) -> F:
        for name, text in becomes.items():
            if name not in section.model_fields:
                raise TypeError(f"{section.__name__} has no field {name}")
            if name in section.__translated__ or (_annotates(section, name) and _declared(section, name)):
                raise TypeError(f"{section.__name__}.{name} has two fates")
            section.__translated__[name] = text
        return function

    return register


def keys(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key under `section`. Raises TypeError for a field without a fate."""
    for name, info in section.model_fields.items():
        if (nested := section_of(info)) is not None:
            yield from keys(nested, f"{prefix}{name}{_plural(info)}.")
        else:
            yield Key(
                path=prefix + name, type=_type_name(info.annotation), default=_default(info), fate=_fate(section, name)
            )


def has_key(section: type[Section], path: Sequence[str]) -> bool:
    """Whether a key, split at its dots, names a field under `section`, an entry of its list, or a part of one.

    The index of a list and the name in a mapping are parts of their own: ["tasksets", "0", "path"].
    """
    name, *rest = path
    if name not in section.model_fields:
        return False
    info = section.model_fields[name]
    if (nested := section_of(info)) is None:
        return True
    rest = rest[1:] if _plural(info) else rest
    return not rest or has_key(nested, rest)


def translate_declared(section: Section) -> Translation:
    """Translate the keys whose fate needs no code: copied, ignored and refused ones."""
    result, ignored = NOTHING, dict[str, list[str]]()
    for path, kind, name, value, is_set in _walk(section, ""):
        match _fate(kind, name):
            case Copied(to) if value is not None:
                result += settings({to: value})
            case Ignored(why) if is_set and value is not None:
                ignored.setdefault(why, []).append(path)
            case Refused(reason, fix) if is_set and value != _default(kind.model_fields[name]):
                result += fault(path, reason, fix)
            case _:
                pass
    return result + combine(note(f"{', '.join(paths)}: {why}") for why, paths in ignored.items())


def note_unused(section: Section | None, prefix: str, why: str) -> Translation:
    """A note that the keys set under `section` have no effect in this run, though they would in another."""
    if section is None:
        return NOTHING
    paths = [
        path
        for path, kind, name, value, is_set in _walk(section, prefix)
        if is_set and value is not None and isinstance(_fate(kind, name), Copied | Translated)
    ]
    return note(f"{', '.join(paths)}: {why}") if paths else NOTHING


def section_of(info: FieldInfo) -> type[Section] | None:
    """The class of sections in this field: directly, in a list or in a mapping."""
    return next(iter(_sections(info.annotation)), None)


def _walk(section: Section, prefix: str) -> Iterator[tuple[str, type[Section], str, Any, bool]]:
    """(path, section class, field, value, whether the file sets it) of every key under `section`."""
    for name, info in type(section).model_fields.items():
        value = section.__dict__[name]
        for suffix, nested in _nested(value):
            yield from _walk(nested, f"{prefix}{name}{suffix}.")
        if section_of(info) is None:
            yield prefix + name, type(section), name, value, name in section.model_fields_set


def _nested(value: Any) -> Iterator[tuple[str, Section]]:
    """Sections in a value, each with the suffix of its path."""
    if isinstance(value, Section):
        yield "", value
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", entry) for index, entry in enumerate(value) if isinstance(entry, Section))
    elif isinstance(value, Mapping):
        yield from ((f".{name}", entry) for name, entry in value.items() if isinstance(entry, Section))


def _sections(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation] if issubclass(annotation, Section) else []
    return [section for part in get_args(annotation) for section in _sections(part)]


def _plural(info: FieldInfo) -> str:
    text = str(info.annotation)
    return "[]" if "tuple[" in text or "list[" in text else ".*" if "dict[" in text else ""


def _fate(section: type[Section], name: str) -> Fate:
    """The fate of a field; a subclass overrides that of its base, by an annotation or a translator."""
    for kind in section.__mro__:
        if not issubclass(kind, Section):
            continue
        if name in kind.__translated__:
            return Translated(kind.__translated__[name])
        if _annotates(kind, name) and (declared := _declared(kind, name)):
            return declared
    raise TypeError(
        f"{section.__name__}.{name} has no fate: annotate the field with Copied, Ignored or Refused, or name it in "
        f"@translates({section.__name__}, {name}=…)"
    )


def _annotates(section: type[Section], name: str) -> bool:
    return name in inspect.get_annotations(section)


def _declared(section: type[Section], name: str) -> Fate | None:
    metadata = section.model_fields[name].metadata
    return next((entry for entry in metadata if isinstance(entry, Copied | Ignored | Refused)), None)


def _default(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True)


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return "null" if annotation is type(None) else annotation.__name__
    return str(annotation).replace("typing.", "").replace(" | None", "")


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(first)
    for key, value in second.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(before, value)
        else:
            merged[key] = value
    return merged
