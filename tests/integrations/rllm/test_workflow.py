"""Workflows: how an episode is collected, its rewards and metrics, and how a rollout may end."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integrations.rllm.flows import (
    TASK,
    FunctionFlow,
    GuessAgent,
    GuessEnv,
    TwoSolvers,
    engine,
    episodes,
    is_right,
)
from tinsmith.errors import UserError
from tinsmith.rllm import (
    CumulativeWorkflow,
    Episode,
    MultiTurnWorkflow,
    SimpleWorkflow,
    SingleTurnWorkflow,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
)

REASON = TerminationReason


def run(function: Any, **args: Any) -> Episode:
    return episodes(FunctionFlow, {"function": function, **args}, engine("yes"), 1, raise_on_error=False)[0]


def steps(*rewards: float | None) -> list[Step]:
    return [Step(chat_completions=[{"role": "user", "content": "?"}], reward=reward) for reward in rewards]


def test_returned_episode_is_taken_as_it_is():
    episode = Episode(id="own", trajectories=[Trajectory(name="x", steps=steps(1.0), reward=None)], metrics={"m": 1.0})

    async def returned(flow, task, uid):
        return episode

    assert run(returned) is episode
    assert episode.trajectories[0].reward is None
    assert episode.metrics == {"m": 1.0}


def test_committed_trajectories_are_collected_and_scored():
    async def committed(flow, task, uid):
        flow.commit(name="solver", trajectory=Trajectory(steps=steps(0.5, 0.25)))
        flow.commit(name="solver", trajectory=Trajectory(steps=steps(0.25)))
        flow.commit(trajectory=Trajectory(name="judge", steps=steps(0.0), reward=1.0))
        flow.commit(name="empty", trajectory=Trajectory())

    episode = run(committed)
    assert [(trajectory.name, trajectory.reward) for trajectory in episode.trajectories] == [
        ("solver", 0.75),
        ("solver", 0.25),
        ("judge", 1.0),  # a reward that the workflow set is kept
    ]
    assert (episode.id, episode.task, episode.is_correct) == ("t:0", TASK, True)
    assert episode.metrics == {"solver_acc": 0.5, "judge_acc": 1.0}
    assert episode.termination_reason is REASON.UNKNOWN


def test_rewards_of_none_count_as_zero():
    async def committed(flow, task, uid):
        flow.commit(name="solver", trajectory=Trajectory(steps=steps(None, None), reward=None))

    episode = run(committed, gamma=0.5)
    assert (episode.trajectories[0].reward, episode.is_correct) == (0.0, False)


def test_agents_that_are_not_committed_are_collected():
    async def played(flow, task, uid):
        flow.agent = GuessAgent()
        flow.other = GuessAgent()
        for agent in (flow.agent, flow.other):
            agent.update_from_env("?", 0.0, False, {})
            agent.update_from_model("yes")
        flow.commit(name="kept", agent=flow.other, reset=True)
        assert flow.other.trajectory.steps == []

    assert [trajectory.name for trajectory in run(played).trajectories] == ["kept", "guesser"]


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6), st.floats(0, 1), st.sampled_from([0.0, 0.25, 1.0]))
def test_step_rewards_are_shaped_and_discounted(rewards: list[float], gamma: float, bonus: float):
    flow = FunctionFlow(engine("yes"), lambda *_: None, gamma=gamma, reward_bonus_coeff=bonus)
    trajectory = Trajectory(steps=steps(*rewards))
    flow.adjust_step_rewards(trajectory)
    shaped = [r + bonus * (r - rewards[t - 1]) if t else r for t, r in enumerate(rewards)]
    returns = [sum(gamma ** (u - t) * shaped[u] for u in range(t, len(shaped))) for t in range(len(shaped))]
    assert [step.reward for step in trajectory.steps] == pytest.approx(returns if gamma else shaped)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (TerminationEvent(REASON.MAX_TURNS_EXCEEDED), REASON.MAX_TURNS_EXCEEDED),
        (ValueError("broken"), REASON.ERROR),
        (TimeoutError("of the tool, not of the workflow"), REASON.ERROR),
    ],
)
def test_rollout_that_ends_early_keeps_its_trajectories(outcome: Exception, reason: REASON):
    async def ended(flow, task, uid):
        flow.commit(name="solver", trajectory=Trajectory(steps=steps(1.0)))
        raise outcome

    episode = run(ended)
    assert episode.termination_reason is reason
    assert [trajectory.reward for trajectory in episode.trajectories] == [1.0]
    if reason is REASON.ERROR:
        assert episode.info["error"]["error_type"] == type(outcome).__name__
        assert "test_workflow.py" in episode.info["error"]["traceback"]


def test_rollout_that_hangs_times_out():
    async def hanging(flow, task, uid):
        flow.commit(name="solver", trajectory=Trajectory(steps=steps(1.0)))
        await asyncio.Event().wait()

    episode = run(hanging, timeout=0.02)
    assert episode.termination_reason is REASON.TIMEOUT
    assert len(episode.trajectories) == 1


def test_result_that_is_no_episode_is_an_error():
    async def wrong(flow, task, uid):
        return 1.0

    episode = run(wrong)
    assert episode.termination_reason is REASON.ERROR
    assert "run returned a float" in episode.info["error"]["error_message"]


def test_error_of_the_metrics_does_not_hide_the_first():
    class Broken(FunctionFlow):
        def collect_metrics(self, episode: Episode) -> None:
            raise KeyError("metrics")

    async def failing(flow, task, uid):
        raise ValueError("first")

    (episode,) = episodes(Broken, {"function": failing}, engine("yes"), 1, raise_on_error=False)
    assert episode.info["error"]["error_message"] == "first"


def test_functions_that_block_run_in_the_executor():
    async def blocked(flow, task, uid):
        threads = await flow.run_in_executor(lambda: __import__("threading").current_thread().name)
        assert threads.startswith("workflow")

    assert run(blocked).termination_reason is REASON.UNKNOWN


def test_unknown_arguments_are_named():
    with pytest.raises(UserError, match="TwoSolvers has no argument 'solutions'"):
        TwoSolvers(engine("yes"), solutions=2)


def test_simple_workflow_scores_one_reply():
    results = episodes(SimpleWorkflow, {"reward_function": is_right}, engine("yes", "no"), 16)
    assert {(e.trajectories[0].steps[0].action.action, e.is_correct) for e in results} == {("yes", True), ("no", False)}
    assert {e.termination_reason for e in results} == {REASON.ENV_DONE}
    assert results[0].trajectories[0].steps[0].response_ids[-1] == 0


def test_simple_workflow_names_fields_of_a_row_without_prompt():
    async def main():
        flow = SimpleWorkflow(engine("yes"), is_right)
        return await flow.run_with_termination_handling({"text": "?"}, "t:0")

    assert "Its fields are text" in asyncio.run(main()).info["error"]["error_message"]


def test_multi_turn_workflow_plays_until_done():
    results = episodes(
        MultiTurnWorkflow, {"agent_cls": GuessAgent, "env_cls": GuessEnv, "max_steps": 3}, engine("yes", "no"), 24
    )
    for episode in results:
        (trajectory,) = episode.trajectories
        actions = [step.action for step in trajectory.steps]
        assert actions == ["no"] * (len(actions) - 1) + [actions[-1]]
        assert episode.is_correct == (actions[-1] == "yes")
        assert trajectory.is_cumulative()
        for earlier, later in zip(trajectory.steps, trajectory.steps[1:], strict=False):
            before = earlier.prompt_ids + earlier.response_ids  # tokens, not text, are extended
            assert later.prompt_ids[: len(before)] == before
    assert {e.termination_reason for e in results} == {REASON.ENV_DONE, REASON.MAX_TURNS_EXCEEDED}


def test_single_turn_workflow_takes_one_step():
    results = episodes(SingleTurnWorkflow, {"agent_cls": GuessAgent, "env_cls": GuessEnv}, engine("no"), 1)
    assert len(results[0].trajectories[0].steps) == 1
    assert results[0].termination_reason is REASON.MAX_TURNS_EXCEEDED


def test_cumulative_workflow_shrinks_the_budget_of_a_reply():
    limited = engine("no", max_tokens=12)
    results = episodes(CumulativeWorkflow, {"agent_cls": GuessAgent, "env_cls": GuessEnv, "max_steps": 9}, limited, 1)
    # each turn adds a reply of 3 tokens and an observation of 5: the third turn has no budget left
    (trajectory,) = results[0].trajectories
    assert [len(step.response_ids) for step in trajectory.steps] == [3, 3]
    assert results[0].termination_reason is REASON.MAX_RESPONSE_LENGTH_EXCEEDED


def test_cut_reply_ends_with_its_reason():
    (episode,) = episodes(SimpleWorkflow, {"reward_function": is_right}, engine("yes", max_tokens=2), 1)
    assert episode.termination_reason is REASON.MAX_RESPONSE_LENGTH_EXCEEDED


def test_prompt_above_the_limit_ends_the_rollout():
    (episode,) = episodes(SimpleWorkflow, {"reward_function": is_right}, engine("yes", max_prompt_tokens=3), 1)
    assert episode.termination_reason is REASON.MAX_PROMPT_LENGTH_EXCEEDED
    assert episode.trajectories == []
    assert not episode.is_correct
    assert all(math.isfinite(value) for value in episode.metrics.values())
