"""Many tasks through a pool of workflows: order, retries, errors, and pass@k."""

from __future__ import annotations

import asyncio
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integrations.rllm.flows import TASK, FunctionFlow, TwoSolvers, engine, episodes
from tinsmith.errors import TinsmithError, UserError
from tinsmith.rllm import AgentWorkflowEngine, Episode, TerminationReason, Trajectory, mean_metrics, pass_metrics


def test_episodes_are_in_the_order_of_tasks():
    async def later(flow, task, uid):
        for _ in range(task["wait"]):
            await asyncio.sleep(0)
        return Episode(id=uid, task=task)

    async def main():
        runner = AgentWorkflowEngine(FunctionFlow, {"function": later}, engine("yes"), n_parallel_tasks=3)
        tasks = [{"wait": 9}, {"wait": 0}, {"wait": 4}, {"wait": 1}]
        return await runner.execute_tasks(tasks, ["a", "b", "a", "b"])

    assert [episode.id for episode in asyncio.run(main())] == ["a:0", "a:1", "b:0", "b:1"]


def test_pool_limits_rollouts_at_the_same_time():
    active, most, flows = [0], [0], set()

    async def counted(flow, task, uid):
        flows.add(id(flow))
        active[0] += 1
        most[0] = max(most[0], active[0])
        await asyncio.sleep(0)
        active[0] -= 1
        return Episode(id=uid)

    episodes(FunctionFlow, {"function": counted}, engine("yes"), 20, n_parallel_tasks=3)
    assert most[0] == 3
    assert len(flows) == 3  # workflow objects are used again


def test_failed_rollouts_are_tried_again():
    calls: list[str] = []

    async def fails_twice(flow, task, uid):
        calls.append(uid)
        if len(calls) < 3:
            raise ValueError("for a moment")
        return Episode(id=uid)

    (episode,) = episodes(FunctionFlow, {"function": fails_twice}, engine("yes"), 1, retry_limit=3)
    assert calls == ["t:0"] * 3
    assert episode.id == "t:0"


def test_last_error_is_raised_or_returned():
    async def fails(flow, task, uid):
        raise ValueError("broken")

    with pytest.raises(TinsmithError, match="t:0 failed 2 times: ValueError: broken"):
        episodes(FunctionFlow, {"function": fails}, engine("yes"), 1, retry_limit=2)
    (episode,) = episodes(FunctionFlow, {"function": fails}, engine("yes"), 1, raise_on_error=False)
    assert episode.termination_reason is TerminationReason.ERROR
    assert episode.info["error"]["error_message"] == "broken"


def test_workflows_share_the_store():
    async def counts(flow, task, uid):
        await flow.store.set("n", await flow.store.get("n", 0) + 1)
        return Episode(id=uid, metrics={"n": await flow.store.get("n")})

    collected = episodes(FunctionFlow, {"function": counts}, engine("yes"), 4)
    assert sorted(episode.metrics["n"] for episode in collected) == [1, 2, 3, 4]


def test_validation_is_known_to_the_engine_and_only_then():
    seen: list[bool] = []

    async def looks(flow, task, uid):
        seen.append(flow.rollout_engine.is_validation)
        return Episode(id=uid)

    async def main():
        runner = AgentWorkflowEngine(FunctionFlow, {"function": looks}, engine("yes"))
        await runner.execute_tasks([TASK], is_validation=True)
        await runner.execute_tasks([TASK])

    asyncio.run(main())
    assert seen == [True, False]


def test_modes_of_concurrent_calls_do_not_mix():
    seen: dict[str, set[bool]] = {"train": set(), "val": set()}

    async def looks(flow, task, uid):
        for _ in range(5):
            seen[task["mode"]].add(flow.rollout_engine.is_validation)
            seen[task["mode"]].add(await flow.run_in_executor(lambda: flow.rollout_engine.is_validation))
        return Episode(id=uid)

    async def main():
        runner = AgentWorkflowEngine(FunctionFlow, {"function": looks}, engine("yes"))
        await asyncio.gather(
            runner.execute_tasks([{"mode": "train"}] * 3),
            runner.execute_tasks([{"mode": "val"}] * 3, is_validation=True),
        )

    asyncio.run(main())
    assert seen == {"train": {False}, "val": {True}}


def test_all_errors_of_a_call_are_raised():
    async def fails(flow, task, uid):
        raise ValueError(f"broken {uid}")

    with pytest.raises(TinsmithError) as error:
        episodes(FunctionFlow, {"function": fails}, engine("yes"), 2, retry_limit=1)
    assert "ValueError: broken t:0" in str(error.value)
    assert "ValueError: broken t:1" in str(error.value)


def test_wrong_arguments_are_named():
    with pytest.raises(UserError, match="not a subclass"):
        AgentWorkflowEngine(dict, {}, engine("yes"))  # type: ignore[arg-type]
    runner = AgentWorkflowEngine(TwoSolvers, {}, engine("yes"))
    with pytest.raises(UserError, match="1 task and 2 task_ids"):
        asyncio.run(runner.execute_tasks([TASK], ["a", "b"]))


def test_two_solvers_are_measured():
    collected = episodes(TwoSolvers, {}, engine("yes", "no"), 8)
    values = mean_metrics(collected)
    rewards = [t.total_reward for e in collected for t in e.trajectories if t.name == "solver"]
    assert values["solver_acc"] == pytest.approx(sum(rewards) / len(rewards))
    assert values["judge_acc"] == pass_metrics(collected)["pass@1"]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=4))
def test_pass_metrics_equal_their_definitions(results: list[list[bool]]):
    collected = [
        Episode(id=f"{task}:{n}", is_correct=right, trajectories=[Trajectory()])
        for task, rights in enumerate(results)
        for n, right in enumerate(rights)
    ]
    values = pass_metrics(collected)
    flat = [right for rights in results for right in rights]
    assert values["pass@1"] == pytest.approx(sum(flat) / len(flat))
    largest, smallest = max(map(len, results)), min(map(len, results))
    if largest > 1:
        assert values[f"pass@{largest}"] == pytest.approx(sum(any(rights) for rights in results) / len(results))
    for k in (1, 2, 4):
        if k <= smallest:
            shares = [_share(rights, k) for rights in results]
            assert values[f"unbiased_pass@{k}"] == pytest.approx(sum(shares) / len(shares))


def _share(rights: list[bool], k: int) -> float:
    subsets: list[Any] = list(combinations(rights, k))
    return sum(any(subset) for subset in subsets) / len(subsets)
