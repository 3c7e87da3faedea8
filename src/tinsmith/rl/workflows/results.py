"""Checks of what workflows return, before anything else of the run reads it: a wrong value fails its rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinsmith.chat.strict_json import check_text, encodable
from tinsmith.plurals import counted
from tinsmith.rl.guards.user_code import MAX_LENGTH
from tinsmith.rl.rewards.base import as_number
from tinsmith.rl.types import Rollout, Trajectory, Turn


def checked(result: Any, count: int) -> tuple[Rollout, ...]:
    """The rollouts of a workflow, with numbers as floats; those that hold anything else have failed.

    Raises TypeError unless there are `count`.
    """
    if not isinstance(result, Sequence) or len(result) != count:
        size = counted(len(result), "rollout") if isinstance(result, Sequence) else f"a {type(result).__name__}"
        raise TypeError(f"the workflow returned {size} instead of {counted(count, 'rollout')}")
    return tuple(map(_checked, result))


def _checked(rollout: Any) -> Rollout:
    if not isinstance(rollout, Rollout):
        return Rollout(error=f"the workflow returned a {type(rollout).__name__} instead of a Rollout")
    if rollout.error:
        return replace(rollout, error=encodable(str(rollout.error))[:MAX_LENGTH])
    try:
        plain = replace(
            rollout,
            trajectories=tuple(map(_plain_trajectory, rollout.trajectories)),
            reward_parts=_plain_numbers("reward part", rollout.reward_parts),
            metrics=_plain_numbers("metric", rollout.metrics),
            correct=None if rollout.correct is None else bool(rollout.correct),
        )
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        message = encodable(f"the workflow returned a wrong rollout: {error}")
        return Rollout(error=message[:MAX_LENGTH], termination="error")
    return note_truncation(fail_if_not_finite(plain))


def _plain_trajectory(trajectory: Trajectory) -> Trajectory:
    reward, turns = as_number(trajectory.reward, "reward"), tuple(map(_plain_turn, trajectory.turns))
    return replace(trajectory, reward=reward, turns=turns)


def _plain_turn(turn: Turn) -> Turn:
    for name, tokens in (("prompt", turn.prompt), ("tokens", turn.tokens)):
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0)):
            raise ValueError(f"{name} of a turn must be token ids")
    _check_text("the text of a turn", turn.text)
    return turn if turn.reward is None else replace(turn, reward=as_number(turn.reward, "reward of a turn"))


def _plain_numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    for name in values:
        _check_text(f"the name of a {kind}", str(name))
    return {str(name): as_number(value, f"{kind} {name}") for name, value in values.items()}


def _check_text(place: str, text: str) -> None:
    try:
        check_text(text)
    except ValueError as error:
        raise ValueError(f"{place} is no text: {error}") from error


def fail_if_not_finite(rollout: Rollout) -> Rollout:
    """Return the rollout, or a failed one if a reward is NaN or infinite: such rewards cannot be compared."""
    turns = [(f"turn {number}", turn.reward) for number, turn in enumerate(rollout.turns, 1) if turn.reward is not None]
    rewards = [(f"the reward of {each.role}", each.reward) for each in rollout.trajectories]
    if rollout.error or all(math.isfinite(value) for _, value in (*rewards, *turns)):
        return rollout
    named = (*rollout.reward_parts.items(), *turns, *rewards)
    wrong = next(f"{name} is {value}" for name, value in named if not math.isfinite(value))
    return rollout.failed(f"reward: {wrong}, and must be a finite number")


def note_truncation(rollout: Rollout) -> Rollout:
    """The rollout, with termination `max_response` if it was done but a trajectory ended at max_tokens."""
    truncated = rollout.termination == "done" and any(each.truncated for each in rollout.trajectories)
    return replace(rollout, termination="max_response") if truncated and not rollout.error else rollout
