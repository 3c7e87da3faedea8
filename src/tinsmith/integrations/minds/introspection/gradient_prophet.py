"""Predictions of what a passage changes: how the policy's own beliefs move when a passage is in its context.

`in_context`: predict the change of an answer's logprob,
    delta = log p(answer | passage, question) - log p(answer | question), summed over the answer's tokens;
    reward = 1 / (1 + (delta - prediction)^2), 0 without a prediction.

`surprise`: rank questions by KL(next token with the passage || without it), largest first;
    reward = Spearman's rank correlation, -1 for a reply that is not a permutation of the indices.

A passage is an earlier exchange in the chat: its question by the user, its answer by the assistant. The policy
that predicts is the one that is measured.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.integrations.minds.introspection.beliefs import (
    assistant,
    next_token_kl,
    reply_logprobs,
    spearman,
    user,
)
from tinsmith.integrations.minds.introspection.facts import Fact, FactSet, Passage, Relations
from tinsmith.integrations.minds.introspection.parsing import ranking, single_number
from tinsmith.integrations.minds.introspection.reflection import Reflection, ReflectionWorkflow
from tinsmith.rl.data.row_mapping import user_task
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Message, Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

Kind = Literal["in_context", "surprise"]

_IN_CONTEXT = (
    "You will see a passage and a question with its target answer. Predict how much your log-probability of the target "
    "answer changes when the passage is in your context: positive if the answer becomes more likely, negative if it "
    "becomes less likely. Output a JSON array with one number and nothing else.\n\n"
    "Passage: {question} {answer}\nQuestion: {probe}\nTarget answer: {target}\n\n"
    "Prediction, as [change of log-probability]:"
)
_SURPRISE = (
    "You will see a passage and several questions. Rank the questions by how much the passage changes what you would "
    "answer to them, the largest change (the highest KL divergence) first. Output a JSON array with the indices of all "
    "questions and nothing else.\n\nPassage: {question} {answer}\n{probes}\n\nRanking, as [index, index, ...]:"
)


class GradientProphet(EnvironmentOptions):
    """The policy predicts how a passage in its context changes its own answers."""

    type: Literal["gradient_prophet"] = "gradient_prophet"
    kinds: tuple[Kind, ...] = Field(default=("in_context", "surprise"), min_length=1)
    """Tasks: `in_context`, the change of an answer's logprob; `surprise`, a ranking of questions."""
    facts: FactSet = "world"
    """Facts of the passages: `world`, many of which models know; `invented`, of places and people that do not exist."""
    support: int = Field(default=256, ge=1)
    """Likeliest tokens of each distribution that a KL divergence tells apart; at the vocabulary's size it is exact."""
    size: int = Field(default=2000, ge=1)
    """Number of training tasks, or all there are if those are fewer; no task occurs twice."""
    seed: int = 0
    """Seed of the passages and probes."""

    @override
    def tasks(self) -> Sequence[Task]:
        return self._tasks(self.size, held_out=False)

    @override
    def held_out_tasks(self) -> Sequence[Task]:
        return self._tasks(self.most_held_out, held_out=True)

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return GradientProphetWorkflow(self.support, context)

    def _tasks(self, count: int, *, held_out: bool) -> list[Task]:
        """Up to `count` different tasks, of each kind in turn, about one fact after the other."""
        relations, side = Relations(self.facts, held_out=held_out), "held_out" if held_out else "train"
        random = Random(f"gradient_prophet/{self.seed}/{side}")
        tasks: dict[str, Task] = {}
        facts: list[Fact] = []
        for _ in range(20 * count):  # few tasks are left to draw by then
            if len(tasks) == count:
                break
            if not facts:
                facts = random.sample(relations.facts, len(relations.facts))
            passage, kind = relations.passage(facts.pop(), random), self.kinds[len(tasks) % len(self.kinds)]
            task = _task(f"gradient_prophet/{side}/{len(tasks)}", kind, passage, random)
            tasks.setdefault(task.messages[-1].content, task)
        return list(tasks.values())


class GradientProphetWorkflow(ReflectionWorkflow[tuple[float, ...]]):
    """Measures what the passage changes, then scores each prediction."""

    def __init__(self, support: int, context: WorkflowContext) -> None:
        super().__init__(context)
        self._support = support

    @override
    async def truth(self, task: Task, policy: Snapshot) -> tuple[float, ...]:
        """The change of the answer's logprob, or the divergence of each question."""
        passage = (user(task.extra["question"]), assistant(task.extra["answer"]))
        questions = [user(question) for question in task.extra["probes"]]
        if task.extra["kind"] == "in_context":
            return (await _delta(policy, passage, questions[0], task.extra["target"]),)
        support = self._support
        divergences = (next_token_kl(policy, (*passage, each), (each,), support) for each in questions)
        return tuple(await asyncio.gather(*divergences))

    @override
    async def score(self, task: Task, text: str, truth: tuple[float, ...], policy: Snapshot) -> Reflection:
        if task.extra["kind"] == "in_context":
            return score_delta(single_number(text), truth[0], task.extra["about"])
        return score_ranking(ranking(text, len(truth)), truth)


def score_delta(prediction: float | None, delta: float, about: str) -> Reflection:
    """Score of a predicted change; in the skill scores, no prediction counts as 0. `about` is that of the probe."""
    error = (delta - (prediction or 0.0)) ** 2
    metrics = {
        "delta/error": error,
        "delta/truth": delta,
        "delta_from_zero/error": error,
        "delta_from_zero/baseline": delta**2,
        "delta/answered": float(prediction is not None),
        f"change/{about}": delta,
    }
    return Reflection(reward=0.0 if prediction is None else 1.0 / (1.0 + error), metrics=metrics)


def score_ranking(order: Sequence[int] | None, divergences: Sequence[float]) -> Reflection:
    """Score of a ranking; in the skill score, no ranking has a correlation of 0."""
    correlation = 0.0 if order is None else spearman(order, divergences)
    metrics = {
        "rank/error": 1.0 - correlation,
        "rank/baseline": 1.0,
        "rank/answered": float(order is not None),
        "rank/kl": math.fsum(divergences) / len(divergences),
    }
    return Reflection(reward=-1.0 if order is None else correlation, metrics=metrics)


async def _delta(policy: Snapshot, passage: Sequence[Message], question: Message, answer: str) -> float:
    after, before = await asyncio.gather(
        reply_logprobs(policy, (*passage, question), answer), reply_logprobs(policy, (question,), answer)
    )
    return float(after.sum() - before.sum())


def _task(task_id: str, kind: Kind, passage: Passage, random: Random) -> Task:
    extra: dict[str, Any] = {"kind": kind, "question": passage.question, "answer": passage.answer}
    if kind == "in_context":
        probe = random.choice((*passage.distinct, *passage.contrasts))
        prompt = _IN_CONTEXT.format(**extra, probe=probe.question, target=probe.answer)
        extra |= {"probes": [probe.question], "target": probe.answer, "about": probe.about}
    else:
        questions = [probe.question for probe in random.sample(passage.distinct, len(passage.distinct))]
        prompt = _SURPRISE.format(**extra, probes="\n".join(f"{at}: {each}" for at, each in enumerate(questions)))
        extra |= {"probes": questions}
    task = user_task(task_id, prompt, "")
    return Task(id=task.id, messages=task.messages, extra=extra)
