"""Records of rollouts under the names of rLLM: Step, Trajectory, Episode, TrajectoryGroup, and how a rollout ends.

An Episode is one rollout of a task. Its Trajectories are the runs of its roles, and a Step is one reply of a model.
The records are mutable, because workflows and evaluators set rewards on them. All of them convert to JSON and back.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import pairwise
from typing import Any

from tinsmith.errors import UserError
from tinsmith.plurals import counted

DEFAULT_NAME = "default_traj_name"
"""Name of a trajectory that the workflow does not name."""


class TerminationReason(Enum):
    """Why a rollout ended."""

    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    ERROR = "error"


class TerminationEvent(Exception):
    """Raised in a workflow to end its rollout; the trajectories up to here are kept."""

    def __init__(self, reason: TerminationReason = TerminationReason.UNKNOWN) -> None:
        super().__init__(f"the rollout ended: {reason.value}")
        self.reason = reason


@dataclass
class ToolCall:
    """A tool call in a reply."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The call as JSON values."""
        return {"name": self.name, "arguments": self.arguments}


@dataclass
class ModelOutput:
    """A reply of a model, as an engine returns it."""

    text: str | None = None
    """The whole reply, with its reasoning."""
    content: str | None = None
    """The reply without reasoning and tool calls."""
    reasoning: str | None = None
    """The text between <think> and </think>."""
    tool_calls: list[ToolCall] | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    multi_modal_inputs: dict[str, list[Any]] | None = None
    """Always None: only text is supported."""
    logprobs: list[float] | None = None
    """Log-probabilities of `completion_ids` under the sampling distribution."""
    prompt_logprobs: list[float] | None = None
    prompt_length: int = 0
    completion_length: int = 0
    finish_reason: str | None = None
    """`stop` or `length`."""
    weight_version: int | None = None
    """Number of updates of the weights that sampled the reply."""
    metrics: dict[str, Any] | None = None
    model: str = ""
    """Empty: the policy in training. Otherwise the name of another model, whose replies are not trained on."""

    def to_dict(self) -> dict[str, Any]:
        """The reply as JSON values."""
        return {**vars(self), "tool_calls": [call.to_dict() for call in self.tool_calls or ()]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelOutput:
        """The reply that `to_dict` wrote; fields that are absent have their defaults."""
        values = _own_fields(cls, data)
        calls = [ToolCall(**call) for call in values.pop("tool_calls", None) or ()]
        return cls(**values, tool_calls=calls or None)


@dataclass
class Action:
    """What a reply means to an environment or a reward function."""

    action: Any = None


@dataclass
class Step:
    """One reply of a model, with its conversation, its parsed action and its reward.

    Token fields that are not set are those of `model_output`. Raises UserError if tokens and logprobs differ in number.
    """

    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chat_completions: list[dict[str, Any]] = field(default_factory=list)
    """The conversation up to and including the reply."""
    observation: Any = None
    thought: str | None = ""
    action: Any = None
    model_response: str = ""
    model_output: ModelOutput | None = None
    info: dict[str, Any] = field(default_factory=dict)
    reward: float | None = 0.0
    done: bool = False
    mc_return: float = 0.0
    advantage: list[float] | float | None = None
    """Advantage of the reply, or of each of its tokens; read only with precomputed advantages."""
    weight_version: int | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    input: Any = None
    output: Any = None
    metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.chat_completions = deepcopy(self.chat_completions)
        self.info = deepcopy(self.info)
        if (output := self.model_output) is not None:
            self.prompt_ids = self.prompt_ids or list(output.prompt_ids or ())
            self.response_ids = self.response_ids or list(output.completion_ids or ())
            self.logprobs = self.logprobs or list(output.logprobs or ())
            self.model_response = self.model_response or output.content or output.text or ""
            self.weight_version = output.weight_version if self.weight_version is None else self.weight_version
        if self.logprobs and len(self.logprobs) != len(self.response_ids):
            raise UserError(
                f"A step has {len(self.response_ids)} response_ids and {counted(len(self.logprobs), 'logprob')}.",
                "Set both from the same reply, or leave both out and set model_output.",
            )

    @classmethod
    def from_model_output(
        cls, model_output: ModelOutput, messages: list[dict[str, Any]] | None = None, action: Any = None
    ) -> Step:
        """The step of a reply to `messages`."""
        reply = {"role": "assistant", "content": model_output.content, "reasoning": model_output.reasoning}
        return cls(
            chat_completions=[*(messages or []), reply],
            thought=model_output.reasoning or "",
            action=action,
            model_output=model_output,
        )

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON values; of an Action, its content."""
        output = self.model_output.to_dict() if self.model_output else None
        action = self.action.action if isinstance(self.action, Action) else self.action
        return {name: _json(value) for name, value in {**vars(self), "model_output": output, "action": action}.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Step:
        """The step that `to_dict` wrote; fields that are absent have their defaults."""
        values = _own_fields(cls, data)
        output = values.pop("model_output", None)
        return cls(**values, model_output=ModelOutput.from_dict(output) if output is not None else None)


@dataclass
class Trajectory:
    """The steps of one role. Trajectories of equal names are compared with each other."""

    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    name: str = DEFAULT_NAME
    """The role, such as solver."""
    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float | None = None
    """None: the sum of the rewards of the steps."""
    info: dict[str, Any] = field(default_factory=dict)
    signals: dict[str, float] = field(default_factory=dict)
    """Numbers for metrics."""
    input: Any = None
    output: Any = None
    metadata: dict[str, Any] | None = None

    @property
    def result(self) -> Any:
        """The output."""
        return self.output

    @property
    def total_reward(self) -> float:
        """The reward, or the sum of the rewards of the steps if none is set."""
        return self.reward if self.reward is not None else sum(step.reward or 0.0 for step in self.steps)

    def is_cumulative(self) -> bool:
        """Whether the conversation of each step begins with that of the step before it."""
        chats = [step.chat_completions for step in self.steps]
        return all(later[: len(earlier)] == earlier for earlier, later in pairwise(chats))

    def to_dict(self) -> dict[str, Any]:
        """The trajectory as JSON values; images of the task are left out."""
        steps = [step.to_dict() for step in self.steps]
        values = {name: _json(value) for name, value in vars(self).items() if name not in ("steps", "task")}
        return {**values, "task": _json(_without_images(self.task)), "steps": steps}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        """The trajectory that `to_dict` wrote; fields that are absent have their defaults."""
        values = _own_fields(cls, data)
        steps = [Step.from_dict(step) for step in values.pop("steps", ())]
        return cls(**values, steps=steps)


@dataclass
class Episode:
    """One rollout of a task."""

    id: str = ""
    """TASK_ID:NUMBER of the rollout."""
    task: Any = None
    termination_reason: TerminationReason | None = None
    is_correct: bool | None = None
    """None: not stated; an evaluation then compares the reward with its threshold."""
    trajectories: list[Trajectory] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    """Numbers by name, averaged over rollouts."""
    info: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    """Results that an evaluator reads, such as the final answer."""
    session_id: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def task_id(self) -> str:
        """The part of `id` before its last colon."""
        return self.id.rpartition(":")[0] or self.id

    @property
    def rollout_idx(self) -> str:
        """The part of `id` after its last colon."""
        return self.id.rpartition(":")[2] if ":" in self.id else "0"

    def to_dict(self) -> dict[str, Any]:
        """The rollout as JSON values; images of the task are left out."""
        values = {name: _json(value) for name, value in vars(self).items() if name not in ("trajectories", "task")}
        return {
            **values,
            "task": _json(_without_images(self.task)),
            "trajectories": [trajectory.to_dict() for trajectory in self.trajectories],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Episode:
        """The rollout that `to_dict` wrote; fields that are absent have their defaults."""
        values = _own_fields(cls, data)
        reason = values.pop("termination_reason", None)
        trajectories = [Trajectory.from_dict(trajectory) for trajectory in values.pop("trajectories", ())]
        return cls(
            **values,
            trajectories=trajectories,
            termination_reason=TerminationReason(reason) if reason is not None else None,
        )


@dataclass
class TrajectoryGroup:
    """Trajectories that are compared with each other."""

    trajectories: list[Trajectory]
    group_id: str = ""
    """TASK_ID:ROLE."""
    metadata: list[dict[str, Any]] = field(default_factory=list)
    weight_version: int = 0

    @property
    def group_role(self) -> str:
        """The part of `group_id` after its last colon."""
        return self.group_id.rpartition(":")[2] if ":" in self.group_id[:-1] else "all_groups"

    @property
    def task_id(self) -> str:
        """The part of `group_id` before its last colon."""
        return self.group_id.rpartition(":")[0] or self.group_id


def _own_fields(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `data` that are fields of `cls`."""
    names = {own.name for own in fields(cls)}
    return {name: value for name, value in data.items() if name in names}


def _without_images(task: Any) -> Any:
    if not isinstance(task, Mapping):
        return task
    return {key: value for key, value in task.items() if key not in ("image", "images")}


def _json(value: Any) -> Any:
    """`value` as JSON values; an object that JSON has no type for becomes its text."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Enum():
            return value.value
        case Mapping():
            return {str(key): _json(part) for key, part in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_json(part) for part in value]
        case Action():
            return _json(value.action)
        case ToolCall() | Step() | Trajectory() | Episode() | ModelOutput():
            return value.to_dict()
        case _:
            return _json_number(value)


def _json_number(value: Any) -> Any:
    """A number of numpy as Python's; anything else as text."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else str(value)
