"""Conversations with the policy: what workflows written by users hold, one for each role that takes part in a rollout.

A workflow of one role receives a Conversation. A workflow of several roles receives a WorkflowPolicy, from which it
starts a conversation for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.rewards.compared import score_by
from tinsmith.rl.scoring.pool import ScoringPool
from tinsmith.rl.types import POLICY, Message, Rollout, Task, Termination, Trajectory, Turn


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
        settings = SamplingConfig.model_validate({**self._sampling.model_dump(), **(sampling or {})})
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

    def reset(self) -> None:
        """Clear the history. The next reply starts a new conversation, and so a new training row."""
        self._history = []


@dataclass(slots=True)
class WorkflowPolicy:
    """The policy as a workflow of several roles samples it in one rollout.

    Example:

        class SolverJudge:
            async def run(self, task: Task, policy: WorkflowPolicy) -> Rollout:
                solver, judge = policy.conversation("solver"), policy.conversation("judge")
                answer = await solver.say(*task.messages)
                verdict = await judge.say(f"Is this right? Answer yes or no.\n{answer.text}")
                right = answer.text.strip() == task.answer
                solver.reward, judge.reward = float(right), float((verdict.text.strip() == "yes") == right)
                return policy.rollout(correct=right)
    """

    snapshot: Snapshot
    """The weights that sample this rollout."""
    sampling: SamplingConfig
    seed: int
    store: dict[str, Any]
    """Values that all rollouts of the run share; checkpoints save those that JSON can hold."""
    evaluating: bool
    """Whether the rollout is part of an evaluation."""
    # Worker processes of the run, in which `score` makes comparisons that may take long.
    _scoring: ScoringPool | None = None
    _conversations: list[Conversation] = field(default_factory=list)

    def conversation(self, role: str = POLICY, *, model: str = "", trained: bool = True) -> Conversation:
        """Start a conversation. All conversations with a reply become trajectories of the rollout.

        `model`: a base model or tinker:// path of the server that replies in place of the policy and is not trained.
        `trained=False`: the policy replies, without being trained on it.
        """
        seed = request_seed(self.seed, len(self._conversations)) if self._conversations else self.seed
        conversation = Conversation(self.snapshot, self.sampling, seed, role=role, model=model, trained=trained)
        self._conversations.append(conversation)
        return conversation

    async def open_model(self, name: str) -> Snapshot:
        """Another model of the server, a base model or a tinker:// path, to sample from without a trajectory."""
        return await self.snapshot.open_model(name)

    async def score(self, reward: Reward, task: Task, text: str) -> Score:
        """The score of a text by a reward function, which `make_reward` makes from its settings."""
        turn = Turn(prompt=(), tokens=(), logprobs=(), text=text, stop="stop")
        return await score_by(reward, task, Rollout.single((turn,)), self.snapshot, self._scoring)

    @property
    def without_reward(self) -> tuple[str, ...]:
        """Roles with a trained trajectory that was given no reward."""
        return tuple(each.role for each in self._conversations if each.trained and each.total_reward is None)

    def rollout(
        self,
        *,
        correct: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        termination: Termination = "done",
    ) -> Rollout:
        """The rollout of all conversations so far. `metrics` are averaged over rollouts as workflow/NAME."""
        return Rollout(
            trajectories=tuple(each.trajectory for each in self._conversations if each.turns),
            correct=correct,
            metrics=metrics or {},
            termination=termination,
        )
