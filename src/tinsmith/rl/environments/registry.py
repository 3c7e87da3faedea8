"""The types of environments: `tasks`, `openenv`, `custom`, and entry points of the group `tinsmith.environments`.

Modules of environments are loaded when this module is imported, so they cannot import it or RunConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from tinsmith import entry_points
from tinsmith.errors import ConfigError
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.environments.custom import CustomEnvironment
from tinsmith.rl.environments.openenv import OpenEnvironment
from tinsmith.rl.environments.tasks import TasksEnvironment
from tinsmith.settings import Settings

GROUP = "tinsmith.environments"
"""Group of entry points: the name of each is the `type` of an EnvironmentOptions class."""


def _installed() -> Iterator[type[EnvironmentOptions]]:
    """The classes of installed packages. Raises ConfigError for an entry point that names none."""
    for name, kind in entry_points.load(GROUP, type).items():
        field = kind.model_fields.get("type") if issubclass(kind, EnvironmentOptions) else None
        if field is None or field.default != name or name in ("tasks", "openenv", "custom"):
            raise ConfigError(
                f"Entry point {name} of {GROUP}: {kind.__module__}:{kind.__qualname__} is no environment of this type.",
                f'Derive it from tinsmith.EnvironmentOptions, with the field type: Literal["{name}"] = "{name}".',
            )
        yield kind


_INSTALLED = tuple(_installed())
SECTIONS: Mapping[str, type[Settings]] = {key: kind for each in _INSTALLED for key, kind in each.sections.items()}
"""Sections of a run file that environments of installed types share, by key."""
BY_ID = tuple(str(each.model_fields["type"].default) for each in _INSTALLED if "id" in each.model_fields)
"""Installed types whose environments have an id, such as `verifiers`."""

if TYPE_CHECKING:
    EnvironmentConfig = EnvironmentOptions
else:
    EnvironmentConfig = Annotated[
        Union[TasksEnvironment, OpenEnvironment, *_INSTALLED, CustomEnvironment],
        Field(discriminator="type"),
    ]
