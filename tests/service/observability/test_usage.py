"""Audit log, billing and trace export, also after a restart."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from tests.service.support.inprocess import Api, api, pass_body, until
from tinsmith.service.observability.audit import KEEP_SPANS_S
from tinsmith.service.storage.records import Checkpoint, Session
from tinsmith.service.storage.tables import SPANS, STORED


def window(hours: int = 1) -> str:
    whole = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    times = (whole - timedelta(hours=hours), whole + timedelta(hours=1))
    return "&".join(
        f"{name}={at:%Y-%m-%dT%H:%M:%SZ}" for name, at in zip(("starting_on", "ending_before"), times, strict=True)
    )


async def bill(app: Api, hours: int = 1) -> dict:
    answer = await app.http.get(f"/api/v1/billing/usage/events?{window(hours)}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def counted(app: Api) -> dict[str, int]:
    """Billed tokens or checkpoints of the last hours by kind."""
    counts: dict[str, int] = {}
    for event in (await bill(app))["data"]:
        info = event["event_info"]
        kind = info["type"] + ("_cached" if info.get("cached") else "")
        counts[kind] = counts.get(kind, 0) + info.get("token_count", info.get("count", 0))
    return counts


async def trained(app: Api, model: str, seq: int, tokens: int) -> None:
    await app.result((await app.post("forward_backward", pass_body(model, seq, range(5, 6 + tokens)))).json())


async def sampled(app: Api, session: str, prompt: list[int]) -> None:
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = (await app.post("create_sampling_session", body)).json()["sampling_session_id"]
    params = {"max_tokens": 4, "stop": []}
    ask = {"prompt": {"chunks": [{"tokens": prompt}]}, "num_samples": 2, "sampling_params": params}
    promise = (await app.post("asample", {"sampling_session_id": sampler, "seq_id": 0, **ask})).json()
    assert (await app.result(promise)).status_code == 200


def test_tokens_are_billed_by_kind_and_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            session = model.partition(":")[0]
            await trained(app, model, 1, 7)
            await trained(app, model, 2, 5)
            bad = await app.post("forward_backward", pass_body(model, 3, loss_fn="nonsense"))
            assert bad.status_code == 400
            await sampled(app, session, [5, 6, 7, 8])
            await app.call("save_weights", {"model_id": model, "seq_id": 4, "path": "a"})
            counts = await counted(app)
            assert counts["training"] == 12
            assert counts["sampling_sample"] == 8
            assert counts["sampling_prefill"] + counts.get("sampling_prefill_cached", 0) == 4
            assert counts["checkpoint"] == 1
            data = (await bill(app))["data"]
            tokens = [event for event in data if event["event_info"]["type"] != "storage"]
            assert {(event["session_id"], event["base_model"]) for event in tokens} == {(session, "toy")}
            assert all(event["estimated_cost_usd"] is None for event in data)
        async with api(tmp_path) as app:
            assert await counted(app) == counts
            await trained(app, model, 5, 3)
            assert (await counted(app))["training"] == 15

    asyncio.run(main())


def test_storage_is_billed_from_save_to_deletion(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            path = (await app.call("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
            await app.service.audit_log.flush()
            size = app.service.store.all(Checkpoint)[0].size_bytes
            now = time.time()
            begun = now - 5400
            await app.service.store.write(lambda db: db.execute(STORED.update().values(begun=begun)))
            events = [event for event in (await bill(app, 3))["data"] if event["event_info"]["type"] == "storage"]
            total = sum(event["event_info"]["gigabyte_hours"] for event in events)
            assert total == pytest.approx(1.5 * size / 1e9, rel=0.01)
            first = int(begun // 3600)
            assert len(events) == int(now // 3600) - first + 1
            begins = datetime.fromisoformat(events[0]["bucket_start"])
            assert begins.timestamp() == first * 3600
            share = events[0]["event_info"]["gigabyte_hours"] / (size / 1e9)
            assert share == pytest.approx((first + 1) - begun / 3600, rel=1e-6)
            before = time.time()
            await app.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a")
            await app.service.audit_log.flush()
            async with app.service.store.database.connect() as db:
                [row] = (await db.execute(select(STORED))).all()
            assert before <= row.ended <= time.time()
            billed = [event for event in (await bill(app, 3))["data"] if event["event_info"]["type"] == "storage"]
            assert sum(event["event_info"]["gigabyte_hours"] for event in billed) == pytest.approx(total, rel=0.01)
            many = [{**row._mapping, "id": f"c{n}", "begun": now - 7200 - n, "ended": now} for n in range(500)]
            await app.service.store.write(lambda db: db.execute(STORED.insert(), many))
            events = [event for event in (await bill(app, 4))["data"] if event["event_info"]["type"] == "storage"]
            wanted = sum(now - row["begun"] for row in many) / 3600 * size / 1e9
            total = sum(event["event_info"]["gigabyte_hours"] for event in events)
            assert total == pytest.approx(wanted + 1.5 * size / 1e9, rel=1e-3)
            assert len(events) == int(now // 3600) - int(many[-1]["begun"] // 3600) + 1
            stored = (await app.http.get("/api/v1/billing/usage/checkpoints/current")).json()
            assert stored["data"] == []
            assert path

    asyncio.run(main())


@pytest.mark.parametrize(
    ("starting_on", "ending_before", "says"),
    [
        ("2026-07-13T00:30:00Z", "2026-07-13T02:00:00Z", "whole hours"),
        ("2026-07-13T00:00:00", "2026-07-13T02:00:00Z", "whole hours"),
        ("2026-07-13T02:00:00Z", "2026-07-13T02:00:00Z", "empty or too long"),
        ("2026-07-13T02:00:00Z", "2026-07-28T02:00:00Z", "empty or too long"),
        ("2100-01-01T00:00:00Z", "2100-01-02T00:00:00Z", "in the future"),
        ("yesterday", "2026-07-13T02:00:00Z", "starting_on"),
    ],
)
def test_rejects_invalid_billing_windows(starting_on: str, ending_before: str, says: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            query = f"starting_on={starting_on}&ending_before={ending_before}"
            answer = await app.http.get(f"/api/v1/billing/usage/events?{query}")
            assert answer.status_code == 400
            assert says in answer.json()["detail"]

    asyncio.run(main())


def test_audit_log_lists_events_with_their_actor(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            session = model.partition(":")[0]
            at = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
            path = (await app.call("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
            await app.call("save_weights", {"model_id": model, "seq_id": 2, "path": "a", "overwrite": True})
            await app.post("load_weights", {"model_id": model, "seq_id": 3, "path": path, "optimizer": True})
            await app.http.post(f"{at}/publish")
            await app.http.delete(f"{at}/publish")
            await app.http.put(f"{at}/ttl", json={"ttl_seconds": 3600})
            await app.http.put(f"/api/v1/sessions/{session}/project", json={"project_id": "p"})
            [checkpoint] = [record for record in app.service.store.all(Checkpoint) if not record.deleted]
            log, changes = app.service.audit_log, []
            changed = log.checkpoint_changed
            log.checkpoint_changed = lambda *entry: (changed(*entry), changes.append(entry[1]))  # type: ignore[method-assign]
            await app.service.store.update(Checkpoint, checkpoint.id, expires=time.time())
            app.service.sessions.wake()
            await until(lambda: "checkpoint_expired" in changes)
        async with api(tmp_path) as app:
            entries = (await app.http.get("/api/v1/audit")).json()["entries"]
            assert [entry["event"] for entry in entries] == [
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
            times = [datetime.fromisoformat(entry["timestamp"]) for entry in entries]
            assert times == sorted(times)
            assert all(timestamp.tzinfo is not None for timestamp in times)
            [moved] = (await app.http.get("/api/v1/audit?event_type=projects")).json()["entries"]
            assert moved["event_details"]["project_id"] == "p"
            today, before = (f"{datetime.now(UTC).date() - timedelta(days=days)}" for days in (0, 1))
            assert len((await app.http.get(f"/api/v1/audit?day={today}")).json()["entries"]) == 9
            assert (await app.http.get(f"/api/v1/audit?day={before}")).json() == {"entries": []}

    asyncio.run(main())


def test_trace_export_shows_when_requests_waited_and_ran(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            session = model.partition(":")[0]
            began = time.time() * 1e6
            await trained(app, model, 1, 7)
            await app.step(model, 2)
            await sampled(app, session, [5, 6])
            export = (await app.http.get(f"/api/v1/sessions/{session}/trace_export")).json()
            assert export["status"] == "ready"
            trace = (await app.http.get(export["url"])).json()
            ran = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
            assert list(ran) == ["create", "forward_backward", "step"]
            assert ran["forward_backward"]["args"]["tokens"] == 7
            assert began < ran["forward_backward"]["ts"] < ran["step"]["ts"] < time.time() * 1e6
            ends = ran["forward_backward"]["ts"] + ran["forward_backward"]["dur"]
            assert ends <= ran["step"]["ts"]
            pairs: dict[str, list[str]] = {}
            for event in trace["traceEvents"]:
                if event["ph"] in "be":
                    pairs.setdefault(f"{event['cat']} {event['id']}", []).append(event["ph"])
            assert set(map(tuple, pairs.values())) == {("b", "e")}
            assert len(pairs) == 5  # four requests waited; the sample has a pair of its own
            empty = (await app.post("create_session", {})).json()["session_id"]
            url = (await app.http.get(f"/api/v1/sessions/{empty}/trace_export")).json()["url"]
            assert [event["ph"] for event in (await app.http.get(url)).json()["traceEvents"]] == ["M"]
            assert (await app.http.get("/api/v1/sessions/none/trace_export")).status_code == 404

    asyncio.run(main())


def test_spans_of_requests_are_deleted_after_a_week(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            await app.service.audit_log.flush()
            await app.service.store.write(
                lambda db: db.execute(SPANS.update().values(ended=time.time() - KEEP_SPANS_S - 60))
            )
        async with api(tmp_path) as app:
            await app.step(model, 1)
            for _ in range(6000):  # old spans are deleted at the start
                await app.service.audit_log.flush()
                async with app.service.store.database.connect() as db:
                    kinds = [span.kind for span in (await db.execute(select(SPANS))).all()]
                if kinds == ["step"]:
                    break
                await asyncio.sleep(0.01)
            assert kinds == ["step"]

    asyncio.run(main())


def test_failed_flush_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            await app.service.audit_log.flush()
            with monkeypatch.context() as broken:
                broken.setattr(app.service.store, "write", lambda _work: 1 / 0)
                await trained(app, model, 1, 4)
                app.service.audit_log.record("local", "checkpoint_read", "local")
                with pytest.raises(ZeroDivisionError):
                    await app.service.audit_log.flush()
            assert (await counted(app))["training"] == 4
            assert len((await app.http.get("/api/v1/audit")).json()["entries"]) == 1
            for metadata in ({"a": 1}, {"a": {"b": np.pi}}):
                [session] = app.service.store.all(Session)
                await app.service.store.update(Session, session.id, metadata=json.loads(json.dumps(metadata)))
                shown = (await bill(app))["sessions"][session.id]["user_metadata"]
                assert all(isinstance(value, str) for value in shown.values())

    asyncio.run(main())
