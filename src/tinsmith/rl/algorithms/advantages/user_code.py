"""Advantages that users compute: in the workflow, turn by turn, or in a function of the rewards of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Trace, Traces, broadcast, net_rewards
from tinsmith.rl.plugins import OWN_KEYS, Arguments, ImportPath, check_signature, import_object, path_text


class PrecomputedAdvantage(Advantage):
    """The advantages that the workflow set on each turn: a number for all its tokens, or one for each token."""

    type: Literal["precomputed"] = "precomputed"
    compares: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Advantages of all tokens. Raises ConfigError if a turn has none, or not one for each token."""
        return [[self._advantages(trace) for trace in traces_G] for traces_G in traces_PG]

    def _advantages(self, trace: Trace) -> np.ndarray:
        pieces = [np.zeros(0)]
        for length, value in zip(trace.turns, trace.turn_advantages, strict=True):
            if value is None:
                raise ConfigError(
                    "advantage precomputed reads the advantages of turns, but a turn of this workflow has none.",
                    "Set them on every turn: conversation.credit(advantages=…), or Turn.advantages.",
                )
            advantages = np.asarray(value, np.float64)
            if advantages.ndim and len(advantages) != length:
                raise ConfigError(
                    f"A turn of {counted(length, 'token')} has {counted(len(advantages), 'advantage')}.",
                    "Set a number, or one for each token of the turn, its stop token included.",
                )
            pieces.append(np.broadcast_to(advantages, length))
        return np.concatenate(pieces)


class CustomAdvantage(Advantage):
    """User code: a function from the rewards of each group to the advantage of each trajectory.

    It gets a list of float64 arrays, one for each group of a role, and returns arrays of the same shapes. KL penalties
    are already subtracted from the rewards.

    Example: def centered(rewards): return [group - group.mean() for group in rewards]
    """

    type: Literal["custom"] = "custom"
    path: ImportPath
    """Import path, module:attribute: `my_package.advantages:centered`, or `mine:centered` for mine.py in `plugins`.
    From Python, also the function itself."""
    args: Arguments = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _check_path(self) -> CustomAdvantage:
        _ = self._function
        return self

    @cached_property
    def _function(self) -> Callable[..., Sequence[Any]]:
        """The function. Raises ValueError if the path or the arguments are wrong."""
        function, path = import_object(self.path), path_text(self.path)
        if not callable(function):
            raise ValueError(f"{path} is not a function")
        check_signature(function, path, ("rewards",), self.args, OWN_KEYS["advantage"])
        return cast(Callable[..., Sequence[Any]], function)

    @property
    @override
    def of_groups(self) -> bool:
        return False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Advantages of all tokens. Raises ConfigError unless the function returns a number for each trajectory."""
        rewards_PG = [net_rewards(traces_G) for traces_G in traces_PG]
        values_PG = [np.asarray(values_G, np.float64) for values_G in self._function(list(rewards_PG), **self.args)]
        shapes, needed = [values_G.shape for values_G in values_PG], [rewards_G.shape for rewards_G in rewards_PG]
        if shapes != needed or not all(np.isfinite(values_G).all() for values_G in values_PG):
            raise ConfigError(
                f"{path_text(self.path)} returned arrays of the shapes {shapes} for rewards of the shapes {needed}, or "
                "numbers that are not finite.",
                "Return one array for each group, with a number for each of its rewards.",
            )
        return [broadcast(traces_G, values_G) for traces_G, values_G in zip(traces_PG, values_PG, strict=True)]
