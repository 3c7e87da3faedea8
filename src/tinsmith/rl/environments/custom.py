"""Custom environments: an EnvironmentOptions class of a user, selected by its import path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import model_validator
from typing_extensions import override

from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.plugins import CustomPart, Kind, import_object, path_text, validated

_SHARED = tuple(EnvironmentOptions.model_fields)


class CustomEnvironment(CustomPart, EnvironmentOptions):
    """User code: an EnvironmentOptions class."""

    kind: ClassVar[Kind] = "environment"
    type: Literal["custom"] = "custom"

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_class(cls, values: Any) -> Any:
        """The class may have other defaults of the fields that every environment has."""
        if not isinstance(values, Mapping) or "path" not in values:
            return values
        fields = _class_at(values["path"]).model_fields
        return {**{key: fields[key].get_default(call_default_factory=True) for key in _SHARED}, **values}

    @model_validator(mode="after")
    def _check_args(self) -> CustomEnvironment:
        if misplaced := [key for key in _SHARED if key in self.args]:
            raise ValueError(f"args.{misplaced[0]}: set {misplaced[0]} beside path, not in args")
        _ = self._target
        return self

    @cached_property
    def _target(self) -> EnvironmentOptions:
        shared = {key: value for key, value in self if key in _SHARED}
        return validated(_class_at(self.path), path_text(self.path), {**shared, **self.args})

    @property
    @override
    def resolved(self) -> EnvironmentOptions:
        return self._target


def _class_at(path: Any) -> type[EnvironmentOptions]:
    """The EnvironmentOptions class at an import path. Raises ValueError if there is none."""
    target = import_object(path)
    if not (isinstance(target, type) and issubclass(target, EnvironmentOptions)):
        raise ValueError(f"{path_text(path)} is not an EnvironmentOptions class")
    return target
