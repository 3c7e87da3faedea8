"""retrieve_future and retrieve_futures: waiting polls, failures, dropped and unknown results."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from tests.service.support.inprocess import Api, Factory, api, pass_body, until
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import EngineError
from tinsmith.service.engines.host import RunningEngine
from tinsmith.service.storage.retention import UNFETCHED_S, Retention, prune


def sample_body(sampler: str, seq: int, **changes) -> dict:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "type": "sample",
        **changes,
    }


async def base_sampler(app: Api) -> str:
    session = (await app.post("create_session", {"tags": []})).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    return (await app.post("create_sampling_session", body)).json()["sampling_session_id"]


def test_poll_waits_until_the_result(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "step" else None
        async with api(tmp_path, start, hold_s=0.3) as app:
            model = await app.model()
            promise = (await app.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})).json()
            began = time.monotonic()
            pending = await app.poll(promise)
            assert (pending.status_code, pending.json()) == (408, {"queue_state": "active"})
            assert time.monotonic() - began > 0.25
            poll = asyncio.create_task(app.result(promise))
            await asyncio.sleep(0.05)
            gate.set()
            assert "metrics" in (await poll).json()

    asyncio.run(main())


def test_dropped_result_is_gone_and_unknown_is_not_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            sampler = await base_sampler(app)
            promise = (await app.post("asample", sample_body(sampler, 10**18))).json()
            assert promise["sample_sequence_ids"] == [f"{promise['request_id']}:{i}" for i in range(2)]
            assert (await app.result(promise)).headers["content-type"] == "application/x-protobuf"
            model = await app.model()
            trained = (await app.post("forward_backward", pass_body(model, 1))).json()
            body = (await app.result(trained)).content
        async with api(tmp_path) as app:
            assert (await app.result(promise)).status_code == 410  # the client submits it again
            assert (await app.result(trained)).content == body
            for unknown in ("nothing", "s:train:0:1", f"{model}:9", f"{sampler}x:1"):
                assert (await app.result({"request_id": unknown})).status_code == 404
            await prune(app.service.store, Retention(fetched_s=1.0, ended_s=1.0), time.time() + 2 * UNFETCHED_S)
        async with api(tmp_path) as app:
            assert (await app.result(trained)).status_code == 410

    asyncio.run(main())


def test_repeated_sample_runs_once(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            sampler = await base_sampler(app)
            promises = [(await app.post("asample", sample_body(sampler, 3))).json() for _ in range(3)]
            assert promises[0] == promises[1] == promises[2]
            answers = {(await app.result(promises[0])).content for _ in range(3)}
            assert len(answers) == 1
            assert start.made[0].engine.calls.count("sample") == 1  # type: ignore[attr-defined]

    asyncio.run(main())


def test_cancelled_sample_fails(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "sample" else None
        async with api(tmp_path, start) as app:
            sampler = await base_sampler(app)
            promise = (await app.post("asample", sample_body(sampler, 0))).json()
            await asyncio.sleep(0)
            assert (await app.post("cancel_future", promise)).status_code == 200
            answer = (await app.result(promise)).json()
            assert answer["category"] == "user"
            assert "cancelled" in answer["error"]
            gate.set()
            assert (await app.post("cancel_future", {"request_id": "unknown"})).status_code == 200

    asyncio.run(main())


def test_unreadable_store_returns_an_error_result(tmp_path: Path, monkeypatch) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:

            async def broken(*_):
                raise OSError("disk")

            async def dead(*_):
                raise EngineError("It is dead.")

            for fault in (broken, dead):
                monkeypatch.setattr(app.service.store, "result", fault)
                answer = await app.result({"request_id": "x:train:0:1"})
                assert answer.status_code == 200
                assert answer.json()["category"] == "server"

    asyncio.run(main())


def test_close_ends_waiting_polls(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        start.hook = lambda call, argument: asyncio.sleep(60) if call == "step" else None
        async with api(tmp_path, start, hold_s=30) as app:
            model = await app.model()
            promise = (await app.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})).json()
            poll = asyncio.create_task(app.poll(promise))
            await until(lambda: bool(app.service.futures._futures[promise["request_id"]].waiters))
            app.service.futures.wake_waiters()
            assert (await poll).status_code == 408

    asyncio.run(main())


def test_request_of_an_unserved_base_model_stays_pending(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        start.hook = lambda call, argument: asyncio.sleep(60) if call == "step" else None
        async with api(tmp_path, start) as app:
            model = await app.model()
            promise = (await app.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})).json()
        async with api(tmp_path, models=("other",), hold_s=0.2) as app:
            answer = await app.poll(promise)
            reason = "base model toy is not served now"
            assert answer.status_code == 408
            assert answer.json() == {"queue_state": "paused_capacity", "queue_state_reason": reason}
            refused = await app.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
            assert refused.status_code == 404
        async with api(tmp_path) as app:
            assert "metrics" in (await app.result(promise)).json()

    asyncio.run(main())


async def poll(app: Api, sampler: str, cursor: int = 0, **changes) -> httpx.Response:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": changes.pop("clone", 0)}
    return await app.post("retrieve_futures", {"target": target, "prev_cursor": cursor, **changes})


def test_session_poll_lists_finished_samples(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "sample" else None
        async with api(tmp_path, start, hold_s=44) as app:
            sampler = await base_sampler(app)
            promises = [(await app.post("asample", sample_body(sampler, seq))).json() for seq in (0, 1, 10**18)]
            waiting = asyncio.create_task(poll(app, sampler))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            gate.set()
            answer = (await waiting).json()
            while len(answer["completions"]) < 2:
                answer = (await poll(app, sampler)).json()
            for listed, promise in zip(answer["completions"], promises, strict=False):
                size = len((await app.result(promise)).content)
                expected = {"state": "finished", "request_id": promise["request_id"]}
                assert listed == {**expected, "response_payload_uncompressed_size": size}
            began = time.monotonic()
            empty = (await poll(app, sampler, answer["cursor"], timeout=0)).json()
            assert empty == {"completions": [], "cursor": answer["cursor"]}
            assert time.monotonic() - began < 40, "it did not wait for hold_s"
            clone = (await poll(app, sampler, clone=10**9)).json()
            assert [completion["request_id"] for completion in clone["completions"]] == [f"{sampler}:{10**18}"]

    asyncio.run(main())


def test_acknowledged_results_are_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            sampler = await base_sampler(app)
            own, path = [(await app.post("asample", sample_body(sampler, seq))).json() for seq in (0, 1)]
            assert (await app.result(own)).status_code == 200
            ids = [own["request_id"], "another:sample:0:1", "x"]
            assert (await poll(app, sampler, timeout=0, retrieved_request_ids=ids)).status_code == 200
            assert (await app.result(own)).status_code == 410
            assert (await app.result(path)).status_code == 200
            assert (await poll(app, "nobody:sample:0")).status_code == 404

    asyncio.run(main())


def test_sampling_waits_for_a_failing_disk(tmp_path: Path, monkeypatch) -> None:
    """The client retries; after a crash it would wait forever for a sample that no file names."""

    def fail(descriptor: int, text: bytes, offset: int) -> None:
        raise OSError(5, "Input/output error")

    async def main() -> None:
        async with api(tmp_path) as app:
            sampler = await base_sampler(app)
            monkeypatch.setattr("tinsmith.service.results.unfinished_samples.RETRY_S", 0.0)
            with monkeypatch.context() as patch:
                patch.setattr("tinsmith.service.results.unfinished_samples._write_at", fail)
                refused = await app.post("asample", sample_body(sampler, 0))
                assert (refused.status_code, app.service.futures.pending("local")) == (429, 0)
            promise = (await app.post("asample", sample_body(sampler, 0))).json()
            assert (await app.result(promise)).status_code == 200

    asyncio.run(main())


def test_unfinished_samples_cannot_be_acknowledged(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "sample" else None
        async with api(tmp_path, start) as app:
            sampler = await base_sampler(app)
            promise = (await app.post("asample", sample_body(sampler, 0))).json()
            await poll(app, sampler, timeout=0, retrieved_request_ids=[promise["request_id"]])
            assert app.service.futures.pending("local") == 1, "it still runs"
            gate.set()
            assert (await app.result(promise)).status_code == 200
            assert app.service.futures.pending("local") == 0

    asyncio.run(main())


def test_samples_lost_in_a_crash_are_listed_as_failed(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "sample" and argument.max_tokens == 9 else None
        async with api(tmp_path, start) as app:
            sampler = await base_sampler(app)
            fetched, ended, running = [
                (await app.post("asample", sample_body(sampler, seq, sampling_params={"max_tokens": tokens}))).json()
                for seq, tokens in ((0, 4), (1, 4), (2, 9))
            ]
            assert (await app.result(fetched)).status_code == 200
            [_], cursor = (await poll(app, sampler)).json().values()
        for _ in range(2):  # the second process ends without a poll
            async with api(tmp_path) as app:
                listed = (await poll(app, sampler, cursor)).json()["completions"]
                assert listed == [{"state": "failed", "request_id": item["request_id"]} for item in (ended, running)]
        async with api(tmp_path) as app:
            assert (await app.result(ended)).status_code == 410
            again = await app.post(
                "asample", sample_body(sampler, 2)
            )  # the promise was lost, so the client repeats the seq_id
            assert again.json()["request_id"] == running["request_id"]
            assert (await app.result(running)).status_code == 200
        async with api(tmp_path) as app:
            assert (await poll(app, sampler, timeout=0)).json()["completions"] == []

    asyncio.run(main())


def test_close_answers_session_polls_with_408(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, hold_s=30) as app:
            sampler = await base_sampler(app)
            waiting = asyncio.create_task(poll(app, sampler))
            await until(lambda: any(log.waiters for log in app.service.futures.completions._logs.values()))
            app.service.futures.wake_waiters()
            assert (await waiting).status_code == 408

    asyncio.run(main())


def test_large_result_announces_its_size_first(tmp_path: Path, monkeypatch) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            sampler = await base_sampler(app)
            promise = (await app.post("asample", sample_body(sampler, 0))).json()
            size = len((await app.result(promise)).content)
            request = {"request_id": promise["request_id"], "allow_metadata_only": True}
            assert (
                len((await app.post("retrieve_future", request)).content) == size
            )  # small results have no size announcement
            monkeypatch.setattr("tinsmith.service.routes.futures.INLINE", 10)
            announced = (await app.post("retrieve_future", request)).json()
            assert announced == {"status": "complete_metadata", "response_payload_size": size}
            assert len((await app.result(promise)).content) == size

    asyncio.run(main())


def test_pending_poll_has_the_reason_of_a_pause(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        start.hook = lambda call, argument: asyncio.sleep(60)

        async def once(config: EngineConfig) -> RunningEngine:
            return await (asyncio.sleep(60) if start.made else start(config))

        async with api(tmp_path, once, hold_s=0.2) as app:
            sampler = await base_sampler(app)
            promise = (await app.post("asample", sample_body(sampler, 0))).json()
            assert (await app.poll(promise)).json() == {"queue_state": "active"}
            start.made[-1].died.set()
            pending = await app.poll(promise)
            assert pending.status_code == 408
            assert pending.json()["queue_state"] == "paused_capacity"
            assert "engine of toy" in pending.json()["queue_state_reason"]

    asyncio.run(main())


def test_too_many_samples_return_429(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "sample" else None
        async with api(tmp_path, start, queued_samples=2) as app:
            sampler = await base_sampler(app)
            answers = [await app.post("asample", sample_body(sampler, seq)) for seq in range(3)]
            assert [answer.status_code for answer in answers] == [200, 200, 429]
            assert answers[2].headers["retry-after-ms"] == "1000"
            gate.set()
            for answer in answers[:2]:
                assert (await app.result(answer.json())).status_code == 200
            assert (await app.post("asample", sample_body(sampler, 2))).status_code == 200

    asyncio.run(main())


def test_cancelled_sample_is_cancelled_in_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            sampler = await base_sampler(app)
            endless = sample_body(sampler, 0, sampling_params={"max_tokens": 32000, "stop": []})
            promise = (await app.post("asample", endless)).json()
            engine = start.made[0].engine
            await until(lambda: engine._sampling == {promise["request_id"]})  # type: ignore[attr-defined]
            await app.post("cancel_future", promise)
            await until(lambda: engine._sampling == set())  # type: ignore[attr-defined]
            await until(lambda: app.service.sampling._running == {})
            assert "cancelled" in (await app.result(promise)).json()["error"]

    asyncio.run(main())


def test_training_requests_are_not_cancelled(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "run" else None
        async with api(tmp_path, start) as app:
            model = await app.model()
            promise = (await app.post("forward_backward", pass_body(model, 1))).json()
            assert (await app.post("cancel_future", promise)).json() == {"status": "not_cancelled"}
            gate.set()
            assert (await app.result(promise)).headers["content-type"] == "application/x-protobuf"

    asyncio.run(main())


def test_session_end_cancels_only_its_samples(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            own, other = await base_sampler(app), await base_sampler(app)
            endless = {"sampling_params": {"max_tokens": 32000, "stop": []}}
            stopped, running = [
                (await app.post("asample", sample_body(item, 0, **endless))).json() for item in (own, other)
            ]
            engine, ids = start.made[0].engine, {each["request_id"] for each in (stopped, running)}
            await until(lambda: engine._sampling == ids)  # type: ignore[attr-defined]
            assert (await app.post(f"sessions/{own.split(':')[0]}/finish", {})).status_code == 204
            await until(lambda: engine._sampling == {running["request_id"]})  # type: ignore[attr-defined]
            assert "cancelled" in (await app.result(stopped)).json()["error"]
            await app.post("cancel_future", running)

    asyncio.run(main())
