"""Parts that installed packages provide by entry points, as Tinsmith itself does.

A package lists them in its pyproject.toml (docs/code/packages.md):

    [project.entry-points."tinsmith.dialects"]
    acme = "acme_tinsmith.dialect:DIALECT"
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from tinsmith.errors import ConfigError

T = TypeVar("T")
OWN = "tinsmith"


def load(group: str, kind: type[T]) -> Mapping[str, T]:
    """The objects of a group by name, each of them a `kind`; those of other packages come before Tinsmith's own.

    Raises ConfigError for an object that cannot be imported or is no `kind`, and for a name that two packages have.
    """
    points: dict[str, metadata.EntryPoint] = {}
    for point in sorted(_points(group, tuple(sys.path)), key=lambda point: (_package(point) == OWN, point.name)):
        if (other := points.get(point.name)) and (other.value, _package(other)) != (point.value, _package(point)):
            raise ConfigError(
                f"{_package(other)} and {_package(point)} both have an entry point {point.name} of {group}.",
                "Uninstall one of them.",
            )
        points[point.name] = point
    return {name: _loaded(point, kind) for name, point in points.items()}


@lru_cache(maxsize=8)
def _points(group: str, _path: tuple[str, ...]) -> list[metadata.EntryPoint]:
    """The entry points of a group in the packages of this path. Of Tinsmith's source tree, which may be newer than its
    installation or not be installed at all, those of its pyproject.toml."""
    installed = list(metadata.entry_points(group=group))
    file = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    if project.get("name") != OWN:
        return installed
    declared = project["entry-points"].get(group, {}).items()
    own = [metadata.EntryPoint(name=name, value=value, group=group) for name, value in declared]
    return [*own, *(point for point in installed if _package(point) != OWN)]


def _loaded(point: metadata.EntryPoint, kind: type[T]) -> T:
    place = f"Entry point {point.name} of {point.group} in the package {_package(point)}"
    try:
        value = point.load()
    except Exception as error:
        raise ConfigError(
            f"{place}: {point.value} cannot be imported: {type(error).__name__}: {error}",
            "Install another version of the package, or uninstall it.",
        ) from error
    if not isinstance(value, kind):
        raise ConfigError(f"{place}: {point.value} is no {kind.__name__}.", "Correct the entry point.")
    return value


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else OWN
