"""An episode of verifiers as a Rollout.

Each trace is a trajectory of its agent. Its turns are those that the run's endpoint recorded while they were sampled:
tokens and logprobs are never derived from text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tinsmith.rl.types import POLICY, Rollout, Termination, Trajectory, Turn

if TYPE_CHECKING:
    import verifiers.v1 as vf

_TERMINATIONS: Mapping[str, Termination] = {
    "max_turns": "max_turns",
    "max_input_tokens": "max_prompt",
    "max_output_tokens": "max_response",
    "max_total_tokens": "max_response",
}


def episode_rollout(episode: vf.Episode, turns: Mapping[str, Sequence[Turn]], *, complete: bool) -> Rollout:
    """The rollout of an episode; `complete` is whether its result is valid.

    `turns` are those of each trace by its id, in the order in which the traces began.

    An episode that is not valid, or whose tokens lack logprobs, is a failed rollout, never one with reward 0.
    """
    begun = list(turns)
    traces = sorted(
        (trace for trace in episode.traces if trace.ok or not complete), key=lambda trace: begun.index(trace.id)
    )
    single = {trace.agent.name for trace in episode.traces} == {"agent"}
    trajectories = tuple(
        Trajectory(
            turns=tuple(turns[trace.id]),
            role=POLICY if single else trace.agent.name,
            reward=trace.reward,
            trained=trace.agent.trainable,
        )
        for trace in traces
        if turns.get(trace.id)
    )
    rollout = Rollout(
        trajectories=trajectories,
        reward_parts=_means([(_prefix(trace, single), _scores(trace)) for trace in traces]),
        metrics=_means([(_prefix(trace, single), trace.metrics) for trace in traces]),
        termination=_termination(episode, traces),
    )
    error = _failure(episode, trajectories, complete=complete)
    return rollout.failed(error) if error else rollout


def _failure(episode: vf.Episode, trajectories: Sequence[Trajectory], *, complete: bool) -> str:
    """Why an episode cannot be trained on; empty if it can."""
    if not complete:
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        return f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode did not complete"
    if not trajectories:
        return "no agent of the episode sampled the policy"
    return "" if all(has_logprobs(each.turns) for each in trajectories) else NO_LOGPROB


NO_LOGPROB = "a sampled token has no finite logprob"


def has_logprobs(turns: Sequence[Turn]) -> bool:
    """Whether every sampled token has a finite logprob."""
    return all(len(turn.logprobs) == len(turn.tokens) and all(map(math.isfinite, turn.logprobs)) for turn in turns)


def _scores(trace: vf.Trace) -> dict[str, float | None]:
    return {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}


def _prefix(trace: vf.Trace, single: bool) -> str:
    return "" if single else f"{trace.agent.name}/"


def _means(named: Sequence[tuple[str, Mapping[str, float | None]]]) -> dict[str, float]:
    """Mean of each value over the traces that have it, by prefix and name."""
    collected: dict[str, list[float]] = {}
    for prefix, values in named:
        for name, value in values.items():
            if value is not None:
                collected.setdefault(f"{prefix}{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in collected.items()}


def _termination(episode: vf.Episode, traces: Sequence[vf.Trace]) -> Termination:
    if episode.is_timeout or any(trace.is_timeout for trace in traces):
        return "timeout"
    for trace in traces:
        if (reason := _TERMINATIONS.get(str(trace.stop_condition))) is not None:
            return reason
    return "done"
