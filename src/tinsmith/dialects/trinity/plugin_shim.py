"""What a plugin file written for Trinity-RFT imports, so that its reward functions run where Trinity is not.

While such files are imported, `trinity` and all below it are stand-ins with three names: `RewardFn` to derive from,
`REWARD_FUNCTIONS` to register with, and `get_logger`. A class that is registered there is a reward of that name. Any
other name is refused where it is imported: what a workflow of Trinity's does is a function here
(docs/guides/workflows-and-rewards.md).
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
    """What says what a reply is worth; `__call__` takes any of response, prompt, truth and messages by name."""

    def __init__(self, **_: Any) -> None:
        """Arguments of a class that reads none itself."""

    def __call__(self, **_: Any) -> float | Mapping[str, float]:
        """A number, or named parts that add up."""
        raise NotImplementedError


class Registry:
    """`REWARD_FUNCTIONS`."""

    def register_module(self, name: str) -> Callable[[type], type]:
        """Marks a class as the reward `name`."""
        return lambda kind: reward(name)(_called(kind))


@contextmanager
def standing_in() -> Iterator[None]:
    """While the block runs, `import trinity…` finds stand-ins, whatever is installed."""
    finder = _Finder()
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _is_ours(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update({"RewardFn": RewardFn, "REWARD_FUNCTIONS": Registry(), "get_logger": logging.getLogger})


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name.islower():  # a module below this one is found as any other
            raise AttributeError(name)
        raise ImportError(
            f"{self.__name__}.{name} is not here: of Trinity, a plugin may use RewardFn and REWARD_FUNCTIONS. "
            "Write a workflow as a function: docs/guides/workflows-and-rewards.md"
        )


def _called(kind: type) -> type:
    """The class with objects that are also called as rewards here are: with a task and a rollout."""
    wanted = inspect.signature(kind.__call__).parameters.values()
    every = any(one.kind is one.VAR_KEYWORD for one in wanted)
    names = {one.name for one in wanted}

    def call(self: Any, *args: Any, **named: Any) -> Any:
        match args:
            case (Task() as task, Rollout() as rollout):
                given = {
                    "response": rollout.text,
                    "prompt": task.messages[-1].content,
                    "truth": task.answer,
                    "messages": [{"role": one.role, "content": one.content} for one in task.messages],
                }
                return kind.__call__(self, **{name: value for name, value in given.items() if every or name in names})
            case _:
                return kind.__call__(self, *args, **named)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__})
