"""Stand-in for the package `trinity`, so that reward functions written for Trinity-RFT run without it.

While plugin files are imported, `trinity` and all its submodules offer three names: `RewardFn` to derive from,
`REWARD_FUNCTIONS` to register with, and `get_logger`. A registered class becomes a reward of that name. Importing any
other name is an error: Trinity's workflows are functions here (docs/train/environments.md).
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tinsmith.rl.plugins import reward
from tinsmith.rl.types import Rollout, Task

PACKAGE = "trinity"


class RewardFn:
    """Base class of reward functions. `__call__` takes any of response, prompt, truth and messages by name."""

    def __init__(self, **_: Any) -> None:
        """Accepts any arguments, for a subclass without a constructor of its own."""

    def __call__(self, **_: Any) -> float | Mapping[str, float]:
        """The reward: a number, or named parts whose sum is the reward."""
        raise NotImplementedError


class Registry:
    """Type of `REWARD_FUNCTIONS`."""

    def register_module(self, name: str) -> Callable[[type], type]:
        """Register a class as the reward `name`."""
        return lambda cls: reward(name)(_adapted(cls))


@contextmanager
def plugin_shim() -> Iterator[None]:
    """Within the block, `import trinity…` finds the shim, whether or not Trinity is installed."""
    finder = _Finder()
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_trinity(name)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_trinity(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_trinity(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _is_trinity(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _ShimModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update({"RewardFn": RewardFn, "REWARD_FUNCTIONS": Registry(), "get_logger": logging.getLogger})


class _ShimModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name.islower():  # a submodule: the import system finds it
            raise AttributeError(name)
        raise ImportError(
            f"{self.__name__}.{name} is not available: a plugin can use Trinity's RewardFn and REWARD_FUNCTIONS. "
            "Write a workflow as a function: docs/train/environments.md"
        )


def _adapted(cls: type) -> type:
    """A subclass whose objects can be called as rewards are here: with a task and a rollout."""
    parameters = inspect.signature(cls.__call__).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}

    def call(self: Any, *args: Any, **named: Any) -> Any:
        match args:
            case (Task() as task, Rollout() as rollout):
                available = {
                    "response": rollout.text,
                    "prompt": task.messages[-1].content,
                    "truth": task.answer,
                    "messages": [{"role": message.role, "content": message.content} for message in task.messages],
                }
                wanted = {name: value for name, value in available.items() if takes_all or name in names}
                return cls.__call__(self, **wanted)
            case _:
                return cls.__call__(self, *args, **named)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__})
