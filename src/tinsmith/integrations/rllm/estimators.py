"""Advantage estimators of a script: functions that `register_rllm_adv_estimator` gives a name for the configuration."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

from tinsmith.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rllm_estimator__"


def register_rllm_adv_estimator(name: str) -> Callable[[F], F]:
    """Decorator: make a function of a loaded module the estimator `name` of `algorithm.adv_estimator`.

    The function takes the rewards of each group, a list of float64 arrays, and by name, if it wants it, the
    configuration's section `algorithm` as `algorithm_config`. It returns the advantages, or (advantages, returns), of
    which the returns are not used: arrays of the same shapes as the rewards.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, name)
        return function

    return mark


def registered_estimators(algorithm_config: Any) -> dict[str, Mapping[str, Any]]:
    """The settings of an advantage for each registered name. Raises ConfigError if two functions share a name."""
    functions: dict[str, FunctionType] = {}
    for module in list(sys.modules.values()):
        for value in list(vars(module).values()):
            if type(value) is FunctionType and _MARK in vars(value):  # isinstance would load lazy objects
                name = vars(value)[_MARK]
                if functions.setdefault(name, value) is not value:
                    raise ConfigError(f"Two functions are registered as the estimator {name}.", "Rename one of them.")
    return {
        name: {"type": "custom", "path": _of_rewards(function, algorithm_config)}
        for name, function in functions.items()
    }


def _of_rewards(function: FunctionType, algorithm_config: Any) -> Callable[[Sequence[np.ndarray]], Any]:
    """The function with the signature of Tinsmith's custom advantages. Raises ConfigError if it needs more."""
    parameters = inspect.signature(function).parameters
    if "traj_groups" in parameters:
        raise ConfigError(
            f"The estimator {function.__qualname__} takes traj_groups, which is not available.",
            "Use the rewards and algorithm_config only.",
        )
    named = {"algorithm_config": algorithm_config} if "algorithm_config" in parameters else {}

    def advantages(rewards: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        result = function(rewards, **named)
        return result[0] if isinstance(result, tuple) else result

    advantages.__module__, advantages.__qualname__ = function.__module__, function.__qualname__
    return advantages
