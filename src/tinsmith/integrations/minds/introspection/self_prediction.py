"""Questions with a stated confidence, such as arithmetic: the policy predicts whether its own answer is right.

    reward = format_weight * [well formed] + answer_weight * [correct] + calibration_weight * (1 - (p - [correct])^2)

p is the stated confidence. The last term is there only if the reply has an answer and a confidence from 0 to 1; a reply
is well formed if it has both. (p - [correct])^2 is the Brier score, which is lowest for honest probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.integrations.minds.introspection.beliefs import assistant, user
from tinsmith.integrations.minds.introspection.parsing import answer_number, exact_number, labelled, probability
from tinsmith.integrations.minds.introspection.reflection import Reflection, ReflectionWorkflow
from tinsmith.rl.data.row_mapping import LazySequence
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Message, Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

Operation = Literal["+", "-", "*"]
Question = tuple[int, Operation, int]

_EXAMPLE: Question = (6, "+", 5)
_LARGE = (10**7, 10**12)
_DIFFICULTIES = ((50, "easy"), (500, "medium"), (50_000, "hard"))
_UNINFORMED = 0.5
"""Confidence of a reply that states none, in the skill score."""

_FORMAT = "FINAL ANSWER: your answer\nCONFIDENCE: probability that it is right, 0.0 to 1.0"
_SYSTEMS = {
    "think": "Answer the question and judge your own answer. First think the problem through between <think> and "
    f"</think>. Then write two lines:\n{_FORMAT}",
    "short": "Answer, and judge your answer:\nFINAL ANSWER: number\nCONFIDENCE: how likely it is right, 0.0 to 1.0",
}
_EXAMPLES = {
    "think": "<think>6 and 4 make 10, and one more makes 11.</think>\n\nFINAL ANSWER: 11\nCONFIDENCE: 0.99",
    "short": "FINAL ANSWER: 11\nCONFIDENCE: 0.99",
}


class StatedConfidence(EnvironmentOptions):
    """Questions; the policy answers and states how likely its answer is right."""

    style: Literal["think", "short"] = "think"
    """`think` requests thoughts before the answer; `short` requests only the answer and the confidence."""
    seed: int = 0
    """Seed of the questions."""
    format_weight: float = Field(default=0.2, ge=0)
    """Reward of a reply that has an answer and a confidence."""
    answer_weight: float = Field(default=0.5, ge=0)
    """Reward of the right answer."""
    calibration_weight: float = Field(default=0.3, ge=0)
    """Reward of a confidence whose Brier score is 0; at most `answer_weight`, so that the right answer always pays."""

    @property
    @override
    def says_correct(self) -> bool:
        return True

    @model_validator(mode="after")
    def _check_weights(self) -> StatedConfidence:
        # At confidence p a right answer earns answer_weight + calibration_weight * (2p - 1) more than a wrong answer.
        if self.calibration_weight > self.answer_weight:
            raise ValueError(
                f"calibration_weight {self.calibration_weight:g} is above answer_weight {self.answer_weight:g}: with "
                "low confidence a wrong answer would earn more than the right one; lower calibration_weight"
            )
        return self

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return StatedConfidenceWorkflow(self, context)

    def question(self, identifier: str, text: str, answer: str, difficulty: str) -> Task:
        """A task with a question, after an example of the form."""
        messages = (
            Message(role="system", content=_SYSTEMS[self.style]),
            user(_ask(_EXAMPLE)),
            assistant(_EXAMPLES[self.style]),
            user(text),
        )
        return Task(id=identifier, messages=messages, answer=answer, extra={"difficulty": difficulty})


class SelfPrediction(StatedConfidence):
    """Arithmetic questions; the policy answers and states how likely its answer is right."""

    type: Literal["self_prediction"] = "self_prediction"
    low: int = Field(default=0, ge=0)
    """Smallest number of a question."""
    high: int = Field(default=999, ge=1)
    """Largest number of a question."""
    operations: tuple[Operation, ...] = Field(default=("+", "-", "*"), min_length=1)
    """Operations of the questions."""
    large_share: float = Field(default=0.15, ge=0, le=1)
    """Share of questions whose numbers are both from 1e7 to 1e12."""
    size: int = Field(default=10_000, ge=1)
    """Number of questions, or all there are if those are fewer; no question occurs twice."""

    @model_validator(mode="after")
    def _check_range(self) -> SelfPrediction:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}; swap them")
        return self

    @override
    def tasks(self) -> Sequence[Task]:
        questions = _questions(self)
        return LazySequence(len(questions), lambda index: self._task(index, questions[index]))

    def _task(self, index: int, question: Question) -> Task:
        a, operation, b = question
        answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
        return self.question(f"self_prediction/{index}", _ask(question), str(answer), difficulty(a, b))


class StatedConfidenceWorkflow(ReflectionWorkflow[None]):
    """Scores answer and confidence of each reply."""

    def __init__(self, options: StatedConfidence, context: WorkflowContext) -> None:
        super().__init__(context)
        self._options = options

    @override
    async def truth(self, task: Task, policy: Snapshot) -> None:
        return None

    @override
    async def score(self, task: Task, text: str, truth: None, policy: Snapshot) -> Reflection:
        answered, right = _judged(labelled(text, "final answer"), task.answer)
        confidence = probability(labelled(text, "confidence"))
        well_formed = answered and confidence is not None
        brier = ((_UNINFORMED if confidence is None else confidence) - right) ** 2
        options, level = self._options, task.extra["difficulty"]
        parts = {
            "format": options.format_weight * well_formed,
            "answer": options.answer_weight * right,
            "calibration": options.calibration_weight * (1.0 - brier) if well_formed else 0.0,
        }
        metrics = {
            "confidence/error": brier,
            "confidence/truth": float(right),
            "answered": float(well_formed),
            f"accuracy/{level}": float(right),
        }
        if confidence is not None:
            metrics |= {"confidence/mean": confidence, f"confidence/{level}": confidence}
        return Reflection(reward=sum(parts.values()), correct=right, parts=parts, metrics=metrics)


def _judged(reply: str | None, answer: str) -> tuple[bool, bool]:
    """Whether the text is an answer, a number if the right answer is one, and whether it is right."""
    expected = exact_number(answer)
    if expected is None:
        return bool(reply), reply == answer
    number = answer_number(reply)
    return number is not None, number == expected


def _ask(question: Question) -> str:
    return "What is {} {} {}?".format(*question)


def difficulty(a: int, b: int) -> str:
    """Difficulty of a question by its larger number: easy, medium, hard or large."""
    return next((name for bound, name in _DIFFICULTIES if max(abs(a), abs(b)) < bound), "large")


def _questions(options: SelfPrediction) -> list[Question]:
    """`size` different questions in random order, without that of the example."""
    random = Random(f"self_prediction/{options.seed}")
    numbers = range(options.low, options.high + 1)
    small = round(options.size * (1.0 - options.large_share))
    small = min(small, possible := len(numbers) ** 2 * len(options.operations))
    seen: set[Question] = set()
    if small > possible // 2:  # too few to draw until they are different
        seen.update(random.sample(list(product(numbers, options.operations, numbers)), small))
    while len(seen) < small:
        seen.add((random.choice(numbers), random.choice(options.operations), random.choice(numbers)))
    large = round(options.size * options.large_share)
    while len(seen) < small + large:
        seen.add((random.randint(*_LARGE), random.choice(options.operations), random.randint(*_LARGE)))
    questions = sorted(seen - {_EXAMPLE})
    random.shuffle(questions)
    return questions
