"""Trinity's stages as ours: each is a whole file of its own, with sections of the stage in place of the file's.

What all stages have alike stands in the run, what differs in each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from tinsmith.dialects.base import Becoming
from tinsmith.dialects.trinity.schema import TrinityFile
from tinsmith.errors import ConfigError
from tinsmith.settings import build

KNOWN = ("stage_name", "mode", "algorithm", "buffer", "data_processor", "explorer", "trainer")
OWN = ("steps", "epochs")
"""A stage says by itself how long it is."""
OF_ALL = {
    ("model", "chat_template"): "chat_template",
    ("model", "chat_template_values"): "enable_thinking",
    ("service", "dtype"): "explorer.rollout_model.dtype",
}
"""What all stages of ours have alike, as they have one model at one service; with Trinity's names."""

One = Callable[[TrinityFile, str], Becoming]


def translate(values: Mapping[str, Any], file: TrinityFile, place: str, one: One) -> Becoming:
    """Settings with `stages`. Raises ConfigError that tells every stage's faults."""
    found: list[tuple[str, Becoming]] = []
    faults: list[str] = []
    for at, stage in enumerate(file.stages):
        name = str(stage.get("stage_name") or "")
        if not name:
            faults.append(f"{place}: 'stages[{at}].stage_name': it is not set. Name each stage.")
        if unknown := [key for key in stage if key not in KNOWN]:
            near = get_close_matches(unknown[0], KNOWN, n=1)
            cure = f"Did you mean '{near[0]}'?" if near else f"Known here: {', '.join(KNOWN)}."
            faults.append(f"{place}: 'stages[{at}].{unknown[0]}': there is no such key. {cure}")
            continue
        sections = {key: part for key, part in stage.items() if key != "stage_name" and part is not None}
        whole = {**{key: part for key, part in values.items() if key != "stages"}, **sections}
        try:
            found.append((name, one(build(TrinityFile, whole, f"{place}, stage {name}"), f"{place}, stage {name}")))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return _together(found, _alike(found, place))


def _alike(found: list[tuple[str, Becoming]], place: str) -> list[str]:
    """Gives every stage what all have alike, and tells it. Raises ConfigError where two say it otherwise."""
    faults, notes = list[str](), list[str]()
    for (section, key), word in OF_ALL.items():
        given = [(name, one.settings[section][key]) for name, one in found if key in one.settings.get(section, {})]
        for name, value in given:
            if value != given[0][1]:
                cure = f"Make them alike, as all stages have one model at one service; stage {given[0][0]} has another."
                faults.append(f"{place}: stage {name}: '{word}': it is not that of every stage. {cure}")
        if 0 < len(given) < len(found):
            notes.append(f"{word}: all stages have that of stage {given[0][0]}, as they have one model at one service.")
        for _, one in found if given else ():
            one.put(f"{section}.{key}", given[0][1])
    if faults:
        raise ConfigError("\n".join(faults))
    return notes


def _together(found: list[tuple[str, Becoming]], notes: list[str]) -> Becoming:
    first = found[0][1].settings
    alike = {
        key: part
        for key, part in first.items()
        if key not in OWN and all(key in other.settings and other.settings[key] == part for _, other in found)
    }
    own = [
        {"name": name, **{key: part for key, part in one.settings.items() if key not in alike}} for name, one in found
    ]
    becoming = Becoming(settings={**alike, "stages": own}, notes=notes)
    for name, one in found:
        for note in one.notes:
            everywhere = all(note in other.notes for _, other in found)
            becoming.note(note if everywhere else f"stage {name}: {note}")
    return becoming
