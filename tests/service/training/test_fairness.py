"""A thousand queued requests of one tenant delay a request of another by at most one pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.service.support.inprocess import Api, Factory, api, pass_body
from tinsmith.service.engines.host import start_engine

pytestmark = pytest.mark.usefixtures("forked_programs")

MANY = 1000
TOKENS = list(range(3, 64))


async def sampler_of(running: Api) -> dict:
    """An asample body without seq_id."""
    session = (await running.post("create_session", {"tags": []})).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    made = (await running.post("create_sampling_session", body)).json()["sampling_session_id"]
    params = {"max_tokens": 8, "stop": []}
    return {"sampling_session_id": made, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": params}


async def accepted(running: Api, path: str, *bodies: object) -> list[dict]:
    answers = await asyncio.gather(*(running.post(path, body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}, answers[-1].text
    return [answer.json() for answer in answers]


def test_tenants_alternate_in_training(tmp_path: Path) -> None:
    async def main() -> None:
        go, factory, ran = asyncio.Event(), Factory(), []

        def hook(call: str, argument: object):
            if call in ("run", "step"):
                assert isinstance(argument, Sequence)
                ran.append([batched.model_id for batched in argument] if call == "run" else [argument])
                return go.wait()
            return None

        factory.hook = hook
        async with api(tmp_path, factory) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            busy, single = await alice.model(), await bob.model()
            await accepted(alice, "forward_backward", *(pass_body(busy, seq, TOKENS) for seq in range(1, MANY)))
            await accepted(alice, "optim_step", {"model_id": busy, "seq_id": MANY, "adam_params": {}})
            [passed] = await accepted(bob, "forward_backward", pass_body(single, 1, TOKENS))
            [stepped] = await accepted(bob, "optim_step", {"model_id": single, "seq_id": 2, "adam_params": {}})
            assert len(ran) == 1, "only the first pass has started"
            go.set()
            for promise in (passed, stepped):
                assert (await bob.result(promise)).status_code == 200
            places = [number for number, batch in enumerate(ran) if single in batch]
            assert places[0] == 1, "the next pass holds requests of both tenants"
            assert busy in ran[1]
            assert places[1] - places[0] <= 2, "at most one other pass between"

    asyncio.run(main())


def test_tenants_alternate_in_optimizer_steps(tmp_path: Path) -> None:
    async def main() -> None:
        go, factory, ran = asyncio.Event(), Factory(), []

        def hook(call: str, argument: object):
            ran.append(argument)
            return go.wait() if call == "step" else None

        factory.hook = hook
        async with api(tmp_path, factory, capture_every=10**6) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            busy, single = await alice.model(), await bob.model()
            steps = [{"model_id": busy, "seq_id": seq, "adam_params": {}} for seq in range(1, 200)]
            await accepted(alice, "optim_step", *steps)
            [promise] = await accepted(bob, "optim_step", {"model_id": single, "seq_id": 1, "adam_params": {}})
            go.set()
            assert (await bob.result(promise)).status_code == 200
            assert ran.index(single) <= 2

    asyncio.run(main())


def test_tenants_alternate_in_sampling(tmp_path: Path) -> None:
    async def main() -> None:
        factory, inside, most, done = Factory(), set(), 0, []

        async def sample(request) -> None:
            nonlocal most
            inside.add(request.request_id)
            most = max(most, len(inside))
            await asyncio.sleep(0.005)
            inside.discard(request.request_id)
            done.append(request.request_id)

        factory.hook = lambda call, argument: sample(argument) if call == "sample" else None
        async with api(tmp_path, factory, cache_tokens=64 * 32) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            many, single = await sampler_of(alice), await sampler_of(bob)
            await accepted(alice, "asample", *({**many, "seq_id": number} for number in range(MANY)))
            before = len(done)
            [promise] = await accepted(bob, "asample", {**single, "seq_id": 0})
            assert (await bob.result(promise)).status_code == 200
            assert done.index(promise["request_id"]) - before <= 2 * 36
            assert running.service.futures.pending("alice") > MANY - before - 3 * 36
            assert most == 36, "capacity of the cache and an eighth ahead"

    asyncio.run(main())


def test_tenants_alternate_on_a_torch_engine(tmp_path: Path, tiny_llama: Path) -> None:
    """32 samples run at a time and 4 more are admitted."""

    async def main() -> None:
        options = {"engine": "torch", "models": (f"toy={tiny_llama}",), "dtype": "float32", "threads": 1}
        async with api(tmp_path, start_engine, cache_tokens=64 * 32, batch_tokens=512, **options) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            many, single = await sampler_of(alice), await sampler_of(bob)
            waiting = running.service.futures.pending
            await accepted(alice, "asample", *({**many, "seq_id": number} for number in range(MANY)))
            before = waiting("alice")
            [promise] = await accepted(bob, "asample", {**single, "seq_id": 0})
            assert (await bob.result(promise)).headers["content-type"] == "application/x-protobuf"
            assert before - waiting("alice") <= 3 * 36
            busy, single = await alice.model(), await bob.model()
            await accepted(alice, "forward_backward", *(pass_body(busy, seq, TOKENS) for seq in range(1, 300)))
            before = waiting("alice")
            [promise] = await accepted(bob, "forward_backward", pass_body(single, 1, TOKENS))
            assert (await bob.result(promise)).headers["content-type"] == "application/x-protobuf"
            assert before - waiting("alice") <= 3 * 36 + 2 * 512 // len(TOKENS)

    asyncio.run(main())
