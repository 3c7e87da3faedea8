"""Agent flows: functions with an OpenAI client; their replies are recorded and matched with their steps."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest

from tinsmith.errors import UserError
from tinsmith.integrations.rllm.flows.records import output_of
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.training_rows import rows_from_trajectory
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.format import Format
from tinsmith.rl.types import Message, Rollout
from tinsmith.rl.types import Task as RunTask
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.rl.workflows.custom import CustomConfig
from tinsmith.rllm import (
    AgentConfig,
    Episode,
    EvalOutput,
    Signal,
    Step,
    Task,
    Trajectory,
    evaluator,
    rollout,
)
from tinsmith.testing import ScriptedSnapshot

ROW = {"question": "yes or no?", "right": "yes"}
TASK = RunTask(id="t/0", messages=(Message(role="user", content=ROW["question"]),), extra={"row": ROW})
USER = {"role": "user", "content": "yes or no?"}


def play(flow: Any, scorer: Any = None, *replies: str, count: int = 1, rewards: Rewards | None = None) -> list[Rollout]:
    """Rollouts of a flow on a policy that samples `replies` with equal probability."""

    async def main() -> list[Rollout]:
        agent_endpoint = AgentEndpoint()
        context = WorkflowContext(
            sampling=SamplingConfig(), rewards=rewards or Rewards([]), agent_endpoint=agent_endpoint
        )
        args = {} if scorer is None else {"evaluator": scorer}
        policy = ScriptedSnapshot(replies or ("yes",), np.zeros(len(replies) or 1), 3)
        try:
            workflow = CustomConfig(path=flow, args=args).make(context)
            return list(await workflow.run(TASK, policy, count=count, seed=5))
        finally:
            await agent_endpoint.close()

    return asyncio.run(main())


async def ask(config: AgentConfig, *messages: dict[str, Any]) -> str:
    async with openai.AsyncOpenAI(base_url=config.base_url, api_key="EMPTY", max_retries=0) as client:
        answer = await client.chat.completions.create(model=config.model, messages=list(messages))  # type: ignore[arg-type]
    return str(answer.choices[0].message.content)


@evaluator
def is_right(task: Task, episode: Episode) -> float:
    return float(str(episode.artifacts.get("answer")) == task["right"])


@rollout
async def answers(task: Task, config: AgentConfig) -> str:
    return await ask(config, {"role": "user", "content": task.instruction})


def test_flow_that_returns_an_answer_is_scored():
    rollouts = play(answers, is_right, "yes", "no", count=8)
    assert {(each.text, each.reward, each.correct) for each in rollouts} == {("yes", 1.0, True), ("no", 0.0, False)}
    assert [trajectory.role for trajectory in rollouts[0].trajectories] == ["solver"]


def test_sync_flow_and_evaluator_run_in_threads():
    @rollout(name="agent")
    def flow(task: Task, config: AgentConfig) -> None:
        with openai.OpenAI(base_url=config.base_url, api_key="EMPTY", max_retries=0) as client:
            client.chat.completions.create(model=config.model, messages=[USER])  # type: ignore[list-item]

    @evaluator()
    async def scorer(task: Task, episode: Episode) -> EvalOutput:
        assert episode.trajectories[0].steps[0].response_ids
        return EvalOutput(reward=0.5, is_correct=True, signals=[Signal("turns", 1.0)])

    (result,) = play(flow, scorer)
    assert [(each.role, each.reward) for each in result.trajectories] == [("agent", 0.5)]
    assert (result.correct, result.metrics) == (True, {"turns": 1.0})


def test_steps_are_matched_by_their_conversations():
    @rollout
    async def flow(task: Task, config: AgentConfig) -> Episode:
        chats = [[{**USER, "content": f"{name}?"}] for name in ("first", "second", "judge")]
        replies = await asyncio.gather(*(ask(config, *messages) for messages in chats))
        trajectories = [
            Trajectory(name=name, reward=reward, steps=[Step(chat_completions=[*messages, reply])])
            for name, reward, messages, reply in zip(
                ("solver", "solver", "judge"),
                (0.0, 1.0, 0.5),
                chats,
                [{"role": "assistant", "content": text} for text in replies],
                strict=True,
            )
        ]
        return Episode(trajectories=trajectories[::-1], is_correct=True, metrics={"acc": 1.0})

    (result,) = play(flow)  # every reply has the same text: only the conversation tells them apart
    prompts = {each.reward: "".join(map(chr, each.turns[0].prompt)) for each in result.trajectories}
    assert prompts == {0.0: "first?", 1.0: "second?", 0.5: "judge?"}
    assert (result.correct, result.metrics) == (True, {"acc": 1.0})


def test_conversation_of_a_flow_is_one_training_row():
    @rollout
    async def flow(task: Task, config: AgentConfig) -> Trajectory:
        messages: list[dict[str, Any]] = []
        for question in ("2 + 3?", "sure?"):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": await ask(config, *messages)})
        steps = [Step(chat_completions=messages[:2]), Step(chat_completions=messages)]
        return Trajectory(name="solver", steps=steps, reward=1.0)

    (result,) = play(flow, None, "five")
    assert len(rows_from_trajectory(result.trajectories[0])) == 1
    assert len(result.turns) == 2


def test_steps_without_replies_are_matched_by_position():
    @rollout
    async def flow(task: Task, config: AgentConfig) -> Trajectory:
        for question in ("a?", "b?"):
            await ask(config, {"role": "user", "content": question})
        return Trajectory(steps=[Step(action=1), Step(action=2)], reward=1.0)

    (result,) = play(flow)
    assert ["".join(map(chr, turn.prompt)) for turn in result.turns] == ["a?", "b?"]


def test_calls_that_the_flow_does_not_return_are_left_out():
    @rollout
    async def flow(task: Task, config: AgentConfig) -> Trajectory:
        replies = [await ask(config, {"role": "user", "content": question}) for question in ("a?", "b?")]
        reply = {"role": "assistant", "content": replies[1]}
        return Trajectory(steps=[Step(chat_completions=[{"role": "user", "content": "b?"}, reply])], reward=1.0)

    (result,) = play(flow)
    assert ["".join(map(chr, turn.prompt)) for turn in result.turns] == ["b?"]


async def _other_text(task: Task, config: AgentConfig) -> Trajectory:
    await ask(config, USER)
    return Trajectory(steps=[Step(chat_completions=[USER, {"role": "assistant", "content": "changed"}])], reward=1.0)


async def _too_many(task: Task, config: AgentConfig) -> Trajectory:
    await ask(config, USER)
    return Trajectory(steps=[Step(), Step()], reward=1.0)


async def _no_calls(task: Task, config: AgentConfig) -> None:
    return None


async def _two_names(task: Task, config: AgentConfig) -> list[Trajectory]:
    await ask(config, USER)
    return [Trajectory(name="a", reward=1.0), Trajectory(name="b", reward=0.0)]


async def _no_reward(task: Task, config: AgentConfig) -> None:
    await ask(config, USER)


async def _raises(task: Task, config: AgentConfig) -> None:
    await ask(config, USER)
    raise KeyError("answer")


async def _wrong_type(task: Task, config: AgentConfig) -> int:
    return 3


async def _key_of_another(task: Task, config: AgentConfig) -> str:
    return await ask(AgentConfig(config.base_url.replace("/v1", "0/v1"), config.model, ""), USER)


@pytest.mark.parametrize(
    ("flow", "error"),
    [
        (_other_text, "No reply of the policy matches the step with the reply 'changed'"),
        (_too_many, "2 steps without a reply, and 1 reply without a step"),
        (_no_calls, "The flow sampled no reply"),
        (_two_names, "2 trajectories have no steps"),
        (_no_reward, "The trajectory 'solver' has no reward"),
        (_raises, "KeyError: 'answer' ("),
        (_wrong_type, "The flow returned a int"),
        (_key_of_another, "AuthenticationError"),
    ],
)
def test_faults_of_a_flow_fail_its_rollout(flow: Any, error: str):
    (result,) = play(rollout(flow))
    assert error in result.error
    assert result.reward == 0.0


def test_rewards_of_the_run_replace_an_evaluator():
    (result,) = play(rollout(_no_reward), rewards=Rewards([Format(pattern="yes")]))
    assert (result.reward, result.error) == (1.0, "")


def test_evaluator_may_set_rewards_of_single_trajectories():
    @rollout
    async def flow(task: Task, config: AgentConfig) -> list[Trajectory]:
        await asyncio.gather(ask(config, USER), ask(config, {**USER, "content": "which?"}))
        return [Trajectory(name="solver", steps=[Step()]), Trajectory(name="judge", steps=[Step()])]

    @evaluator
    def scorer(task: Task, episode: Episode) -> tuple[float, bool]:
        episode.trajectories[0].reward = 0.25
        episode.trajectories[1].signals["length"] = 3.0
        return 1.0, True

    (result,) = play(flow, scorer)
    assert {each.role: each.reward for each in result.trajectories} == {"solver": 0.25, "judge": 1.0}
    assert result.metrics == {"length": 3.0}


@pytest.mark.parametrize(
    ("value", "reward", "right"), [(0.5, 0.5, True), (0, 0.0, False), (True, 1.0, True), ((0.5, False), 0.5, False)]
)
def test_results_of_evaluators_are_converted(value: Any, reward: float, right: bool):
    output = output_of(value)
    assert (output.reward, output.is_correct) == (reward, right)


def test_evaluator_without_a_result_is_an_error():
    for value in (None, "good"):
        with pytest.raises(UserError, match="The evaluator returned"):
            output_of(value)


def test_decorated_functions_can_be_called():
    assert is_right(Task(id="t", metadata=ROW), Episode(artifacts={"answer": "yes"})) == 1.0
    assert is_right.evaluate(Task(id="t", metadata=ROW), Episode(artifacts={"answer": "no"})).is_correct is False
    with pytest.raises(UserError, match="register='x' is not supported"):
        rollout(register="x")  # type: ignore[call-overload]


def test_run_file_records_the_function():
    config = CustomConfig(path=answers, args={"evaluator": is_right})
    recorded = config.model_dump(mode="json")
    assert recorded["path"] == f"{__name__}:answers"
    assert recorded["args"] == {"evaluator": f"{__name__}:is_right"}
    again = CustomConfig.model_validate({key: recorded[key] for key in ("path", "args")})
    assert again._target.flow is answers
