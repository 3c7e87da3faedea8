"""A judge of groups: its ranking is read, or requested again, and becomes each reply's share of the others below it."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from rich.console import Console

from tests.rl.rewards.test_rewards import said
from tests.rl.scripted_run import rows, run, settings
from tinsmith.rl.policy.request_limit import RequestLimit
from tinsmith.rl.policy.sampling import ModelVersion, SampleRequest, SampleResult, Snapshot, encoded
from tinsmith.rl.record.monitors import report
from tinsmith.rl.record.monitors.base import RunInfo
from tinsmith.rl.rewards import Rewards, make_reward
from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.rewards.compared import score_by
from tinsmith.rl.rewards.rank_judge import RankJudge, read_ranking
from tinsmith.rl.rollouts.runner import CANCELLED, Oversampling, RolloutConfig, RolloutRunner
from tinsmith.rl.run.open import _announce
from tinsmith.rl.types import Group, Message, Rollout, Task, Turn
from tinsmith.rl.workflows.base import Workflow
from tinsmith.rl.workflows.group_scoring import GroupScoredWorkflow
from tinsmith.testing import CharacterCodec, ScriptedSnapshot, run_virtually

TASK = Task(id="t/0", messages=(Message(role="user", content="Which {number}?"),), answer="9")
GARBAGE = "All of them are fine."


@pytest.mark.parametrize(
    ("response", "ranks"),
    [
        ("The second. Ranking: 2 > 1 = 3", [1, 0, 1]),
        ("**Ranking:** [2] > (3) > Answer 1.", [2, 0, 1]),
        ("ranking : 3, 1, 2", [1, 2, 0]),
        ("Ranking: 1 > 2 > 3\nNo.\n## Final Ranking:\n\n`3 = 2 = 1`\nbye", [0, 0, 0]),
        *[
            (text, None)
            for text in (
                "", "2 > 1 > 3", "Ranking:", "Ranking: 2 > 1", "Ranking: 2 > 1 > 3 > 4", "Ranking: 1 > 1 > 3",
                "Ranking: 2 >= 1 > 3", "Ranking: 2 > 1 3", "Ranking: two > 1 > 3", "Ranking: 3 > 2 > 1 >",
                "Ranking: 1 < 2 < 3", "Ranking: 1.5 > 2 > 3", "Ranking: 1 > 2 > 3\nRanking: none",
            )
        ],
    ],
)  # fmt: skip
def test_ranking_is_read_or_there_is_none(response, ranks):
    assert read_ranking(response, 3) == ranks


def judge_by(respond: Callable[[list[str], str], str]) -> tuple[Snapshot, list[str]]:
    """The policy of a server whose judge responds to the replies in its prompt, and the prompts."""
    prompts: list[str] = []

    async def sample(request: SampleRequest) -> SampleResult:
        prompts.append("".join(chr(token) for token in encoded(request.prompt, CharacterCodec()).tokens))
        replies = re.findall(r"^Answer \d+:\n(.*)$", prompts[-1], re.MULTILINE)
        turn = Turn(prompt=(1,), tokens=(2,), logprobs=(0.0,), text=respond(replies, prompts[-1]), stop="stop")
        return SampleResult(turns=(turn,))

    async def open_model(name: str) -> Snapshot:
        assert name == "big"
        return Snapshot(ModelVersion(version=0, chat=CharacterCodec(), sample=sample, open_model=open_model))

    version = ModelVersion(version=0, chat=CharacterCodec(), sample=sample, open_model=open_model)
    return Snapshot(version), prompts


def by_number(replies: list[str], _: str = "") -> str:
    """The right ranking: larger numbers are better, equal ones are ties."""
    levels = [[at for at, reply in enumerate(replies, 1) if float(reply) == value] for value in map(float, replies)]
    ordered = sorted({tuple(level) for level in levels}, key=lambda level: -float(replies[level[0] - 1]))
    return "Ranking: " + " > ".join(" = ".join(map(str, level)) for level in ordered)


def scores(texts: list[str], policy: Snapshot, seed: int = 5, **how) -> list[float]:
    judge = make_reward({"type": "rank_judge", "model": "big", **how})
    values = asyncio.run(judge.judge_group(TASK, [said(text) for text in texts], policy, seed))
    return [Score.of(value).value for value in values]


def shares_below(texts: list[str]) -> list[float]:
    """By definition: the mean over all others of 1 for a worse one and 1/2 for an equal one."""
    numbers = [float(text) for text in texts]
    pairs = [(a, b) for a, b in permutations(range(len(texts)), 2)]
    wins = {(a, b): 1.0 if numbers[a] > numbers[b] else 0.5 if numbers[a] == numbers[b] else 0.0 for a, b in pairs}
    return [float(np.mean([wins[at, b] for b in range(len(texts)) if b != at])) for at in range(len(texts))]


@pytest.mark.parametrize("texts", [["3", "1"], ["1", "2.0", "2", "7", "1"], ["1", "1", "1"], list("31415926")])
def test_scores_are_shares_of_the_others_below(texts):
    policy, prompts = judge_by(by_number)
    for seed in range(3):
        assert scores(texts, policy, seed) == pytest.approx(shares_below(texts))
    assert len(prompts) == (0 if len(set(texts)) == 1 else 3)
    assert all("Which {number}?" in prompt and prompt.count("\nAnswer ") == len(set(texts)) for prompt in prompts)


def test_position_of_a_reply_averages_out():
    policy, prompts = judge_by(lambda replies, _: "Ranking: " + " > ".join(map(str, range(1, len(replies) + 1))))
    texts = ["a", "b", "c", "d"]
    assert sorted(scores(texts, policy)) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert scores(texts, policy, passes=100) == pytest.approx([0.5] * 4, abs=0.1)
    assert scores(texts, policy, 8) == scores(texts, policy, 8)
    assert len({prompt.partition("Answer 1:")[2] for prompt in prompts}) == 24


def test_parts_of_a_large_group_average_to_its_ranking():
    policy, prompts = judge_by(by_number)
    texts = list("3141592")
    shares = scores(texts, policy, passes=100, replies_per_prompt=3)
    assert shares == pytest.approx(shares_below(texts), abs=0.12)
    assert {prompt.count("\nAnswer ") for prompt in prompts} <= {2, 3}


def test_request_is_repeated_without_a_ranking():
    answers = iter([GARBAGE, "Ranking: 1 > 1"])
    policy, prompts = judge_by(lambda replies, _: next(answers, by_number(replies)))
    assert scores(["1", "2"], policy) == [0.0, 1.0]
    assert len(prompts) == 3
    policy, prompts = judge_by(lambda *_: GARBAGE)
    with pytest.raises(ValueError, match=r"no ranking of 2 replies: 'All of them are fine\.'"):
        scores(["1", "2"], policy, retries=1)
    assert len(prompts) == 2
    with pytest.raises(ValueError, match="two replies or more, and the group has 1"):
        scores(["1"], policy)


def test_prompt_of_the_file_needs_the_replies():
    policy, prompts = judge_by(by_number)
    scores(["1", "2"], policy, prompt="{count}\n{replies}\n{nothing}")
    assert prompts[0].startswith("2\nAnswer 1:\n")
    assert prompts[0].endswith("\n{nothing}")
    with pytest.raises(ValueError, match=r"it has no \{replies\}"):
        RankJudge(model="big", prompt="Rank them.")


class Counting(Workflow):
    """Replies 1, 2, 3, … in the order of calls; those of `failing` fail."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self._number, self._failing = 0, failing

    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        numbers = range(self._number + 1, self._number + count + 1)
        self._number += count
        return tuple(Rollout(error="odd") if at in self._failing else said(str(at)) for at in numbers)


def rolled(
    policy: Snapshot, *rewards: Reward, failing: tuple[int, ...] = (), size: int = 3, over=None, **config
) -> Group:
    """A group whose rewards are these."""
    workflow = GroupScoredWorkflow(Counting(failing), Rewards(rewards))
    runner = RolloutRunner(RolloutConfig(**config), RequestLimit(10))
    tasks = [TASK] * (2 if over else 1)
    return run_virtually(runner.run_groups(workflow, tasks, policy, size=size, seeds=range(len(tasks)), over=over))[0]


@pytest.mark.parametrize(("split", "retries", "left"), [(0, 0, 3), (1, 0, 3), (1, 2, 4), (0, 1, 4)])
def test_whole_group_is_ranked_once(split, retries, left):
    policy, prompts = judge_by(by_number)
    group = rolled(policy, RankJudge(model="big", weight=2.0), failing=(2,), size=4, split=split, retries=retries)
    good = [rollout for rollout in group.rollouts if not rollout.error]
    expected = shares_below([rollout.text for rollout in good])
    assert len(good) == left
    assert len(prompts) == 1
    assert [rollout.reward_parts["rank_judge"] for rollout in good] == pytest.approx(expected)
    assert list(group.rewards) == pytest.approx([2 * share for share in expected])


def test_group_without_a_ranking_fails_and_is_retried():
    policy, _ = judge_by(lambda *_: GARBAGE)
    group = rolled(policy, RankJudge(model="big", retries=0))
    assert all(each.error.startswith("reward: ValueError: the judge gave no ranking") for each in group.rollouts)
    assert group.rewards == ()
    first = iter([GARBAGE])
    policy, _ = judge_by(lambda replies, _: next(first, by_number(replies)))
    group = rolled(policy, RankJudge(model="big", retries=0), retries=1)
    assert [rollout.text for rollout in group.rollouts] == ["4", "5", "6"]
    assert list(group.rewards) == pytest.approx([0, 0.5, 1])


class Slow(Reward):
    """Compares the first group at once, and any later one after a minute."""

    type: str = "slow"

    async def judge_group(self, task, rollouts, policy, seed):
        await asyncio.sleep(60 * (1 - seed))
        return [np.nan, *[1.0] * (len(rollouts) - 1)]


@pytest.mark.parametrize("partial", [True, False])
def test_cancelled_group_has_no_replies_without_its_reward(partial):
    policy, _ = judge_by(by_number)
    group = rolled(policy, Slow(), over=Oversampling(ratio=0.5, wait=1, partial=partial))
    assert [each.error for each in group.rollouts] == [CANCELLED] * 3
    group = rolled(policy, Slow(), timeout=9)
    assert {each.error for each in group.rollouts} == {"reward: timed out after 9 seconds"}


def test_values_of_a_comparison_are_checked():
    policy, _ = judge_by(by_number)
    group = rolled(policy, Slow())
    assert group.rollouts[0].error == "reward: slow is nan, and must be a finite number"
    assert group.rewards == (1.0, 1.0)
    short = make_reward({"type": "custom", "path": lambda task, rollouts: [1.0]})
    assert "returned 1 value for 3 replies" in rolled(policy, short).rollouts[0].error
    with pytest.raises(ValueError, match="compares the replies of a group"):
        asyncio.run(score_by(RankJudge(model="big"), TASK, said("1"), ScriptedSnapshot(("",), np.zeros(1), 0), None))


def rarest(task, rollouts, scale=1.0):
    """A reward of one's own for a whole group: the share of other replies."""
    texts = [rollout.text for rollout in rollouts]
    return [scale * (1 - texts.count(text) / len(texts)) for text in texts]


def test_function_of_a_group_is_a_reward_of_a_run(tmp_path):
    own = {"type": "custom", "path": rarest, "args": {"scale": 2.0}}
    config = settings(tmp_path / "run", rewards=[own, {"type": "format", "pattern": "yes"}], steps=2)
    run(config)
    written = rows(tmp_path / "run")
    assert all(0 < row["reward/rarest"] < 2 for row in written if "reward/mean" in row)
    assert [("eval/reward/format" in row, "eval/reward/rarest" in row) for row in written if "eval/pass@1" in row] == [
        (True, False)
    ] * 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"group_size": 1, "algorithm": {"type": "reinforceplusplus"}, "eval": {}}, "set group_size to 2 or more"),
        ({"eval": {"every": 1}}, r"because those of the run compare the replies of a group; set eval\.rewards"),
        ({"eval": {"rewards": [{"type": "rank_judge", "model": "m"}]}}, r"eval\.rewards: rank_judge compares"),
        ({"rewards": [{"type": "custom", "path": f"{__name__}:rarest", "isolated": 2}]}, "isolated is not used"),
        (
            yaml.safe_load(
                "{tasks: {}, rewards: [], eval: {}, environments: [{type: tasks, name: a, train: {type: addition}, "
                "rewards: [{type: rank_judge, model: m}]}]}"
            ),
            "environment a: rank_judge compares replies, and no reward function scores single ones; set its rewards, "
            "or held_out to 0",
        ),
    ],
)  # fmt: skip
def test_settings_that_leave_nothing_to_compare_are_refused(tmp_path, changes, problem):
    with pytest.raises(ValueError, match=problem):
        settings(tmp_path, **{"rewards": [{"type": "rank_judge", "model": "m"}], "eval": {}, **changes})
    assert not settings(tmp_path, rewards=[{"type": "rank_judge", "model": "m"}], eval={}).evaluates


def test_held_out_tasks_without_a_reward_are_said(tmp_path):
    own, single = {"type": "custom", "path": rarest}, {"type": "format", "pattern": "yes"}
    assert settings(tmp_path, rewards=[own, single], eval={}).not_evaluated == ""
    assert settings(tmp_path, rewards=[own], eval={"rewards": [single]}).not_evaluated == ""
    config, out = settings(tmp_path, rewards=[own], eval={}), io.StringIO()
    assert config.not_evaluated.startswith("rarest compares the replies of a group")
    _announce(config, SimpleNamespace(loss_location="here"), Console(file=out, width=200))
    assert "held-out tasks are not evaluated: rarest compares" in out.getvalue()
    values = config.model_dump(mode="json")
    info = RunInfo(name="r", folder=tmp_path, steps=2, settings=values, not_evaluated=config.not_evaluated)
    assert "not evaluated" in report.write(info).read_text()
    assert "not evaluated" not in report.write(replace(info, not_evaluated="")).read_text()
