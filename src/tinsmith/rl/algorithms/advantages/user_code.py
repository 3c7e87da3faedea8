"""Advantages that users compute: in the workflow, or in a function of the rewards or replies of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.plurals import counted
from tinsmith.rl.algorithms.advantages.base import Advantage, Advantages, Trace, Traces, net_rewards
from tinsmith.rl.plugins import CustomPart, Kind, import_object


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


class CustomAdvantage(CustomPart, Advantage):
    """User code: a function from the groups of a step to the advantages of their replies, all groups of a role at once.

    Its first parameter says what it gets: `groups`, for each group a list of a Trace of each reply, with its reward,
    tokens, logprobs and turns; by any other name, such as `rewards`, a list of float64 arrays of the rewards of each
    group, minus KL penalties. It returns for each group, and in it for each reply, a number or one for each token.

    Example: def centered(rewards): return [group - group.mean() for group in rewards]
    """

    kind: ClassVar[Kind] = "advantage"
    type: Literal["custom"] = "custom"

    @override
    def check_code(self) -> None:
        _ = self._function

    @cached_property
    def _function(self) -> Callable[..., Sequence[Any]]:
        """The function. Raises ValueError if the path or the arguments are wrong."""
        return self.function_of("groups" if self._reads_replies else "rewards")[0]

    @property
    def _reads_replies(self) -> bool:
        """Whether the function gets replies in place of rewards."""
        function = import_object(self.path)
        return callable(function) and next(iter(inspect.signature(function).parameters), "") == "groups"

    @property
    @override
    def of_groups(self) -> bool:
        return False

    @override
    def compute(self, traces_PG: Traces, random: np.random.Generator) -> Advantages:
        """Advantages of all tokens. Raises ConfigError unless the function returns numbers for each trajectory."""
        groups = [list(traces_G) if self._reads_replies else net_rewards(traces_G) for traces_G in traces_PG]
        values_PG = self._function(groups)
        with self.errors_named():  # the values may be those of a generator
            values_PG = [list(values_G) for values_G in values_PG]
        lengths, needed = [len(values_G) for values_G in values_PG], [len(traces_G) for traces_G in traces_PG]
        if lengths != needed:
            raise self.fault(
                f"returned groups of {lengths} advantages for groups of {needed} replies",
                "Return one array for each group, with a number for each of its replies, or an array for each token.",
            )
        return [
            [self._of_tokens(trace, value) for trace, value in zip(traces_G, values_G, strict=True)]
            for traces_G, values_G in zip(traces_PG, values_PG, strict=True)
        ]

    def _of_tokens(self, trace: Trace, value: Any) -> np.ndarray:
        """The advantages of the tokens of a reply, float64 [T]."""
        with self.errors_named():
            array = np.asarray(value, np.float64)
        if array.shape not in ((), (trace.length,)) or not np.isfinite(array).all():
            returned = "a number that is not finite" if array.shape in ((), (trace.length,)) else f"shape {array.shape}"
            raise self.fault(
                f"returned {returned} for a reply of {counted(trace.length, 'token')}",
                "Return one array for each group, with a finite number for each of its replies, or for each token.",
            )
        return np.broadcast_to(array, trace.length).copy()
