"""Worker: failures and deaths of engines, failed commits, packed passes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.support.inprocess import Api, Factory, api, loss_in, pass_body, until
from tinsmith.engine.base import Pass
from tinsmith.errors import BadRequest, EngineError
from tinsmith.service.config import ServeConfig
from tinsmith.service.server import run_service
from tinsmith.service.storage.records import Model, OptimStep
from tinsmith.service.training.operations import Operations


async def train(app: Api, model: str, seq: int, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        promise = (await app.post("forward_backward", pass_body(model, seq))).json()
        stepped = (await app.post("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": {}})).json()
        losses.append(loss_in(await app.result(promise)))
        assert "metrics" in (await app.result(stepped)).json()
        seq += 2
    return losses


@pytest.mark.parametrize("call", ["run", "step", "capture", "persist", "sample"])
def test_dead_engine_is_restarted_and_replayed(tmp_path: Path, call: str) -> None:
    async def main() -> None:
        start, calls = Factory(), 0

        def hook(name: str, _argument: object) -> None:
            nonlocal calls
            calls += name == call
            if name == call and calls == (3 if call in ("run", "step") else 1):
                start.kill()

        async with api(tmp_path / "a", capture_every=2) as calm, api(tmp_path / "b", start, capture_every=2) as shaken:
            start.hook = hook
            answers = []
            for app in (calm, shaken):
                model = await app.model(seed=1)
                losses = await train(app, model, 1, 3)
                save = {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 0}
                sampler = (await app.call("save_weights_for_sampler", save))["sampling_session_id"]
                losses += await train(app, model, 8, 2)
                answers.append((losses, await sampled(app, sampler)))
            assert answers[0] == answers[1]
            assert len(start.made) == 2

    asyncio.run(main())


async def sampled(app: Api, sampler: str) -> bytes:
    """Submit a sample; after a 410 submit it again under the next seq_id, as the SDK does."""
    for number in range(3):
        body = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 4, "seed": 3},
            "prompt_logprobs": True,
        }
        answer = await app.result((await app.post("asample", body)).json())
        if answer.status_code != 410:
            assert answer.status_code == 200, answer.text
            return answer.content
    raise AssertionError("lost three times")


def test_dead_idle_engine_is_restarted_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model()
            start.kill()
            await until(lambda: len(start.made) == 2)
            await until(lambda: app.service.workers["toy"].host.is_up)
            assert (await app.http.get("/api/v1/healthz")).status_code == 200
            assert len(await train(app, model, 1, 1)) == 1

    asyncio.run(main())


def test_training_continues_while_a_separate_sampler_is_down(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        start.sampler_up = asyncio.Event()
        async with api(tmp_path, start) as app:
            model = await app.model()
            waiting = await app.http.get("/api/v1/healthz")
            assert (waiting.status_code, waiting.json()["waiting_for"]) == (503, ["toy"])
            assert 'tinsmith_sampler_up{model="toy"} 0.0' in (await app.http.get("/metrics")).text
            assert len(await train(app, model, 1, 1)) == 1
            start.sampler_up.set()
            assert (await app.http.get("/api/v1/healthz")).status_code == 200
            assert 'tinsmith_sampler_up{model="toy"} 1.0' in (await app.http.get("/metrics")).text

    asyncio.run(main())


def test_request_that_kills_engines_fails_alone(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()

        def hook(name: str, argument: object) -> None:
            if name == "run" and any(
                len(batched.data[0].tokens) == 9 for batched in argument if isinstance(batched, Pass)
            ):  # type: ignore[union-attr]
                start.kill()

        start.hook = hook
        async with api(tmp_path, start) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            good, bad = await app.model(session, 0), await app.model(session, 1)
            promises = [
                (await app.post("forward_backward", body)).json()
                for body in (pass_body(good, 1), pass_body(bad, 1, range(10)), pass_body(bad, 2), pass_body(good, 2))
            ]
            answers = [await app.result(promise) for promise in promises]
            failed = answers.pop(1).json()
            assert failed["category"] == "server"
            assert "died 3 times" in failed["error"]
            assert len({loss_in(answer) for answer in answers}) == 1

    asyncio.run(main())


def test_failed_requests_block_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        faults: list[Exception] = [BadRequest("No such step.", "Try another."), ZeroDivisionError()]

        def hook(name: str, argument: object) -> None:
            if name == "step" and faults:
                raise faults.pop(0)

        start.hook = hook
        async with api(tmp_path, start) as app:
            model = await app.model()
            assert await app.step(model, 1) == {"error": "No such step. Try another.", "category": "user"}
            assert (await app.step(model, 2))["category"] == "server"
            assert "metrics" in await app.step(model, 4)

    asyncio.run(main())


@pytest.mark.parametrize("fault", [BadRequest("No."), ZeroDivisionError()])
def test_failed_commit_replaces_the_engine(tmp_path: Path, fault: Exception) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path / "calm") as app:
            model = await app.model(seed=1)
            await train(app, model, 1, 1)
            expected = await train(app, model, 5, 2)
        async with api(tmp_path / "faulty", start) as app:
            finish, store = app.service.store.finish, app.service.store

            async def failing(ends, *records) -> None:
                if any(end.request.seq == 3 and not end.result.failed for end in ends):
                    raise fault
                await finish(ends, *records)

            store.finish = failing  # type: ignore[method-assign]
            model = await app.model(seed=1)
            await train(app, model, 1, 1)
            assert (await app.step(model, 3))["category"] == "server"
            await until(lambda: len(start.made) == 2)
            losses = await train(app, model, 5, 1)
        async with api(tmp_path / "faulty") as app:
            assert losses + await train(app, model, 7, 1) == expected

    asyncio.run(main())


def held(start: Factory, call: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold the next such call of the engine: (it has begun, it may go on)."""
    entered, gate = asyncio.Event(), asyncio.Event()

    def hook(name: str, _argument: object):
        if name == call and not gate.is_set():
            entered.set()
            return gate.wait()
        return None

    start.hook = hook
    return entered, gate


async def step_during_passes(app: Api, start: Factory, model: str) -> list[dict]:
    """Give the engine a step while it computes the passes before it; returns the promises of both."""
    entered, gate = held(start, "run")
    promises = [(await app.post("forward_backward", pass_body(model, 1))).json()]
    await entered.wait()
    promises.append((await app.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})).json())
    await until(lambda: [entry.running for entry in app.service.workers["toy"].queue()] == [True, True])
    gate.set()
    return promises


def test_step_is_given_to_the_engine_during_its_passes(tmp_path: Path) -> None:
    """Break it: let `Worker._passing` return nothing, or give the step its turn before the passes."""

    async def main() -> None:
        start = Factory()
        async with api(tmp_path / "calm") as calm, api(tmp_path / "ahead", start) as app:
            model = await calm.model(seed=1)
            await calm.result((await calm.post("forward_backward", pass_body(model, 1))).json())
            expected = await calm.step(model, 2, rate=1e-4)
            answers = [await app.result(each) for each in await step_during_passes(app, start, await app.model(seed=1))]
            assert "metrics" in answers[1].json()
            assert answers[1].json()["metrics"]["grad_norm"] == expected["metrics"]["grad_norm"] > 0

    asyncio.run(main())


def test_step_is_stored_in_one_transaction_with_its_passes(tmp_path: Path) -> None:
    """Break it: leave `next_step` out of `Execution._run_passes`."""

    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            groups: list[list[int]] = []
            finish, store = app.service.store.finish, app.service.store

            async def observed(ends, *records) -> None:
                groups.append([end.request.seq for end in ends])
                await finish(ends, *records)

            model = await app.model(seed=1)
            store.finish = observed  # type: ignore[method-assign]
            for promise in await step_during_passes(app, start, model):
                await app.result(promise)
            assert groups == [[1, 2]]
            assert "metrics" in await app.step(model, 3)
            assert groups == [[1, 2], [3]]

    asyncio.run(main())


def test_step_that_fails_leaves_its_passes_their_results(tmp_path: Path) -> None:
    """Break it: let `ModelState.performing` leave the result open after an error: the passes wait for ever."""

    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model(seed=1)
            perform = Operations.perform

            async def failing(self, request, *others):
                done = await perform(self, request, *others)
                if isinstance(request.operation, OptimStep):
                    raise EngineError("no step")
                return done

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Operations, "perform", failing)
                passed, stepped = await step_during_passes(app, start, model)
                assert loss_in(await app.result(passed)) > 0
                assert "no step" in (await app.result(stepped)).json()["error"]

    asyncio.run(main())


def test_step_runs_again_if_its_passes_are_not_stored(tmp_path: Path) -> None:
    """Break it: store the step's result without `Execution._stored`. The passes fail, so their gradient is gone."""

    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            finish, store = app.service.store.finish, app.service.store

            async def failing(ends, *records) -> None:
                if any(end.request.seq == 1 and not end.result.failed for end in ends):
                    raise ZeroDivisionError
                await finish(ends, *records)

            store.finish = failing  # type: ignore[method-assign]
            passed, stepped = await step_during_passes(app, start, await app.model(seed=1))
            assert (await app.result(passed)).json()["category"] == "server"
            assert (await app.result(stepped)).json()["metrics"]["grad_norm"] == 0
            assert len(start.made) == 2

    asyncio.run(main())


def test_bad_request_beside_others_fails_alone(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        gate, entered = asyncio.Event(), asyncio.Event()

        def hook(name: str, argument: object):
            if name == "run":
                entered.set()
                return gate.wait()
            return None

        start.hook = hook
        async with api(tmp_path, start) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            models = [await app.model(session, number) for number in range(3)]
            promises = [(await app.post("forward_backward", pass_body(models[0], 1))).json()]
            await entered.wait()
            promises += [(await app.post("forward_backward", pass_body(model, 2))).json() for model in models]
            start.made[-1].engine._models.pop(models[1])  # type: ignore[attr-defined]
            gate.set()
            answers = [await app.result(promise) for promise in promises]
            assert "has no model" in answers[2].json()["error"]
            assert loss_in(answers[1]) == loss_in(answers[3])

    asyncio.run(main())


def test_model_without_its_capture_returns_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start, capture_every=1) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            model, other = await app.model(session, 0), await app.model(session, 1)
            await app.step(model, 1)
            await until(lambda: getattr(app.service.store.find(Model, model), "captured", None) is not None)
            [state] = (tmp_path / "journal").glob("*/[!.]*/adapter_model.safetensors")
            state.unlink()
            start.kill()
            answer = await app.step(model, 2)
            assert answer["category"] == "server"
            assert "cannot be restored" in answer["error"]
            assert "metrics" in await app.step(other, 1)

    asyncio.run(main())


def test_model_whose_replay_kills_engines_is_abandoned(tmp_path: Path) -> None:
    """Its waiting samples fail, and later requests on it start no engine."""

    async def main() -> None:
        start, held = Factory(), asyncio.Event()
        start.hook = lambda call, _: held.wait() if call == "persist" else None
        async with api(tmp_path, start) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            model, other = await app.model(session, 0), await app.model(session, 1)
            await train(app, model, 1, 1)
            save = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
            sampler = (await app.call("save_weights_for_sampler", save))["sampling_session_id"]
            start.hook = lambda call, _: start.kill() if call == "run" else None
            start.kill()
            held.set()
            body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [5]}]}}
            promise = (await app.post("asample", {**body, "sampling_params": {"max_tokens": 1}})).json()
            while (answer := await app.result(promise)).status_code == 410:
                body["seq_id"] += 1
                promise = (await app.post("asample", {**body, "sampling_params": {"max_tokens": 1}})).json()
            assert "3 engines died" in answer.json()["error"]
            engines = len(start.made)
            assert engines <= 5
            for seq in (4, 5):
                assert "3 engines died" in (await app.step(model, seq))["error"]
            assert "metrics" in await app.step(other, 1)
            assert len(start.made) == engines
        start.hook = lambda call, _: None
        async with api(tmp_path, start) as app:
            assert "metrics" in await app.step(model, 6), "a restart replays the model again"

    asyncio.run(main())


def test_failed_engine_start_is_reported(tmp_path: Path) -> None:
    async def refuse(_config):
        raise EngineError("No memory.", "Take a smaller model.")

    async def main() -> None:
        reported = asyncio.get_running_loop().create_future()
        config = ServeConfig(models=("toy",), engine="fake", data=tmp_path)
        async with run_service(config, refuse, reported.set_result):
            assert "No memory" in str(await reported)

    asyncio.run(main())
