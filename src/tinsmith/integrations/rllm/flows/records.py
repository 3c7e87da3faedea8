"""Records of agent flows under the names of rLLM: what a flow and an evaluator receive and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinsmith.errors import UserError
from tinsmith.integrations.rllm.records import Episode, Trajectory


@dataclass
class Task:
    """A row of a dataset, as a flow and an evaluator receive it. `task[key]` is a field of the row."""

    id: str
    instruction: str = ""
    """The question, prompt or problem of the row."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row."""

    @property
    def data(self) -> dict[str, Any]:
        """The row."""
        return self.metadata

    def __getitem__(self, key: str) -> Any:
        return self.metadata[key]

    def __contains__(self, key: object) -> bool:
        return key in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the row, or `default`."""
        return self.metadata.get(key, default)


@dataclass
class AgentConfig:
    """Where a flow samples the policy: the settings of an OpenAI client, for one rollout. Any API key is valid."""

    base_url: str
    model: str
    session_uid: str
    is_validation: bool = False
    sampling_params: dict[str, Any] = field(default_factory=dict)
    """The run's sampling settings. Requests without settings of their own use them."""
    metadata: dict[str, Any] = field(default_factory=dict)
    api_key: str = "EMPTY"


@dataclass
class Signal:
    """A number that an evaluator measures; it becomes a metric."""

    name: str
    value: float
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvalOutput:
    """The result of an evaluator. `reward` is that of trajectories that it gives none."""

    reward: float
    is_correct: bool
    signals: list[Signal] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


def episode_of(result: Any, task: Task, name: str) -> Episode:
    """The episode of what a flow returned. Raises UserError for a type that is none of those of `rollout`."""
    match result:
        case Episode():
            episode = result
        case None:
            episode = Episode(trajectories=[Trajectory(name=name)])
        case Trajectory():
            episode = Episode(trajectories=[result])
        case str():
            episode = Episode(trajectories=[Trajectory(name=name, output=result)], artifacts={"answer": result})
        case Mapping():
            episode = Episode(trajectories=[Trajectory(name=name)], artifacts=dict(result))
        case list() if result and all(isinstance(each, Trajectory) for each in result):
            episode = Episode(trajectories=result)
        case _:
            raise UserError(
                f"The flow returned a {type(result).__name__}.", "Return an Episode, a Trajectory, text, or nothing."
            )
    episode.task = task.metadata if episode.task is None else episode.task
    if "answer" not in episode.artifacts and episode.trajectories and episode.trajectories[-1].output is not None:
        episode.artifacts["answer"] = str(episode.trajectories[-1].output)
    return episode


def output_of(result: Any) -> EvalOutput:
    """The result of an evaluator as an EvalOutput. Raises UserError for another type."""
    match result:
        case EvalOutput():
            return result
        case bool():
            return EvalOutput(reward=float(result), is_correct=result)
        case (reward, right):
            return EvalOutput(reward=float(reward), is_correct=bool(right))
        case None | str():
            pass
        case _:
            try:
                return EvalOutput(reward=float(result), is_correct=float(result) > 0)
            except (TypeError, ValueError):
                pass
    raise UserError(
        f"The evaluator returned a {type(result).__name__}.", "Return an EvalOutput, a number, or whether it is right."
    )
