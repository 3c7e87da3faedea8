"""Conversations with the policy, one for each role that takes part in a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.types import POLICY, Message, Termination, Trajectory, Turn


class Terminated(Exception):
    """Raised by a workflow to end its rollout early; the replies so far are kept."""

    def __init__(self, reason: Termination) -> None:
        super().__init__(reason)
        self.reason: Termination = reason


class Conversation:
    """A conversation with the policy, in one role.

    `say` appends messages and samples the reply; `reset` starts over with an empty history. All replies become the
    turns of one trajectory.

    Example:

        @workflow("check")
        async def check(task: Task, conversation: Conversation) -> float:
            await conversation.say(*task.messages)
            reply = await conversation.say("Check your answer. Give the final number only.")
            return 1.0 if reply.text.strip() == task.answer else 0.0
    """

    def __init__(
        self,
        policy: Snapshot,
        sampling: SamplingConfig,
        seed: int,
        *,
        role: str = POLICY,
        model: str = "",
        trained: bool = True,
    ) -> None:
        """`seed` belongs to the rollout; the seed of each reply is derived from it and the reply's index.

        `model`: name of another model that replies in place of the policy.
        """
        self.policy, self.role, self.trained = policy, role, trained and not model
        self.reward: float | None = None
        """Reward of the trajectory; None: the sum of the turns' rewards."""
        self._sampling, self._seed, self._model = sampling, seed, model
        self._history: list[Message | Turn] = []
        self._turns: list[Turn] = []
        self._replies = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All replies so far, including those before a `reset`."""
        return tuple(self._turns)

    @property
    def trajectory(self) -> Trajectory:
        """The replies so far with their reward; 0 if none was given."""
        return Trajectory(turns=self.turns, role=self.role, reward=self.total_reward or 0.0, trained=self.trained)

    @property
    def total_reward(self) -> float | None:
        """`reward`, else the sum of the turns' rewards; None if no turn has one."""
        if self.reward is not None:
            return float(self.reward)
        rewards = [turn.reward for turn in self._turns if turn.reward is not None]
        return sum(rewards) if rewards else None

    async def say(
        self,
        *messages: Message | str,
        state: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Append messages to the conversation, sample the reply, append it and return it.

        A string is a user message. `state` identifies the state of the environment, for advantages that compare turns
        in equal states. `tools` are passed to the chat template. `sampling` overrides sampling settings for this reply.
        Raises PromptTooLong if the conversation no longer fits in the model's context.
        """
        history = [
            *self._history,
            *(Message(role="user", content=message) if isinstance(message, str) else message for message in messages),
        ]
        settings = SamplingConfig.model_validate({**dict(self._sampling), **(sampling or {})})
        number, self._replies = self._replies, self._replies + 1
        policy = await self.policy.open_model(self._model) if self._model else self.policy
        prompt = policy.chat.encode(history, tools)
        (turn,) = await policy.sample(prompt, count=1, seed=request_seed(self._seed, number), sampling=settings)
        turn = replace(turn, state=state, model=self._model)
        self._history = [*history, turn]
        self._turns.append(turn)
        return turn

    def credit(self, reward: float | None = None, *, advantages: float | Sequence[float] | None = None) -> None:
        """Set the reward of the last reply, for algorithms with a reward per turn.

        `advantages`: of all its tokens, or of each, its stop token included; the advantage `precomputed` reads them.
        """
        last = self._turns[-1] if reward is None else replace(self._turns[-1], reward=reward)
        if advantages is not None:
            values = float(advantages) if isinstance(advantages, float | int) else tuple(map(float, advantages))
            last = replace(last, advantages=values)
        self._turns[-1] = last

    def record(self, turns: Sequence[Turn]) -> None:
        """Add replies that an endpoint of the policy has sampled."""
        self._turns.extend(turns)

    def reset(self) -> None:
        """Clear the history. The next reply starts a new conversation, and so a new training row."""
        self._history = []
