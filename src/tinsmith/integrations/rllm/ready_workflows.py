"""Ready workflows under the names of rLLM: one reply, or a conversation of an agent with an environment."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from tinsmith.errors import UserError
from tinsmith.integrations.rllm.agents import BaseAgent, BaseEnv
from tinsmith.integrations.rllm.records import (
    Action,
    Episode,
    ModelOutput,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
)
from tinsmith.integrations.rllm.rewards import RewardFunction
from tinsmith.integrations.rllm.rollouts import task_messages
from tinsmith.integrations.rllm.workflow import Workflow


class SimpleWorkflow(Workflow):
    """One reply to the task, scored by `reward_function`."""

    def __init__(self, rollout_engine: Any, reward_function: RewardFunction, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.reward_function = reward_function

    @override
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        self.reset(task, uid)
        messages = task_messages(task)
        output: ModelOutput = await self.rollout_engine.get_model_response(messages, application_id=uid, **kwargs)
        step = Step.from_model_output(output, messages, Action(action=output.content))
        score = await self.run_in_executor(self.reward_function, task, step.action)
        step.reward = float(score.reward)
        self.commit(trajectory=Trajectory(name="solver", task=task, steps=[step]))
        raise TerminationEvent(_reason(output, TerminationReason.ENV_DONE))


class MultiTurnWorkflow(Workflow):
    """A conversation of an agent with an environment, of at most `max_steps` replies."""

    def __init__(
        self,
        rollout_engine: Any,
        agent_cls: type[BaseAgent],
        env_cls: type[BaseEnv],
        agent_args: dict[str, Any] | None = None,
        env_args: dict[str, Any] | None = None,
        max_steps: int = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(rollout_engine, **kwargs)
        for kind in (agent_cls, env_cls):
            if not isinstance(kind, type):
                raise UserError(f"{kind!r} is not a class.", "Pass the class of the agent and of the environment.")
        self.agent, self.env = agent_cls(**(agent_args or {})), env_cls(**(env_args or {}))
        self.max_steps = max_steps

    @override
    def reset(self, task: dict[str, Any] | None = None, uid: str | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the agent, and begin the task in the environment. Returns (observation, info)."""
        self.task, self.uid, self._completed_trajectories = task, uid or "", []
        self.agent.reset()
        self.agent.trajectory.task = task
        return self.env.reset(task=task)

    @override
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        observation, info = await self.run_in_executor(self.reset, task, uid)
        self.agent.update_from_env(observation, 0.0, False, info)
        for _ in range(self.max_steps):
            output = await self._reply(uid, **kwargs)
            count = len(self.agent.trajectory.steps)
            action = self.agent.update_from_model(output.text or "")
            attach_output(self.agent, output, count)
            observation, reward, done, info = await self.run_in_executor(self.env.step, action)
            self.agent.update_from_env(observation, float(reward), bool(done), info)
            if done or output.finish_reason == "length":
                raise TerminationEvent(_reason(output, TerminationReason.ENV_DONE))
        raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)

    async def _reply(self, uid: str, **kwargs: Any) -> ModelOutput:
        return await self.rollout_engine.get_model_response(
            list(self.agent.chat_completions), application_id=uid, **kwargs
        )


class SingleTurnWorkflow(MultiTurnWorkflow):
    """One reply of an agent to an environment."""

    def __init__(self, rollout_engine: Any, agent_cls: type[BaseAgent], env_cls: type[BaseEnv], **kwargs: Any) -> None:
        if kwargs.pop("max_steps", 1) != 1:
            raise UserError("SingleTurnWorkflow has one step.", "Remove max_steps, or use MultiTurnWorkflow.")
        super().__init__(rollout_engine, agent_cls, env_cls, max_steps=1, **kwargs)


class CumulativeWorkflow(MultiTurnWorkflow):
    """A conversation whose replies and observations share one budget: the engine's max_response_length.

    A reply has at most the budget minus the tokens added since the first prompt.
    """

    @override
    async def _reply(self, uid: str, **kwargs: Any) -> ModelOutput:
        engine, messages = self.rollout_engine, list(self.agent.chat_completions)
        length = engine.count_prompt_tokens(messages)
        self._first_length = self._first_length or length
        budget = engine.max_response_length - (length - self._first_length)
        if budget <= 0:
            raise TerminationEvent(TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED)
        return await engine.get_model_response(
            messages,
            application_id=uid,
            **{"accumulate_reasoning": True, "enforce_max_prompt_length": False, **kwargs, "max_tokens": budget},
        )

    @override
    def reset(self, task: dict[str, Any] | None = None, uid: str | None = None) -> tuple[Any, dict[str, Any]]:
        self._first_length = 0
        return super().reset(task, uid)


def attach_output(agent: BaseAgent, output: ModelOutput, count: int) -> None:
    """Set `model_output`, with its tokens, on the step that the agent added for this reply.

    `count` is the number of its steps before. Raises UserError if the agent added no step.
    """
    steps = agent.trajectory.steps
    step = steps[-1] if steps else None
    if step is None or (len(steps) == count and step.response_ids):
        raise UserError(
            f"{type(agent).__name__}.update_from_model added no step.", "Append a Step to the trajectory in it."
        )
    if not step.response_ids:
        step.model_output = output
        step.__post_init__()


def _reason(output: ModelOutput, otherwise: TerminationReason) -> TerminationReason:
    return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED if output.finish_reason == "length" else otherwise
