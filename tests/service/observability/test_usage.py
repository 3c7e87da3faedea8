"""The audit log, bills and traces say what happened, no more and no less, also after a restart."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from tests.service.inprocess import Api, api, pass_body
from tinsmith.service.observability.audit import KEEP_SPANS_S
from tinsmith.service.storage.records import Checkpoint, Session
from tinsmith.service.storage.tables import SPANS, STORED


def window(hours: int = 1) -> str:
    whole = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    times = (whole - timedelta(hours=hours), whole + timedelta(hours=1))
    return "&".join(
        f"{name}={at:%Y-%m-%dT%H:%M:%SZ}" for name, at in zip(("starting_on", "ending_before"), times, strict=True)
    )


async def bill(on: Api, hours: int = 1) -> dict:
    answer = await on.http.get(f"/api/v1/billing/usage/events?{window(hours)}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def counted(on: Api) -> dict[str, int]:
    """kind -> tokens, or checkpoints, over all hours."""
    found: dict[str, int] = {}
    for event in (await bill(on))["data"]:
        info = event["event_info"]
        kind = info["type"] + ("_cached" if info.get("cached") else "")
        found[kind] = found.get(kind, 0) + info.get("token_count", info.get("count", 0))
    return found


async def trained(on: Api, model: str, seq: int, tokens: int) -> None:
    await on.result((await on.post("forward_backward", pass_body(model, seq, range(5, 6 + tokens)))).json())


async def sampled(on: Api, session: str, prompt: list[int]) -> None:
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = (await on.post("create_sampling_session", body)).json()["sampling_session_id"]
    params = {"max_tokens": 4, "stop": []}
    ask = {"prompt": {"chunks": [{"tokens": prompt}]}, "num_samples": 2, "sampling_params": params}
    promise = (await on.post("asample", {"sampling_session_id": sampler, "seq_id": 0, **ask})).json()
    assert (await on.result(promise)).status_code == 200


def test_tokens_are_counted_where_they_were_used(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            session = model.partition(":")[0]
            await trained(on, model, 1, 7)
            await trained(on, model, 2, 5)
            bad = await on.post("forward_backward", pass_body(model, 3, loss_fn="nonsense"))
            assert bad.status_code == 400
            await sampled(on, session, [5, 6, 7, 8])
            await on.call("save_weights", {"model_id": model, "seq_id": 4, "path": "a"})
            found = await counted(on)
            assert found["training"] == 12
            assert found["sampling_sample"] == 8
            assert found["sampling_prefill"] + found.get("sampling_prefill_cached", 0) == 4
            assert found["checkpoint"] == 1
            data = (await bill(on))["data"]
            tokens = [one for one in data if one["event_info"]["type"] != "storage"]
            assert {(one["session_id"], one["base_model"]) for one in tokens} == {(session, "toy")}
            assert all(one["estimated_cost_usd"] is None for one in data)
        async with api(tmp_path) as on:
            assert await counted(on) == found
            await trained(on, model, 5, 3)
            assert (await counted(on))["training"] == 15

    asyncio.run(main())


def test_storage_is_bytes_times_hours_from_save_to_deletion(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            path = (await on.call("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
            await on.service.audit_log.flush()
            size = on.service.store.all(Checkpoint)[0].size_bytes
            now = time.time()
            begun = now - 5400
            await on.service.store.write(lambda db: db.execute(STORED.update().values(begun=begun)))
            events = [one for one in (await bill(on, 3))["data"] if one["event_info"]["type"] == "storage"]
            total = sum(one["event_info"]["gigabyte_hours"] for one in events)
            assert total == pytest.approx(1.5 * size / 1e9, rel=0.01)
            first = int(begun // 3600)
            assert len(events) == int(now // 3600) - first + 1
            begins = datetime.fromisoformat(events[0]["bucket_start"])
            assert begins.timestamp() == first * 3600
            share = events[0]["event_info"]["gigabyte_hours"] / (size / 1e9)
            assert share == pytest.approx((first + 1) - begun / 3600, rel=1e-6)
            await on.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a")
            await on.service.audit_log.flush()
            async with on.service.store.database.connect() as db:
                [row] = (await db.execute(select(STORED))).all()
            assert row.ended == pytest.approx(time.time(), abs=5)
            after = [one for one in (await bill(on, 3))["data"] if one["event_info"]["type"] == "storage"]
            assert sum(one["event_info"]["gigabyte_hours"] for one in after) == pytest.approx(total, rel=0.01)
            many = [{**row._mapping, "id": f"c{n}", "begun": now - 7200 - n, "ended": now} for n in range(500)]
            await on.service.store.write(lambda db: db.execute(STORED.insert(), many))
            events = [one for one in (await bill(on, 4))["data"] if one["event_info"]["type"] == "storage"]
            wanted = sum(now - one["begun"] for one in many) / 3600 * size / 1e9
            total = sum(one["event_info"]["gigabyte_hours"] for one in events)
            assert total == pytest.approx(wanted + 1.5 * size / 1e9, rel=1e-3)
            assert len(events) == int(now // 3600) - int(many[-1]["begun"] // 3600) + 1
            stored = (await on.http.get("/api/v1/billing/usage/checkpoints/current")).json()
            assert stored["data"] == []
            assert path

    asyncio.run(main())


@pytest.mark.parametrize(
    ("starting_on", "ending_before", "told"),
    [
        ("2026-07-13T00:30:00Z", "2026-07-13T02:00:00Z", "whole hours"),
        ("2026-07-13T00:00:00", "2026-07-13T02:00:00Z", "whole hours"),
        ("2026-07-13T02:00:00Z", "2026-07-13T02:00:00Z", "empty or too long"),
        ("2026-07-13T02:00:00Z", "2026-07-28T02:00:00Z", "empty or too long"),
        ("2100-01-01T00:00:00Z", "2100-01-02T00:00:00Z", "in the future"),
        ("yesterday", "2026-07-13T02:00:00Z", "starting_on"),
    ],
)
def test_a_window_that_is_none_is_refused(starting_on: str, ending_before: str, told: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            query = f"starting_on={starting_on}&ending_before={ending_before}"
            answer = await on.http.get(f"/api/v1/billing/usage/events?{query}")
            assert answer.status_code == 400
            assert told in answer.json()["detail"]

    asyncio.run(main())


def test_the_audit_log_says_what_was_done_and_by_whom(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            session = model.partition(":")[0]
            at = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
            path = (await on.call("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
            await on.call("save_weights", {"model_id": model, "seq_id": 2, "path": "a", "overwrite": True})
            await on.post("load_weights", {"model_id": model, "seq_id": 3, "path": path, "optimizer": True})
            await on.http.post(f"{at}/publish")
            await on.http.delete(f"{at}/publish")
            await on.http.put(f"{at}/ttl", json={"ttl_seconds": 3600})
            await on.http.put(f"/api/v1/sessions/{session}/project", json={"project_id": "p"})
            [checkpoint] = [one for one in on.service.store.all(Checkpoint) if not one.deleted]
            await on.service.store.update(Checkpoint, checkpoint.id, expires=time.time())
            on.service.sessions.wake()
            await asyncio.sleep(0.2)
        async with api(tmp_path) as on:
            entries = (await on.http.get("/api/v1/audit")).json()["entries"]
            assert [one["event"] for one in entries] == [
                "checkpoint_created",
                "checkpoint_overwritten",
                "checkpoint_created",
                "checkpoint_read",
                "checkpoint_published",
                "checkpoint_unpublished",
                "checkpoint_ttl_set",
                "project_session_assigned",
                "checkpoint_expired",
            ]
            assert entries[3]["event_details"] == {
                "actor": "local",
                "tinker_path": path,
                "model_id": model,
                "purpose": "training",
            }
            times = [datetime.fromisoformat(one["timestamp"]) for one in entries]
            assert times == sorted(times)
            assert all(one.tzinfo is not None for one in times)
            [moved] = (await on.http.get("/api/v1/audit?event_type=projects")).json()["entries"]
            assert moved["event_details"]["project_id"] == "p"
            today, before = (f"{datetime.now(UTC).date() - timedelta(days=days)}" for days in (0, 1))
            assert len((await on.http.get(f"/api/v1/audit?day={today}")).json()["entries"]) == 9
            assert (await on.http.get(f"/api/v1/audit?day={before}")).json() == {"entries": []}

    asyncio.run(main())


def test_a_trace_shows_when_requests_waited_and_ran(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            session = model.partition(":")[0]
            began = time.time() * 1e6
            await trained(on, model, 1, 7)
            await on.step(model, 2)
            await sampled(on, session, [5, 6])
            told = (await on.http.get(f"/api/v1/sessions/{session}/trace_export")).json()
            assert told["status"] == "ready"
            trace = (await on.http.get(told["url"])).json()
            ran = {one["name"]: one for one in trace["traceEvents"] if one["ph"] == "X"}
            assert list(ran) == ["create", "forward_backward", "step"]
            assert ran["forward_backward"]["args"]["tokens"] == 7
            assert began < ran["forward_backward"]["ts"] < ran["step"]["ts"] < time.time() * 1e6
            ends = ran["forward_backward"]["ts"] + ran["forward_backward"]["dur"]
            assert ends <= ran["step"]["ts"]
            pairs: dict[str, list[str]] = {}
            for one in trace["traceEvents"]:
                if one["ph"] in "be":
                    pairs.setdefault(f"{one['cat']} {one['id']}", []).append(one["ph"])
            assert set(map(tuple, pairs.values())) == {("b", "e")}
            assert len(pairs) == 5  # four requests waited, the sample ran beside
            empty = (await on.post("create_session", {})).json()["session_id"]
            url = (await on.http.get(f"/api/v1/sessions/{empty}/trace_export")).json()["url"]
            assert [one["ph"] for one in (await on.http.get(url)).json()["traceEvents"]] == ["M"]
            assert (await on.http.get("/api/v1/sessions/none/trace_export")).status_code == 404

    asyncio.run(main())


def test_times_of_requests_are_forgotten_after_a_week(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            await on.service.audit_log.flush()
            await on.service.store.write(
                lambda db: db.execute(SPANS.update().values(ended=time.time() - KEEP_SPANS_S - 60))
            )
        async with api(tmp_path) as on:
            await on.step(model, 1)
            await asyncio.sleep(0.3)  # the first thing that is done is to forget
            await on.service.audit_log.flush()
            async with on.service.store.database.connect() as db:
                assert [one.kind for one in (await db.execute(select(SPANS))).all()] == ["step"]

    asyncio.run(main())


def test_what_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            model = await on.model()
            await on.service.audit_log.flush()
            with monkeypatch.context() as broken:
                broken.setattr(on.service.store, "write", lambda _work: 1 / 0)
                await trained(on, model, 1, 4)
                on.service.audit_log.record("local", "checkpoint_read", "local")
                with pytest.raises(ZeroDivisionError):
                    await on.service.audit_log.flush()
            assert (await counted(on))["training"] == 4
            assert len((await on.http.get("/api/v1/audit")).json()["entries"]) == 1
            for metadata in ({"a": 1}, {"a": {"b": np.pi}}):
                [session] = on.service.store.all(Session)
                await on.service.store.update(Session, session.id, metadata=json.loads(json.dumps(metadata)))
                shown = (await bill(on))["sessions"][session.id]["user_metadata"]
                assert all(isinstance(value, str) for value in shown.values())

    asyncio.run(main())
