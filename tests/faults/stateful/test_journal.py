"""The journal against an engine that never dies: training through deaths of the engine and restarts of the service."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from sqlalchemy import select

from tests.faults.reference import LEARNING_RATE, PROMPT, SAMPLE_SEED, SAMPLE_TOKENS, Reference, Version, digest
from tests.service.support.databases import beside
from tests.service.support.inprocess import Api, Factory, api, loss_in, pass_body
from tinsmith.engine.config import EngineConfig
from tinsmith.service.storage.tables import CHECKPOINTS
from tinsmith.service.wire.protobuf import pb

MODELS = st.integers(0, 1)
TOKENS = st.lists(st.integers(3, 500), min_size=3, max_size=6)
DEATHS = st.one_of(st.none(), st.integers(0, 8))
"""Calls of the engine until it dies, if it does."""


class JournalModel(RuleBasedStateMachine):
    """Two models of one session. Every answer, and every byte of a checkpoint, is as without deaths."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.scratch = tempfile.TemporaryDirectory()
        self.data = Path(self.scratch.name) / "data"
        self.data.mkdir()
        self.reference = Reference(EngineConfig(source="toy", kind="fake"), Path(self.scratch.name) / "reference")
        self.factory = Factory()
        self.stack = AsyncExitStack()
        self.app = self.run(self.start())
        self.session = self.run(self.app.post("create_session", {"tags": []})).json()["session_id"]
        self.models = [self.run(self.app.model(self.session, number, seed=number)) for number in range(2)]
        self.mirrors = [self.reference.create(4, number) for number in range(2)]
        self.seqs = [0, 0]
        self.names = 0
        self.samplers: list[tuple[str, Version]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def start(self) -> Api:
        return await self.stack.enter_async_context(api(self.data, self.factory, capture_every=2, database=None))

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.reference.close()
        self.run(self.loop.shutdown_default_executor())  # an engine that died may still be writing a file
        self.loop.close()
        self.scratch.cleanup()

    def arm(self, calls: int | None) -> None:
        """Let the engine die at a later call."""
        remaining = calls

        def hook(_call: str, _argument: object) -> None:
            nonlocal remaining
            if remaining is not None:
                remaining -= 1
                if remaining < 0:
                    remaining = None
                    self.factory.kill()

        self.factory.hook = hook

    def next_seq(self, number: int) -> int:
        self.seqs[number] += 1
        return self.seqs[number]

    async def submit(self, path: str, body: object) -> dict[str, Any]:
        """Submit a request, twice: the second time changes nothing."""
        first, second = [(await self.app.post(path, body)).json() for _ in range(2)]
        assert first == second, (first, second)
        return first

    async def json(self, promise: dict[str, Any]) -> dict[str, Any]:
        values = (await self.app.result(promise)).json()
        assert "error" not in values, values
        return values

    @rule(number=MODELS, rows=st.lists(TOKENS, min_size=1, max_size=3), steps=st.booleans(), calls=DEATHS)
    def train(self, number: int, rows: list[list[int]], *, steps: bool, calls: int | None) -> None:
        """Several requests at once; without `steps`, gradients that only the journal has."""
        self.arm(calls)
        model, mirror = self.models[number], self.mirrors[number]
        adam = {"learning_rate": LEARNING_RATE}

        async def submit_all() -> list[dict[str, Any]]:
            promises = []
            for row in rows:
                body = pass_body(model, self.next_seq(number), tokens=row)
                promises.append(await self.submit("forward_backward", body))
                if steps:
                    body = {"model_id": model, "seq_id": self.next_seq(number), "adam_params": adam}
                    promises.append(await self.submit("optim_step", body))
            return promises

        promises = iter(self.run(submit_all()))
        for row in rows:
            answer = self.run(self.app.result(next(promises)))
            expected = self.reference.run(mirror, [row])
            assert loss_in(answer) == pytest.approx(-sum(float(values.sum()) for values in expected), rel=1e-5)
            if steps:
                stepped = self.run(self.json(next(promises)))
                assert stepped["metrics"]["grad_norm"] == self.reference.step(mirror)

    @rule(number=MODELS, calls=DEATHS)
    def save(self, number: int, calls: int | None) -> None:
        self.arm(calls)
        self.names += 1
        body = {"model_id": self.models[number], "seq_id": self.next_seq(number), "path": f"state-{self.names}"}
        path = self.run(self.json(self.run(self.submit("save_weights", body))))["path"]
        self.reference.save(self.mirrors[number], path, optimizer=True)

    @rule(number=MODELS, calls=DEATHS)
    def snapshot(self, number: int, calls: int | None) -> None:
        self.arm(calls)
        self.names += 1
        body = {"model_id": self.models[number], "seq_id": self.next_seq(number)}
        body |= {"sampling_session_seq_id": self.names}
        made = self.run(self.json(self.run(self.submit("save_weights_for_sampler", body))))
        self.samplers.append((made["sampling_session_id"], self.reference.version(self.mirrors[number])))

    @precondition(lambda self: self.reference.checkpoints)
    @rule(number=MODELS, data=st.data(), calls=DEATHS)
    def load(self, number: int, data: st.DataObject, calls: int | None) -> None:
        self.arm(calls)
        path = data.draw(st.sampled_from(sorted(self.reference.checkpoints)))
        body = {"model_id": self.models[number], "seq_id": self.next_seq(number), "path": path, "optimizer": True}
        self.run(self.json(self.run(self.submit("load_weights", body))))
        self.reference.load(self.mirrors[number], path)

    @rule()
    def kill(self) -> None:
        self.arm(None)
        self.factory.kill()

    @rule(calls=DEATHS)
    def restart(self, calls: int | None) -> None:
        """The engine of the next service may die while it replays."""
        self.arm(None)
        self.run(self.stack.aclose())
        self.arm(calls)
        self.app = self.run(self.start())

    @precondition(lambda self: self.samplers)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        self.arm(None)
        sampler, (_, tokens) = data.draw(st.sampled_from(self.samplers))
        assert self.run(self.sampled(sampler)) == tokens

    async def sampled(self, sampler: str) -> tuple[int, ...]:
        """The tokens of a seeded sample, which is submitted again when it is lost."""
        while True:
            self.names += 1
            body = {
                "sampling_session_id": sampler,
                "seq_id": self.names,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(PROMPT)}]},
                "sampling_params": {"max_tokens": SAMPLE_TOKENS, "seed": SAMPLE_SEED},
                "prompt_logprobs": True,
            }
            answer = await self.app.result((await self.app.post("asample", body)).json())
            if answer.status_code != 410:
                break
        message = pb.SampleResponse()
        message.ParseFromString(answer.content)
        return tuple(np.frombuffer(message.sequences[0].tokens, "<i4").tolist())

    @rule()
    def compare_checkpoints(self) -> None:
        with beside(self.data) as engine, engine.connect() as db:
            rows = db.execute(select(CHECKPOINTS).where(CHECKPOINTS.c.kind != "ephemeral")).all()
        folders = {f"tinker://{row.run}/{row.kind}/{row.name}": self.data / "checkpoints" / row.id for row in rows}
        assert folders.keys() == self.reference.checkpoints.keys()
        for path, expected in self.reference.checkpoints.items():
            assert digest(folders[path]) == digest(expected)


def run_model(examples: int) -> None:
    run_state_machine_as_test(
        JournalModel, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None)
    )


def test_deaths_change_no_answer() -> None:
    """Fails without `requests_to_replay` in Journal.restore, or without `is_accepted` in the routes."""
    run_model(6)


@pytest.mark.faults
def test_deaths_change_no_answer_in_many_orders() -> None:
    run_model(100)
