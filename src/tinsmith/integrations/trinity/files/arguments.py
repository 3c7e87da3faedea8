"""Arguments of Trinity's named components (`*_fn_args`, `workflow_args`, …), translated by a table for each component.

Arguments in the file are merged over Trinity's defaults. An unknown argument is a fault that names the nearest one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinsmith.dialects.base import (
    NOTHING,
    Ignored,
    Translation,
    combine,
    did_you_mean,
    fault,
    note,
)


@dataclass(frozen=True, slots=True)
class RenamedArgument:
    """An argument that becomes these settings of the component."""

    names: tuple[str, ...]
    """A name that begins with ^ belongs to a companion: a setting elsewhere that goes with the component."""
    values: Mapping[Any, Any] | None = None
    """Trinity's value -> ours; other values are faults."""
    convert: Callable[[Any], Any] | None = None
    """Computes our value from Trinity's."""
    only_with: str = ""
    """Name of another argument that must be true, else this one has no effect."""


@dataclass(frozen=True, slots=True)
class FixedArgument:
    """An argument with a single supported value."""

    value: Any
    fix: str = "Leave it out."


Argument = RenamedArgument | FixedArgument | Ignored


@dataclass(frozen=True, slots=True)
class Component:
    """A named component of Trinity: our type of it, its arguments, and Trinity's defaults where they differ."""

    type: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


class MergedArguments(NamedTuple):
    """A component's settings, those of its companion (names with ^), and the notes and faults about its arguments."""

    settings: dict[str, Any]
    companion: dict[str, Any]
    messages: Translation


def merge_arguments(component: Component, arguments: Mapping[str, Any], key: str) -> MergedArguments:
    """Merge a file's arguments over the component's defaults. `key` is where the arguments stand in the file."""
    settings, companion = {"type": component.type, **component.settings}, dict[str, Any]()
    ignored = {name: fate.why for name in arguments if isinstance(fate := component.arguments.get(name), Ignored)}
    messages = _note_ignored(ignored, key)
    names = list(component.arguments)
    for name in sorted(arguments.keys() - ignored.keys(), key=lambda name: _position(name, names)):
        value, argument = arguments[name], component.arguments.get(name)
        problem = _problem(argument, name, value, arguments, names, key)
        messages += problem
        if isinstance(argument, RenamedArgument) and problem == NOTHING:
            ours = _converted(argument, value)
            for target in argument.names if ours is not None else ():
                (companion if target.startswith("^") else settings)[target.removeprefix("^")] = ours
    return MergedArguments(settings, companion, messages)


def _position(name: str, names: list[str]) -> tuple[int, str]:
    """In the table's order, so that a specific argument (clip_range_low) wins over a general one (clip_range)."""
    return (names.index(name), name) if name in names else (-1, name)


def _problem(
    argument: Argument | None, name: str, value: Any, arguments: Mapping[str, Any], names: list[str], key: str
) -> Translation:
    """A fault or a note, if this argument cannot be translated."""
    match argument:
        case None:
            return fault(f"{key}.{name}", "there is no such argument.", did_you_mean(name, names))
        case FixedArgument(supported, fix) if value != supported:
            return fault(f"{key}.{name}", f"{value!r} is not supported here.", fix)
        case RenamedArgument(only_with=other) if other and not arguments.get(other):
            return note(f"{key}.{name}: it has an effect only with {other}: true.")
        case RenamedArgument(values=values) if values is not None and value not in values:
            choices = ", ".join(map(str, values))
            return fault(f"{key}.{name}", f"there is no {value!r}.", f"It is one of {choices}.")
        case _:
            return NOTHING


def _converted(argument: RenamedArgument, value: Any) -> Any:
    if argument.values is not None:
        return argument.values[value]
    return argument.convert(value) if argument.convert else value


def _note_ignored(ignored: Mapping[str, str], key: str) -> Translation:
    return combine(
        note(f"{', '.join(f'{key}.{name}' for name in ignored if ignored[name] == why)}: {why}")
        for why in dict.fromkeys(ignored.values())
    )
