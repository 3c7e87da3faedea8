"""Workflows make rollouts of a task: single turn, multi turn, and the user's own code."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot
from tinsmith.rl.policy.training_rows import rows_from_trajectory
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.format import Format
from tinsmith.rl.types import Message, Rollout, Task, Turn
from tinsmith.rl.workflows.base import WorkflowContext, WorkflowOptions, WorkflowPolicy
from tinsmith.rl.workflows.conversation import Conversation, Terminated
from tinsmith.rl.workflows.custom import CustomConfig
from tinsmith.rl.workflows.multi_turn import Answer, Environment, MultiTurnConfig
from tinsmith.rl.workflows.single_turn import THINK, MathConfig, SingleTurnConfig
from tinsmith.testing import END, ScriptedSnapshot, run_virtually

PROMPT = Message(role="user", content="yes or no?")
TASK = Task(id="t/0", messages=(PROMPT,), answer="yes")
HERE = __name__
YES = Rewards([Format(pattern="yes")])


def policy(*replies: str) -> ScriptedSnapshot:
    """A policy of version 3 that samples `replies` with equal probability."""
    return ScriptedSnapshot(replies, np.zeros(len(replies)), 3)


def play(
    config: WorkflowOptions, speaker: Snapshot, *, count: int = 4, rewards: Rewards = YES, seed: int = 5, **sampling
) -> tuple[Rollout, ...]:
    """Rollouts of TASK by a workflow."""
    parts = WorkflowContext(sampling=SamplingConfig(**sampling), rewards=rewards, agent_endpoint=AgentEndpoint())
    return asyncio.run(config.make(parts).run(TASK, speaker, count=count, seed=seed))


def prompt(turn: Turn) -> str:
    """Text of a turn's prompt; `|` marks the end of a reply."""
    return "".join(chr(token) if token != END else "|" for token in turn.prompt)


def test_single_turn_samples_and_scores():
    rollouts = play(SingleTurnConfig(system="Be short. "), policy("yes", "no"), count=20)
    assert {prompt(rollout.turns[0]) for rollout in rollouts} == {"Be short. yes or no?"}
    assert {(rollout.text, rollout.reward) for rollout in rollouts} == {("yes", 1.0), ("no", 0.0)}


def test_math_adds_its_system_message_unless_the_task_has_one():
    assert prompt(play(MathConfig(), policy("yes"))[0].turns[0]) == THINK + PROMPT.content
    own = replace(TASK, messages=(Message(role="system", content="own "), PROMPT))
    parts = WorkflowContext(sampling=SamplingConfig(), rewards=YES, agent_endpoint=AgentEndpoint())
    (rollout,) = asyncio.run(MathConfig().make(parts).run(own, policy("yes"), count=1, seed=0))
    assert prompt(rollout.turns[0]) == "own " + PROMPT.content


def test_rewards_read_the_reply_with_its_prefix():
    (rollout,) = play(SingleTurnConfig(reply_prefix="ye"), policy("s"), count=1)
    assert prompt(rollout.turns[0]) == "yes or no?ye"
    assert rollout.turns[0].tokens == (ord("s"), END)
    assert (rollout.text, rollout.reward) == ("yes", 1.0)


class Count(Environment):
    """Counts the replies, rewards each `yes`, and ends after `turns` replies."""

    def __init__(self, task: Task, seed: int, turns: int, paid: bool = True) -> None:
        super().__init__(task, seed)
        self.turns, self.paid, self.replies = turns, paid, 0

    def begin(self) -> Answer:
        return Answer(state="0")

    async def step(self, reply: Turn) -> Answer:
        self.replies += 1
        reward = float(reply.text == "yes") if self.paid else None
        return Answer(
            message=f"#{self.replies}", reward=reward, done=self.replies == self.turns, state=str(self.replies)
        )


def counted(**args) -> MultiTurnConfig:
    """A multi-turn workflow with the environment Count."""
    return MultiTurnConfig.model_validate({"path": f"{HERE}:Count", "args": args, "system": "s:"})


def test_conversation_is_one_row_with_replies_in_the_mask():
    (rollout,) = play(counted(turns=3), policy("yes"), count=1, rewards=Rewards([]))
    assert [prompt(turn) for turn in rollout.turns] == [
        "s:yes or no?",
        "s:yes or no?yes|#1",
        "s:yes or no?yes|#1yes|#2",
    ]
    assert [turn.reward for turn in rollout.turns] == [1.0, 1.0, 1.0]
    assert [turn.state for turn in rollout.turns] == ["0", "1", "2"]
    assert (rollout.reward, rollout.reward_parts) == (3.0, {"workflow": 3.0})
    (row,) = rows_from_trajectory(rollout.trajectories[0])
    assert "".join(chr(token) for token in row.targets[row.mask]) == "yes\0yes\0yes\0"


def test_workflow_reward_and_run_rewards_are_summed():
    (rollout,) = play(counted(turns=2), policy("yes"), count=1)
    assert rollout.reward_parts == {"workflow": 2.0, "format": 1.0}
    assert rollout.reward == 3.0
    (unpaid,) = play(counted(turns=2, paid=False), policy("yes"), count=1)
    assert unpaid.reward_parts == {"format": 1.0}
    assert {turn.reward for turn in unpaid.turns} == {None}
    (nothing,) = play(counted(turns=2, paid=False), policy("yes"), count=1, rewards=Rewards([]))
    assert "neither the workflow nor the run's rewards" in nothing.error


def test_conversation_ends_at_max_turns_or_max_prompt_tokens():
    config = counted(turns=9).model_copy(update={"max_turns": 2})
    assert len(play(config, policy("yes"))[0].turns) == 2
    assert len(play(counted(turns=9), policy("yes"), max_prompt_tokens=len("s:yes or no?yes|#1"))[0].turns) == 2
    (failed,) = play(counted(turns=9), policy("yes"), count=1, max_prompt_tokens=3)
    assert "max_prompt_tokens is 3" in failed.error


class Mute(Environment):
    """Reports no states."""

    def step(self, reply: Turn) -> Answer:
        return Answer(done=True)


def test_first_state_defaults_to_the_task_id():
    config = MultiTurnConfig.model_validate({"path": f"{HERE}:Mute"})
    assert {turn.state for rollout in play(config, policy("yes")) for turn in rollout.turns} == {TASK.id}


class Broken(Environment):
    """Fails for some seeds."""

    def step(self, reply: Turn) -> Answer:
        if self.seed % 2:
            raise RuntimeError("out of order")
        return Answer(reward=1.0, done=True)


def test_failing_environment_fails_its_rollout_only():
    rollouts = play(MultiTurnConfig(path=f"{HERE}:Broken"), policy("yes"), count=16)
    assert {rollout.error.partition(" (workflows/")[0] for rollout in rollouts} == {"", "RuntimeError: out of order"}


async def unpaid(task: Task, conversation: Conversation) -> None:
    await conversation.say(*task.messages)


async def twice(task: Task, conversation: Conversation, again: str = "sure?") -> float | None:
    first = await conversation.say(*task.messages, state="first")
    if first.text == "no":
        return None
    conversation.credit(0.25)
    await conversation.say(again)
    conversation.reset()
    await conversation.say("new: ", sampling={"max_tokens": 1})
    other = await conversation.policy.open_model("big")
    assert len(await other.sample([PROMPT], count=1, seed=0, sampling=SamplingConfig())) == 1
    return 0.5


def test_custom_workflow_is_an_async_function():
    config = CustomConfig(path=f"{HERE}:twice", args={"again": "really?"})
    (rollout,) = play(config, policy("yes"), count=1)
    assert [prompt(turn) for turn in rollout.turns] == ["yes or no?", "yes or no?yes|really?", "new: "]
    assert [turn.reward for turn in rollout.turns] == [0.25, None, None]
    assert rollout.turns[0].state == "first"
    assert rollout.reward_parts == {"workflow": 0.5, "format": 0.0}
    assert len(rows_from_trajectory(rollout.trajectories[0])) == 2
    (plain,) = play(config, policy("no"), count=1)
    assert plain.reward_parts == {"format": 0.0}


def test_rollouts_of_a_group_differ_and_repeat_with_the_seed():
    config = CustomConfig(path=f"{HERE}:twice")
    texts = [rollout.turns[0].text for rollout in play(config, policy("yes", "no"), count=16)]
    assert set(texts) == {"yes", "no"}
    assert [rollout.turns[0].text for rollout in play(config, policy("yes", "no"), count=16)] == texts


async def parts_of(task: Task, conversation: Conversation) -> dict[str, float]:
    await conversation.say("x")
    return {"speed": 1.0, "taste": 0.5}


async def silent(task: Task, conversation: Conversation) -> float:
    return 1.0


def test_workflow_may_return_parts_and_must_sample():
    (rollout,) = play(CustomConfig(path=f"{HERE}:parts_of"), policy("yes"), count=1, rewards=Rewards([]))
    assert rollout.reward_parts == {"workflow": 1.5, "workflow/speed": 1.0, "workflow/taste": 0.5}
    (none,) = play(CustomConfig(path=f"{HERE}:silent"), policy("yes"), count=1)
    assert none.error == "the workflow sampled no reply"


async def talkative(task: Task, conversation: Conversation, ending: str = "") -> float | str:
    while True:
        reply = await conversation.say(*task.messages)
        match ending:
            case "turns":
                raise Terminated("max_turns")
            case "hang":
                await asyncio.sleep(60)
            case "raise":
                raise RuntimeError("lost")
            case "exit":
                sys.exit(3)
            case "text":
                return reply.text


@pytest.mark.parametrize(
    ("ending", "termination", "error"),
    [
        ("turns", "max_turns", ""),
        ("hang", "timeout", ""),
        ("prompt", "max_prompt", ""),
        ("raise", "error", r"RuntimeError: lost \(workflows/test_workflows\.py:\d+\)"),
        ("exit", "error", r"SystemExit: 3 \(workflows/test_workflows\.py:\d+\)"),
        ("text", "error", "the workflow's own reward is a str, and must be a number"),
    ],
)
def test_functions_end_as_other_workflows_do(ending, termination, error):
    config = CustomConfig(path=talkative, args={"ending": ending}, timeout=0.2)
    parts = WorkflowContext(sampling=SamplingConfig(max_prompt_tokens=40), rewards=YES, agent_endpoint=AgentEndpoint())
    (rollout,) = run_virtually(config.make(parts).run(TASK, policy("yes"), count=1, seed=5))
    assert (rollout.termination, bool(re.fullmatch(error, rollout.error))) == (termination, True)
    assert {turn.text for turn in rollout.turns} == {"yes"}
    assert rollout.reward_parts == ({} if error else {"format": 1.0})


def test_early_end_before_the_first_reply_says_why():
    async def waits(task: Task, conversation: Conversation) -> None:
        await asyncio.sleep(60)

    parts = WorkflowContext(sampling=SamplingConfig(max_prompt_tokens=3), rewards=YES, agent_endpoint=AgentEndpoint())
    run = CustomConfig(path=waits, timeout=0.5).make(parts).run(TASK, policy("yes"), count=1, seed=5)
    assert run_virtually(run)[0].error == "timed out after 0.5 seconds, before the first reply"
    (long,) = run_virtually(CustomConfig(path=talkative).make(parts).run(TASK, policy("yes"), count=1, seed=5))
    assert long.error.startswith("The prompt has 10 tokens, sampling.max_prompt_tokens is 3.")


async def credited(task: Task, conversation: Conversation) -> None:
    for reward in (0.25, 0.5):
        await conversation.say(*task.messages)
        conversation.credit(reward)


def test_reward_without_return_value_is_that_of_the_turns():
    (rollout,) = play(CustomConfig(path=credited), policy("yes"), count=1)
    assert (rollout.reward, rollout.reward_parts) == (1.75, {"workflow": 0.75, "format": 1.0})


def test_custom_takes_environments_and_agents():
    (game,) = play(CustomConfig(path=Count, args={"turns": 2}, timeout=9), policy("yes"), count=1)
    assert (game.reward_parts, game.turns[1].state) == ({"workflow": 2.0, "format": 1.0}, "1")
    assert not CustomConfig(path=f"{HERE}:quiet_agent").provides_states
    with pytest.raises(ValueError, match="has no argument 'round'"):
        CustomConfig(path=quiet_agent, args={"round": 2})


async def quiet_agent(task: Task, client: Any, model: str, rounds: int = 1) -> None:
    """Sends no request."""


class Held(WorkflowOptions):
    """A workflow of the user's own in full."""

    said: str

    @override
    async def rollout(self, task: Task, policy: WorkflowPolicy, seed: int) -> None:
        await policy.conversation().say(Message(role="system", content=self.said), *task.messages)


def test_options_class_is_a_workflow_with_checked_options():
    config = CustomConfig(path=f"{HERE}:Held", args={"said": "hm "})
    assert prompt(play(config, policy("yes"))[0].turns[0]) == "hm yes or no?"
    assert not config.provides_rewards


def plain(task: Task, conversation: Conversation) -> None: ...


@pytest.mark.parametrize(
    ("path", "args", "sentence"),
    [
        ("nowhere.at.all:x", {}, "cannot be imported"),
        (f"{HERE}:missing", {}, "cannot be imported"),
        ("no_colon", {}, "write module:attribute"),
        (f"{HERE}:plain", {}, "neither an async function"),
        (f"{HERE}:twice", {"agian": "?"}, "agian"),
        (f"{HERE}:Held", {"sad": "?"}, "'sad'"),
    ],
)
def test_unusable_path_is_an_error_before_the_run(tmp_path: Path, path, args, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings(tmp_path, workflow={"type": "custom", "path": path, "args": args})
    if sentence == "cannot be imported":
        with pytest.raises(ValueError, match=sentence):
            settings(tmp_path, workflow={"type": "multi_turn", "path": path, "args": args})


def test_run_without_rewards_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="rewards is missing"):
        settings(tmp_path, rewards=[])
    assert settings(tmp_path, rewards=[], workflow={"type": "custom", "path": f"{HERE}:twice"}).rewards == ()


@pytest.mark.parametrize("workflow", [{"type": "single_turn"}, {"type": "custom", "path": f"{HERE}:unpaid"}])
def test_distillation_needs_no_rewards(tmp_path, workflow):
    distillation = {"type": "on_policy_distill", "teacher": "large"}
    change = {"tasks": {"train": {"type": "addition"}, "held_out": 0}, "eval": {}, "steps": 2}
    config = settings(tmp_path, algorithm=distillation, rewards=[], workflow=workflow, **change)
    assert run(config).step == 2
    steps = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert [(row["reward/mean"], row["rollouts/failed"]) for row in steps] == [(0.0, 0)] * 2


def test_run_with_conversations_has_no_failures(tmp_path):
    workflow = {"type": "multi_turn", "path": f"{HERE}:Count", "args": {"turns": 1}}
    config: RunConfig = settings(
        tmp_path, workflow=workflow, rewards=[], steps=2, algorithm={"type": "multi_step_grpo", "kl": {"coef": 0}}
    )
    assert run(config).step == 2
    assert all(row["rollouts/failed"] == 0 for row in rows(tmp_path) if "reward/mean" in row)


def test_mask_truncated_excludes_cut_replies_from_training(tmp_path):
    shared = {"steps": 1, "sampling": {"max_tokens": 3}, "workflow": {"type": "single_turn"}}
    for masked in (False, True):
        algorithm = {"mask_truncated": masked, "merge_replies": False, "advantage": {"std_threshold": None}}
        run(settings(tmp_path / str(masked), algorithm=algorithm, **shared))
    learned = {
        masked: next(row["optim/rows"] for row in rows(tmp_path / str(masked)) if "optim/rows" in row)
        for masked in (False, True)
    }
    assert learned[True] < learned[False]
