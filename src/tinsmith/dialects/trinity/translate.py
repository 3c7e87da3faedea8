"""A whole file of Trinity-RFT becomes the settings of a run, with what is to be said about it.

All that must be mended is told at once, a line each, with the cure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.dialects.base import Becoming, settle
from tinsmith.dialects.trinity import (
    algorithm,
    buffers,
    course,
    data,
    demonstrations,
    evaluation,
    model,
    monitors,
    operators,
    stages,
    sync,
    workflows,
)
from tinsmith.dialects.trinity.schema import MARKS, TrinityFile
from tinsmith.dialects.trinity.schema_buffer import Buffers
from tinsmith.errors import ConfigError
from tinsmith.rl.plugins import Names
from tinsmith.settings import build

NAME = "Trinity-RFT"
PARTS = (model, algorithm, data, demonstrations, buffers, workflows, evaluation, course, sync, operators, monitors)
"""In this order: what comes later reads what is there."""


def recognises(values: Mapping[str, Any]) -> bool:
    """Whether the file is Trinity's: by a section that no run file of ours has, or by a key of one that both have."""
    told = {"model": {"model_path"}, "algorithm": {"algorithm_type"}, "buffer": set(Buffers.model_fields)}
    sections = ((values.get(name), keys) for name, keys in told.items())
    return not MARKS.isdisjoint(values) or any(
        isinstance(section, Mapping) and not keys.isdisjoint(section) for section, keys in sections
    )


def defaults() -> dict[str, Any]:
    """What `${…}` of a file finds where the file itself says nothing."""
    return TrinityFile().model_dump(mode="json")


def translate(values: Mapping[str, Any], place: str, plugins: Names = frozenset()) -> Becoming:
    """The settings and the notes; `plugins` are what a folder of them marks. Raises ConfigError with every fault."""

    def one(file: TrinityFile, place: str) -> Becoming:
        becoming = Becoming(plugins=plugins)
        settle(file, becoming)
        for part in PARTS:
            part.translate(file, becoming)
        if becoming.faults:
            raise ConfigError("\n".join(f"{place}: {fault}" for fault in becoming.faults))
        return becoming

    file = build(TrinityFile, values, place)
    return stages.translate(values, file, place, one) if file.stages else one(file, place)
