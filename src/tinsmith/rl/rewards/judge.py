"""LLM as judge: another model grades the reply, or checks it against each criterion of a rubric.

The judge is a model of the policy's server (a base model by name, or a tinker:// path) or of any server with an
OpenAI-compatible API. A response of the judge without a grade marks the rollout as failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, Self

import httpx
from pydantic import Field, model_validator
from typing_extensions import override

from tinsmith.plurals import counted
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot
from tinsmith.rl.rewards.base import Reward, Score
from tinsmith.rl.types import Message, Rollout, Task
from tinsmith.settings import Settings

GRADE = """You grade an answer.

Question:
{question}

Right answer, if one is known:
{answer}

Answer to grade:
{reply}

How good is the answer, from {low} (worthless) to {high} (perfect)? Explain in one or two sentences.
Then write a last line:
Score: N"""

CHECK = """You check an answer against a list of criteria.

Question:
{question}

Right answer, if one is known:
{answer}

Answer to check:
{reply}

Criteria:
{criteria}

For each criterion in order, does the answer meet it?
Write only a JSON list of {count} numbers, each 1 for yes or 0 for no."""

_SCORE = re.compile(r"score[^\w+-]{0,6}([-+]?\d+(?:\.\d+)?)", re.IGNORECASE)
_LIST = re.compile(r"\[[\s\d,.]*\]")

RESPONSES = 10_000
"""Responses that a judge remembers."""


class Criterion(Settings):
    """A criterion of a rubric."""

    description: str
    """The requirement, as a sentence for the judge."""
    weight: float = 1.0
    """Weight in the score. Negative: a criterion that a good answer does not meet."""


class Responses:
    """The newest responses to prompts, by prompt, so that equal prompts are sent once."""

    def __init__(self) -> None:
        self._pending: dict[bytes, asyncio.Lock] = {}
        self._responses: dict[bytes, str] = {}

    async def get(self, prompt: str, send: Callable[[], Awaitable[str]]) -> str:
        """The response to a prompt, which `send` gets unless it is there; a request that fails is sent again."""
        key = sha256(prompt.encode(errors="surrogatepass")).digest()
        lock = self._pending.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self._responses:
                self._responses[key] = await send()
                if len(self._responses) > RESPONSES:
                    del self._responses[next(iter(self._responses))]
            response = self._responses[key]
        if not lock.locked():
            self._pending.pop(key, None)
        return response


class ModelJudge(Reward):
    """Base class of rewards that ask a model of the policy's server, or of an OpenAI-compatible one."""

    model: str
    """Base model or tinker:// path on the policy's server; with `base_url`, the model's name on that server."""
    base_url: str = ""
    """OpenAI-compatible server of the judge, such as http://127.0.0.1:8001/v1. Empty: the policy's server."""
    key_env: str = "OPENAI_API_KEY"
    """With `base_url`: environment variable that holds the API key. If it is not set, no key is sent."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of the judge's response."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge. At 0, equal questions are sent once in a run."""
    chat_template_values: dict[str, Any] = Field(default_factory=dict)
    """Variables for the judge's chat template, such as {enable_thinking: false}."""
    timeout: float = Field(default=120.0, gt=0)
    """With `base_url`: timeout of a request to the judge, in seconds."""

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if "base_url" not in self.model_fields_set and self.model_fields_set & {"key_env", "timeout"}:
            raise ValueError("key_env and timeout have no effect without base_url; set base_url or remove them")
        return self

    @cached_property
    def _responses(self) -> Responses:
        return Responses()

    async def ask(self, prompt: str, fields: Mapping[str, str], policy: Snapshot, seed: int = 0) -> str:
        """The model's response to a prompt with its {fields} replaced; at temperature 0, equal prompts with one seed
        are sent once. Raises ValueError or httpx errors for a request that failed."""
        text = _fill(prompt, fields)

        async def response() -> str:
            return await (self._ask_server(text) if self.base_url else self._ask_policy_server(text, policy, seed))

        return await (self._responses.get(f"{seed} {text}", response) if self.temperature == 0 else response())

    async def _ask_policy_server(self, prompt: str, policy: Snapshot, seed: int) -> str:
        judge = await policy.open_model(self.model)
        sampling = SamplingConfig(max_tokens=self.max_tokens, temperature=self.temperature)
        tokens = judge.chat.with_template_values(self.chat_template_values).prompt(
            [Message(role="user", content=prompt)]
        )
        turns = await judge.sample(tokens, count=1, seed=seed, sampling=sampling)
        return turns[0].text

    async def _ask_server(self, prompt: str) -> str:
        key = os.environ.get(self.key_env, "")
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        if self.chat_template_values:
            body["chat_template_kwargs"] = self.chat_template_values
        async with httpx.AsyncClient(timeout=self.timeout) as client:
            response = await client.post(
                f"{self.base_url.rstrip('/')}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
            )
        if response.is_error:
            raise ValueError(f"the judge at {self.base_url} answered {response.status_code}: {response.text[:200]}")
        return str(response.json()["choices"][0]["message"]["content"])


class Judge(ModelJudge):
    """Score by another model, 0 to 1: a grade, or the weighted share of met criteria of a rubric (arXiv 2507.17746)."""

    type: Literal["judge"] = "judge"
    prompt: str = ""
    """Replaces the built-in prompt. Fields: {question}, {answer}, {reply}, {low}, {high}, {criteria}, {count}."""
    rubric: tuple[Criterion, ...] = ()
    """Criteria for the replies to every task."""
    rubric_key: str = ""
    """Key in a task's `extra` that holds more criteria, as a list of {description, weight}. Empty: none."""
    low: float = 0.0
    """Lowest grade; it scores 0."""
    high: float = 10.0
    """Highest grade; it scores 1."""
    right_from: float | None = Field(default=None, gt=0, le=1)
    """Score from which the rollout is right, for pass@k. Not set: this reward does not say what is right."""

    @model_validator(mode="after")
    def _check_scale(self) -> Judge:
        if self.high <= self.low:
            raise ValueError("high must be above low")
        return self

    @property
    @override
    def says_correct(self) -> bool:
        return self.right_from is not None

    @override
    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> Score:
        """Return the score. Raises ValueError for a response without a grade, httpx errors for a failed request."""
        rubric = self._rubric(task)
        fields = {
            "question": question_of(task),
            "answer": task.answer,
            "reply": rollout.text,
            "low": f"{self.low:g}",
            "high": f"{self.high:g}",
            "criteria": "\n".join(f"{number}. {criterion.description}" for number, criterion in enumerate(rubric, 1)),
            "count": str(len(rubric)),
        }
        response = await self.ask(self.prompt or (CHECK if rubric else GRADE), fields, policy)
        value = _weighted_share(response, rubric) if rubric else self._grade(response)
        return Score(value=value, correct=None if self.right_from is None else value >= self.right_from - 1e-9)

    def _rubric(self, task: Task) -> Sequence[Criterion]:
        if not self.rubric_key:
            return self.rubric
        rows = task.extra.get(self.rubric_key)
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"{task.id} has no rubric under {self.rubric_key!r}")
        criteria = [{key: row[key] for key in ("description", "weight") if key in row} for row in rows]
        return [*self.rubric, *(Criterion.model_validate(values) for values in criteria)]

    def _grade(self, response: str) -> float:
        grades = _SCORE.findall(response)
        if not grades:
            raise ValueError(f"the judge gave no grade: {response[-200:]!r}")
        return min(1.0, max(0.0, (float(grades[-1]) - self.low) / (self.high - self.low)))


def question_of(task: Task) -> str:
    """The texts of a task's messages."""
    return "\n\n".join(message.content for message in task.messages)


def _weighted_share(response: str, rubric: Sequence[Criterion]) -> float:
    """Sum of the weights of met criteria over the sum of positive weights, at least 0."""
    lists = _LIST.findall(response)
    marks: list[Any] = json.loads(lists[-1]) if lists else []
    if len(marks) != len(rubric):
        raise ValueError(f"the judge gave no list of {counted(len(rubric), 'mark')}: {response[-200:]!r}")
    total = sum(criterion.weight for criterion in rubric if criterion.weight > 0) or 1.0
    met = [criterion.weight for criterion, mark in zip(rubric, marks, strict=True) if mark]
    return max(0.0, sum(met) / total)


def _fill(prompt: str, fields: Mapping[str, str]) -> str:
    """Replace every {field} of the prompt. Not str.format, because replies and prompts contain other braces."""
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), prompt)
