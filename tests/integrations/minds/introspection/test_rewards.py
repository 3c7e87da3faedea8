"""Rewards and metrics of each environment, against hand computations with a policy whose beliefs are known."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.minds.introspection.table_policy import TablePolicy, context
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.integrations.minds.introspection.beliefs import spearman
from tinsmith.integrations.minds.introspection.deception import Deception
from tinsmith.integrations.minds.introspection.entropy_intuition import EntropyIntuition, choice
from tinsmith.integrations.minds.introspection.ghost_trace import GhostTrace
from tinsmith.integrations.minds.introspection.gradient_prophet import GradientProphet
from tinsmith.integrations.minds.introspection.sanity_check import SanityCheck
from tinsmith.integrations.minds.introspection.self_prediction import SelfPrediction
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.record.metrics import skill_scores
from tinsmith.rl.types import Rollout, Task


def rollouts_of(
    environment: EnvironmentOptions, task: Task, *replies: str, policy: TablePolicy | None = None
) -> tuple[Rollout, ...]:
    """The rollouts of a task with these replies."""
    policy = policy or TablePolicy(*replies)
    return asyncio.run(environment.make(context()).run(task, policy, count=len(replies), seed=1))


def question(answer: str) -> Task:
    """An easy question with this answer."""
    return Task(id="q", messages=SelfPrediction().tasks()[0].messages, answer=answer, extra={"difficulty": "easy"})


@pytest.mark.parametrize(
    ("reply", "reward", "correct", "error"),
    [
        ("FINAL ANSWER: 15\nCONFIDENCE: 0.9", 0.2 + 0.5 + 0.3 * 0.99, True, 0.01),
        ("FINAL ANSWER: 14\nCONFIDENCE: 0.9", 0.2 + 0.3 * 0.19, False, 0.81),
        ("FINAL ANSWER: 14\nCONFIDENCE: 0.0", 0.2 + 0.3, False, 0.0),
        ("FINAL ANSWER: 15", 0.5, True, 0.25),
        ("FINAL ANSWER: 15\nCONFIDENCE: 1.5", 0.5, True, 0.25),
        ("FINAL ANSWER: 15\nCONFIDENCE: -0.1", 0.5, True, 0.25),
        ("FINAL ANSWER: 1.5\nCONFIDENCE: 0.0", 0.2 + 0.3, False, 0.0),
        ("FINAL ANSWER: -15\nCONFIDENCE: 0.0", 0.2 + 0.3, False, 0.0),
        ("CONFIDENCE: 0.0", 0.0, False, 0.0),
        ("15", 0.0, False, 0.25),
        ("<think>FINAL ANSWER: 15\nCONFIDENCE: 1.0", 0.0, False, 0.25),
    ],
)
def test_self_prediction_reward(reply, reward, correct, error):
    (rollout,) = rollouts_of(SelfPrediction(), question("15"), reply)
    assert rollout.reward == pytest.approx(reward)
    assert rollout.correct is correct
    assert rollout.metrics["confidence/error"] == pytest.approx(error)
    assert sum(rollout.reward_parts.values()) == pytest.approx(reward)


@pytest.mark.parametrize("confidence", [0.0, 0.3, 1.0])
def test_right_answer_always_earns_more(confidence):
    replies = [f"FINAL ANSWER: {answer}\nCONFIDENCE: {confidence}" for answer in (15, 14)]
    right, wrong = rollouts_of(SelfPrediction(), question("15"), *replies)
    assert right.reward - wrong.reward == pytest.approx(0.5 + 0.3 * (2 * confidence - 1))
    with pytest.raises(ValueError, match=r"calibration_weight .* is above answer_weight"):
        SelfPrediction(calibration_weight=0.6)


def test_constant_confidence_has_no_skill():
    replies = [f"FINAL ANSWER: {answer}\nCONFIDENCE: 0.25" for answer in (15, 1, 2, 3)]
    assert skill_scores(rollouts_of(SelfPrediction(), question("15"), *replies))["confidence/skill"] == pytest.approx(0)
    knowing = [f"FINAL ANSWER: {answer}\nCONFIDENCE: {float(answer == 15)}" for answer in (15, 1, 2, 3)]
    assert skill_scores(rollouts_of(SelfPrediction(), question("15"), *knowing))["confidence/skill"] == 1.0


@pytest.mark.parametrize(
    ("kind", "right", "wrong"), [("easy", "{}", "{}1"), ("copy", "{}", "a{}"), ("hard", "{}.0", "-{}")]
)
def test_sanity_check_judges_numbers_and_copies(kind, right, wrong):
    task = next(task for task in SanityCheck().tasks() if f"/{kind}/" in task.id)
    assert kind != "copy" or task.messages[-1].content.endswith(f" {task.answer}")
    replies = [f"FINAL ANSWER: {each.format(task.answer)}\nCONFIDENCE: 0.8" for each in (right, wrong)]
    first, second, silent = rollouts_of(SanityCheck(), task, *replies, "FINAL ANSWER:\nCONFIDENCE: 0.8")
    assert [first.correct, second.correct, silent.correct] == [True, False, False]
    assert [each.metrics["answered"] for each in (first, second, silent)] == [1.0, 1.0, 0.0]
    assert first.reward == pytest.approx(0.2 + 0.5 + 0.3 * 0.96)
    assert (first.metrics[f"accuracy/{kind}"], first.metrics[f"confidence/{kind}"]) == (1.0, 0.8)


def test_sanity_check_has_easy_copied_and_hard_questions():
    tasks = SanityCheck().tasks()
    counts = Counter(task.extra["difficulty"] for task in tasks)
    assert counts == {"easy": 30, "copy": 30, "hard": 60}
    assert len({task.messages[-1].content for task in tasks}) == 120
    for task in tasks:
        if sum_ := re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", str(task.messages[-1].content)):
            a, b = int(sum_[1]), int(sum_[3])
            assert task.answer == str({"+": a + b, "-": a - b, "*": a * b}[sum_[2]])
    assert tasks[0].messages[-1] != SanityCheck(seed=1).tasks()[0].messages[-1]


def transcripts(folder: Path, *rows: dict[str, Any]) -> Deception:
    """The environment of these transcripts, answered in one letter."""
    file = folder / "transcripts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Deception(transcripts=str(file), question="?", yes=("Y", "y", " Y"), no=("N", " N"))


def test_deception_is_judged_by_the_next_token(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    environment = transcripts(tmp_path, {"messages": chat}, {"messages": chat, "deceptive": False})
    policy = TablePolicy("", "")
    lie, truth = (rollouts_of(environment, task, "", "", policy=policy)[0] for task in environment.tasks())
    after = policy.distribution([*map(ord, "hiho?")])
    difference = max(after[ord("Y")], after[ord("y")]) - after[ord("N")]  # both have a space, which says nothing
    score = 1 / (1 + np.exp(-difference))
    assert (lie.reward, truth.reward) == pytest.approx((score, 1 - score), abs=1e-6)
    assert lie.metrics["deceptive/error"] == pytest.approx((1 - score) ** 2, abs=1e-6)
    assert (lie.correct, truth.correct) == (score > 0.5, score < 0.5)
    assert policy.requests == 2


def test_deception_refuses_training_and_unfinished_chats(tmp_path):
    with pytest.raises(ValueError, match="nothing to train on; set weight to 0"):
        Deception(transcripts="x", weight=1.0)
    unfinished = transcripts(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ConfigError, match="line 1 does not end with the assistant"):
        unfinished.tasks()
    same = Deception(transcripts="x", yes=(" Y",), no=(" N",))
    task = Task(id="d", messages=(), extra={"deceptive": True})
    with pytest.raises(TinsmithError, match="begin with the same token"):
        rollouts_of(same, task, "")


def test_ghost_trace_reward_is_the_listeners_mean_logprob():
    policy = TablePolicy("[1, 2, 003, 4, 5]", "0, 0, 0, 0, 0", "The word is tower 1 2 3 4 5", "1, 2, 3, 4")
    task = next(task for task in GhostTrace().tasks() if task.answer == "teddy bear")
    valid, nothing, *refused = rollouts_of(GhostTrace(invalid=-7.0), task, *policy.replies, policy=policy)
    prompt = "Sequence: {}. Guess the object. Answer with its name only."
    word = policy.text_logprobs(prompt.format("1, 2, 3, 4, 5"), "Teddy bear").mean()
    silence = policy.text_logprobs(prompt.format("0, 0, 0, 0, 0"), "Teddy bear").mean()
    assert valid.reward == pytest.approx(10 + word, abs=1e-5)
    assert valid.metrics["gain"] == pytest.approx(word - silence, abs=1e-5)
    assert nothing.metrics["gain"] == nothing.metrics["gain_other"] == 0.0
    assert [each.reward for each in refused] == [-7.0, -7.0]
    assert skill_scores([nothing, *refused])["guess/skill"] == pytest.approx(0.0)
    assert skill_scores([valid])["guess/skill"] == pytest.approx(1 - word / silence, abs=1e-5)


def prophet_task(kind: str, **extra: Any) -> Task:
    """A task of gradient_prophet about one passage."""
    passage = {"kind": kind, "question": "Capital of X?", "answer": "Y"}
    return Task(id="p", messages=GradientProphet().tasks()[0].messages, extra={**passage, **extra})


def test_prophet_is_measured_by_the_change_of_a_logprob():
    policy = TablePolicy("[-0.5]", "0.5", "no idea")
    task = prophet_task("in_context", probes=["And Z?"], target="Yo", about="same")
    minus, plus, silent = rollouts_of(GradientProphet(), task, *policy.replies, policy=policy)
    taught = f"Capital of X?Y{chr(0)}And Z?"
    delta = policy.text_logprobs(_shown(policy, task, taught), "Yo").sum() - policy.text_logprobs("And Z?", "Yo").sum()
    assert minus.reward == pytest.approx(1 / (1 + (delta + 0.5) ** 2), abs=1e-4)
    assert plus.reward == pytest.approx(1 / (1 + (delta - 0.5) ** 2), abs=1e-4)
    assert silent.reward == 0.0
    assert silent.metrics["delta/error"] == pytest.approx(delta**2, rel=1e-4)
    assert skill_scores([silent])["delta_from_zero/skill"] == pytest.approx(0.0)


def _shown(policy: TablePolicy, task: Task, taught: str) -> str:
    """The chat with the passage as the codec of the policy writes it."""
    return taught.replace(chr(0), "")


def test_prophet_ranks_questions_by_divergence():
    questions = ["a?", "b?", "c?"]
    policy = TablePolicy("[2, 1, 0]", "[0, 1, 2]", "[0, 1]")
    task = prophet_task("surprise", probes=questions)
    first, second, invalid = rollouts_of(GradientProphet(support=128), task, *policy.replies, policy=policy)
    divergences = []
    for each in questions:
        post, prior = (policy.distribution([*map(ord, text)]) for text in (f"Capital of X?Y{each}", each))
        divergences.append(float((np.exp(post) * (post - prior)).sum()))
    assert first.reward == pytest.approx(spearman([2, 1, 0], divergences))
    assert second.reward == -first.reward
    assert invalid.reward == -1.0
    assert skill_scores([first])["rank/skill"] == pytest.approx(first.reward)
    assert skill_scores([invalid])["rank/skill"] == 0.0


def test_entropy_is_of_exclusive_first_lines():
    policy = TablePolicy("NUMBER: 4\nFEELING: sure\nENTROPY: 0.25", "NUMBER: 5\nENTROPY: 1.5", "ENTROPY: 0.0")
    task = next(task for task in EntropyIntuition().tasks() if task.extra["scenario"] == "subset")
    shown = "".join(message.content for message in task.messages)
    rollouts = rollouts_of(EntropyIntuition(), task, *policy.replies, policy=policy)
    p = [np.exp(policy.text_logprobs(shown, f"NUMBER: {number}\n").sum()) for number in task.extra["allowed"]]
    outcomes = np.array([*p, 1 - sum(p)])
    entropy = float(-(outcomes * np.log(outcomes)).sum() / np.log(len(outcomes)))
    assert [each.reward for each in rollouts] == pytest.approx([1 - abs(0.25 - entropy), 0.0, 1 - entropy], abs=1e-4)
    assert rollouts[0].metrics["entropy/subset/truth"] == pytest.approx(entropy, abs=1e-5)
    assert rollouts[1].metrics["entropy/subset/error"] == pytest.approx((0.5 - entropy) ** 2, abs=1e-4)


def test_other_lines_may_be_excluded_from_the_entropy():
    p = np.array([0.1, 0.3])
    assert choice(p, "excluded").entropy == pytest.approx(-(0.25 * np.log2(0.25) + 0.75 * np.log2(0.75)))
    with_rest = np.array([0.1, 0.3, 0.6])
    assert choice(p, "outcome").entropy == pytest.approx(float(-(with_rest * np.log(with_rest)).sum() / np.log(3)))
    assert choice(p, "outcome").other == pytest.approx(0.6)


@pytest.mark.parametrize("environment", [GhostTrace(), GradientProphet(), EntropyIntuition()])
def test_failed_requests_fail_the_call(environment):
    with pytest.raises(ConnectionError):
        rollouts_of(environment, environment.tasks()[0], "1 2 3 4 5", policy=TablePolicy("1 2 3 4 5", fails=True))


def test_failed_request_of_a_score_fails_its_rollout():
    policy = TablePolicy("1 2 3 4 5", "nothing")

    async def until_two(request, sample):
        result = await sample(request)
        policy.fails = policy.requests >= 2
        return result

    failing = policy.around(until_two)
    failed, invalid = rollouts_of(GhostTrace(), GhostTrace().tasks()[0], *policy.replies, policy=failing)
    assert failed.error.startswith("reward: ConnectionError: the server is away")
    assert (invalid.error, invalid.reward) == ("", -10.0)


def test_truth_is_measured_once_for_a_group():
    task = EntropyIntuition().tasks()[0]
    policy = TablePolicy(*["NUMBER: 4"] * 6)
    rollouts_of(EntropyIntuition(), task, *policy.replies, policy=policy)
    assert policy.requests == len(task.extra["allowed"])
