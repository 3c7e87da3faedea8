"""Client configuration, sessions, keys and unknown routes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.service.support.inprocess import Factory, api, until
from tinsmith.service.storage.records import Session


def test_client_config_disables_parallel_chunks(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            flags = (await app.post("client/config", {"sdk_version": "0.38.0"})).json()
            assert flags["parallel_fwdbwd_chunks"] is False
            assert flags["custom_loss_server_side"] is False
            dynamic = (await app.post("client/dynamic_config", {"sdk_version": "0.38.0"})).json()
            assert dynamic["sample_cancel_enabled"] is True

    asyncio.run(main())


def test_every_route_except_healthz_needs_a_key(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            app.http.headers["X-API-Key"] = "tml-other"
            for path in ("client/config", "create_session", "optim_step", "retrieve_future", "telemetry"):
                answer = await app.post(path, {})
                assert answer.status_code == 401
                assert "X-API-Key" in answer.json()["detail"]
            del app.http.headers["X-API-Key"]
            assert (await app.post("asample", {})).status_code == 401
            assert (await app.http.get("/api/v1/healthz")).status_code == 200

    asyncio.run(main())


def test_unknown_routes_return_json_errors(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            for answer in (await app.post("archive_weights", {}), await app.http.get("/api/v1/create_session")):
                assert answer.status_code in (404, 405)
                assert "is not served here" in answer.json()["detail"]

    asyncio.run(main())


def test_idempotency_key_returns_the_same_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            headers = {"X-Idempotency-Key": "k"}
            first, second = [
                (await app.http.post("/api/v1/create_session", content=b"{}", headers=headers)).json() for _ in range(2)
            ]
            assert first == second
            assert (await app.post("create_session", {})).json() != first

    asyncio.run(main())


def test_request_that_arrives_twice_at_once_makes_one_session(tmp_path: Path) -> None:
    """Fails without `_beginning` in Sessions.begin: both would find no session and make one."""

    async def main() -> None:
        async with api(tmp_path) as app:
            key = {"x-idempotency-key": "k"}
            sent = [app.send("POST", "/api/v1/create_session", {"tags": []}, **key) for _ in range(2)]
            answers = await asyncio.gather(*sent)
            assert len({answer.json()["session_id"] for answer in answers}) == 1
            assert len(app.service.store.all(Session)) == 1

    asyncio.run(main())


def test_heartbeat_fails_after_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            session = (await app.post("create_session", {"tags": ["a"], "user_metadata": None})).json()["session_id"]
            assert (await app.post("session_heartbeat", {"session_id": session})).json()["type"] == "session_heartbeat"
            assert (await app.post("session_heartbeat", {"session_id": "no"})).status_code == 404
            for _ in range(2):  # the first reason counts
                answer = await app.post(f"sessions/{session}/finish", {"reason": {"type": "errored"}, "detail": "x"})
                assert answer.status_code == 204
            assert (await app.post("session_heartbeat", {"session_id": session})).status_code == 410
            assert (await app.post("telemetry", {"events": [], "anything": 1})).json() == {"status": "accepted"}

    asyncio.run(main())


def test_silent_session_ends_and_unloads_its_model(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model()
            await app.step(model, 1)
            body = {"session_id": model.split(":")[0], "sampling_session_seq_id": 0, "base_model": "toy"}
            sampler = (await app.post("create_sampling_session", body)).json()["sampling_session_id"]
            engine = start.made[0].engine
            assert model in engine._models  # type: ignore[attr-defined]
            app.service.sessions._timeout_s = 0.3
            app.service.sessions.wake()
            await until(lambda: model not in engine._models)  # type: ignore[attr-defined]
            refused = await app.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
            assert "silence" in refused.json()["detail"]
            assert "silence" in (await app.post("asample", _ask(sampler))).json()["detail"]

    asyncio.run(main())


def _ask(sampler: str) -> dict:
    return {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}


def test_heartbeats_keep_a_session_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is the test's."""
    now = time.time()
    monkeypatch.setattr("tinsmith.service.sessions.time", SimpleNamespace(time=lambda: now))

    async def main() -> None:
        nonlocal now
        async with api(tmp_path, session_timeout_s=400) as app:
            sessions = app.service.sessions
            sessions._activity._clock = lambda: now
            session = (await app.post("create_session", {})).json()["session_id"]
            for _ in range(6):
                now += 150
                sessions.wake()
                await until(lambda: not sessions._wake.is_set())
                assert (await app.post("session_heartbeat", {"session_id": session})).status_code == 200
            now += 410
            sessions.wake()
            await until(lambda: app.service.store.find(Session, session).ended == "silence")

    asyncio.run(main())
