"""Arguments of Trinity's named parts (`*_fn_args`, `workflow_args`, …) as settings of ours, by a table for each part.

A file's arguments lie over Trinity's defaults; one that the table does not have is refused with the nearest name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tinsmith.dialects.base import Becoming, NoMeaning


@dataclass(frozen=True, slots=True)
class To:
    """The value goes to these settings of the part; `values` translates it, `by` computes it."""

    names: tuple[str, ...]
    values: Mapping[Any, Any] | None = None
    by: Callable[[Any], Any] | None = None
    where: str = ""
    """Only where this other argument is true."""


@dataclass(frozen=True, slots=True)
class Only:
    """No other value is possible here."""

    value: Any
    cure: str = "Leave it out."


Argument = To | Only | NoMeaning


@dataclass(frozen=True, slots=True)
class Part:
    """One of Trinity's parts: our type, what Trinity sets otherwise than we do, and its arguments."""

    type: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def laid_over(
    part: Part, given: Mapping[str, Any], key: str, beside: dict[str, Any], becoming: Becoming
) -> dict[str, Any]:
    """The part's settings with the arguments over its defaults; what is named ^NAME goes to `beside`."""
    settings = {"type": part.type, **part.settings}
    known = list(part.arguments)
    given = _meaning(part, given, key, becoming)
    for name in sorted(given, key=lambda one: known.index(one) if one in known else -1):
        value = given[name]
        match part.arguments.get(name):
            case None:
                becoming.fault(f"{key}.{name}", "there is no such argument.", near(name, known))
            case Only(only, cure):
                if value != only:
                    becoming.fault(f"{key}.{name}", f"{value!r} is not possible here.", cure)
            case To(where=where) if where and not given.get(where):
                becoming.note(f"{key}.{name}: it counts only with {where}: true.")
            case To(names, values) if values is not None and value not in values:
                known_values = ", ".join(map(str, values))
                becoming.fault(f"{key}.{name}", f"there is no {value!r}.", f"It is one of {known_values}.")
            case To(names, values, by):
                found = values[value] if values is not None else by(value) if by else value
                for to in names if found is not None else ():
                    (beside if to.startswith("^") else settings)[to.removeprefix("^")] = found
    return settings


def _meaning(part: Part, given: Mapping[str, Any], key: str, becoming: Becoming) -> dict[str, Any]:
    """Those arguments that say something here; it is told of the others why they do not."""
    idle = {name: fate.why for name in given if isinstance(fate := part.arguments.get(name), NoMeaning)}
    for why in dict.fromkeys(idle.values()):
        becoming.note(f"{', '.join(f'{key}.{name}' for name in idle if idle[name] == why)}: {why}")
    return {name: value for name, value in given.items() if name not in idle}


def near(name: str, known: Iterable[Any]) -> str:
    """The cure for a name that there is not."""
    names = [str(one) for one in known]
    found = get_close_matches(name, names, n=1)
    return f"Did you mean '{found[0]}'?" if found else f"Known here: {', '.join(names) or 'none'}."
