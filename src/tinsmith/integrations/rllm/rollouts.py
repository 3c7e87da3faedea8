"""Episodes as the rollouts that a run trains on, and rows of data as tasks.

A step becomes a turn with its own tokens. Replies of other models have a name and are not trained on. A step of the
policy without tokens is an error, which names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinsmith.errors import UserError
from tinsmith.integrations.rllm.engines.base import split_reasoning
from tinsmith.integrations.rllm.records import Episode, Step, TerminationReason
from tinsmith.integrations.rllm.records import Trajectory as RllmTrajectory
from tinsmith.rl.types import Rollout, Task, Termination, Trajectory, Turn

PROMPT_KEYS = ("question", "prompt", "problem")
"""Fields of a row that hold its prompt; `messages` holds a chat."""

ROW = "row"
"""Field of `Task.extra` with the row of a dataset."""

_TERMINATIONS: Mapping[TerminationReason | None, Termination] = {
    None: "done",
    TerminationReason.ENV_DONE: "done",
    TerminationReason.UNKNOWN: "done",
    TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED: "max_prompt",
    TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED: "max_response",
    TerminationReason.MAX_TURNS_EXCEEDED: "max_turns",
    TerminationReason.TIMEOUT: "timeout",
    TerminationReason.ERROR: "error",
}


def rollout_of(episode: Episode) -> Rollout:
    """The rollout of an episode. Raises UserError if a step has no tokens, or a reward or metric is no number."""
    termination = _TERMINATIONS[episode.termination_reason]
    trajectories = tuple(_trajectory(each) for each in episode.trajectories if each.steps)
    if termination == "error":
        return Rollout(trajectories=trajectories).failed(error_of(episode))
    if not any(trajectory.turns for trajectory in trajectories):
        ending = "" if termination == "done" else f" before it ended with {termination}"
        return Rollout(termination=termination, error=f"the workflow returned no steps{ending}")
    return Rollout(
        trajectories=trajectories,
        correct=None if episode.is_correct is None else bool(episode.is_correct),
        metrics={str(name): _number(value, f"the metric {name!r}") for name, value in episode.metrics.items()},
        termination=termination,
    )


def _trajectory(trajectory: RllmTrajectory) -> Trajectory:
    turns = tuple(_turn(step, trajectory.name, number) for number, step in enumerate(trajectory.steps, 1))
    reward = _number(trajectory.total_reward, f"the reward of {trajectory.name!r}")
    return Trajectory(turns=turns, role=trajectory.name, reward=reward)


def _turn(step: Step, name: str, number: int) -> Turn:
    output = step.model_output
    model = output.model if output is not None else ""
    text = (output.text if output is not None else None) or step.model_response or ""
    place = f"step {number} of the trajectory {name!r}"
    if not model:
        if not step.response_ids:
            raise UserError(f"{place} has no tokens.", "Set model_output to the reply of the engine.")
        if len(step.logprobs) != len(step.response_ids):
            raise UserError(f"{place} has no logprobs.", "Set model_output to the reply of the engine.")
    return Turn(
        prompt=tuple(step.prompt_ids),
        tokens=tuple(step.response_ids),
        logprobs=tuple(step.logprobs),
        text=text,
        stop="length" if output is not None and output.finish_reason == "length" else "stop",
        model=model,
        version=step.weight_version or 0,
        reward=None if step.reward is None else _number(step.reward, f"the reward of {place}"),
        advantages=_advantages(step.advantage, place),
    )


def _advantages(value: Any, place: str) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return tuple(_number(each, f"the advantage of {place}") for each in value)
    return _number(value, f"the advantage of {place}")


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is {value!r}.", "Set a number.") from error


def reply_text(turn: Turn) -> tuple[str, str]:
    """(whole reply, reply without its reasoning), without spaces around them."""
    return turn.text.strip(), split_reasoning(turn.text)[0].strip()


def task_row(task: Task) -> dict[str, Any]:
    """The row of a task, as a workflow of rLLM receives it; of a task that has none, its prompt and answer."""
    if set(task.extra) == {ROW} and isinstance(task.extra[ROW], Mapping):
        return dict(task.extra[ROW])
    if task.extra:
        return dict(task.extra)
    messages = [{"role": message.role, "content": message.content, **message.more} for message in task.messages]
    row = {"id": task.id, "messages": messages, "question": task.messages[-1].content if task.messages else ""}
    return {**row, "ground_truth": task.answer, "answer": task.answer}


def wrapped_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its prompt, for a source of tasks: a row without a prompt is identified by its JSON."""
    if row.get("messages") or any(row.get(key) is not None for key in PROMPT_KEYS):
        return {"messages": task_messages(dict(row)), ROW: row}
    return {"messages": [{"role": "user", "content": json.dumps(row, sort_keys=True, default=str)}], ROW: row}


def task_messages(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a row: its messages, question, prompt or problem. Raises UserError."""
    if task.get("messages"):
        return [dict(message) for message in task["messages"]]
    for key in PROMPT_KEYS:
        if task.get(key) is not None:
            return [{"role": "user", "content": str(task[key])}]
    raise UserError(
        f"The task has none of messages, {', '.join(PROMPT_KEYS)}.", f"Its fields are {', '.join(map(str, task))}."
    )


def error_of(episode: Episode) -> str:
    """The error of a failed episode in one line."""
    error = episode.info.get("error") or {}
    if isinstance(error, Mapping):
        return f"{error.get('error_type', 'Error')}: {error.get('error_message', '')}"
    return str(error)
