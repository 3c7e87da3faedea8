"""Settings that the processes of a run must have in common, compared through their buffer: they may share no folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinsmith.errors import ConfigError
from tinsmith.rl.rollouts.buffers.base import Buffer
from tinsmith.rl.run.folder import shared_settings

_NOTE = "settings-"


async def agree(buffer: Buffer, settings: Mapping[str, Any], part: str, more: Mapping[str, Any] | None = None) -> None:
    """Compare the settings of this process with those of the others, and note them in the buffer.

    `part`: train, explore or explore-NAME. `more`: further values that others with the same key must have. Raises
    ConfigError that names another process and the keys.
    """
    own = {**shared_settings(settings), **(more or {})}
    for name, text in (await buffer.notes()).items():
        other = name.removeprefix(_NOTE)
        if other in (name, part):
            continue
        if different := _different(own, json.loads(text)):
            raise ConfigError(
                f"The process {other} of this run differs in {', '.join(different)}.",
                "Set the same values for all processes of the run, or another buffer.run or buffer.path for a new run.",
            )
    await buffer.note(f"{_NOTE}{part}", json.dumps(own))


def _different(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in first.keys() & second.keys() if first[key] != second[key])
