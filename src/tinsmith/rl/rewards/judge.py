"""A reward that another model gives: a grade for the whole reply, or a yes or no to each criterion of a rubric.

The judge is other weights of the policy's own server (a base model by its name, or a tinker:// path), or any server
that speaks OpenAI's dialect. What it says is read strictly: without a grade the rollout is a failed one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import httpx
from pydantic import Field, model_validator

from tinsmith.rl.policy.base import SamplingConfig, Snapshot
from tinsmith.rl.rewards.base import Reward
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


class Criterion(Settings):
    """One line of a rubric."""

    description: str
    """What an answer must do."""
    weight: float = 1.0
    """Its share; below 0 for what an answer must not do."""


class Judge(Reward):
    """What another model says, 0 to 1: a grade, or the weighted share of a rubric's criteria (arXiv 2507.17746)."""

    type: Literal["judge"] = "judge"
    model: str
    """A base model or a tinker:// path of the policy's server; with `base_url`, the name that server knows."""
    base_url: str = ""
    """Of another server in OpenAI's dialect, as http://127.0.0.1:8001/v1; empty: the policy's server."""
    key_env: str = "OPENAI_API_KEY"
    """With `base_url`: the environment variable that holds its key; one that is not set sends none."""
    prompt: str = ""
    """In place of the built-in one; fields {question}, {answer}, {reply}, {low}, {high}, {criteria}, {count}."""
    rubric: tuple[Criterion, ...] = ()
    """Of every task."""
    rubric_key: str = ""
    """Where a task's `extra` holds a rubric of its own: a list of {description, weight}."""
    low: float = 0.0
    """The worst grade."""
    high: float = 10.0
    """The best grade."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest word of the judge."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the judge."""
    chat_template_values: dict[str, Any] = Field(default_factory=dict)
    """What the judge's chat template reads by name, as {enable_thinking: false}."""
    timeout: float = Field(default=120.0, gt=0)
    """With `base_url`: seconds for one word of the judge."""

    @model_validator(mode="after")
    def _scale_has_a_length(self) -> Judge:
        if self.high <= self.low:
            raise ValueError("high must be above low")
        if "base_url" not in self.model_fields_set and self.model_fields_set & {"key_env", "timeout"}:
            raise ValueError("key_env and timeout are for a judge at base_url")
        return self

    async def judge(self, task: Task, rollout: Rollout, policy: Snapshot) -> float:
        """Raises ValueError where the judge gives no grade, httpx's errors where it cannot be reached."""
        rubric = self._rubric(task)
        fields = {
            "question": "\n\n".join(one.content for one in task.messages),
            "answer": task.answer,
            "reply": rollout.text,
            "low": f"{self.low:g}",
            "high": f"{self.high:g}",
            "criteria": "\n".join(f"{number}. {one.description}" for number, one in enumerate(rubric, 1)),
            "count": str(len(rubric)),
        }
        prompt = _filled(self.prompt or (CHECK if rubric else GRADE), fields)
        said = await (self._elsewhere(prompt) if self.base_url else self._here(prompt, policy))
        return _share(said, rubric) if rubric else self._grade(said)

    def _rubric(self, task: Task) -> Sequence[Criterion]:
        if not self.rubric_key:
            return self.rubric
        given = task.extra.get(self.rubric_key)
        if not isinstance(given, list) or not given:
            raise ValueError(f"{task.id} has no rubric under {self.rubric_key!r}")
        kept = [{key: one[key] for key in ("description", "weight") if key in one} for one in given]
        return [*self.rubric, *(Criterion.model_validate(one) for one in kept)]

    async def _here(self, prompt: str, policy: Snapshot) -> str:
        other = await policy.open_model(self.model)
        sampling = SamplingConfig(max_tokens=self.max_tokens, temperature=self.temperature)
        tokens = other.chat.with_template_values(self.chat_template_values).prompt(
            [Message(role="user", content=prompt)]
        )
        turns = await other.sample(tokens, count=1, seed=0, sampling=sampling)
        return turns[0].text

    async def _elsewhere(self, prompt: str) -> str:
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
            answer = await client.post(
                f"{self.base_url.rstrip('/')}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
            )
        if answer.is_error:
            raise ValueError(f"the judge at {self.base_url} answered {answer.status_code}: {answer.text[:200]}")
        return str(answer.json()["choices"][0]["message"]["content"])

    def _grade(self, said: str) -> float:
        grades = _SCORE.findall(said)
        if not grades:
            raise ValueError(f"the judge gave no grade: {said[-200:]!r}")
        return min(1.0, max(0.0, (float(grades[-1]) - self.low) / (self.high - self.low)))


def _share(said: str, rubric: Sequence[Criterion]) -> float:
    """Weights of what is met over all weights above 0, not below 0."""
    lists = _LIST.findall(said)
    marks: list[Any] = json.loads(lists[-1]) if lists else []
    if len(marks) != len(rubric):
        raise ValueError(f"the judge gave no list of {len(rubric)} marks: {said[-200:]!r}")
    whole = sum(one.weight for one in rubric if one.weight > 0) or 1.0
    return max(0.0, sum(one.weight for one, mark in zip(rubric, marks, strict=True) if mark) / whole)


def _filled(prompt: str, fields: dict[str, str]) -> str:
    """Every {field} put in, and nothing else: replies are full of braces."""
    return re.sub(r"\{(\w+)\}", lambda found: fields.get(found[1], found[0]), prompt)
