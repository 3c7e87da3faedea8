"""Tenant isolation: two tenants send each other's ids to every route.

Routes are read from the app, so a new route fails here until it has a line in CASES. Each request is sent twice,
with ids of another tenant and with ids that do not exist; the responses must be equal except for the ids.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.service.support.inprocess import Api, api, loss_in, pass_body
from tinsmith.service.app import endpoints
from tinsmith.service.storage.records import Checkpoint, CustomLoss, Model, SamplingSession, Session

SECRET = "opensesame"
"""In every name that a tenant chooses."""


@dataclass(frozen=True, kw_only=True)
class Ids:
    """Ids of one tenant, or ids that do not exist."""

    session: str
    number: str
    """Of a model, in its id."""
    name: str
    """Of a checkpoint of each kind."""
    request: str
    sample: str
    folder: str
    own_session: str = ""
    """A session of the calling tenant."""

    @property
    def model(self) -> str:
        return f"{self.session}:train:{self.number}"

    @property
    def sampler(self) -> str:
        return f"{self.session}:sample:0"

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/weights/{self.name}"


Body = Callable[[Ids], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Bodies to send to a route, and its response to a tenant that does not own the ids in them."""

    bodies: tuple[Body, ...] = (lambda ids: {},)
    status: int = 404
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    single_use: bool = False
    """The request can be sent only once."""


def unknown(*bodies: Body) -> Case:
    """Names an object of another tenant: refused as if it did not exist."""
    return Case(bodies=bodies or (lambda ids: {},))


def of_path() -> Case:
    """The object is in the path."""
    return Case()


def silent(*bodies: Body, status: int = 200) -> Case:
    """Names no object, or has an equal response for every tenant; it contains no data of another tenant."""
    return Case(bodies=bodies or (lambda ids: {},), status=status)


def training(**more: object) -> Case:
    return unknown(lambda ids: {"model_id": ids.model, "seq_id": 50, **more})


def of_model(**more: object) -> Case:
    """The OpenAI API: every name of weights."""
    return unknown(
        lambda ids: {"model": ids.path, **more},
        lambda ids: {"model": f"toy;{ids.path}", **more},
        lambda ids: {"model": ids.model, **more},
        lambda ids: {"model": ids.sampler, **more},
    )


GRAPH = {"inputs": [], "graph": {"format": 1, "nodes": []}}
PROMPT = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 1}}

_FROM, _TO = (f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%d}T00:00:00Z" for days in (-3, 3))
THIS_WEEK = f"?starting_on={_FROM}&ending_before={_TO}"

CASES = {
    "POST /client/config": silent(),
    "POST /client/dynamic_config": silent(),
    "POST /create_session": silent(),
    "POST /session_heartbeat": unknown(lambda ids: {"session_id": ids.session}),
    "POST /sessions/{session_id}/finish": of_path(),
    "POST /telemetry": silent(lambda ids: {"session_id": ids.session, "events": []}),
    "GET /get_server_capabilities": silent(),
    "GET /healthz": silent(),
    "GET /livez": silent(),
    "GET /readyz": silent(),
    "GET /v1/models": silent(),
    "GET /v1/models/{name:path}": unknown(),
    "POST /v1/chat/completions": of_model(messages=[{"role": "user", "content": "hi"}]),
    "POST /v1/responses": of_model(input="hi"),
    "POST /v1/completions": of_model(prompt="hi"),
    "POST /inference/v1/generate": of_model(token_ids=[5, 6], sampling_params={"max_tokens": 1}),
    "GET /metrics": Case(status=403, headers={"x-forwarded-for": "10.0.0.1"}),
    "POST /create_sampling_session": unknown(
        lambda ids: {"session_id": ids.session, "sampling_session_seq_id": 9, "base_model": "toy"},
        lambda ids: {"session_id": ids.session, "sampling_session_seq_id": 0, "base_model": "toy"},
        lambda ids: {"session_id": ids.own_session, "sampling_session_seq_id": 9, "model_path": ids.path},
    ),
    "GET /samplers/{sampler_id}": of_path(),
    "POST /join_sampling_session": unknown(lambda ids: {"sampling_session_id": ids.sampler}),
    "POST /asample": unknown(
        lambda ids: {"sampling_session_id": ids.sampler, "seq_id": 0, **PROMPT},
        lambda ids: {"sampling_session_id": ids.sampler, "seq_id": 77, **PROMPT},
    ),
    "POST /routed_experts": unknown(lambda ids: {"sequence_ids": [f"{ids.sample}:0"]}),
    "GET /audit": silent(),
    "GET /billing/usage/events": replace(silent(), query=THIS_WEEK),
    "GET /billing/usage/checkpoints/current": silent(),
    "GET /sessions/{session_id}/trace_export": of_path(),
    "GET /sessions/{session_id}/queue": of_path(),
    "GET /sessions": silent(),
    "GET /sessions/{session_id}": of_path(),
    "POST /sessions/search": silent(
        lambda ids: {},
        lambda ids: {"session_id": ids.session},
        lambda ids: {"display_name": SECRET},
        lambda ids: {"owner": {"type": "user", "owner_urns": ["tml:organization_user:alice:alice"]}},
    ),
    "PUT /sessions/{session_id}/project": unknown(lambda ids: {"project_id": "mine"}),
    "POST /create_model": unknown(
        lambda ids: {"session_id": ids.session, "model_seq_id": 0, "base_model": "toy"},
        lambda ids: {"session_id": ids.session, "model_seq_id": 9, "base_model": "toy"},
    ),
    "POST /get_info": unknown(lambda ids: {"model_id": ids.model}),
    "POST /forward_backward": unknown(lambda ids: pass_body(ids.model, 50), lambda ids: pass_body(ids.model, 1)),
    "POST /unload_model": unknown(lambda ids: {"model_id": ids.model}),
    "POST /optim_step": training(adam_params={}),
    "POST /import_checkpoint": Case(status=400, query="?name=mine&base_model=toy"),
    "POST /save_weights": training(path="mine", overwrite=True),
    "POST /save_weights_for_sampler": training(path="mine"),
    "POST /save_weights_external": training(path="mine"),
    "POST /load_weights": unknown(
        lambda ids: {"model_id": ids.model, "seq_id": 50, "path": ids.path, "optimizer": False},
        lambda ids: {"session_id": ids.session, "model_seq_id": 0, "path": ids.path, "optimizer": False},
        lambda ids: {"session_id": ids.session, "model_seq_id": 9, "path": ids.path, "optimizer": False},
        lambda ids: {"session_id": ids.own_session, "model_seq_id": 9, "path": ids.path, "optimizer": True},
    ),
    "POST /create_custom_loss": unknown(
        lambda ids: {"session_id": ids.session, "custom_loss_seq_id": 0, "name": "l", **GRAPH},
        lambda ids: {"session_id": ids.session, "custom_loss_seq_id": 9, "name": "l", **GRAPH},
    ),
    "GET /training_runs": silent(),
    "GET /training_runs/{run}": of_path(),
    "GET /training_runs/{run}/checkpoints": of_path(),
    "GET /checkpoints": silent(),
    "POST /retrieve_future": unknown(
        lambda ids: {"request_id": ids.request},
        lambda ids: {"request_id": ids.sample},
        lambda ids: {"request_id": f"{ids.session}:loss:0"},
    ),
    "POST /retrieve_futures": unknown(
        lambda ids: {
            "target": {"type": "sampling_session", "sampling_session_id": ids.sampler, "cloned_sampler_id": 0},
            "prev_cursor": 0,
            "timeout": 0,
            "retrieved_request_ids": [ids.sample],
        }
    ),
    "POST /cancel_future": silent(lambda ids: {"request_id": ids.sample}, lambda ids: {"request_id": ids.request}),
    "HEAD /files/{folder}/{name}": replace(of_path(), query="?expires=99999999999&signature=0"),
    "GET /files/{folder}/{name}": replace(of_path(), query="?expires=99999999999&signature=0"),
    "GET /admin/sessions": Case(status=403),
    "GET /admin/queue": Case(status=403),
    "GET /admin/processes": Case(status=403),
    "GET /admin/usage": Case(status=403),
    "GET /admin/base_models": Case(status=403),
    "POST /admin/base_models": Case(status=403),
    "DELETE /admin/base_models/{name:path}": Case(status=403),
    "POST /admin/sessions/{session_id}/end": Case(status=403),
    "POST /admin/models/{model_id}/end": Case(status=403),
    "POST /admin/requests/{request_id}/cancel": Case(status=403),
    "POST /auth/token": silent(),
    "GET /auth/apikey/me": silent(),
    "DELETE /auth/apikey/me": Case(status=204, single_use=True),
    "POST /weights_info": unknown(lambda ids: {"tinker_path": ids.path}),
    "POST /copy_weights": unknown(
        lambda ids: {"source_path": ids.path, "destination_project_id": "mine"},
        lambda ids: {"source_path": ids.path, "session_id": ids.session, "model_seq_id": 9},
        lambda ids: {"source_path": ids.path, "session_id": ids.own_session, "model_seq_id": 9},
    ),
    "POST /training_runs/{run}/checkpoints/{kind}/{name}/publish": of_path(),
    "DELETE /training_runs/{run}/checkpoints/{kind}/{name}/publish": of_path(),
    "PUT /training_runs/{run}/checkpoints/{kind}/{name}/ttl": unknown(lambda ids: {"ttl_seconds": 3600}),
    "POST /training_runs/{run}/checkpoints/{kind}/{name}/access_token": of_path(),
    "GET /training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": of_path(),
    "GET /training_runs/{run}/checkpoints/{kind}/{name}/archive": of_path(),
    "DELETE /training_runs/{run}/checkpoints/{kind}/{name}": of_path(),
}


def routes() -> list[str]:
    """METHOD /path of every route; /api/v1 is left out."""
    return [
        f"{method} {prefix.removeprefix('/api/v1')}{endpoint.path}"
        for prefix, endpoint in endpoints()
        if prefix != "/oai/api/v1"  # the routes of /v1
        for method in endpoint.methods
    ]


def test_every_route_has_a_case() -> None:
    assert sorted(CASES) == sorted(set(routes())), "a new route needs a line in CASES: its response to another tenant"


def records(app: Api) -> list:
    store = app.service.store
    return [
        item
        for kind in (Session, Model, SamplingSession, Checkpoint, CustomLoss)
        for item in store.all(kind)
        if item.owner == "alice"
    ]


async def fill(alice: Api) -> Ids:
    """Create an object of every kind, named SECRET where tenants choose names, and run requests on them."""
    fields = {"tags": [SECRET], "user_metadata": {"k": SECRET}, "display_name": SECRET, "project_id": SECRET}
    session = (await alice.post("create_session", fields)).json()["session_id"]
    model = await alice.model(session, 0)
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    sampler = (await alice.post("create_sampling_session", sampling)).json()["sampling_session_id"]
    sample = (await alice.post("asample", {"sampling_session_id": sampler, "seq_id": 0, **PROMPT})).json()
    await alice.result(sample)
    trained = (await alice.post("forward_backward", pass_body(model, 1))).json()
    await alice.result(trained)
    for seq, call in enumerate(("save_weights", "save_weights_for_sampler", "save_weights_external"), 2):
        await alice.call(call, {"model_id": model, "seq_id": seq, "path": SECRET, "user_metadata": {"k": SECRET}})
    loss = CustomLoss(id=f"{session}:loss:0", owner="alice", session_id=session, created=1.0, graph=SECRET)
    await alice.service.store.put(loss)
    [made] = [item for item in alice.service.store.all(Checkpoint) if item.kind == "weights"]
    return Ids(
        session=session, number="0", name=SECRET, request=trained["request_id"], sample=sample["request_id"],
        folder=made.id,
    )  # fmt: skip


def nonexistent(ids: Ids) -> Ids:
    """Ids of the same form that do not exist."""
    session = "0" * 8 + ids.session[8:]
    return replace(
        ids, session=session, name="nothing", request=f"{session}:train:0:1", sample=f"{session}:sample:0:0",
        folder="0" * 32,
    )  # fmt: skip


def places(route: str, ids: Ids) -> list[str]:
    """The route's path with the ids in it, once for each kind of checkpoint."""
    parameters = {
        "session_id": ids.session, "sampler_id": ids.sampler, "run": ids.model, "name": ids.name, "folder": ids.folder,
        "model_id": ids.model, "request_id": ids.sample,
    }  # fmt: skip
    path = route.partition(" ")[2]
    path = path if path.startswith(("/metrics", "/livez", "/readyz", "/v1", "/inference")) else f"/api/v1{path}"
    if path.startswith("/v1/models/"):
        parameters["name"] = ids.model
    kinds = ("weights", "sampler_weights", "external_weights") if "{kind}" in path else ("",)
    return [path.replace(":path", "").format(kind=kind, **parameters) for kind in kinds]


def bare(text: str, ids: Ids) -> str:
    """A response without its ids and tokens."""
    for word in (ids.request, ids.sample, ids.path, ids.model, ids.sampler, ids.session, ids.folder, ids.name):
        text = text.replace(word, "*")
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|eyJ[\w.-]+", "*", text)


@pytest.mark.parametrize("route", sorted(CASES))
def test_ids_of_another_tenant_are_unknown(tmp_path: Path, route: str) -> None:
    async def main() -> None:
        case, method = CASES[route], route.partition(" ")[0]
        async with api(tmp_path, custom_losses=True) as app:
            alice, bob = await app.tenant("alice"), await app.tenant("bob")
            hers = await fill(alice)
            own = (await bob.post("create_session", {})).json()["session_id"]
            hers = replace(hers, own_session=own)
            before, result = records(app), (await alice.result({"request_id": hers.request})).content
            for body in case.bodies:
                fields: list[list[str]] = []
                for ids in (hers, nonexistent(hers))[: 1 if case.single_use else 2]:
                    fields.append([])
                    for place in places(route, ids):
                        answer = await bob.send(method, f"{place}{case.query}", body(ids), **case.headers)
                        assert answer.status_code == case.status, (place, answer.text)
                        fields[-1].append(bare(answer.text, ids))
                        sent = json.dumps(str(body(ids))) + place
                        assert SECRET in sent or SECRET not in answer.text
                        assert hers.session in sent or hers.session not in answer.text
                assert fields[0] == fields[-1], "the response reveals which ids exist"
            assert records(app) == before
            assert (await alice.result({"request_id": hers.request})).content == result
            assert (await alice.result({"request_id": hers.sample})).status_code == 200
            passed = (await alice.post("forward_backward", pass_body(hers.model, 50))).json()
            assert loss_in(await alice.result(passed)) > 0, "her model still trains"
            assert await (await app.tenant("carol")).model(), "another tenant is served"

    asyncio.run(main())


def test_idempotency_keys_are_per_tenant(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            alice, bob = await app.tenant("alice"), await app.tenant("bob")

            async def begin(tenant: Api) -> str:
                answer = await tenant.send("POST", "/api/v1/create_session", {}, **{"X-Idempotency-Key": "same"})
                return answer.json()["session_id"]

            hers, his = await begin(alice), await begin(bob)
            assert hers != his
            assert (await begin(alice), await begin(bob)) == (hers, his)

    asyncio.run(main())


def test_keys_of_one_tenant_share_resources(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            alice, ci = await app.tenant("alice"), await app.tenant("ci", "alice")
            hers = await fill(alice)
            assert (await ci.result({"request_id": hers.request})).status_code == 200
            assert (await ci.step(hers.model, 60))["metrics"]

    asyncio.run(main())
