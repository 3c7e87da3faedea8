"""What the monitors have in common that write to a tracker: its settings, and which of the tracker's runs is ours.

The tracker's id of the run is kept in trackers.json of the run folder, so a run that goes on goes on there too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tinsmith.errors import ConfigError
from tinsmith.rl.monitors.base import RunInfo
from tinsmith.rl.monitors.names import renamed
from tinsmith.settings import Settings


class Tracker(Settings):
    """What every tracker is told."""

    names: Literal["tinsmith", "trinity"] = "tinsmith"
    """Of metrics: ours, or Trinity-RFT's where it has the same one."""

    def told(self, values: Mapping[str, float]) -> dict[str, float]:
        """The metrics under the names that are wanted."""
        if self.names == "tinsmith":
            return dict(values)
        return {renamed(name): value for name, value in values.items()}


class Project(Tracker):
    """What trackers have that hold many runs."""

    project: str = "tinsmith"
    """Under which runs are gathered."""
    group: str = ""
    """Of runs to be compared; empty: none."""
    name: str = ""
    """Of the run; empty: the run's own."""
    tags: tuple[str, ...] = ()
    """Words to find it by."""


def kept(info: RunInfo, tracker: str, make: Callable[[], str]) -> str:
    """The id of this run in `tracker`; made the first time."""
    file = info.folder / "trackers.json"
    ids: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    if tracker not in ids:
        file.write_text(json.dumps({**ids, tracker: make()}) + "\n")
        return kept(info, tracker, make)
    return ids[tracker]


def missing(package: str, extra: str) -> ConfigError:
    """The error of a tracker whose package is not installed."""
    return ConfigError(f"monitors: {extra} wants the package {package}.", f"pip install 'tinsmith[{extra}]'")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as dotted keys and texts; what is empty is left out."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif value not in (None, "", [], ()):
            found[prefix + key] = str(value)
    return found
