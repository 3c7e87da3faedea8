"""retrieve_future: holds, failures, what was forgotten and what never was."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.service.inprocess import Api, Factory, api, pass_body


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


async def base_sampler(on: Api) -> str:
    session = (await on.post("create_session", {"tags": []})).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    return (await on.post("create_sampling_session", body)).json()["sampling_session_id"]


def test_a_poll_is_held_and_woken(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "step" else None
        async with api(tmp_path, start, hold_s=0.3) as on:
            model = await on.model()
            promise = (await on.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})).json()
            began = time.monotonic()
            pending = await on.result(promise)
            assert (pending.status_code, pending.json()) == (408, {"queue_state": "active"})
            assert 0.25 < time.monotonic() - began < 3
            poll = asyncio.create_task(on.result(promise))
            await asyncio.sleep(0.05)
            gate.set()
            assert "metrics" in (await poll).json()

    asyncio.run(main())


def test_what_is_forgotten_is_gone_and_what_never_was_is_not_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            sampler = await base_sampler(on)
            promise = (await on.post("asample", sample_body(sampler, 10**18))).json()
            assert promise["sample_sequence_ids"] == [f"{promise['request_id']}:{i}" for i in range(2)]
            assert (await on.result(promise)).headers["content-type"] == "application/x-protobuf"
            model = await on.model()
            trained = (await on.post("forward_backward", pass_body(model, 1))).json()
            body = (await on.result(trained)).content
        async with api(tmp_path) as on:
            assert (await on.result(promise)).status_code == 410  # the client submits it again
            assert (await on.result(trained)).content == body
            for unknown in ("nothing", "s:train:0:1", f"{model}:9", f"{sampler}x:1"):
                assert (await on.result({"request_id": unknown})).status_code == 404
            await on.service.store.prune(time.time() + 1, [])
        async with api(tmp_path) as on:
            assert (await on.result(trained)).status_code == 410

    asyncio.run(main())


def test_a_repeated_sample_runs_once_and_stays_for_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as on:
            sampler = await base_sampler(on)
            promises = [(await on.post("asample", sample_body(sampler, 3))).json() for _ in range(3)]
            assert promises[0] == promises[1] == promises[2]
            answers = {(await on.result(promises[0])).content for _ in range(3)}
            assert len(answers) == 1
            assert start.made[0].engine.calls.count("sample") == 1  # type: ignore[attr-defined]

    asyncio.run(main())


def test_a_cancelled_sample_fails(tmp_path: Path) -> None:
    async def main() -> None:
        start, gate = Factory(), asyncio.Event()
        start.hook = lambda call, argument: gate.wait() if call == "sample" else None
        async with api(tmp_path, start) as on:
            sampler = await base_sampler(on)
            promise = (await on.post("asample", sample_body(sampler, 0))).json()
            await asyncio.sleep(0)
            assert (await on.post("cancel_future", promise)).status_code == 200
            answer = (await on.result(promise)).json()
            assert answer["category"] == "user"
            assert "cancelled" in answer["error"]
            gate.set()
            assert (await on.post("cancel_future", {"request_id": "unknown"})).status_code == 200

    asyncio.run(main())


def test_a_store_that_cannot_be_read_is_an_error_and_no_loop(tmp_path: Path, monkeypatch) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:

            async def broken(*_):
                raise OSError("disk")

            monkeypatch.setattr(on.service.store, "answer", broken)
            answer = await on.result({"request_id": "x:train:0:1"})
            assert answer.status_code == 200
            assert answer.json()["category"] == "server"

    asyncio.run(main())


def test_closing_sends_polls_home(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        start.hook = lambda call, argument: asyncio.sleep(60) if call == "step" else None
        async with api(tmp_path, start, hold_s=30) as on:
            model = await on.model()
            promise = (await on.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})).json()
            poll = asyncio.create_task(on.result(promise))
            await asyncio.sleep(0.05)
            on.service.futures.close()
            assert (await asyncio.wait_for(poll, 2)).status_code == 408

    asyncio.run(main())


def test_a_request_whose_base_model_is_no_longer_served_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        start.hook = lambda call, argument: asyncio.sleep(60) if call == "step" else None
        async with api(tmp_path, start) as on:
            model = await on.model()
            promise = (await on.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})).json()
        async with api(tmp_path, models=("other",)) as on:
            answer = (await on.result(promise)).json()
            assert "not served now" in answer["error"]
            refused = await on.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
            assert refused.status_code == 404
        async with api(tmp_path) as on:
            assert "metrics" in (await on.result(promise)).json()

    asyncio.run(main())
