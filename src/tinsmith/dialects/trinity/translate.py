"""A whole file of Trinity-RFT becomes the settings of a run, with what is to be said about it.

All that must be mended is told at once, a line each, with the cure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.dialects.base import Becoming, settle
from tinsmith.dialects.trinity import algorithm, course, data, lessons, model, monitors, operators, stages, sync, work
from tinsmith.dialects.trinity.keys import MARKS, TrinityFile
from tinsmith.errors import ConfigError
from tinsmith.settings import build

NAME = "Trinity-RFT"


def recognises(values: Mapping[str, Any]) -> bool:
    """Whether the file is Trinity's: by a section that no run file of ours has, or by a key of one that both have."""
    of_model, of_algorithm = values.get("model"), values.get("algorithm")
    return (
        not MARKS.isdisjoint(values)
        or (isinstance(of_model, Mapping) and "model_path" in of_model)
        or (isinstance(of_algorithm, Mapping) and "algorithm_type" in of_algorithm)
    )


def defaults() -> dict[str, Any]:
    """What `${…}` of a file finds where the file itself says nothing."""
    return TrinityFile().model_dump(mode="json")


def translate(values: Mapping[str, Any], place: str) -> Becoming:
    """The settings and the notes. Raises ConfigError that tells every fault."""
    file = build(TrinityFile, values, place)
    return stages.translate(values, file, place, _one) if file.stages else _one(file, place)


def _one(file: TrinityFile, place: str) -> Becoming:
    becoming = Becoming()
    settle(file, becoming)
    for part in (model, algorithm, data, lessons, work, course, sync, operators, monitors):
        part.translate(file, becoming)
    if becoming.faults:
        raise ConfigError("\n".join(f"{place}: {fault}" for fault in becoming.faults))
    return becoming
