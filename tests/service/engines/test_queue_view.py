"""Places in the queue and expected times: computed by hand, and as polls and metrics show them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.service.support.inprocess import Factory, api, pass_body
from tinsmith.engine.base import SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.service.engines.queue_view import QueueEntry, Throughput, in_turn
from tinsmith.service.wire.protobuf import pb


def entry(name: str, tokens: int) -> QueueEntry:
    """A request of the owner in the name's first letter."""
    return QueueEntry(
        request_id=name, owner=name[0], model_id="", kind="forward", tokens=tokens, running=False, waited_s=0.0
    )


def test_owners_are_served_equal_tokens() -> None:
    entries = [entry("a0", 100), entry("a1", 100), entry("a2", 100), entry("b0", 60), entry("b1", 60)]
    placed = in_turn(entries, tokens_per_s=10.0)
    assert [(each.request_id, each.place, each.tokens_before, each.expected_s) for each in placed] == [
        ("b0", 0, 0, 6.0), ("a0", 1, 60, 16.0), ("b1", 2, 160, 22.0), ("a1", 3, 220, 32.0), ("a2", 4, 320, 42.0)
    ]  # fmt: skip
    assert placed[3].description == "3 requests (220 tokens) before this one, about 32 s"
    assert in_turn(entries, None)[1].description == "1 request (60 tokens) before this one"


def test_throughput_counts_the_time_in_which_something_ran() -> None:
    measured = Throughput()
    assert measured.tokens_per_s is None
    measured.start(100.0)
    measured.start(100.01)
    measured.end(10, 100.02)
    measured.end(30, 100.04)
    measured.start(5000.0)
    measured.end(40, 5000.04)
    assert measured.tokens_per_s == pytest.approx(1000.0, rel=0.01)


def test_old_speed_is_forgotten() -> None:
    measured = Throughput()
    for number in range(100):
        measured.start(10.0 * number)
        measured.end(1000 if number < 50 else 10, 10.0 * number + 9.9)
    assert measured.tokens_per_s == pytest.approx(1.0, rel=0.1)


def test_poll_of_a_waiting_request_has_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        start, go = Factory(), asyncio.Event()
        async with api(tmp_path, start, hold_s=0.05) as running:
            model = await running.model()
            start.hook = lambda call, _: go.wait() if call == "run" else None
            promises = [(await running.post("forward_backward", pass_body(model, seq))).json() for seq in (1, 2, 3)]
            await asyncio.sleep(1.0)  # a view may be that old
            answers = [await running.poll(promise) for promise in promises]
            assert [answer.status_code for answer in answers] == [408] * 3
            assert answers[0].json() == {"queue_state": "active"}
            reason = "2 requests (6 tokens) before this one"
            assert answers[2].json() == {"queue_state": "active", "queue_state_reason": reason}
            text = (await running.http.get("/metrics")).text
            assert 'tinsmith_waiting_requests{model="toy",queue="training"} 2.0' in text
            assert 'tinsmith_waiting_tokens{model="toy",queue="training"} 6.0' in text
            waiting = running.service.workers["toy"].queue()
            assert [(each.running, each.kind, each.place) for each in waiting] == [
                (True, "forward_backward", 0), (False, "forward_backward", 1), (False, "forward_backward", 2)
            ]  # fmt: skip
            go.set()

    asyncio.run(main())


def test_session_reads_what_it_waits_for(tmp_path: Path) -> None:
    """Training and samples that wait for those of another tenant; a session that runs waits for nothing."""

    async def main() -> None:
        start, go = Factory(), asyncio.Event()
        async with api(tmp_path, start) as running:
            alice, bob = await running.tenant("alice"), await running.tenant("bob")
            models = [await tenant.model() for tenant in (alice, bob)]
            start.hook = lambda call, _: go.wait() if call in ("run", "sample") else None
            for tenant, model, count in ((alice, models[0], 320), (bob, models[1], 64)):
                session = model.partition(":")[0]
                body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
                sampler = (await tenant.post("create_sampling_session", body)).json()["sampling_session_id"]
                body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}}
                await tenant.post("asample", {**body, "num_samples": count, "sampling_params": {"max_tokens": 3}})
                await tenant.post("forward_backward", pass_body(model, 1))
                await asyncio.sleep(0)
            paths = [f"/api/v1/sessions/{model.partition(':')[0]}/queue" for model in models]
            waits = [
                (await running.http.get(path, headers=tenant._headers)).json()["waits"]
                for tenant, path in zip((alice, bob), paths, strict=True)
            ]
            assert waits[0] == []
            assert [(wait["queue"], wait["reason"]) for wait in waits[1]] == [
                ("sampling", "number 2 in the queue, after 1 request of other tenants")
            ]
            assert (await running.http.get(paths[0], headers=bob._headers)).status_code == 404
            go.set()

    asyncio.run(main())


def test_parts_of_a_request_give_its_samples(tmp_path: Path) -> None:
    """A request with 150 samples runs in three parts, and gives the samples and the prompt's logprobs of one."""

    async def main() -> None:
        start, sampled = Factory(), []
        start.hook = lambda call, argument: sampled.append(argument) if call == "sample" else None
        async with api(tmp_path, start) as running:
            session = (await running.post("create_session", {"tags": []})).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
            made = (await running.post("create_sampling_session", body)).json()["sampling_session_id"]
            body = {"sampling_session_id": made, "seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}}
            body |= {"num_samples": 150, "sampling_params": {"max_tokens": 3, "seed": 4}, "prompt_logprobs": True}
            answer = await running.result((await running.post("asample", body)).json())
        assert [part.num_samples for part in sampled] == [64, 64, 22]
        message = pb.SampleResponse()
        message.ParseFromString(answer.content)
        engine = FakeEngine(EngineConfig(source="toy", kind="fake"))
        whole = await engine.sample(
            SampleRequest(request_id="r", prompt=np.array([5, 6, 7], np.int32), num_samples=150, max_tokens=3, seed=4)
        )
        tokens = [sequence.tokens.tolist() for sequence in whole.sequences]
        assert [np.frombuffer(each.tokens, "<i4").tolist() for each in message.sequences] == tokens

    asyncio.run(main())
