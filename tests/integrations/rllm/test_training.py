"""Episodes in a run: steps become turns with their tokens, and what cannot be trained on fails with a reason."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from tests.integrations.rllm.flows import FunctionFlow, GuessAgent, GuessEnv, TwoSolvers
from tinsmith.integrations.rllm.rollouts import rollout_of, task_row, wrapped_row
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.training_rows import rows_from_trajectory
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.format import Format
from tinsmith.rl.types import Message, Rollout, Task
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.rl.workflows.custom import CustomConfig
from tinsmith.rl.workflows.results import fail_if_not_finite
from tinsmith.rllm import (
    CumulativeWorkflow,
    Episode,
    ModelOutput,
    MultiTurnWorkflow,
    OpenAIEngine,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    Workflow,
)
from tinsmith.testing import END, ScriptedSnapshot

FLOWS = "tests.integrations.rllm.flows"
ROW = {"question": "yes or no?", "right": "yes"}
TASK = Task(id="t/0", messages=(Message(role="user", content=ROW["question"]),), extra={"row": ROW})
USER = {"role": "user", "content": "yes or no?"}


def play(
    path: Any,
    args: dict[str, Any] | None = None,
    *,
    replies: tuple[str, ...] = ("yes", "no"),
    count: int = 4,
    rewards: Rewards | None = None,
    context: WorkflowContext | None = None,
    task: Task = TASK,
    **sampling: Any,
) -> tuple[Rollout, ...]:
    """Rollouts of a workflow of rLLM, selected as a run file selects one."""
    context = context or WorkflowContext(
        sampling=SamplingConfig(**sampling), rewards=rewards or Rewards([]), agent_endpoint=AgentEndpoint()
    )
    policy = ScriptedSnapshot(replies, np.zeros(len(replies)), 3)
    workflow = CustomConfig(path=path, args=args or {}).make(context)
    return asyncio.run(workflow.run(task, policy, count=count, seed=5))


def flow(function: Any, **more: Any) -> Rollout:
    """The rollout of a workflow that is a function."""
    return play(FunctionFlow, {"function": function}, count=1, **more)[0]


def test_trajectories_keep_their_names_rewards_and_tokens():
    for rollout in play(TwoSolvers, count=8):
        assert [each.role for each in rollout.trajectories] == ["solver", "solver", "judge"]
        for trajectory in rollout.trajectories:
            (turn,) = trajectory.turns
            assert turn.tokens == (*map(ord, turn.text), END)
            assert turn.logprobs[0] == pytest.approx(math.log(0.5))
            assert (turn.version, turn.model) == (3, "")
            assert trajectory.reward == float(turn.text == "yes")
        assert rollout.correct == (rollout.trajectories[2].reward == 1.0)
        accuracy = sum(each.reward for each in rollout.trajectories[:2]) / 2
        assert rollout.metrics == {"solver_acc": accuracy, "judge_acc": rollout.trajectories[2].reward}


def test_rollouts_are_equal_for_equal_seeds():
    assert play(TwoSolvers, count=8) == play(TwoSolvers, count=8)
    assert len({rollout.text for rollout in play(TwoSolvers, count=16)}) == 2


def test_conversation_is_one_training_row():
    args = {"agent_cls": GuessAgent, "env_cls": GuessEnv, "max_steps": 3}
    for path in (MultiTurnWorkflow, CumulativeWorkflow):
        for rollout in play(path, args, replies=("no",), count=2, max_tokens=99):
            (trajectory,) = rollout.trajectories
            assert (trajectory.role, len(trajectory.turns), rollout.termination) == ("guesser", 3, "max_turns")
            (row,) = rows_from_trajectory(rollout.trajectories[0])
            assert "".join(map(chr, row.targets[row.mask])) == "no\0no\0no\0"


def test_rewards_of_the_run_are_added():
    rewards = Rewards([Format(pattern="yes", weight=0.5)])
    for rollout in play(TwoSolvers, rewards=rewards, count=8):
        for trajectory in rollout.trajectories:
            assert trajectory.reward == (1.5 if trajectory.text == "yes" else 0.0)


def test_replies_of_other_models_are_not_trained_on():
    async def judged(self, task, uid):
        output = await self.rollout_engine.get_model_response([USER])
        other = ModelOutput(text="right", model="gpt", finish_reason="stop")
        steps = [Step(chat_completions=[USER], model_output=each) for each in (output, other)]
        return Episode(id=uid, trajectories=[Trajectory(name="solver", steps=steps, reward=1.0)])

    rollout = flow(judged)
    assert [turn.model for turn in rollout.turns] == ["", "gpt"]
    (row,) = rows_from_trajectory(rollout.trajectories[0])
    assert row.mask.sum() == len(rollout.turns[0].tokens)


def test_advantages_of_the_workflow_are_kept():
    async def weighted(self, task, uid):
        output = await self.rollout_engine.get_model_response([USER])
        steps = [Step(model_output=output, advantage=[0.5] * output.completion_length)]
        return Episode(id=uid, trajectories=[Trajectory(steps=[*steps, Step(model_output=output, advantage=2)])])

    turns = flow(weighted).turns
    assert turns[0].advantages == (0.5,) * len(turns[0].tokens)
    assert turns[1].advantages == 2.0


@pytest.mark.parametrize(
    ("reason", "termination"),
    [
        (TerminationReason.MAX_TURNS_EXCEEDED, "max_turns"),
        (TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED, "max_response"),
        (TerminationReason.ENV_DONE, "done"),
    ],
)
def test_rollout_that_ends_early_is_trained_on(reason: TerminationReason, termination: str):
    async def ended(self, task, uid):
        step = Step.from_model_output(await self.rollout_engine.get_model_response([USER]), [USER])
        step.reward = 0.5
        self.commit(name="solver", trajectory=Trajectory(steps=[step]))
        raise TerminationEvent(reason)

    rollout = flow(ended)
    assert (rollout.termination, rollout.error) == (termination, "")
    assert [(each.role, each.reward) for each in rollout.trajectories] == [("solver", 0.5)]
    assert rollout.metrics == {"solver_acc": 0.5}


async def raises(self, task, uid):
    raise ValueError("broken")


async def nothing(self, task, uid):
    return None


async def no_tokens(self, task, uid):
    return Episode(id=uid, trajectories=[Trajectory(name="judge", steps=[Step(model_response="yes")])])


async def bad_metric(self, task, uid):
    output = await self.rollout_engine.get_model_response([USER])
    return Episode(id=uid, trajectories=[Trajectory(steps=[Step(model_output=output)])], metrics={"acc": "high"})


async def long_prompt(self, task, uid):
    await self.rollout_engine.get_model_response([{**USER, "content": "x" * 99}])


async def judge_is_down(self, task, uid):
    await OpenAIEngine("judge", base_url="http://127.0.0.1:9", api_retries=0).get_model_response([USER])


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raises, "ValueError: broken"),
        (nothing, "the workflow returned no steps"),
        (no_tokens, "step 1 of the trajectory 'judge' has no tokens. Set model_output to the reply of the engine."),
        (bad_metric, "the metric 'acc' is 'high'. Set a number."),
        (long_prompt, "the workflow returned no steps before it ended with max_prompt"),
        (judge_is_down, "127.0.0.1:9/chat/completions does not respond"),
    ],
)
def test_faults_of_a_workflow_fail_its_rollout(function: Any, error: str):
    rollout = flow(function, max_prompt_tokens=20)
    assert error in rollout.error
    assert rollout.reward == 0.0


def test_rewards_that_are_not_finite_fail_the_rollout():
    async def not_a_number(self, task, uid):
        output = await self.rollout_engine.get_model_response([USER])
        steps = [Step(model_output=output)]
        rewards = (math.nan, 1.0)  # two trajectories of one role
        return Episode(id=uid, trajectories=[Trajectory(name="solver", steps=steps, reward=r) for r in rewards])

    assert fail_if_not_finite(flow(not_a_number)).error.startswith("reward: the reward of solver is nan")


def test_workflow_that_hangs_keeps_what_it_committed():
    class Hangs(Workflow):
        @override
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            output = await self.rollout_engine.get_model_response([USER])
            self.commit(
                name="solver", trajectory=Trajectory(steps=[Step(chat_completions=[USER], model_output=output)])
            )
            await asyncio.Event().wait()

    (rollout,) = play(Hangs, {"timeout": 0.05}, count=1)
    assert (rollout.termination, len(rollout.turns)) == ("timeout", 1)


def test_workflow_objects_are_used_again_but_not_after_errors():
    created: list[int] = []

    class Counted(TwoSolvers):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            created.append(1)

        @override
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
            if task.get("fail"):
                raise ValueError
            return await super().run(task, uid, **kwargs)

    context = WorkflowContext(sampling=SamplingConfig(), rewards=Rewards([]), agent_endpoint=AgentEndpoint())
    workflow = CustomConfig(path=Counted).make(context)
    policy = ScriptedSnapshot(("yes",), np.zeros(1), 3)
    failing = replace(TASK, extra={"row": {**ROW, "fail": True}})

    async def main() -> None:
        for task in (TASK, TASK, failing, TASK):
            await workflow.run(task, policy, count=2, seed=1)

    asyncio.run(main())
    assert len(created) == 4


def test_store_and_mode_reach_the_workflow():
    seen: list[Any] = []

    class Looks(TwoSolvers):
        @override
        async def run(self, task: dict[str, Any], uid: str, is_validation: bool = False, **kwargs: Any) -> Any:
            assert self.store is not None
            await self.store.set("n", await self.store.get("n", 0) + 1)
            seen.append((is_validation, self.rollout_engine.is_validation))
            return await super().run(task, uid)

    context = WorkflowContext(
        sampling=SamplingConfig(), rewards=Rewards([]), agent_endpoint=AgentEndpoint(), evaluating=True
    )
    play(Looks, context=context, count=3)
    assert context.store == {"n": 3}
    assert seen == [(True, True)] * 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"function": raises, "rollout_engine": 1}, "the run itself gives rollout_engine"),
        ({}, "cannot be created with"),
    ],
)
def test_wrong_arguments_are_errors_before_the_run(args: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        CustomConfig(path=FunctionFlow, args=args)


def test_functions_of_a_run_file_are_imported():
    (rollout,) = play(
        "tinsmith.rllm:SimpleWorkflow",
        {"reward_function": "tests.integrations.rllm.flows:is_right"},
        replies=("yes",),
        count=1,
    )
    assert [(each.role, each.reward) for each in rollout.trajectories] == [("solver", 1.0)]
    with pytest.raises(ValueError, match="cannot be imported"):
        CustomConfig(path="tinsmith.rllm:SimpleWorkflow", args={"reward_function": f"{FLOWS}:none"})


def test_class_without_run_is_refused():
    class Nothing(Workflow):
        pass

    with pytest.raises(ValueError, match="has no async def run"):
        CustomConfig(path=Nothing)


def test_rows_of_datasets_and_other_tasks_reach_the_workflow():
    assert task_row(TASK) == ROW
    assert task_row(replace(TASK, extra={"target": 3, "nums": [1, 2]})) == {"target": 3, "nums": [1, 2]}
    row = task_row(replace(TASK, extra={}, answer="yes"))
    assert (row["question"], row["ground_truth"], row["messages"]) == ("yes or no?", "yes", [USER])


def test_rows_without_a_prompt_are_known_by_their_fields():
    assert wrapped_row({"problem": "2?"})["messages"] == [{"role": "user", "content": "2?"}]
    assert wrapped_row({"b": 1, "a": 2})["messages"] == [{"role": "user", "content": '{"a": 2, "b": 1}'}]


def test_correctness_that_is_not_stated_stays_open():
    output = ModelOutput(text="yes", prompt_ids=[1], completion_ids=[2], logprobs=[0.0])
    trajectories = [Trajectory(steps=[Step(model_output=output, reward=1.0)])]
    assert rollout_of(Episode(trajectories=trajectories)).correct is None
    assert rollout_of(Episode(trajectories=trajectories, is_correct=False)).correct is False
