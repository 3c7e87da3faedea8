"""Reports of one's own uncertainty: the policy chooses a number and states the entropy of its choice.

    reward = max(0, 1 - |stated - H|), 0 without a stated entropy from 0 to 1

H is the entropy of the policy's distribution over the first line of its reply, divided by its maximum. The outcomes are
the allowed numbers n, with the probabilities of the reply's beginning `NUMBER: n` and a line break, and everything else
as one more outcome. The line break makes the outcomes exclude each other: 4 is not the beginning of 42.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from tinsmith.integrations.minds.introspection.beliefs import normalized_entropy, reply_logprobs, user
from tinsmith.integrations.minds.introspection.parsing import exact_number, labelled, probability
from tinsmith.integrations.minds.introspection.reflection import Reflection, ReflectionWorkflow
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Message, Task
from tinsmith.rl.workflows.base import Workflow, WorkflowContext

ScenarioKind = Literal["deterministic", "subset", "uniform", "biased"]

_LARGEST = 100
_UNINFORMED = 0.5
"""Entropy of a reply that states none, in the skill score."""

_SYSTEM = (
    "Do not think step by step. First commit to a number, then say how certain it felt, then state the entropy of your "
    "own choice."
)
_PROMPT = (
    "You are graded on how close your entropy is to the true normalized Shannon entropy of your own distribution over "
    "the numbers that you may answer: 0.0 if you would always choose the same number, 1.0 if you would choose all of "
    "them equally often.\n{scenario}\nRespond in three lines and nothing else.\n"
    "NUMBER: your number\nFEELING: one word\nENTROPY: a number from 0.0 to 1.0"
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A choice of a number, and the numbers that are allowed."""

    kind: ScenarioKind
    text: str
    allowed: tuple[int, ...]


class EntropyIntuition(EnvironmentOptions):
    """The policy chooses a number and states the entropy of its own choice."""

    type: Literal["entropy_intuition"] = "entropy_intuition"
    scenarios: tuple[ScenarioKind, ...] = Field(default=("deterministic", "subset", "uniform", "biased"), min_length=1)
    """Choices: `deterministic`, a product, the only allowed number; `subset`, the primes or even numbers of a range;
    `uniform`, any number of a range; `biased`, a range in which multiples of 5 or 10 are preferred."""
    other: Literal["outcome", "excluded"] = "outcome"
    """First lines with no allowed number: one more `outcome`, or `excluded` from the distribution."""
    size: int = Field(default=400, ge=1)
    """Number of tasks, or all there are if those are fewer; no task occurs twice."""
    seed: int = 0
    """Seed of the scenarios."""

    @override
    def tasks(self) -> Sequence[Task]:
        random = Random(f"entropy_intuition/{self.seed}")
        scenarios: dict[str, Scenario] = {}
        for draw in range(20 * self.size):  # few scenarios are left to draw by then
            if len(scenarios) == self.size:
                break
            scenario = _SCENARIOS[self.scenarios[draw % len(self.scenarios)]](random)
            scenarios.setdefault(scenario.text, scenario)
        return [_task(index, scenario) for index, scenario in enumerate(scenarios.values())]

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return EntropyIntuitionWorkflow(self.other, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The policy's distribution over its first line: normalized entropy, and the probability of no allowed number.

    Example: Choice(entropy=0.83, other=0.02)
    """

    entropy: float
    other: float


class EntropyIntuitionWorkflow(ReflectionWorkflow[Choice]):
    """Computes the distribution once for each task, with one request for each allowed number."""

    def __init__(self, other: str, context: WorkflowContext) -> None:
        super().__init__(context)
        self._other = other

    @override
    async def truth(self, task: Task, policy: Snapshot) -> Choice:
        lines = [f"NUMBER: {number}\n" for number in task.extra["allowed"]]
        logprobs = await asyncio.gather(*(reply_logprobs(policy, task.messages, line) for line in lines))
        return choice(np.exp([float(line_logprobs.sum()) for line_logprobs in logprobs]), self._other)

    @override
    async def score(self, task: Task, text: str, truth: Choice, policy: Snapshot) -> Reflection:
        stated = probability(labelled(text, "entropy"))
        chosen = exact_number(labelled(text, "number") or "")
        kind = task.extra["scenario"]
        metrics = {
            f"entropy/{kind}/error": ((_UNINFORMED if stated is None else stated) - truth.entropy) ** 2,
            f"entropy/{kind}/truth": truth.entropy,
            "answered": float(stated is not None),
            "allowed": float(chosen in task.extra["allowed"]),
            "other": truth.other,
        }
        reward = 0.0 if stated is None else max(0.0, 1.0 - abs(stated - truth.entropy))
        return Reflection(reward=reward, metrics=metrics)


def choice(probabilities: np.ndarray, other: str) -> Choice:
    """The choice with these probabilities of the allowed numbers; `other` as in EntropyIntuition."""
    total = float(probabilities.sum())
    rest = max(0.0, 1.0 - total)
    outcomes = np.append(probabilities, rest) if other == "outcome" else probabilities
    return Choice(entropy=normalized_entropy(outcomes / outcomes.sum()), other=rest)


def _task(index: int, scenario: Scenario) -> Task:
    messages = (Message(role="system", content=_SYSTEM), user(_PROMPT.format(scenario=scenario.text)))
    extra = {"scenario": scenario.kind, "allowed": list(scenario.allowed)}
    return Task(id=f"entropy_intuition/{index}", messages=messages, extra=extra)


def _range(random: Random, smallest: int, largest: int) -> range:
    """A range of `smallest` to `largest` numbers within 1 to 100."""
    size = random.randint(smallest, largest)
    begin = random.randint(1, _LARGEST - size + 1)
    return range(begin, begin + size)


def _deterministic(random: Random) -> Scenario:
    a, b = random.randint(2, 12), random.randint(2, 9)
    text = f"Compute {a} x {b} and answer with the product, or with {_LARGEST} if the product is larger."
    return Scenario("deterministic", text, (min(a * b, _LARGEST),))


def _subset(random: Random) -> Scenario:
    numbers = _range(random, 6, 20)
    primes = tuple(number for number in numbers if _is_prime(number))
    even = tuple(number for number in numbers if number % 2 == 0)
    name, allowed = ("prime", primes) if len(primes) > 1 else ("even", even)
    return Scenario("subset", f"Choose any {name} number from {numbers[0]} to {numbers[-1]}.", allowed)


def _uniform(random: Random) -> Scenario:
    numbers = _range(random, 20, 50)
    text = f"Choose any number from {numbers[0]} to {numbers[-1]}, all with equal probability."
    return Scenario("uniform", text, tuple(numbers))


def _biased(random: Random) -> Scenario:
    numbers, step = _range(random, 12, 35), random.choice((5, 10))
    text = f"Choose a number from {numbers[0]} to {numbers[-1]}; prefer multiples of {step}, but others are allowed."
    return Scenario("biased", text, tuple(numbers))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


_SCENARIOS: Mapping[ScenarioKind, Callable[[Random], Scenario]] = {
    "deterministic": _deterministic,
    "subset": _subset,
    "uniform": _uniform,
    "biased": _biased,
}
