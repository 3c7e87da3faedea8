"""Predict what training on one's own answer changes.

The policy gets the task of another environment and a probe: a question with its answer. It gives an answer to the task
and predicts by how much one step of training on this answer would change the logprob of the probe's answer.

    reward = reward of the answer in the other environment + alpha * score of the prediction

The true change is measured by a shadow step (docs/research/shadow.md). It starts from the version of the policy that
sampled the reply; it trains on the task's prompt and the answer in the chat template, with the loss on the answer only.
All rollouts of a group have one task and the same probes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from random import Random
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.errors import TinsmithError, UserError
from tinsmith.integrations.minds.introspection.beliefs import assistant, user
from tinsmith.integrations.minds.introspection.entropy_intuition import EntropyIntuition
from tinsmith.integrations.minds.introspection.ghost_trace import GhostTrace
from tinsmith.integrations.minds.introspection.gradient_prophet import GradientProphet
from tinsmith.integrations.minds.introspection.prediction import Parsed, Scoring, parse, score
from tinsmith.integrations.minds.introspection.self_prediction import SelfPrediction
from tinsmith.integrations.minds.shadow.environment import SHADOW, ShadowEnvironment, shadow_of
from tinsmith.integrations.minds.shadow.records import ShadowText
from tinsmith.integrations.minds.shadow.service import ShadowService
from tinsmith.integrations.minds.shadow.statistics import Moments, ProbeStatistics, moments_of
from tinsmith.plurals import counted
from tinsmith.rl.data.row_mapping import LazySequence
from tinsmith.rl.environments.base import EnvironmentOptions, OpeningRun
from tinsmith.rl.environments.custom import CustomEnvironment
from tinsmith.rl.environments.tasks import TasksEnvironment
from tinsmith.rl.guards.user_code import contained, describe
from tinsmith.rl.policy.sampling import Middleware, Sample, SampleRequest, SampleResult, Snapshot
from tinsmith.rl.types import Message, Rollout, Task, Trajectory, Turn
from tinsmith.rl.workflows.base import Workflow, WorkflowContext
from tinsmith.settings import Settings, changed_keys

_PROMPT = (
    "\n\n---\nThere is a second part. You will be trained for one step on your answer to the task above. Predict what "
    "this changes for {probes}\n{question}\nYou may reason first. End your reply with these two lines, the prediction "
    "before the answer:\nPREDICTION: {form}\nANSWER: <your answer to the task>"
)
_QUESTIONS: dict[Scoring, tuple[str, str]] = {
    "absolute": (
        "By how much does the log-probability of the answer change, in nats?",
        "<number, with a - if it falls>",
    ),
    "normalised": (
        "By how much does the log-probability of the answer change, compared with how it usually changes? 0 is the "
        "usual change, 1 is one standard deviation above it, -1 is one below.",
        "<number, with a - if it is below>",
    ),
    "sign": ("Does the log-probability of the answer rise or fall?", "<+ if it rises, - if it falls>"),
    "rank": (
        "In which order do the log-probabilities of the answers change, from the largest rise to the largest fall?",
        "<the numbers of the probes in this order, separated by commas>",
    ),
}

_BEGINNING = "PREDICTION:"

InnerEnvironment = Annotated[
    TasksEnvironment | GhostTrace | GradientProphet | SelfPrediction | EntropyIntuition | CustomEnvironment,
    Field(discriminator="type"),
]


class GradientProbe(Settings):
    """A question and the answer whose logprob is measured."""

    question: str = Field(min_length=1)
    """The question."""
    answer: str = Field(min_length=1)
    """The answer."""


class GradientIntuition(ShadowEnvironment):
    """Tasks of another environment, with a prediction of what training on the answer changes for a probe."""

    type: Literal["gradient_intuition"] = "gradient_intuition"
    inner: InnerEnvironment
    """The environment of the tasks. Its policy gives one reply to each; its own name, weight, sampling and held_out are
    not used."""
    alpha: float = Field(default=0.3, gt=0)
    """Weight of the prediction's score in the reward."""
    score: Scoring = "normalised"
    """Score of a prediction. `absolute`: max(0, 1 - |prediction - change|), the change in nats. `normalised`:
    1 / (1 + (prediction - z)^2), with z = (change - mean) / standard deviation of the probe's earlier changes.
    `sign`: 1 if the prediction has the sign of the change. `rank`: (1 + Spearman's correlation) / 2 for the order of
    several probes."""
    probes: tuple[GradientProbe, ...] = ()
    """Probes; empty: 24 questions of general knowledge. Each task has one of them, or some with score rank."""
    rank_probes: int = Field(default=4, ge=2)
    """Number of probes of a task with score rank."""
    train_weight: Literal["one", "advantage"] = "one"
    """Weight of the answer's tokens in the step: 1, or the answer's reward minus the mean reward of its group, which
    is the effect of the policy's own update."""
    begin_reply: bool = False
    """Begin every reply with `PREDICTION:`, which the policy continues: small models then keep the form more often, but
    cannot reason first."""
    invalid: float = 0.0
    """Reward of a reply without an ANSWER line."""
    seed: int = 0
    """Seed of the choice of probes."""

    @model_validator(mode="after")
    def _check(self) -> GradientIntuition:
        shared = set(EnvironmentOptions.model_fields) & set(changed_keys(self.inner))
        if shared:
            raise ValueError(f"inner.{min(shared)} is not used; set {min(shared)} of gradient_intuition")
        if SHADOW in self.inner.resolved.sections:
            raise ValueError("inner takes shadow steps itself; choose an environment without them")
        if self.score == "rank" and self.rank_probes > len(self.all_probes):
            raise ValueError(
                f"rank_probes is {self.rank_probes}, but there are {counted(len(self.all_probes), 'probe')}"
            )
        return self

    @property
    def all_probes(self) -> tuple[GradientProbe, ...]:
        """The probes of the settings, or the built-in ones."""
        return self.probes or tuple(
            GradientProbe(question=question, answer=answer) for question, answer in _built_in_probes()
        )

    @override
    async def open(self, run: OpeningRun) -> None:
        await super().open(run)
        await self.inner.resolved.open(run)

    @override
    def tasks(self) -> Sequence[Task]:
        return self._all_with_probes(self.inner.resolved.tasks())

    @override
    def held_out_tasks(self) -> Sequence[Task] | None:
        tasks = self.inner.resolved.held_out_tasks()
        return None if tasks is None else self._all_with_probes(tasks)

    def _all_with_probes(self, tasks: Sequence[Task]) -> Sequence[Task]:
        return LazySequence(len(tasks), lambda index: self.with_probes(tasks[index]))

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return GradientIntuitionWorkflow(self, context, shadow_of(context))

    def with_probes(self, task: Task) -> Task:
        """A task of the inner environment with probes, chosen by its id, and the question about them."""
        draw = Random(f"gradient_intuition/{self.seed}/{task.id}")
        probes = draw.sample(self.all_probes, self.rank_probes if self.score == "rank" else 1)
        lines = [f'Probe {at}: "{each.question}" Answer: "{each.answer}"' for at, each in enumerate(probes, 1)]
        if len(probes) == 1:
            lines = [lines[0].replace("Probe 1", "Probe")]
        question, form = _QUESTIONS[self.score]
        plural = "the answers to these probe questions." if len(probes) > 1 else "the answer to this probe question."
        more = _PROMPT.format(probes="\n".join([plural, *lines]), question=question, form=form)
        last = replace(task.messages[-1], content=task.messages[-1].content + more)
        extra = {
            "inner": [asdict(message) for message in task.messages],
            "probes": [[each.question, each.answer] for each in probes],
        }
        begin = (assistant(_BEGINNING),) if self.begin_reply else ()
        messages = (*task.messages[:-1], last, *begin)
        return replace(task, messages=messages, extra={**task.extra, "gradient_intuition": extra})


class GradientIntuitionWorkflow(Workflow):
    """Samples replies, lets the inner workflow score the answers, and measures what training on them changes."""

    def __init__(self, options: GradientIntuition, context: WorkflowContext, shadow: ShadowService) -> None:
        self._options, self._context, self._shadow = options, context, shadow
        self._inner = options.inner.resolved.make(context)
        self._statistics = ProbeStatistics(context.store.setdefault(f"gradient_intuition/{options.title}", {}))

    @override
    async def run(self, task: Task, policy: Snapshot, *, count: int, seed: int) -> tuple[Rollout, ...]:
        policy = policy.pinned()
        turns = await policy.sample(task.messages, count=count, seed=seed, sampling=self._context.sampling)
        count_probes = len(task.extra["gradient_intuition"]["probes"])
        beginning = _BEGINNING if self._options.begin_reply else ""
        replies = [parse(beginning + turn.text, self._options.score, count_probes) for turn in turns]
        pairs = list(zip(turns, replies, strict=True))
        answers = await asyncio.gather(*(self._answer(task, turn, reply, policy, seed) for turn, reply in pairs))
        weights = self._weights(answers)
        measured = await asyncio.gather(
            *(
                self._measure(task, turn, reply, weight, policy) if answer and not answer.error else _nothing()
                for (turn, reply), answer, weight in zip(pairs, answers, weights, strict=True)
            )
        )
        moments = self._moments(task, policy, [each for each in measured if isinstance(each, list) and each])
        return tuple(
            self._rollout(turn, reply, answer, deltas, moments)
            for (turn, reply), answer, deltas in zip(pairs, answers, measured, strict=True)
        )

    async def _answer(self, task: Task, turn: Turn, reply: Parsed, policy: Snapshot, seed: int) -> Rollout | None:
        """The rollout of the inner environment with the answer as its reply; None without an answer."""
        if reply.answer is None:
            return None
        inner = replace(task, messages=_inner_messages(task))
        answering = policy.around(_single_reply(replace(turn, text=reply.answer)))

        def failed(error: BaseException) -> tuple[Rollout]:
            return (Rollout.single((turn,)).failed(f"inner environment: {describe(error)}"),)

        (rollout,) = await contained(self._inner.run(inner, answering, count=1, seed=seed), failed)
        return rollout

    def _weights(self, answers: Sequence[Rollout | None]) -> list[float]:
        if self._options.train_weight == "one":
            return [1.0] * len(answers)
        rewards = [answer.reward for answer in answers if answer is not None and not answer.error]
        mean = sum(rewards) / max(1, len(rewards))
        return [answer.reward - mean if answer is not None else 0.0 for answer in answers]

    async def _measure(
        self, task: Task, turn: Turn, reply: Parsed, weight: float, policy: Snapshot
    ) -> list[float] | TinsmithError:
        """The change of each probe; empty if there is no prediction to score."""
        if reply.prediction is None or reply.answer is None:
            return []
        probes = task.extra["gradient_intuition"]["probes"]
        if weight == 0:
            return [0.0] * len(probes)
        chat = policy.chat
        train = ShadowText.chat(chat, (*_inner_messages(task), assistant(reply.answer)), weight)
        texts = [ShadowText.chat(chat, (user(question), assistant(answer))) for question, answer in probes]
        try:
            delta = await self._shadow.delta(train=[train], probes=texts, at=turn.version)
        except TinsmithError as error:
            return error
        return [probe.delta for probe in delta.probes]

    def _moments(self, task: Task, policy: Snapshot, measured: Sequence[list[float]]) -> list[Moments]:
        """Moments of each probe of the task before this version; in the first version, those of the group itself."""
        moments = []
        for at, (question, _) in enumerate(task.extra["gradient_intuition"]["probes"]):
            deltas = [each[at] for each in measured]
            moments.append(self._statistics.moments(question, policy.version) or moments_of(deltas))
            if not self._context.evaluating:
                for delta in deltas:
                    self._statistics.add(question, policy.version, delta)
        return moments

    def _rollout(
        self,
        turn: Turn,
        reply: Parsed,
        answer: Rollout | None,
        deltas: list[float] | TinsmithError,
        moments: Sequence[Moments],
    ) -> Rollout:
        parsed = {"predicted": float(reply.prediction is not None), "answered": float(answer is not None)}
        if answer is None:
            return replace(Rollout.single((turn,), self._options.invalid), metrics=parsed)
        if answer.error or isinstance(deltas, TinsmithError):
            return Rollout.single((turn,)).failed(answer.error or f"shadow step: {deltas}")
        metrics = {**{f"inner/{name}": value for name, value in answer.metrics.items()}, **parsed}
        parts, reward = {"inner": answer.reward}, answer.reward
        if reply.prediction is not None:
            scored = score(reply.prediction, deltas, moments, self._options.score)
            reward += self._options.alpha * scored.score
            parts["prediction"] = scored.score
            metrics |= {**scored.metrics, "delta": sum(deltas) / len(deltas)}
        return Rollout(
            trajectories=(Trajectory(turns=(turn,), reward=reward),),
            reward_parts=parts,
            correct=answer.correct,
            metrics=metrics,
        )


def _single_reply(turn: Turn) -> Middleware:
    """A fixed reply, once."""
    left = [turn]

    async def reply(request: SampleRequest, sample: Sample) -> SampleResult:
        if not request.count:
            return await sample(request)
        if not left or request.count != 1:
            raise UserError(
                "gradient_intuition wraps environments with one reply for each rollout; this one samples more.",
                "Choose another inner environment.",
            )
        return SampleResult(turns=(left.pop(),))

    return reply


async def _nothing() -> list[float]:
    return []


def _inner_messages(task: Task) -> tuple[Message, ...]:
    return tuple(Message(**message) for message in task.extra["gradient_intuition"]["inner"])


def _built_in_probes() -> list[tuple[str, str]]:
    text = (files("tinsmith.integrations.minds.introspection") / "probes.json").read_text(encoding="utf-8")
    return [(question, answer) for question, answer in json.loads(text)]
