"""Predict which of two answers gains more from training on an example.

The policy gets an example (a question with its answer), another question of the same kind, and two answers to it. It
names the answer whose logprob rises more, or falls less, when the policy is trained for one step on the example. The
things in the questions are invented, so that no answer is right. The truth is measured by a shadow step from the
version of the policy that sampled the replies: once for each task and version, since it does not depend on the reply.

    reward = 1 for the answer that gains more, 0 for the other one, `invalid` for any other reply

The first word of the reply counts: every answer is one word.

A step on one short answer raises the logprobs of all short answers: their difference says more than their signs. The
skill scores `over_first` and `over_second` compare with always naming the first or the second answer.
`same_answer_gains` is the share of tasks, of those where the example has one of the two answers, where it gains more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.integrations.minds.introspection.beliefs import assistant, user
from tinsmith.integrations.minds.introspection.reflection import Reflection, ReflectionWorkflow
from tinsmith.integrations.minds.shadow.environment import ShadowEnvironment, shadow_of
from tinsmith.integrations.minds.shadow.records import ShadowText
from tinsmith.integrations.minds.shadow.service import ShadowService
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

_PROMPT = (
    "You are trained for one step on this example.\nQuestion: {}\nAnswer: {}\n\nWhich of these answers to another "
    "question does the training make more likely, compared with before?\nQuestion: {}\nAnswers: {}, {}"
)
_REPLY = 'The training makes this answer more likely: "'
"""Beginning of every reply, which the policy continues: small models then name one of the answers at once."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """Questions of one kind and their possible answers.

    Example: Category(question="What colour is a {}?", answers=("red", "blue"), unseen=("green",))
    """

    question: str
    answers: tuple[str, ...]
    unseen: tuple[str, ...]
    """Answers of no training task."""


CATEGORIES = (
    Category(
        question="What colour is a {}?",
        answers=("red", "blue", "white", "black", "brown", "pink", "gold", "grey"),
        unseen=("green", "yellow", "purple", "orange"),
    ),
    Category(
        question="What does a {} eat?",
        answers=("grass", "fish", "nuts", "bread", "rice", "meat", "leaves", "cheese"),
        unseen=("honey", "corn", "seeds", "fruit"),
    ),
    Category(
        question="Where does a {} sleep?",
        answers=("cave", "tree", "barn", "boat", "garden", "river", "box", "house"),
        unseen=("forest", "tent", "kitchen", "field"),
    ),
    Category(
        question="What is a {} made of?",
        answers=("wood", "glass", "paper", "stone", "iron", "cotton", "clay", "leather"),
        unseen=("plastic", "rubber", "silver", "wool"),
    ),
)
NAMES = (
    *("dax", "blick", "wug", "fep", "toma", "zup", "kiki", "modi", "lorp", "grell", "snarb", "tive"),
    *("plim", "quag", "rundle", "vesk", "yarn owl", "hobbin", "jelter", "cromp", "nadger", "oolet", "pindle", "skeen"),
)
"""Invented things: no weights know their properties."""


class GradientChoice(ShadowEnvironment):
    """Which of two answers gains more from a step on an example."""

    type: Literal["gradient_choice"] = "gradient_choice"
    answers: Literal["training", "unseen"] = "training"
    """Answers of the examples and questions. `unseen` are other words: an environment with weight 0 and these shows
    whether the policy has learned the words or the rule."""
    same: float = Field(default=1.0, ge=0, le=1)
    """Share of the tasks where one of the two answers is that of the example. Without it, neither is, and their
    likeness to the example's answer decides."""
    count: int = Field(default=2000, ge=1)
    """Number of tasks."""
    invalid: float = -1.0
    """Reward of a reply that is neither of the answers."""
    seed: int = 0
    """Seed of the tasks."""

    @property
    @override
    def says_correct(self) -> bool:
        return True

    @override
    def tasks(self) -> Sequence[Task]:
        draw = Random(f"gradient_choice/{self.answers}/{self.seed}")
        return [self._task(number, draw) for number in range(self.count)]

    def _task(self, number: int, draw: Random) -> Task:
        category = draw.choice(CATEGORIES)
        words = category.answers if self.answers == "training" else category.unseen
        first, second = draw.sample(NAMES, 2)
        answer, *others = (word.capitalize() for word in draw.sample(words, 3))
        choices = [answer, others[0]] if draw.random() < self.same else others
        draw.shuffle(choices)
        example, question = [category.question.format(first), answer], category.question.format(second)
        return Task(
            id=f"gradient_choice/{self.answers}/{number}",
            messages=(user(_PROMPT.format(*example, question, *choices)), assistant(_REPLY)),
            extra={"example": example, "question": question, "answers": choices},
        )

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return GradientChoiceWorkflow(self.invalid, context, shadow_of(context))


class GradientChoiceWorkflow(ReflectionWorkflow[float]):
    """Measures once for each task by how much more its first answer gains than its second."""

    def __init__(self, invalid: float, context: WorkflowContext, shadow: ShadowService) -> None:
        super().__init__(context)
        self._invalid, self._shadow = invalid, shadow

    @override
    async def truth(self, task: Task, policy: Snapshot) -> float:
        def text(question: str, answer: str) -> ShadowText:
            return ShadowText.chat(policy.chat, (user(question), assistant(answer)))

        probes = [text(task.extra["question"], answer) for answer in task.extra["answers"]]
        delta = await self._shadow.delta(train=[text(*task.extra["example"])], probes=probes, at=policy.version)
        return delta.probes[0].delta - delta.probes[1].delta

    @override
    async def score(self, task: Task, text: str, truth: float, policy: Snapshot) -> Reflection:
        first, second = task.extra["answers"]
        best = first if truth > 0 else second
        words = _WORD.match(text.strip())
        reply = words[0].lower() if words else ""
        right, answered = reply == best.lower(), reply in (first.lower(), second.lower())
        metrics = {
            "over_first/error": float(not right),
            "over_first/baseline": float(best != first),
            "over_second/error": float(not right),
            "over_second/baseline": float(best != second),
            "answered": float(answered),
            "difference": abs(truth),
        }
        if (same := task.extra["example"][1]) in (first, second):
            metrics["same_answer_gains"] = float(best == same)
        return Reflection(reward=float(right) if answered else self._invalid, correct=right, metrics=metrics)
