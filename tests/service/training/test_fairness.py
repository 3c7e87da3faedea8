"""A thousand queued requests of one tenant delay a request of another by at most one micro-batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.service.support.inprocess import Api, Factory, api, pass_body
from tinsmith.engine.base import Pass
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.torch_engine import TorchEngine
from tinsmith.engine.training.micro_batches.batch import Part
from tinsmith.engine.training.micro_batches.runner import RunningMicroBatch
from tinsmith.service.engines.host import RunningEngine, start_engine
from tinsmith.service.storage.records import FutureResult

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


def test_training_of_one_tenant_starts_beside_that_of_another(tmp_path: Path) -> None:
    """Break it: let `next_groups` return nothing while something runs."""

    async def main() -> None:
        go, factory, ran = asyncio.Event(), Factory(), []

        def hook(call: str, argument: object):
            if call in ("run", "step"):
                ran.append(argument if isinstance(argument, str) else {batched.model_id for batched in argument})  # type: ignore[attr-defined]
            return go.wait() if call == "run" and len(ran) == 1 else None

        factory.hook = hook
        async with api(tmp_path, factory) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            busy, single = await alice.model(), await bob.model()
            await accepted(alice, "forward_backward", *(pass_body(busy, seq, TOKENS) for seq in range(1, MANY)))
            await accepted(alice, "optim_step", {"model_id": busy, "seq_id": MANY, "adam_params": {}})
            [passed] = await accepted(bob, "forward_backward", pass_body(single, 1, TOKENS))
            assert (await bob.result(passed)).status_code == 200
            [stepped] = await accepted(bob, "optim_step", {"model_id": single, "seq_id": 2, "adam_params": {}})
            assert (await bob.result(stepped)).status_code == 200
            assert ran == [{busy}, {single}, single], "the first pass of alice still runs"
            go.set()

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
        factory, go, inside, most, done = Factory(), asyncio.Event(), set(), 0, []
        pending: dict[str, int] = {}

        async def sample(request) -> None:
            nonlocal most
            inside.add(request.request_id)
            most = max(most, len(inside))
            await go.wait()
            await asyncio.sleep(0.005)
            inside.discard(request.request_id)
            done.append(request.request_id)
            pending[request.request_id] = running.service.futures.pending("alice")

        factory.hook = lambda call, argument: sample(argument) if call == "sample" else None
        async with api(tmp_path, factory, cache_tokens=64 * 32) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            many, single = await sampler_of(alice), await sampler_of(bob)
            await accepted(alice, "asample", *({**many, "seq_id": number} for number in range(MANY)))
            [promise] = await accepted(bob, "asample", {**single, "seq_id": 0})
            go.set()
            assert (await bob.result(promise)).status_code == 200
            assert done.index(promise["request_id"]) <= 2 * 36
            assert pending[promise["request_id"]] > MANY - 3 * 36
            assert most == 36, "capacity of the cache and an eighth ahead"

    asyncio.run(main())


def test_tenants_alternate_on_a_torch_engine(tmp_path: Path, tiny_llama: Path) -> None:
    """32 samples run at a time and 4 more are admitted."""

    async def main() -> None:
        options = {"engine": "torch", "models": (f"toy={tiny_llama}",), "dtype": "float32", "threads": 1}
        async with api(tmp_path, start_engine, cache_tokens=64 * 32, batch_tokens=512, **options) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            many, single = await sampler_of(alice), await sampler_of(bob)
            ended = _ended(running)
            await accepted(alice, "asample", *({**many, "seq_id": number} for number in range(MANY)))
            [promise] = await accepted(bob, "asample", {**single, "seq_id": 0})
            begun = len(ended)
            assert (await bob.result(promise)).headers["content-type"] == "application/x-protobuf"
            assert ended.index(promise["request_id"]) - begun <= 3 * 36
            busy, single = await alice.model(), await bob.model()
            await accepted(alice, "forward_backward", *(pass_body(busy, seq, TOKENS) for seq in range(1, 300)))
            [promise] = await accepted(bob, "forward_backward", pass_body(single, 1, TOKENS))
            begun = len(ended)
            assert (await bob.result(promise)).headers["content-type"] == "application/x-protobuf"
            overtaken = ended[begun : ended.index(promise["request_id"])]
            assert sum(each.startswith(busy) for each in overtaken) <= 2 * 512 // len(TOKENS)

    asyncio.run(main())


def _ended(running: Api) -> list[str]:
    """The requests that end from now on, in their order; how soon a test sees their results is chance."""
    futures, ended = running.service.futures, list[str]()
    resolve = futures.resolve

    def resolve_listed(request_id: str, result: FutureResult) -> None:
        ended.append(request_id)
        resolve(request_id, result)

    futures.resolve = resolve_listed  # type: ignore[method-assign]
    return ended


class CountedEngine(TorchEngine):
    """Counts micro-batches, and those between the start and the end of each call of `run`, by share."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        runner: Any = self.trainer._runner
        self.turns = 0
        self.go = asyncio.Event()
        self.go.set()
        self.waits: dict[str, list[int]] = {}
        self.tokens: Counter[str] = Counter()
        start, advance = runner.start, runner.advance

        def counted_start(parts: Sequence[Part], with_grad: bool) -> RunningMicroBatch:
            self.tokens.update({run.share: sum(len(row.tokens) for row in rows) for run, rows in parts})
            return start(parts, with_grad)

        def counted_advance(running: Sequence[RunningMicroBatch]) -> None:
            advance(running)
            self.turns += len(running)

        runner.start, runner.advance = counted_start, counted_advance

    async def run(self, passes: Sequence[Pass]):
        await self.go.wait()
        start = self.turns
        results = await super().run(passes)
        self.waits.setdefault(passes[0].share, []).append(self.turns - start)
        return results


@asynccontextmanager
async def counted_service(tmp_path: Path, source: Path) -> AsyncIterator[tuple[Api, list[CountedEngine]]]:
    """A service on an engine in this process, with micro-batches of 64 tokens."""
    engines: list[CountedEngine] = []

    async def start(config: EngineConfig) -> RunningEngine:
        engines.append(CountedEngine(config))
        return RunningEngine(engine=engines[0], died=asyncio.Event())

    options = {"engine": "torch", "models": (f"toy={source}",), "dtype": "float32", "threads": 1, "pass_tokens": 128}
    async with api(tmp_path, start, batch_tokens=512, **options) as running:
        yield running, engines


def test_small_request_waits_for_one_micro_batch(tmp_path: Path, tiny_llama: Path) -> None:
    """Break it: let `MicroBatchQueue._next_micro_batch` order runs by arrival, or `next_groups` wait for what runs."""

    async def main() -> None:
        async with counted_service(tmp_path, tiny_llama) as (running, engines):
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            busy, single = await alice.model(), await bob.model()
            large = await accepted(alice, "forward_backward", *(pass_body(busy, seq, TOKENS) for seq in range(1, 200)))
            [small] = await accepted(bob, "forward_backward", pass_body(single, 1, TOKENS[:20]))
            assert (await bob.result(small)).headers["content-type"] == "application/x-protobuf"
            stepped = await bob.step(single, 2)
            assert "metrics" in stepped
            assert running.service.futures.pending("alice") > 100, "alice still waits"
            assert engines[0].waits["bob"][0] <= 2, "the micro-batch that ran, and its own"
            assert (await alice.result(large[-1])).headers["content-type"] == "application/x-protobuf"

    asyncio.run(main())


def test_equal_tenants_train_equal_tokens(tmp_path: Path, tiny_llama: Path) -> None:
    """Few large requests of one tenant and many small ones of another: equal tokens while both have work."""

    async def main() -> None:
        async with counted_service(tmp_path, tiny_llama) as (running, engines):
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            busy, other = await alice.model(), await bob.model()
            bodies = (
                (pass_body(busy, seq, TOKENS) for seq in range(1, 200)),
                (pass_body(other, seq, TOKENS[:8]) for seq in range(1, 600)),
            )
            engines[0].go.clear()  # both have all of their work
            large = await accepted(alice, "forward_backward", *bodies[0])
            small = await accepted(bob, "forward_backward", *bodies[1])
            engines[0].go.set()
            await bob.result(small[len(small) // 2])
            shares = [engines[0].tokens[name] for name in ("alice", "bob")]
            assert min(shares) > 0.8 * max(shares) > 400, shares
            await asyncio.gather(alice.result(large[-1]), bob.result(small[-1]))

    asyncio.run(main())


@pytest.mark.slow
def test_small_request_waits_for_one_large_pass(tmp_path: Path, smollm2: Path) -> None:
    """Beside 1,000 requests of 1,000 tokens, each of which is a micro-batch: the one that runs, and its successor if
    that has begun with it."""

    async def main() -> None:
        options = {"engine": "torch", "models": (f"toy={smollm2}",), "hold_s": 40.0}
        async with api(tmp_path, start_engine, **options) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            busy, single = await alice.model(), await bob.model()
            large = [pass_body(busy, seq, [seq, *range(5, 1005)]) for seq in range(1, MANY)]  # rows share nothing
            await accepted(alice, "forward_backward", *large)
            for seq in range(1, 5):
                before = running.service.futures.pending("alice")
                [promise] = await accepted(bob, "forward_backward", pass_body(single, seq, list(range(5, 70))))
                assert (await bob.result(promise)).headers["content-type"] == "application/x-protobuf"
                assert before - running.service.futures.pending("alice") <= 2

    asyncio.run(main())
