"""Callbacks of users: code that a run calls as it starts, after each step and evaluation, and as it ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from typing_extensions import override

from tinsmith.rl.plugins import (
    KINDS,
    CustomPart,
    Kind,
    await_if_needed,
    check_signature,
    import_object,
    named_arguments,
    path_text,
)

HOOKS: Mapping[str, tuple[str, ...]] = {
    "on_start": ("run",),
    "on_step": ("run", "step", "metrics"),
    "on_evaluation": ("run", "step", "metrics"),
    "on_end": ("run",),
}
"""Hooks of a callback, and what each may take, by name."""


class CustomCallback(CustomPart):
    """User code: a function, which is called after each step, or a class with any of the hooks on_start, on_step,
    on_evaluation and on_end; async or not.

    The parameters of a hook are chosen by name: `run`, the tinsmith.Run; and of on_step and on_evaluation `step` and
    `metrics`, those of the step or of the evaluation. If one of these two returns a text, the run ends after the step,
    for this reason, as by a condition of `until`. A callback that fails ends the run with its error.

    Example: def hot(metrics): return "entropy is 0" if metrics.get("optim/entropy", 1) < 0.01 else None
    """

    kind: ClassVar[Kind] = "callback"
    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        _ = self._target

    @cached_property
    def _target(self) -> Any:
        """The function, class or object. Raises ValueError if it cannot be a callback."""
        target, path, keys = import_object(self.path), path_text(self.path), KINDS["callback"].own_keys
        if inspect.isroutine(target):
            named_arguments(target, path, HOOKS["on_step"], self.args, keys)
            return target
        hooks = _hooks(target)
        if not hooks:
            raise ValueError(f"{path} is neither a function nor has it a hook {', '.join(HOOKS)}")
        for name, hook in hooks.items():
            named_arguments(hook, f"{path}.{name}", (*_self(target), *HOOKS[name]), {})
        if isinstance(target, type):
            check_signature(target, path, (), self.args, keys)
        elif self.args:
            raise ValueError(f"{path} is an object, which takes no args")
        return target

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """The hooks of the callback, of a new object if it is a class."""
        target = self._target
        if inspect.isroutine(target):
            taken = named_arguments(target, path_text(self.path), HOOKS["on_step"], self.args)
            return {"on_step": _with(target, taken, self.args)}
        if isinstance(target, type):
            with self.errors_named():
                target = target(**self.args)
        return {
            name: _with(hook, named_arguments(hook, name, HOOKS[name], {}), {}) for name, hook in _hooks(target).items()
        }


def _self(target: Any) -> tuple[str, ...]:
    return ("self",) if isinstance(target, type) else ()


def _hooks(target: Any) -> dict[str, Callable[..., Any]]:
    members = dict(inspect.getmembers(target, callable))
    return {name: members[name] for name in HOOKS if name in members}


def _with(function: Callable[..., Any], taken: Sequence[str], args: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, called with those of the values that it takes."""
    return lambda values: function(**{name: values[name] for name in taken}, **args)


class Callbacks:
    """The callbacks of a run."""

    def __init__(self, configs: Sequence[CustomCallback]) -> None:
        """Raises ConfigError if the class of one cannot be created."""
        self._hooks = [(config, config.hooks()) for config in configs]

    async def call(self, name: str, run: Any, step: int = 0, metrics: Mapping[str, float] | None = None) -> str:
        """Call a hook of all callbacks. Returns why the run is to end; empty if it goes on.

        Raises ConfigError if a callback fails, or returns anything but a text or nothing.
        """
        values = {"run": run, "step": step, "metrics": dict(metrics or {})}
        reasons = []
        for config, hooks in self._hooks:
            if (hook := hooks.get(name)) is None:
                continue
            with config.errors_named():
                returned = await await_if_needed(hook(values))
            if returned is not None and not isinstance(returned, str):
                raise config.fault(
                    f"returned {returned!r:.80} from {name}", "Return nothing, or a text that says why the run ends."
                )
            reasons.append(returned or "")
        return next(filter(None, reasons), "")
