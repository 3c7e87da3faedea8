"""The administrator's view: sessions, use, and the end of what a tenant left."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.support.inprocess import Factory, api, pass_body, until
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
            await until(lambda: "sample" in calls)  # the queues are read once a second
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
