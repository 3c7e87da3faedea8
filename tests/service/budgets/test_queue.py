"""Requests of clients that have gone: last in the queue, and cancelled with their session."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.support.inprocess import Factory, api, pass_body, until
from tinsmith.service.budgets.activity import ABANDONED_S
from tinsmith.service.storage.records import Model, Session


def test_requests_of_silent_sessions_run_last(tmp_path: Path) -> None:
    """Fails without `attended_first` in the worker."""

    async def main() -> None:
        start, go, ran = Factory(), asyncio.Event(), []

        async def hook(passes: object) -> None:
            ran.append({request.model_id for request in passes})  # type: ignore[attr-defined]
            await go.wait()

        start.hook = lambda call, argument: hook(argument) if call == "run" else None
        async with api(tmp_path, start, batch_tokens=1) as app:
            first, dead, living = await app.model(), await app.model(), await app.model()
            await app.post("forward_backward", pass_body(first, 1))
            promises = [(await app.post("forward_backward", pass_body(dead, seq))).json() for seq in (1, 2)]
            await until(lambda: bool(ran))
            now = app.service.sessions._activity._clock()
            for model in (first, living):
                app.service.sessions._activity._seen[model.partition(":")[0]] = now + ABANDONED_S
            app.service.sessions._activity._clock = lambda: now + ABANDONED_S
            await app.post("forward_backward", pass_body(living, 1))
            go.set()
            await until(lambda: len(ran) == 4)
            assert ran == [{first}, {living}, {dead}, {dead}]
            assert (await app.result(promises[1])).status_code == 200

    asyncio.run(main())


def test_queue_of_a_session_ends_with_its_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without `cancel_requests` in `Sessions.run`."""

    async def main() -> None:
        start, go = Factory(), asyncio.Event()
        start.hook = lambda call, argument: go.wait() if call == "run" else None  # type: ignore[return-value]
        async with api(tmp_path, start) as app:
            model = await app.model()
            await app.post("forward_backward", pass_body(model, 1))
            queued = [(await app.post("forward_backward", pass_body(model, seq))).json() for seq in (2, 3)]
            sessions = app.service.sessions
            sessions._timeout_s, sessions._activity._seen = 0.0, {}
            sessions.wake()
            for promise in queued:
                assert "client was silent" in (await app.result(promise)).json()["error"]
            go.set()
            await until(lambda: app.service.model(model, "local").state == "ended")
            assert start.made[0].engine.calls.count("run") == 1  # type: ignore[attr-defined]

    asyncio.run(main())


def test_polls_and_heartbeats_keep_a_session_alive(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            session = app.service.store.find(Session, model.partition(":")[0])
            assert session is not None
            activity, other = app.service.sessions._activity, await app.tenant("other")
            now = activity._clock() + 1000.0
            activity._clock = lambda: now
            assert activity.is_silent(session.id, 900)
            await other.result({"request_id": f"{model}:0"})
            await app.result({"request_id": "nothing"})
            assert activity.is_silent(session.id, 900)
            await app.result({"request_id": f"{model}:0"})
            assert not activity.is_silent(session.id, 900)
            now += 1000.0
            await app.post("session_heartbeat", {"session_id": session.id})
            assert not activity.is_silent(session.id, 900)
            assert app.service.store.find(Model, model) is not None

    asyncio.run(main())
