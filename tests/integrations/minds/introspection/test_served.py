"""Truths measured through the service, against transformers in float64; and whole runs."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.integrations.minds.introspection.table_policy import context
from tests.rl.scripted_run import rows, run
from tinsmith.integrations.minds.introspection.entropy_intuition import EntropyIntuition, EntropyIntuitionWorkflow
from tinsmith.integrations.minds.introspection.ghost_trace import GhostTrace, GhostTraceWorkflow
from tinsmith.integrations.minds.introspection.gradient_prophet import GradientProphet, GradientProphetWorkflow
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.testing import ScriptedPolicy

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and key of a service with the torch engine."""
    config = ServeConfig(models=(f"tiny={tiny_llama}",), data=tmp_path_factory.mktemp("served"), dtype="float32")
    with embedded(config) as address:
        yield address


class Reference:
    """Next-token distributions of the tiny model in float64, of chats rendered by its tokenizer."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def logprobs(self, chat: list[tuple[str, str]], reply: str = "") -> np.ndarray:
        """Logprobs after the chat and after each token of the reply, [K + 1, V]."""
        messages = [{"role": role, "content": content} for role, content in chat]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt, tokens = (self._tokenizer.encode(part, add_special_tokens=False) for part in (text, reply))
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 :]
        return logits.log_softmax(-1).numpy()

    def reply(self, chat: list[tuple[str, str]], reply: str) -> np.ndarray:
        """Logprobs of the reply's tokens."""
        tokens = self._tokenizer.encode(reply, add_special_tokens=False)
        return self.logprobs(chat, reply)[range(len(tokens)), tokens]


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference(tiny_llama)


def truth_of(served: tuple[str, str], workflow: Any, task: Any) -> Any:
    """The truth that a workflow measures through the service."""

    async def main() -> Any:
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=4), *served, seed=1)
        try:
            return await workflow.truth(task, await policy.snapshot())
        finally:
            await policy.models.close()

    return asyncio.run(main())


def test_listener_logprobs_equal_the_reference(served, reference):
    workflow = GhostTrace().make(context())
    assert isinstance(workflow, GhostTraceWorkflow)
    task = next(task for task in GhostTrace().tasks() if task.answer == "tennis ball")
    truth = truth_of(served, workflow, task)
    chat = [("user", "Sequence: 0, 0, 0, 0, 0. Guess the object. Answer with its name only.")]
    assert truth.word == pytest.approx(reference.reply(chat, "Tennis ball").mean(), abs=1e-5)
    assert truth.other == pytest.approx(reference.reply(chat, truth.other_word.capitalize()).mean(), abs=1e-5)


def test_change_of_a_logprob_equals_the_reference(served, reference):
    workflow = GradientProphet().make(context())
    assert isinstance(workflow, GradientProphetWorkflow)
    task = next(task for task in GradientProphet().tasks() if task.extra["kind"] == "in_context")
    (delta,) = truth_of(served, workflow, task)
    passage = [("user", task.extra["question"]), ("assistant", task.extra["answer"])]
    question = [("user", task.extra["probes"][0])]
    after, before = (reference.reply(chat, task.extra["target"]).sum() for chat in ([*passage, *question], question))
    assert delta == pytest.approx(after - before, abs=1e-4)


@pytest.mark.parametrize("support", [16, 512])
def test_surprise_equals_the_reference(served, reference, support):
    workflow = GradientProphet(support=support).make(context())
    task = next(task for task in GradientProphet().tasks() if task.extra["kind"] == "surprise")
    passage = [("user", task.extra["question"]), ("assistant", task.extra["answer"])]
    for value, probe in zip(truth_of(served, workflow, task), task.extra["probes"], strict=True):
        post, prior = (reference.logprobs(chat)[0] for chat in ([*passage, ("user", probe)], [("user", probe)]))
        ids = sorted({*np.argsort(-post)[:support].tolist(), *np.argsort(-prior)[:support].tolist()})
        p, q = np.exp(post), np.exp(prior)
        expected = float((p[ids] * (post[ids] - prior[ids])).sum())
        if len(ids) < len(p):
            rest, prior_rest = 1 - p[ids].sum(), 1 - q[ids].sum()
            expected += rest * np.log(rest / prior_rest)
        assert value == pytest.approx(expected, abs=2e-4)


def test_entropy_equals_the_reference(served, reference):
    workflow = EntropyIntuition().make(context())
    assert isinstance(workflow, EntropyIntuitionWorkflow)
    task = next(task for task in EntropyIntuition().tasks() if task.extra["scenario"] == "biased")
    truth = truth_of(served, workflow, task)
    chat = [(message.role, message.content) for message in task.messages]
    p = np.array([np.exp(reference.reply(chat, f"NUMBER: {number}\n").sum()) for number in task.extra["allowed"]])
    outcomes = np.append(p, 1 - p.sum())
    assert truth.other == pytest.approx(outcomes[-1], abs=1e-5)
    assert truth.entropy == pytest.approx(-(outcomes * np.log(outcomes)).sum() / np.log(len(outcomes)), abs=1e-5)


def test_a_mixture_of_all_runs_and_reports_skill(tmp_path):
    kinds = ("ghost_trace", "gradient_prophet", "self_prediction", "entropy_intuition")
    config = RunConfig.model_validate(
        {
            "model": {"name": "scripted"},
            "environments": [{"type": kind, "held_out": 8} for kind in kinds],
            "steps": 2,
            "groups_per_step": 12,
            "group_size": 4,
            "eval": {"every": 2},
            "monitors": [{"type": "console"}],
            "folder": str(tmp_path),
        }
    )
    replies = ("1, 2, 3, 4, 5", "[0, 1, 2, 3, 4]", "[0.5]", "FINAL ANSWER: 7\nCONFIDENCE: 0.5", "ENTROPY: 0.5")

    async def connect(state: str, version: int) -> ScriptedPolicy:
        return ScriptedPolicy(replies, tmp_path / "weights", state=state, version=version)

    console = Console(file=io.StringIO(), width=200)
    run(config, connect, console)
    evaluated, *steps = rows(tmp_path)
    assert isinstance(console.file, io.StringIO)
    assert re.search(r"skill above a trivial answer: .*gradient_prophet/rank", console.file.getvalue())
    assert [evaluated[f"eval/{kind}/failed"] for kind in kinds] == [0, 0, 0, 0]
    assert {"eval/gradient_prophet/workflow/rank/skill", "eval/ghost_trace/workflow/answered"} <= evaluated.keys()
    assert {f"env/{kind}/reward/mean" for kind in kinds} <= {name for step in steps for name in step}
