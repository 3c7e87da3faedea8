"""Workflows turn a task into rollouts: asked once, in a conversation, or as code of one's own says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.base import SamplingConfig, Snapshot
from tinsmith.rl.policy.scripted import END, ScriptedSnapshot
from tinsmith.rl.policy.training_rows import rows_from_rollout
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.rewards.format import Format
from tinsmith.rl.types import Message, Rollout, Task, Turn
from tinsmith.rl.workflows.base import WorkflowContext, WorkflowOptions
from tinsmith.rl.workflows.custom import Conversation, CustomConfig
from tinsmith.rl.workflows.multi_turn import Answer, Environment, MultiTurnConfig
from tinsmith.rl.workflows.single_turn import THINK, MathConfig, SingleTurnConfig

ASK = Message(role="user", content="yes or no?")
TASK = Task(id="t/0", messages=(ASK,), answer="yes")
HERE = __name__
YES = Rewards([Format(pattern="yes")])


def policy(*replies: str) -> ScriptedSnapshot:
    return ScriptedSnapshot(replies, np.zeros(len(replies)), 3)


def play(
    config: WorkflowOptions, speaker: Snapshot, *, count: int = 4, rewards: Rewards = YES, seed: int = 5, **sampling
) -> tuple[Rollout, ...]:
    parts = WorkflowContext(sampling=SamplingConfig(**sampling), rewards=rewards, agent_endpoint=AgentEndpoint())
    return asyncio.run(config.make(parts).run(TASK, speaker, count=count, seed=seed))


def prompt(turn: Turn) -> str:
    return "".join(chr(token) if token != END else "|" for token in turn.prompt)


def test_a_single_turn_asks_and_scores():
    rollouts = play(SingleTurnConfig(system="Be short. "), policy("yes", "no"), count=20)
    assert {prompt(one.turns[0]) for one in rollouts} == {"Be short. yes or no?"}
    assert {(one.text, one.reward) for one in rollouts} == {("yes", 1.0), ("no", 0.0)}


def test_math_asks_for_thoughts_unless_the_task_brings_its_own_system():
    assert prompt(play(MathConfig(), policy("yes"))[0].turns[0]) == THINK + ASK.content
    own = replace(TASK, messages=(Message(role="system", content="own "), ASK))
    parts = WorkflowContext(sampling=SamplingConfig(), rewards=YES, agent_endpoint=AgentEndpoint())
    (rollout,) = asyncio.run(MathConfig().make(parts).run(own, policy("yes"), count=1, seed=0))
    assert prompt(rollout.turns[0]) == "own " + ASK.content


def test_a_reply_begins_with_its_prefix_and_rewards_read_both():
    (rollout,) = play(SingleTurnConfig(reply_prefix="ye"), policy("s"), count=1)
    assert prompt(rollout.turns[0]) == "yes or no?ye"
    assert rollout.turns[0].tokens == (ord("s"), END)
    assert (rollout.text, rollout.reward) == ("yes", 1.0)


class Count(Environment):
    """Says how often it was answered; pays for each yes; ends after `turns`."""

    def __init__(self, task: Task, seed: int, turns: int, paid: bool = True) -> None:
        super().__init__(task, seed)
        self.turns, self.paid, self.heard = turns, paid, 0

    def begin(self) -> Answer:
        return Answer(state="0")

    async def step(self, reply: Turn) -> Answer:
        self.heard += 1
        reward = float(reply.text == "yes") if self.paid else None
        return Answer(message=f"#{self.heard}", reward=reward, done=self.heard == self.turns, state=str(self.heard))


def counted(**args) -> MultiTurnConfig:
    return MultiTurnConfig.model_validate({"path": f"{HERE}:Count", "args": args, "system": "s:"})


def test_a_conversation_is_one_row_with_the_policys_words_in_the_mask():
    (rollout,) = play(counted(turns=3), policy("yes"), count=1, rewards=Rewards([]))
    assert [prompt(turn) for turn in rollout.turns] == [
        "s:yes or no?",
        "s:yes or no?yes|#1",
        "s:yes or no?yes|#1yes|#2",
    ]
    assert [turn.reward for turn in rollout.turns] == [1.0, 1.0, 1.0]
    assert [turn.state for turn in rollout.turns] == ["0", "1", "2"]
    assert (rollout.reward, rollout.reward_parts) == (3.0, {"workflow": 3.0})
    (row,) = rows_from_rollout(rollout)
    assert "".join(chr(one) for one in row.targets[row.mask]) == "yes\0yes\0yes\0"


def test_step_rewards_and_rewards_of_the_run_add_up():
    (rollout,) = play(counted(turns=2), policy("yes"), count=1)
    assert rollout.reward_parts == {"workflow": 2.0, "format": 1.0}
    assert rollout.reward == 3.0
    (unpaid,) = play(counted(turns=2, paid=False), policy("yes"), count=1)
    assert unpaid.reward_parts == {"format": 1.0}
    assert {turn.reward for turn in unpaid.turns} == {None}
    (nothing,) = play(counted(turns=2, paid=False), policy("yes"), count=1, rewards=Rewards([]))
    assert "neither the workflow nor the run's rewards" in nothing.error


def test_a_conversation_ends_at_max_turns_and_where_the_prompt_grows_too_long():
    config = counted(turns=9).model_copy(update={"max_turns": 2})
    assert len(play(config, policy("yes"))[0].turns) == 2
    assert len(play(counted(turns=9), policy("yes"), max_prompt_tokens=len("s:yes or no?yes|#1"))[0].turns) == 2
    (failed,) = play(counted(turns=9), policy("yes"), count=1, max_prompt_tokens=3)
    assert "max_prompt_tokens is 3" in failed.error


class Mute(Environment):
    """Says nothing of states."""

    def step(self, reply: Turn) -> Answer:
        return Answer(done=True)


def test_an_environment_that_begins_with_nothing_has_the_task_itself_for_a_first_state():
    config = MultiTurnConfig.model_validate({"path": f"{HERE}:Mute"})
    assert {turn.state for one in play(config, policy("yes")) for turn in one.turns} == {TASK.id}


class Broken(Environment):
    """Fails for some seeds."""

    def step(self, reply: Turn) -> Answer:
        if self.seed % 2:
            raise RuntimeError("out of order")
        return Answer(reward=1.0, done=True)


def test_an_environment_that_fails_costs_its_own_rollout_alone():
    rollouts = play(MultiTurnConfig(path=f"{HERE}:Broken"), policy("yes"), count=16)
    assert {one.error for one in rollouts} == {"", "RuntimeError: out of order"}


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
    assert len(await other.sample([ASK], count=1, seed=0, sampling=SamplingConfig())) == 1
    return 0.5


def test_a_workflow_of_ones_own_is_an_async_function():
    config = CustomConfig(path=f"{HERE}:twice", args={"again": "really?"})
    (rollout,) = play(config, policy("yes"), count=1)
    assert [prompt(turn) for turn in rollout.turns] == ["yes or no?", "yes or no?yes|really?", "new: "]
    assert [turn.reward for turn in rollout.turns] == [0.25, None, None]
    assert rollout.turns[0].state == "first"
    assert rollout.reward_parts == {"workflow": 0.5, "format": 0.0}
    assert len(rows_from_rollout(rollout)) == 2
    (plain,) = play(config, policy("no"), count=1)
    assert plain.reward_parts == {"format": 0.0}


def test_rollouts_of_a_group_draw_apart_and_the_same_seed_draws_again():
    config = CustomConfig(path=f"{HERE}:twice")
    texts = [one.turns[0].text for one in play(config, policy("yes", "no"), count=16)]
    assert set(texts) == {"yes", "no"}
    assert [one.turns[0].text for one in play(config, policy("yes", "no"), count=16)] == texts


async def parts_of(task: Task, conversation: Conversation) -> dict[str, float]:
    await conversation.say("x")
    return {"speed": 1.0, "taste": 0.5}


async def silent(task: Task, conversation: Conversation) -> float:
    return 1.0


def test_a_workflow_may_give_named_parts_and_must_ask():
    (rollout,) = play(CustomConfig(path=f"{HERE}:parts_of"), policy("yes"), count=1, rewards=Rewards([]))
    assert rollout.reward_parts == {"workflow": 1.5, "workflow/speed": 1.0, "workflow/taste": 0.5}
    (none,) = play(CustomConfig(path=f"{HERE}:silent"), policy("yes"), count=1)
    assert none.error == "the workflow sampled no reply"


class Held(WorkflowOptions):
    """A workflow of the user's own in full."""

    said: str

    def make(self, parts: WorkflowContext):
        return SingleTurnConfig(system=self.said).make(parts)


def test_a_settings_class_is_a_workflow_with_checked_options():
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
def test_a_path_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path, path, args, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings(tmp_path, workflow={"type": "custom", "path": path, "args": args})
    if sentence == "cannot be imported":
        with pytest.raises(ValueError, match=sentence):
            settings(tmp_path, workflow={"type": "multi_turn", "path": path, "args": args})


def test_a_run_without_any_reward_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rewards is missing"):
        settings(tmp_path, rewards=[])
    assert settings(tmp_path, rewards=[], workflow={"type": "custom", "path": f"{HERE}:twice"}).rewards == ()


@pytest.mark.parametrize("workflow", [{"type": "single_turn"}, {"type": "custom", "path": f"{HERE}:unpaid"}])
def test_where_a_teacher_says_what_is_learned_nothing_need_judge(tmp_path, workflow):
    taught = {"type": "on_policy_distill", "teacher": "large"}
    change = {"tasks": {"train": {"type": "addition"}, "held_out": 0}, "eval": {}, "steps": 2}
    config = settings(tmp_path, algorithm=taught, rewards=[], workflow=workflow, **change)
    assert run(config).step == 2
    steps = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert [(row["reward/mean"], row["rollouts/failed"]) for row in steps] == [(0.0, 0)] * 2


def test_a_whole_run_of_conversations(tmp_path):
    workflow = {"type": "multi_turn", "path": f"{HERE}:Count", "args": {"turns": 1}}
    config: RunConfig = settings(
        tmp_path, workflow=workflow, rewards=[], steps=2, algorithm={"type": "multi_step_grpo", "kl": {"coef": 0}}
    )
    assert run(config).step == 2
    assert all(row["rollouts/failed"] == 0 for row in rows(tmp_path) if "reward/mean" in row)


def test_what_was_cut_counts_in_comparisons_and_is_not_learned_from(tmp_path):
    shared = {"steps": 1, "sampling": {"max_tokens": 3}, "workflow": {"type": "single_turn"}}
    for masked in (False, True):
        algorithm = {"mask_truncated": masked, "merge_replies": False, "advantage": {"std_threshold": None}}
        run(settings(tmp_path / str(masked), algorithm=algorithm, **shared))
    learned = {
        masked: next(row["optim/rows"] for row in rows(tmp_path / str(masked)) if "optim/rows" in row)
        for masked in (False, True)
    }
    assert learned[True] < learned[False]
