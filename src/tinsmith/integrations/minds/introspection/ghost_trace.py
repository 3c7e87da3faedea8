"""Words as numbers: the policy writes five integers for a word, and is the one that guesses the word from them.

    reward = 10 + mean over the word's tokens of log p(token | listener's prompt with the integers)

The reward of a reply that is not exactly five integers from 0 to 999 is `invalid`. The listener is the policy itself;
it sees the values of the integers and nothing else of the reply. A sequence that says nothing, five
zeros, gives the logprob that the skill score compares with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from random import Random
from typing import Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.integrations.minds.introspection.beliefs import reply_logprobs, user
from tinsmith.integrations.minds.introspection.parsing import integers
from tinsmith.integrations.minds.introspection.reflection import Reflection, ReflectionWorkflow
from tinsmith.rl.data.row_mapping import user_task
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

COUNT = 5
LARGEST = 999
_BASE = 10.0
"""Added to the mean logprob, so that most rewards of valid replies are positive."""
_NOTHING = (0,) * COUNT

_SPEAKER = (
    "Target: {word}. Task: write exactly 5 integers from 0 to 999 that represent this word by feeling, by statistical "
    "association or in any way that you like. Later you will see only the numbers and have to guess the word, so "
    "choose numbers that another copy of you would understand. Do not think long. Output only the numbers, "
    "separated by commas, and nothing else."
)
_LISTENER = "Sequence: {sequence}. Guess the object. Answer with its name only."


class GhostTrace(EnvironmentOptions):
    """The policy writes five integers for a word, and guesses the word from them."""

    type: Literal["ghost_trace"] = "ghost_trace"
    words: Literal["common", "abstract"] = "common"
    """Words of the tasks: `common` nouns of things, or `abstract` nouns, which share no word with them."""
    invalid: float = -10.0
    """Reward of a reply that is not exactly five integers from 0 to 999."""
    seed: int = 0
    """Seed of the order of the words."""
    held_out: int | None = Field(default=50, ge=0)
    """Number of words that are held out for evaluation; 0: none."""

    @override
    def tasks(self) -> Sequence[Task]:
        words = list(word_list(self.words))
        Random(f"ghost_trace/{self.seed}").shuffle(words)
        return [user_task(f"ghost_trace/{word}", _SPEAKER.format(word=word.capitalize()), word) for word in words]

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return GhostTraceWorkflow(self.invalid, word_list(self.words), context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """What the listener believes without a message: mean logprobs of the word, and of another word.

    Example: Silence(word=-4.2, other_word="candle", other=-5.0)
    """

    word: float
    other_word: str
    other: float


class GhostTraceWorkflow(ReflectionWorkflow[Silence]):
    """Scores a sequence by the logprob that the listener gives to the word."""

    def __init__(self, invalid: float, words: Sequence[str], context: WorkflowContext) -> None:
        super().__init__(context)
        self._invalid, self._words = invalid, words

    @override
    async def truth(self, task: Task, policy: Snapshot) -> Silence:
        other_word = Random(task.id).choice([word for word in self._words if word != task.answer])
        word, other = await asyncio.gather(
            *(guess_logprob(policy, _NOTHING, guess) for guess in (task.answer, other_word))
        )
        return Silence(word=word, other_word=other_word, other=other)

    @override
    async def score(self, task: Task, text: str, truth: Silence, policy: Snapshot) -> Reflection:
        sequence = integers(text, COUNT, LARGEST)
        if sequence is None:
            metrics = {"guess/error": -truth.word, "guess/baseline": -truth.word, "answered": 0.0}
            return Reflection(reward=self._invalid, metrics=metrics)
        word, other = await asyncio.gather(
            *(guess_logprob(policy, sequence, guess) for guess in (task.answer, truth.other_word))
        )
        metrics = {
            "guess/error": -word,
            "guess/baseline": -truth.word,
            "gain": word - truth.word,
            "gain_other": other - truth.other,
            "answered": 1.0,
        }
        return Reflection(reward=_BASE + word, metrics=metrics)


async def guess_logprob(policy: Snapshot, sequence: Sequence[int], word: str) -> float:
    """Mean logprob of the word's tokens as the listener's answer to a sequence."""
    chat = [user(_LISTENER.format(sequence=", ".join(map(str, sequence))))]
    return float((await reply_logprobs(policy, chat, word.capitalize())).mean())


def word_list(name: str) -> tuple[str, ...]:
    """The words of a list, in alphabetical order."""
    return tuple(
        (files("tinsmith.integrations.minds.introspection") / f"{name}_words.txt")
        .read_text(encoding="utf-8")
        .split("\n")[:-1]
    )
