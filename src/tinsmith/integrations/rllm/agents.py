"""The agent and environment of a conversation under the names of rLLM: BaseAgent and BaseEnv."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tinsmith.integrations.rllm.records import Action, Step, Trajectory


class BaseAgent(ABC):
    """Keeps the conversation of a role: what the model is sent next, and the steps up to now."""

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        """The conversation, as messages of a chat request."""
        return []

    @property
    def trajectory(self) -> Trajectory:
        """The steps up to now."""
        return Trajectory()

    def update_from_env(self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any) -> None:
        """Add an observation of the environment."""
        raise NotImplementedError(f"{type(self).__name__} has no update_from_env")

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        """Add a reply of the model, and return the action in it."""
        raise NotImplementedError(f"{type(self).__name__} has no update_from_model")

    @abstractmethod
    def reset(self) -> None:
        """Begin a new conversation."""
        ...

    def get_current_state(self) -> Step | None:
        """The last step; None before the first."""
        return self.trajectory.steps[-1] if self.trajectory.steps else None


class BaseEnv(ABC):
    """What the actions of an agent act on."""

    @abstractmethod
    def reset(self, task: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a task. Returns (observation, info)."""
        ...

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Take an action. Returns (observation, reward, done, info)."""
        ...

    def close(self) -> None:
        """Release the resources of the environment."""
        return

    @staticmethod
    def from_dict(info: dict[str, Any]) -> BaseEnv:
        """The environment of a task."""
        raise NotImplementedError

    @staticmethod
    def is_multithread_safe() -> bool:
        """Whether several environments may run in one process."""
        return True
