"""The rollout protocol: a workflow is a function `rollout(task, policy, seed)`.

It samples from `policy`, which records what it samples, and returns a Rollout, the reward of its only conversation, or
nothing. `IndependentRollouts` is the one place that calls it: it limits its time, contains its errors and scores what
it sampled. A workflow is called for many rollouts concurrently, so it keeps no state between calls, and a cancelled
call leaves none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from tinsmith.chat.request import PromptTooLong
from tinsmith.plurals import counted
from tinsmith.rl.guards.user_code import contained, describe, run_user_code
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint, AgentSession
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.base import Reward, RewardValue, Score
from tinsmith.rl.rewards.compared import score_by
from tinsmith.rl.types import POLICY, Rollout, Task, Termination, Trajectory, Turn
from tinsmith.rl.workflows.conversation import Conversation, Terminated
from tinsmith.rl.workflows.scoring import OWN, scored
from tinsmith.settings import Settings


class Workflow(Protocol):
    """Creates the rollouts of a task. Created once per run and called for many tasks concurrently."""

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        """Return `count` rollouts of a task. An exception fails all of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """The objects of a run that a workflow uses.

    Example: WorkflowContext(sampling=SamplingConfig(), rewards=Rewards([Number()]), agent_endpoint=AgentEndpoint())
    """

    sampling: SamplingConfig
    rewards: Rewards
    """Reward functions of the environment."""
    agent_endpoint: AgentEndpoint
    """OpenAI-compatible endpoint through which agents sample the policy."""
    store: dict[str, Any] = field(default_factory=dict)
    """Values that all rollouts of the run share; checkpoints save those that JSON can hold."""
    evaluating: bool = False
    """Whether the rollouts are those of an evaluation."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """What the environments of the run have opened, by name."""


@dataclass(frozen=True, slots=True)
class WorkflowPolicy:
    """The policy in one rollout. What is sampled through it is recorded: each conversation becomes a trajectory.

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
    context: WorkflowContext
    """The objects of the run."""
    seed: int
    """Seed of the rollout."""
    _conversations: list[Conversation] = field(default_factory=list)

    @property
    def sampling(self) -> SamplingConfig:
        """Sampling settings of the environment."""
        return self.context.sampling

    @property
    def store(self) -> dict[str, Any]:
        """Values that all rollouts of the run share; checkpoints save those that JSON can hold."""
        return self.context.store

    @property
    def evaluating(self) -> bool:
        """Whether the rollout is part of an evaluation."""
        return self.context.evaluating

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """The conversations with a reply."""
        return tuple(each for each in self._conversations if each.turns)

    def conversation(self, role: str = POLICY, *, model: str = "", trained: bool = True) -> Conversation:
        """Start a conversation. All conversations with a reply become trajectories of the rollout.

        `model`: a base model or tinker:// path of the server that replies in place of the policy and is not trained.
        `trained=False`: the policy replies, without being trained on it.
        """
        conversation = Conversation(
            self.snapshot, self.sampling, self._next_seed, role=role, model=model, trained=trained
        )
        self._conversations.append(conversation)
        return conversation

    @asynccontextmanager
    async def session(self, role: str = POLICY, *, open_url: bool = False) -> AsyncIterator[AgentSession]:
        """Serve the policy to an OpenAI client for the duration of the block. Its replies become a trajectory.

        The session has the client's `base_url`, `api_key` and `model`. With `open_url`, any key is valid.
        """
        endpoint, seed = self.context.agent_endpoint, self._next_seed
        conversation = self.conversation(role)
        async with endpoint.session(self.snapshot, self.sampling, seed, open_url=open_url) as session:
            try:
                yield session
            finally:
                conversation.record(session.turns)

    async def open_model(self, name: str) -> Snapshot:
        """Another model of the server, a base model or a tinker:// path, to sample from without a trajectory."""
        return await self.snapshot.open_model(name)

    async def score(self, reward: Reward, task: Task, text: str) -> Score:
        """The score of a text by a reward function, which `make_reward` makes from its settings."""
        turn = Turn(prompt=(), tokens=(), logprobs=(), text=text, stop="stop")
        return await score_by(reward, task, Rollout.single((turn,)), self.snapshot, self.context.rewards.pool)

    def rollout(
        self,
        *,
        correct: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        termination: Termination = "done",
    ) -> Rollout:
        """The rollout of all conversations so far. `metrics` are averaged over rollouts as workflow/NAME."""
        return Rollout(
            trajectories=tuple(each.trajectory for each in self.conversations),
            correct=correct,
            metrics=metrics or {},
            termination=termination,
        )

    def failed(self, error: str) -> Rollout:
        """The failed rollout of all conversations so far."""
        turns = [Trajectory(turns=each.turns, role=each.role, trained=each.trained) for each in self.conversations]
        return Rollout(trajectories=tuple(turns)).failed(error)

    @property
    def _next_seed(self) -> int:
        return request_seed(self.seed, len(self._conversations)) if self._conversations else self.seed


RolloutFunction = Callable[[Task, WorkflowPolicy, int], Awaitable[Rollout | RewardValue | None]]
"""Makes one rollout of a task. `seed` differs between the rollouts of a task."""


class IndependentRollouts(Workflow):
    """Makes each rollout by a call of a function; the calls for a task run concurrently."""

    def __init__(self, rollout: RolloutFunction, context: WorkflowContext, timeout: float | None = None) -> None:
        """`timeout`: seconds after which a rollout ends with what was sampled until then."""
        self._rollout, self._context, self._timeout = rollout, context, timeout

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        policies = [WorkflowPolicy(policy, self._context, request_seed(seed, index)) for index in range(count)]
        return tuple(await asyncio.gather(*(self._contained(task, each) for each in policies)))

    async def _contained(self, task: Task, policy: WorkflowPolicy) -> Rollout:
        return await contained(run_user_code(self._scored(task, policy)), lambda error: policy.failed(describe(error)))

    async def _scored(self, task: Task, policy: WorkflowPolicy) -> Rollout:
        """The rollout. One that ends early keeps what was sampled until then, and without a reward is worth 0."""
        result: Rollout | RewardValue | None = None
        ending: Termination = "done"
        nothing_sampled = "the workflow sampled no reply"
        clock = asyncio.timeout(self._timeout)
        try:
            async with clock:
                result = await self._rollout(task, policy, policy.seed)
        except Terminated as end:
            ending = end.reason
        except PromptTooLong as error:
            ending, nothing_sampled = "max_prompt", describe(error)
        except TimeoutError:
            if not clock.expired():
                raise
            ending, nothing_sampled = "timeout", f"timed out after {self._timeout:g} seconds, before the first reply"
        rollout = result if isinstance(result, Rollout) else _rollout_worth(result, policy, ending)
        if rollout.error:
            return rollout
        if not rollout.turns:
            return rollout.failed(nothing_sampled)
        unscored = [each.role for each in policy.conversations if each.trained and each.total_reward is None]
        without_reward = () if isinstance(result, Rollout) or ending != "done" else unscored
        return await scored(task, rollout, self._context.rewards, policy.snapshot, without_reward=without_reward)


def _rollout_worth(value: RewardValue | None, policy: WorkflowPolicy, ending: Termination) -> Rollout:
    """The rollout of all conversations, worth what the function returned, else what it gave its conversations."""
    conversations = policy.conversations
    try:
        score = None if value is None else Score.of(value)
    except (TypeError, ValueError, OverflowError) as error:
        return policy.failed(f"the workflow's own {error}")
    if score is not None:
        if len(conversations) > 1:
            several = counted(len(conversations), "conversation")
            return policy.failed(f"the workflow returned a reward for {several}; set `reward` of each, or return none")
        for conversation in conversations:
            conversation.reward = score.value
    rollout = policy.rollout(termination=ending)
    own = [each.total_reward for each in conversations]
    if len(own) != 1 or own[0] is None:
        return rollout
    parts = {f"{OWN}/{name}": part for name, part in score.parts.items()} if score else {}
    return replace(rollout, reward_parts={OWN: own[0], **parts}, correct=score.correct if score else None)


class WorkflowOptions(Settings):
    """Base class of workflow settings. A subclass implements `rollout`; its fields are settings of the run file.

    Example:

        @workflow("debate")
        class Debate(WorkflowOptions):
            rounds: int = 2

            async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> float:
                conversation = policy.conversation()
                await conversation.say(*task.messages)
                for _ in range(self.rounds):
                    reply = await conversation.say("Argue against your answer, then answer again.")
                return float(reply.text.endswith(task.answer))
    """

    has_tasks: ClassVar[bool] = False
    """Whether the class brings tasks too, and so is an entry of `environments`."""

    @property
    def provides_rewards(self) -> bool:
        """Whether rollouts have a reward, so that the run needs none of its own."""
        return False

    @property
    def provides_states(self) -> bool:
        """Whether turns may have states, which some advantages compare."""
        return True

    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> Rollout | RewardValue | None:
        """Make one rollout of a task: return a Rollout, the reward of its only conversation, or None.

        The rewards of the run are added. An exception fails the rollout. `seed` differs between the rollouts of a task.
        """
        raise NotImplementedError

    def make(self, context: WorkflowContext) -> Workflow:
        """Create the workflow of a run; `context` has the sampling settings of its environment.

        By default each rollout is a call of `rollout`. Implement `make` in place of `rollout` to share work between
        the rollouts of a task, or to keep objects for the whole run.
        """
        return IndependentRollouts(self.rollout, context)


class AdaptedWorkflow:
    """Base class of workflows in the API of another system: `{type: custom, path: …}` takes a subclass or an object."""

    @classmethod
    def workflow_options(cls, args: Mapping[str, Any]) -> WorkflowOptions:
        """The settings that run it with these arguments. Raises ValueError if it does not take them."""
        raise NotImplementedError
