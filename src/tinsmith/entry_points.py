"""Parts that installed packages provide by entry points, as Tinsmith itself does.

A package lists them in its pyproject.toml (docs/from/extensions.md):

    [project.entry-points."tinsmith.dialects"]
    acme = "acme_tinsmith.dialect:DIALECT"
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TypeVar

from tinsmith.errors import ConfigError

T = TypeVar("T")
OWN = "tinsmith"


def load(group: str, kind: type[T]) -> Mapping[str, T]:
    """The objects of a group by name, each of them a `kind`; those of other packages come before Tinsmith's own.

    Raises ConfigError for an object that cannot be imported or is no `kind`, for a name that two packages have, and if
    Tinsmith's own are missing.
    """
    points: dict[str, metadata.EntryPoint] = {}
    for point in sorted(metadata.entry_points(group=group), key=lambda point: (_package(point) == OWN, point.name)):
        if (other := points.get(point.name)) and (other.value, _package(other)) != (point.value, _package(point)):
            raise ConfigError(
                f"{_package(other)} and {_package(point)} both have an entry point {point.name} of {group}.",
                "Uninstall one of them.",
            )
        points[point.name] = point
    if not any(_package(point) == OWN for point in points.values()):
        raise ConfigError(
            f"Tinsmith has no entry point of {group}: it is not installed, or its code is newer than its installation.",
            "Install it again; in its folder: pip install --no-deps -e .",
        )
    return {name: _loaded(point, kind) for name, point in points.items()}


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
    return point.dist.name if point.dist else "an unknown package"
