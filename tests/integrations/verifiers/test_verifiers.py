"""Environments of verifiers: unmodified packages, run against scripted replies. Skipped without the package."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rl.workflows.test_workflows import policy
from tinsmith.errors import ConfigError
from tinsmith.integrations.verifiers import VerifiersEnvironment
from tinsmith.rl.environments.mixture import mixture_workflow, split_environments
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.training_rows import rows_from_trajectory
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.testing import END

HERE = Path(__file__).parent
GYM = str(Path(__file__).parents[3] / "examples" / "verifiers" / "gym_taskset.py")
CALL = '<tool_call>\n{"name": "words_length", "arguments": {"word": "ant"}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def needs_verifiers() -> None:
    """Skips the module without the package, which takes seconds to import."""
    pytest.importorskip("verifiers.v1")


def package(name: str) -> str:
    return str(HERE / "packages" / name)


def rollouts(
    environment: VerifiersEnvironment,
    replies: Sequence[str],
    *,
    count: int = 2,
    task: Task | None = None,
    seed: int = 5,
) -> tuple[Rollout, ...]:
    """Rollouts of the first task, or of `task`."""

    async def main() -> tuple[Rollout, ...]:
        endpoint = AgentEndpoint()
        context = WorkflowContext(sampling=SamplingConfig(max_tokens=99), rewards=Rewards([]), agent_endpoint=endpoint)
        try:
            workflow = environment.make(context)
            return await workflow.run(task or environment.tasks()[0], policy(*replies), count=count, seed=seed)
        finally:
            await endpoint.close()

    return asyncio.run(main())


def test_infinite_taskset_gives_rows_after_the_held_out_ones():
    tasks = VerifiersEnvironment(id=GYM, size=50, args={"options": {"max_terms": 2}}).tasks()
    assert len(tasks) == 50
    assert [tasks[7].id, tasks[2].id] == ["gym_taskset/107", "gym_taskset/102"]
    entry = tasks[7].extra["verifiers"]["entry"]
    assert entry["question"] in tasks[7].messages[0].content
    assert entry["metadata"]["num_terms"] == 2


def test_selection_picks_rows_as_verifiers_does():
    tasks = VerifiersEnvironment(id=GYM, select={"skip": 3, "limit": 2}).tasks()
    assert [task.id for task in tasks] == ["gym_taskset/3", "gym_taskset/4"]


def test_rewards_and_metrics_are_those_of_the_task():
    environment = VerifiersEnvironment(id=GYM)
    task = environment.tasks()[0]
    right = task.extra["verifiers"]["entry"]["answer"]
    (rollout,) = rollouts(environment, [f"So.\nAnswer: {right}"], count=1)
    assert (rollout.reward, rollout.reward_parts, rollout.metrics) == (1.0, {"correct": 1.0}, {"marked": 1.0})
    (turn,) = rollout.turns
    assert turn.tokens == (*map(ord, f"So.\nAnswer: {right}"), END)
    assert len(turn.logprobs) == len(turn.tokens)
    assert turn.version == 3
    assert "".join(map(chr, turn.prompt)) == task.messages[0].content


def test_rollout_uses_the_row_of_its_task():
    environment = VerifiersEnvironment(id=GYM)
    tasks = environment.tasks()
    for task in (tasks[4], tasks[9]):
        right = task.extra["verifiers"]["entry"]["answer"]
        (rollout,) = rollouts(environment, [f"Answer: {right}"], count=1, task=task)
        assert rollout.reward == 1.0


def test_two_roles_share_the_policy_but_one_is_not_trained():
    rollout, _ = rollouts(VerifiersEnvironment(id=package("duel.py")), ["a", "bcd"])
    asker, solver = rollout.trajectories
    assert [(each.role, each.trained, len(each.turns)) for each in rollout.trajectories] == [
        ("asker", False, 1),
        ("solver", True, 2),
    ]
    assert asker.reward == len(asker.text) / 2
    assert solver.reward == len(solver.text) / 2
    assert rollout.metrics == {"asker/turns": 1.0, "solver/turns": 2.0}
    assert rollout.reward_parts == {"asker/length": len(asker.text), "solver/length": len(solver.text)}


def test_later_turns_extend_the_sampled_tokens():
    environment = VerifiersEnvironment(id=package("duel.py"), env={"turns": 3})
    (rollout,) = rollouts(environment, ["bcd"], count=1)
    (row,) = rows_from_trajectory(rollout.trajectories[1])
    assert "".join(map(chr, row.targets[row.mask])) == "bcd\0bcd\0bcd\0"


def test_limit_of_a_role_ends_the_rollout():
    environment = VerifiersEnvironment(id=package("duel.py"), env={"turns": 9, "solver": {"max_turns": 2}})
    (rollout,) = rollouts(environment, ["bcd"], count=1)
    assert (rollout.termination, len(rollout.trajectories[1].turns), rollout.error) == ("max_turns", 2, "")


def test_failure_of_the_environment_is_an_error_not_a_reward():
    environment = VerifiersEnvironment(id=package("duel.py"), args={"fail": True})
    (rollout,) = rollouts(environment, ["bcd"], count=1)
    assert "the board is gone" in rollout.error
    assert not rollout.reward_parts


@pytest.mark.slow  # verifiers starts a process for the tools of each rollout
def test_tools_of_a_task_are_called_within_one_row():
    environment = VerifiersEnvironment(id=package("word_tools"))
    (called,) = rollouts(environment, [CALL, "3"], count=1, seed=1)
    assert called.error == ""
    assert (called.reward, called.reward_parts, called.metrics) == (2.0, {"exact": 1.0}, {"calls": 1.0})
    (row,) = rows_from_trajectory(called.trajectories[0])
    assert "".join(map(chr, row.targets[row.mask])) == f"{CALL}\0" + "3\0"


def test_best_of_n_compares_its_attempts():
    environment = VerifiersEnvironment(id=GYM, env={"id": "best-of-n", "n": 3})
    right = environment.tasks()[0].extra["verifiers"]["entry"]["answer"]
    (rollout,) = rollouts(environment, [f"Answer: {right}", "Answer: x"], count=1)
    rewards = [trajectory.reward for trajectory in rollout.trajectories]
    assert len(rewards) == 3
    assert rollout.metrics["pass_at_n"] == float(max(rewards) >= 1)


def test_user_simulation_trains_the_assistant_alone():
    environment = VerifiersEnvironment(id=GYM, env={"id": "user-sim", "user": {"max_turns": 2}})
    (rollout,) = rollouts(environment, ["Answer: 5"], count=1)
    assert {each.role: each.trained for each in rollout.trajectories} == {"assistant": True, "user": False}
    assert rollout.error == ""


def test_held_out_tasks_may_have_their_own_options():
    environment = VerifiersEnvironment(id=package("duel.py"), eval_args={"split": "test"}, eval_select={"limit": 3})
    tasks = environment.held_out_tasks()
    assert tasks is not None
    assert [task.extra["verifiers"]["info"] for task in tasks] == [
        {"number": number, "split": "test"} for number in range(3)
    ]


def broken(replies: Sequence[str], logprobs: tuple[float, ...]) -> Any:
    """A snapshot whose replies have these logprobs."""
    from dataclasses import replace

    async def without_logprobs(request: Any, sample: Any) -> Any:
        result = await sample(request)
        return replace(result, turns=tuple(replace(turn, logprobs=logprobs) for turn in result.turns))

    return policy(*replies).around(without_logprobs)


@pytest.mark.parametrize("logprobs", [(), (float("nan"),) * 2, (0.0,)])
def test_token_without_a_finite_logprob_fails_the_rollout(logprobs):
    environment = VerifiersEnvironment(id=package("duel.py"))

    async def main() -> Rollout:
        endpoint = AgentEndpoint()
        context = WorkflowContext(sampling=SamplingConfig(), rewards=Rewards([]), agent_endpoint=endpoint)
        try:
            workflow = environment.make(context)
            return (await workflow.run(environment.tasks()[0], broken(["a"], logprobs), count=1, seed=1))[0]
        finally:
            await endpoint.close()

    assert asyncio.run(main()).error == "a sampled token has no finite logprob"


CASES: Mapping[str, tuple[dict[str, Any], str]] = {
    "no such taskset": ({"id": "no_such_taskset"}, "verifiers cannot load no_such_taskset"),
    "no such folder": ({"id": "./no_such_folder"}, "no folder"),
    "unknown option of the taskset": ({"args": {"splitt": "test"}}, "splitt"),
    "unknown option of the environment": ({"env": {"rounds": 3}}, "rounds"),
    "unknown option of a role": ({"env": {"solver": {"max_turn": 3}}}, "max_turn"),
    "code on this machine unasked": ({"harness": "bash"}, "no runtime is set"),
    "runtime of the direct harness": ({"env": {"solver": {"runtime": {"type": "docker"}}}}, "has no runtime"),
}


@pytest.mark.parametrize("case", CASES)
def test_option_that_cannot_be_followed_is_refused(case):
    options, message = CASES[case]
    with pytest.raises(ConfigError, match=message):
        VerifiersEnvironment.model_validate({"id": package("duel.py"), **options}).tasks()


def test_endless_selection_is_refused():
    with pytest.raises(ConfigError, match="infinite"):
        VerifiersEnvironment(id=package("duel.py"), select={"shuffle": True}).tasks()


def test_mixture_gives_each_environment_its_own_rows():
    sums = VerifiersEnvironment(id=GYM, name="sums", args={"options": {"max_terms": 2}}, held_out=2)
    chains = VerifiersEnvironment(id=GYM, name="chains", args={"dataset": "chain_sum"}, held_out=2)
    sampler, held_out = split_environments([sums, chains], 3, 4, train=True)
    tasks = sampler.draw(4)
    assert sorted(task.environment for task in tasks) == ["chains", "chains", "sums", "sums"]
    assert [len(held_out[name]) for name in ("sums", "chains")] == [2, 2]

    async def main() -> list[tuple[Rollout, ...]]:
        endpoint = AgentEndpoint()
        context = WorkflowContext(sampling=SamplingConfig(), rewards=Rewards([]), agent_endpoint=endpoint)
        mixture = mixture_workflow([sums, chains], SamplingConfig(max_tokens=99), context)
        try:
            replies = [policy(f"Answer: {task.extra['verifiers']['entry']['answer']}") for task in tasks]
            runs = (mixture.run(task, reply, count=2, seed=1) for task, reply in zip(tasks, replies, strict=True))
            return list(await asyncio.gather(*runs))
        finally:
            await endpoint.close()

    for task, rollouts_of_task in zip(tasks, asyncio.run(main()), strict=True):
        source = task.extra["verifiers"]["entry"]["metadata"]["source_dataset"]
        assert source == {"sums": "basic_arithmetic", "chains": "chain_sum"}[task.environment]
        assert [rollout.reward for rollout in rollouts_of_task] == [1.0, 1.0]
        assert all(question_of(task) in "".join(map(chr, rollout.turns[0].prompt)) for rollout in rollouts_of_task)


def question_of(task: Task) -> str:
    return str(task.extra["verifiers"]["entry"]["question"])
