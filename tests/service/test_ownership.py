"""Checkpoints of another owner: hidden unless published or shared by token, and never writable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from tests.service.support.inprocess import KEY, Api, api
from tinsmith.service.app import create_app
from tinsmith.service.storage.records import Checkpoint, Model, Session
from tinsmith.service.tenancy.keys import create_key


@dataclass(frozen=True)
class TwoTenants:
    """A service with a checkpoint of its own tenant, and a client of another tenant."""

    app: Api
    model: str
    path: str
    stranger: httpx.AsyncClient

    @property
    def route(self) -> str:
        return f"training_runs/{self.model}/checkpoints/weights/a"

    async def load(self, **more) -> httpx.Response:
        """Load the checkpoint into a new model of the stranger."""
        session = (await self.stranger.post("create_session", json={})).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "path": self.path, "optimizer": False, **more}
        return await self.stranger.post("load_weights", json=body)


@asynccontextmanager
async def two_tenants(data: Path) -> AsyncIterator[TwoTenants]:
    async with api(data) as app:
        model = await app.model()
        path = (await app.call("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
        key, _ = await create_key(app.service.store.database, "theirs", "stranger")
        await app.service.tenants.reload()
        transport, headers = httpx.ASGITransport(create_app(app.service)), {"X-API-Key": key}
        async with httpx.AsyncClient(transport=transport, base_url="http://t/api/v1/", headers=headers) as stranger:
            yield TwoTenants(app, model, path, stranger)


def records(app: Api) -> list:
    return [*app.service.store.all(Model), *app.service.store.all(Checkpoint), *app.service.store.all(Session)]


def test_unpublished_checkpoint_is_unknown_to_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_tenants(tmp_path) as tenants:
            session = tenants.model.rpartition(":train:")[0]
            before = records(tenants.app)
            calls = [
                ("GET", f"training_runs/{tenants.model}", None),
                ("GET", f"training_runs/{tenants.model}?access_scope=accessible", None),
                ("GET", f"training_runs/{tenants.model}/checkpoints", None),
                ("DELETE", tenants.route, None),
                ("POST", f"{tenants.route}/publish", None),
                ("DELETE", f"{tenants.route}/publish", None),
                ("PUT", f"{tenants.route}/ttl", {"ttl_seconds": 3600}),
                ("POST", f"{tenants.route}/access_token", {}),
                ("GET", f"{tenants.route}/external_weights_urls", None),
                ("POST", "weights_info", {"tinker_path": tenants.path}),
                ("POST", "copy_weights", {"source_path": tenants.path, "destination_project_id": "p"}),
                ("GET", f"sessions/{session}", None),
                ("PUT", f"sessions/{session}/project", {"project_id": "p"}),
                ("POST", f"sessions/{session}/finish", {}),
                ("POST", "copy_weights", {"source_path": tenants.path, "session_id": session, "model_seq_id": 5}),
            ]
            for method, url, body in calls:
                answer = await tenants.stranger.request(method, url, json=body)
                assert answer.status_code == 404, (method, url, answer.text)
                assert tenants.path in answer.text or "There is no" in answer.text
            assert records(tenants.app) == before
            assert (await tenants.load()).status_code == 404
            for url in ("training_runs", "training_runs?access_scope=accessible", "checkpoints", "sessions"):
                text = (await tenants.stranger.get(url)).text
                assert tenants.model not in text
                assert f'"{session}"' not in text

    asyncio.run(main())


def test_published_checkpoint_is_readable_but_not_writable(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_tenants(tmp_path) as tenants:
            assert (await tenants.app.post(f"{tenants.route}/publish", {})).status_code == 204
            assert (await tenants.load()).status_code == 200
            assert (await tenants.stranger.post("weights_info", json={"tinker_path": tenants.path})).status_code == 200
            copied = await tenants.stranger.post(
                "copy_weights", json={"source_path": tenants.path, "destination_project_id": "p"}
            )
            assert copied.status_code == 200
            seen = (await tenants.stranger.get(f"training_runs/{tenants.model}/checkpoints")).json()["checkpoints"]
            assert [checkpoint["tinker_path"] for checkpoint in seen] == [tenants.path]
            for scope, status in (("accessible", 200), ("owned", 404)):
                run = await tenants.stranger.get(f"training_runs/{tenants.model}?access_scope={scope}")
                assert run.status_code == status
            listed = (await tenants.stranger.get("training_runs?access_scope=accessible")).json()["training_runs"]
            assert tenants.model in [run["training_run_id"] for run in listed]
            for method, url in (
                ("DELETE", tenants.route),
                ("DELETE", f"{tenants.route}/publish"),
                ("POST", f"{tenants.route}/publish"),
            ):
                assert (await tenants.stranger.request(method, url)).status_code == 404
            assert (await tenants.app.http.delete(f"/api/v1/{tenants.route}/publish")).status_code == 204
            assert (await tenants.load()).status_code == 404
            own = (await tenants.stranger.get("checkpoints")).json()["checkpoints"]
            assert [item["tinker_path"] for item in own] == [copied.json()["tinker_path"]]

    asyncio.run(main())


def test_access_token_is_valid_for_one_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_tenants(tmp_path) as tenants:
            await tenants.app.call("save_weights", {"model_id": tenants.model, "seq_id": 2, "path": "b"})
            weights_token = (await tenants.app.post(f"{tenants.route}/access_token", {"ttl_seconds": 60})).json()[
                "weights_access_token"
            ]
            assert (await tenants.load(weights_access_token=weights_token)).status_code == 200
            copied = await tenants.stranger.post(
                "copy_weights",
                json={"source_path": tenants.path, "destination_project_id": "p"},
                headers={"X-Tinker-Weights-Access-Token": weights_token},
            )
            assert copied.status_code == 200
            other = tenants.path.replace("weights/a", "weights/b")
            assert (await tenants.load(path=other, weights_access_token=weights_token)).status_code == 400
            assert (await tenants.load(path=other, weights_access_token=KEY)).status_code == 200
            as_key = await tenants.stranger.get("checkpoints", headers={"X-API-Key": weights_token})
            assert as_key.status_code == 401

    asyncio.run(main())


def test_copy_is_idempotent_by_key(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_tenants(tmp_path) as tenants:
            body = {"source_path": tenants.path, "destination_project_id": "p"}

            async def copy(key: str) -> str:
                answer = await tenants.app.http.post(
                    "/api/v1/copy_weights", json=body, headers={"X-Idempotency-Key": key}
                )
                return answer.json()["tinker_path"]

            same = await asyncio.gather(*(copy("one") for _ in range(3)))
            assert len(set(same)) == 1
            assert await copy("two") not in same
        async with api(tmp_path) as app:
            again = await app.http.post("/api/v1/copy_weights", json=body, headers={"X-Idempotency-Key": "one"})
            assert again.json()["tinker_path"] == same[0]
            assert len([item for item in app.service.store.all(Checkpoint) if item.name == "a"]) == 3
            events = (await app.http.get("/api/v1/audit")).json()["entries"]
            assert [item["event"] for item in events if "copied_from" in str(item)] == ["checkpoint_created"] * 2
            run = same[0].split("/")[2]
            refused = await app.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}})
            assert refused.status_code == 400

    asyncio.run(main())


def test_copy_becomes_a_model_of_a_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_tenants(tmp_path) as tenants:
            session = tenants.model.rpartition(":train:")[0]
            body = {"source_path": tenants.path, "session_id": session, "model_seq_id": 7}
            for _ in range(2):
                made = (await tenants.app.post("copy_weights", body)).json()
                assert made == {"tinker_path": f"tinker://{session}:train:7/weights/a"}
            taken = await tenants.app.post("copy_weights", {**body, "model_seq_id": 0})
            assert taken.status_code == 400
            assert "exists" in taken.text

    asyncio.run(main())


def test_tokens_expire_with_their_key(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            token = (await app.post("auth/token", {})).json()["jwt"]
            headers = {"X-API-Key": token}
            assert (await app.http.get("/api/v1/sessions", headers=headers)).status_code == 200
            again = await app.http.post("/api/v1/auth/token", headers=headers)
            assert app.service.signer.read_token(again.json()["jwt"]) == app.service.signer.read_token(token)
        async with api(tmp_path, api_key="tml-another") as app:
            gone = await app.http.get("/api/v1/sessions", headers=headers)
            assert gone.status_code == 401
            assert 'error="invalid_token"' in gone.headers["WWW-Authenticate"]

    asyncio.run(main())


def test_signed_link_expires(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, public_url="https://front.example/tinker/") as app:
            model = await app.model()
            await app.call("save_weights_external", {"model_id": model, "seq_id": 1, "path": "e"})
            at = f"/api/v1/training_runs/{model}/checkpoints/external_weights/e/external_weights_urls"
            [url, _] = (await app.http.get(at)).json()["urls"].values()
            assert url.startswith("https://front.example/tinker/api/v1/files/")
            [checkpoint] = app.service.store.all(Checkpoint)
            path = f"{checkpoint.id}/adapter_config.json"
            for ends, status in ((time.time() + 3600, 200), (time.time() - 1, 410)):
                query = app.service.signer.link(path, int(ends))
                assert (await app.http.get(f"/api/v1/files/{path}?{query}", headers={})).status_code == status

    asyncio.run(main())


def test_key_revokes_itself_and_its_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        async with two_tenants(tmp_path) as tenants:
            me = (await tenants.stranger.get("auth/apikey/me")).json()
            assert (me["name"], me["details"]["user_details"]["email"]) == ("theirs", "stranger")
            token = {"X-API-Key": (await tenants.stranger.post("auth/token")).json()["jwt"]}
            assert (await tenants.stranger.get("auth/apikey/me", headers=token)).json() == me
            assert (await tenants.stranger.delete("auth/apikey/me")).status_code == 204
            for headers in (None, token):
                assert (await tenants.stranger.get("sessions", headers=headers)).status_code == 401
            entries = await tenants.app.service.audit_log.entries("stranger", "organizations", datetime.now(UTC).date())
            events = [(entry["event"], entry["details"]) for entry in entries]
            assert events == [
                ("organization_key_created", {"actor": "tinsmith keys", "key": "theirs"}),
                ("organization_key_revoked", {"actor": "stranger", "key": "theirs"}),
            ]
            own = await tenants.app.http.delete("/api/v1/auth/apikey/me")
            assert (own.status_code, "server's own" in own.text) == (400, True)

    asyncio.run(main())
