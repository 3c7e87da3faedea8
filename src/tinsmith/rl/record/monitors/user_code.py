"""Monitors that users write: a function of (step, metrics), or a class with the methods of a Monitor that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from typing_extensions import override

from tinsmith.rl.plugins import KINDS, CustomPart, Kind, check_signature, import_object, named_arguments, path_text
from tinsmith.rl.record.layout import Kind as RolloutKind
from tinsmith.rl.record.monitors.base import Monitor, RunInfo
from tinsmith.rl.types import Group

_METHODS: Mapping[str, tuple[str, ...]] = {
    "metrics": ("step", "metrics"),
    "rollouts": ("step", "kind", "groups"),
    "close": (),
}
"""Methods of a monitor, and what a run passes to them."""


class CustomMonitor(CustomPart):
    """User code: a function of (step, metrics), or a class with any of the methods metrics(step, metrics),
    rollouts(step, kind, groups) and close().

    `kind` is train or eval. The class is created once for a run; a parameter `info` of it is the RunInfo of the run. A
    call that fails is logged, and the run goes on.

    Example: def printed(step, metrics): print(step, metrics.get("reward/mean"))
    """

    kind: ClassVar[Kind] = "monitor"
    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        _ = self._target

    @cached_property
    def _target(self) -> Any:
        """The function, class or object. Raises ValueError if it cannot be a monitor."""
        target, path, keys = import_object(self.path), path_text(self.path), KINDS["monitor"].own_keys
        methods = {"metrics": target} if inspect.isroutine(target) else _methods(target)
        if waiting := [name for name, method in methods.items() if inspect.iscoroutinefunction(method)]:
            raise ValueError(f"{path}: {waiting[0]} of a monitor is async; define it with def")
        if inspect.isroutine(target):
            check_signature(target, path, ("step", "metrics"), self.args, keys)
            return target
        if not methods:
            raise ValueError(f"{path} is neither a function nor has it a method {', '.join(_METHODS)}")
        for name, method in methods.items():
            own = ("self",) if isinstance(target, type) else ()
            check_signature(method, f"{path}.{name}", (*own, *_METHODS[name]), {})
        if isinstance(target, type):
            named_arguments(target, path, ("info",), self.args, keys)
        elif self.args:
            raise ValueError(f"{path} is an object, which takes no args")
        return target

    def make(self, info: RunInfo) -> Monitor:
        """The monitor of a run. Raises ConfigError if its class cannot be created."""
        target = self._target
        if inspect.isroutine(target):
            return UserMonitor(self, {"metrics": lambda step, values: target(step, values, **self.args)})
        if isinstance(target, type):
            taken = named_arguments(target, path_text(self.path), ("info",), self.args)
            with self.errors_named():
                target = target(**dict.fromkeys(taken, info), **self.args)
        return UserMonitor(self, _methods(target))


def _methods(target: Any) -> dict[str, Callable[..., Any]]:
    """The methods of a monitor that a class or an object has."""
    members = dict(inspect.getmembers(target, callable))
    return {name: members[name] for name in _METHODS if name in members}


class UserMonitor(Monitor):
    """Forwards to the methods that a user's monitor has."""

    def __init__(self, config: CustomMonitor, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._config, self._methods = config, methods

    def _call(self, name: str, *arguments: Any) -> None:
        if (method := self._methods.get(name)) is not None:
            with self._config.errors_named():
                method(*arguments)

    @override
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._call("metrics", step, dict(values))

    @override
    def rollouts(self, step: int, kind: RolloutKind, groups: Sequence[Group]) -> None:
        self._call("rollouts", step, kind, groups)

    @override
    def close(self) -> None:
        self._call("close")
