"""The administrator's view: sessions, use, and the end of what a tenant left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service.support.inprocess import Api, Factory, api, pass_body, until
from tinsmith.engine.base import SampleRequest
from tinsmith.service import sampling
from tinsmith.service.storage.records import Session


def test_administrator_sees_all_tenants(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            sizes = {}
            for name in ("alice", "bob"):
                tenant = await app.tenant(name)
                model = await tenant.model()
                await tenant.call("save_weights", {"model_id": model, "seq_id": 1, "path": "first"})
                await tenant.call(
                    "save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
                )
                listed = await app.http.get("/api/v1/checkpoints", headers=tenant._headers)
                sizes[name] = sum(checkpoint["size_bytes"] for checkpoint in listed.json()["checkpoints"])
            gone = (await tenant.post("create_session", {})).json()["session_id"]
            await tenant.post(f"sessions/{gone}/finish", {})
            sessions = (await app.http.get("/api/v1/admin/sessions", headers=app._headers)).json()["sessions"]
            assert [session["owner"] for session in sessions] == ["bob", "alice"]  # seen last first
            for session in sessions:
                [model] = session["models"]
                assert (model["rank"], model["state"], model["in_memory"]) == (4, "live", True)
                assert (session["checkpoints"], session["versions"], session["sampling_sessions"]) == (1, 1, 1)
                assert session["disk_bytes"] > 0
                assert 0 <= session["seen_s"] < 60
            everything = await app.http.get("/api/v1/admin/sessions?ended=true", headers=app._headers)
            assert gone in {session["session_id"] for session in everything.json()["sessions"]}
            usage = (await app.http.get("/api/v1/admin/usage", headers=app._headers)).json()["tenants"]
            assert [tenant["owner"] for tenant in usage] == ["alice", "bob"]
            assert all((tenant["models"], tenant["checkpoints"], tenant["versions"]) == (1, 1, 1) for tenant in usage)
            assert {tenant["owner"]: tenant["checkpoint_bytes"] for tenant in usage} == sizes

    asyncio.run(main())


def test_administrator_ends_a_session_and_a_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            alice = await app.tenant("alice")
            model, other = await alice.model(), await alice.model()
            queued = await alice.post("forward_backward", pass_body(model, 1))
            session = model.partition(":")[0]
            assert (await app.post(f"admin/sessions/{session}/end", {})).status_code == 204
            assert (await alice.result(queued.json())).status_code == 200  # queued training still runs
            refused = await alice.post("forward_backward", pass_body(model, 2))
            assert "has ended (administrator)" in refused.json()["detail"]
            record = app.service.store.find(Session, session)
            assert record is not None
            assert "local" in str(record.detail)

            assert (await app.post(f"admin/models/{other}/end", {})).status_code == 204
            await until(lambda: app.service.model(other, "alice").state == "ended")
            for path in (f"models/{other}/end", "sessions/none/end"):
                assert (await app.post(f"admin/{path}", {})).status_code == 404

    asyncio.run(main())


def test_administrator_cancels_a_sample_only(tmp_path: Path) -> None:
    factory, release = Factory(), asyncio.Event()

    async def main() -> None:
        async with api(tmp_path, factory) as app:
            alice = await app.tenant("alice")
            model = await alice.model()
            factory.hook = lambda call, _: release.wait() if call == "sample" else None
            sampling = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 0, "base_model": "toy"}
            sampler = (await alice.post("create_sampling_session", sampling)).json()["sampling_session_id"]
            body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6]}]}}
            sample = (await alice.post("asample", {**body, "sampling_params": {"max_tokens": 1}})).json()
            calls = factory.made[-1].engine.calls  # type: ignore[attr-defined]
            await until(lambda: "sample" in calls)
            queues = (await app.http.get("/api/v1/admin/queue", headers=app._headers)).json()["queues"]
            assert [(queue["base_model"], queue["queue"]) for queue in queues] == [
                ("toy", "training"),
                ("toy", "sampling"),
            ]
            [entry] = queues[1]["requests"]
            assert (entry["request_id"], entry["owner"], entry["running"]) == (sample["request_id"], "alice", True)
            path = f"admin/requests/{sample['request_id']}/cancel"
            assert (await app.post(path, {})).status_code == 204
            assert "was cancelled" in (await alice.result(sample)).text
            await until(lambda: sample["request_id"] not in app.service.sampling._running)
            assert (await app.post(path, {})).status_code == 404
            refused = await app.post(f"admin/requests/{model}:1/cancel", {})
            assert "is a training request" in refused.json()["detail"]

    asyncio.run(main())


async def sampler_of(tenant: Api) -> str:
    session = (await tenant.post("create_session", {"tags": []})).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    return (await tenant.post("create_sampling_session", body)).json()["sampling_session_id"]


async def sample(tenant: Api, sampler: str, seq: int, count: int = 1, first: int = 5) -> dict:
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [first, 6]}]}}
    answer = await tenant.post("asample", {**body, "num_samples": count, "sampling_params": {"max_tokens": 1}})
    return answer.json()


async def rows_of(app: Api) -> dict[str, dict[str, Any]]:
    """The rows of the queue by id, whose number by owner is the one that the usage shows."""
    queues = (await app.http.get("/api/v1/admin/queue", headers=app._headers)).json()["queues"]
    usage = (await app.http.get("/api/v1/admin/usage", headers=app._headers)).json()["tenants"]
    rows = [row for queue in queues for row in queue["requests"]]
    unfinished = {tenant["owner"]: tenant["unfinished_requests"] for tenant in usage}
    assert Counter(row["owner"] for row in rows) == Counter(unfinished)
    return {row["request_id"]: row for row in rows}


def held(release: asyncio.Event) -> Callable[[str, object], Any]:
    """A hook that holds passes, and samples whose prompt does not begin with 9."""

    def hook(call: str, argument: object) -> Any:
        is_held = call == "run" or (isinstance(argument, SampleRequest) and argument.prompt[0] != 9)
        return release.wait() if is_held else None

    return hook


def test_queue_has_every_unfinished_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting, running, in parts, waiting for isolation, being encoded, and completions: each sample can be cancelled,
    and its client gets an error that says so."""
    factory, release, encode = Factory(), asyncio.Event(), asyncio.Event()

    async def encoded(_size: int, work: Callable[..., bytes], *arguments: object) -> bytes:
        await encode.wait()
        return work(*arguments)

    async def main() -> None:
        async with api(tmp_path, factory) as app:
            monkeypatch.setattr(sampling, "run_in_thread_if_large", encoded)
            alice, bob = await app.tenant("alice"), await app.tenant("bob")
            model, sampler, other = await bob.model(), await sampler_of(alice), await sampler_of(bob)
            samples, host = app.service.sampling, app.service.workers["toy"].host
            factory.hook = held(release)
            promises = {"encoding": await sample(alice, sampler, 0, first=9)}
            await until(lambda: samples._running[promises["encoding"]["request_id"]].has_sampled)
            async with host.isolation_lock:
                with monkeypatch.context() as patch:
                    patch.setattr(samples._crash_isolation, "_points", lambda _: sampling.ALONE_POINTS)
                    promises["isolation"] = await sample(alice, sampler, 1)
                    await asyncio.sleep(0)
                promises["parts"] = await sample(alice, sampler, 2, 320)
                promises["waiting"] = await sample(bob, other, 0, 64)
                body = {"model": "toy", "prompt": [5, 6], "max_tokens": 2}
                completions = [
                    asyncio.create_task(bob.send("POST", "/v1/completions", {**body, "stream": stream}))
                    for stream in (False, True)
                ]
                await until(lambda: len(samples._running) == 6)
                training = [(await bob.post("forward_backward", pass_body(model, seq))).json() for seq in (1, 2)]
                rows = await rows_of(app)
                ids = {name: promise["request_id"] for name, promise in promises.items()}
                assert len(rows) == 8
                assert {name: rows[ids[name]]["running"] for name in ids} == {
                    "encoding": True, "isolation": False, "parts": True, "waiting": False
                }  # fmt: skip
                assert Counter(row["kind"] for row in rows.values()) == {
                    "sample": 4, "completion": 2, "forward_backward": 2
                }  # fmt: skip
                for request_id, row in rows.items():
                    status = (await app.post(f"admin/requests/{request_id}/cancel", {})).status_code
                    assert status == (400 if row["kind"] == "forward_backward" else 204), row
                for name, promise in promises.items():
                    answer = await (bob if name == "waiting" else alice).result(promise)
                    assert "was cancelled" in answer.text
                for answer in await asyncio.gather(*completions):
                    assert "was cancelled" in answer.text
            await until(lambda: not samples._running)
            assert set(await rows_of(app)) == {promise["request_id"] for promise in training}
            release.set()
            for promise in training:
                await bob.result(promise)
            assert not await rows_of(app)

    asyncio.run(main())
