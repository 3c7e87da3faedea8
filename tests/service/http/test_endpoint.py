"""The declarations of the routes, and what every route does with them."""

from __future__ import annotations

import asyncio
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.routing import Match

from tests.service.support.inprocess import api
from tinsmith.service.app import create_app, endpoints
from tinsmith.service.http.bodies import JsonBody
from tinsmith.service.http.endpoint import Call, Endpoint, PathTable
from tools.reference import openapi


def all_endpoints() -> list[Endpoint]:
    return [endpoint for _, endpoint in endpoints()]


def test_functions_take_what_their_routes_declare() -> None:
    """Fails if the type of the call of a function is not the body and the parameters of its route."""
    for endpoint in all_endpoints():
        hints = typing.get_type_hints(endpoint.function)
        body, params = typing.get_args(next(hints[name] for name in hints if name != "return"))
        assert params is endpoint.params, endpoint.path
        if endpoint.body is None:
            assert body is type(None), endpoint.path
        elif isinstance(endpoint.body, JsonBody):
            assert body is endpoint.body.model, endpoint.path


def test_table_and_router_find_the_same_endpoints() -> None:
    """Fails if a path without parts is also that of an earlier route with parts."""
    app: Any = create_app(SimpleNamespace(telemetry=None, drain=None))  # type: ignore[arg-type]
    table = PathTable(app, app.routes)
    assert len(table._endpoints) > 50
    for (method, path), endpoint in table._endpoints.items():
        scope = {"type": "http", "method": method, "path": path}
        routed = next(route for route in app.routes if route.matches(scope)[0] is Match.FULL)
        assert routed.endpoint is endpoint


def test_each_route_is_declared_once() -> None:
    mounted = [f"{method} {prefix}{each.path}" for prefix, each in endpoints() for method in each.methods]
    assert sorted(mounted) == sorted(set(mounted))


def test_openapi_schema_has_every_route() -> None:
    made = openapi.schema()
    assert sum(map(len, made["paths"].values())) == sum(len(endpoint.methods) for endpoint in all_endpoints())
    body = made["paths"]["/api/v1/create_session"]["post"]["requestBody"]["content"]
    assert body == {"application/json": {"schema": {"$ref": "#/components/schemas/SessionBody"}}}
    [header] = made["paths"]["/api/v1/create_session"]["post"]["parameters"]
    assert (header["in"], header["name"], header["required"]) == ("header", "x-idempotency-key", False)
    [expires, signature] = made["paths"]["/api/v1/files/{folder}/{name}"]["head"]["parameters"][2:]
    assert (expires["in"], expires["required"], signature["name"]) == ("query", True, "signature")


def test_invalid_parameters_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            for path, headers, place in (
                ("training_runs?limit=-1", {}, "query.limit"),
                ("training_runs?access_scope=all", {}, "query.access_scope"),
                ("admin/sessions?ended=perhaps", {}, "query.ended"),
                ("billing/usage/events?starting_on=2026-01-01T00:00:00Z", {}, "query.ending_before"),
                ("files/x/y?expires=soon&signature=", {}, "query.expires"),
            ):
                refused = await app.send("GET", f"/api/v1/{path}", b"", **headers)
                assert (refused.status_code, place in refused.json()["detail"]) == (400, True), refused.text
            refused = await app.send("POST", "/api/v1/create_session", {}, **{"X-Idempotency-Key": "k" * 257})
            assert refused.json()["detail"].startswith("'header.x-idempotency-key': ")
            assert (await app.send("GET", "/api/v1/training_runs?limit=x&limit=2&other=1", b"")).status_code == 200

    asyncio.run(main())


def test_methods_that_a_path_lacks_are_refused(tmp_path: Path) -> None:
    """Fails with Starlette's HEAD for each GET."""

    async def main() -> None:
        async with api(tmp_path) as app:
            for method, path in (("HEAD", "training_runs"), ("GET", "optim_step"), ("PUT", "training_runs/x")):
                refused = await app.send(method, f"/api/v1/{path}", b"")
                assert refused.status_code == 405
                assert refused.headers["content-type"] == "application/json"

    asyncio.run(main())


def test_call_of_an_open_route_has_no_tenant() -> None:
    call: Call[None] = Call(
        http=None,  # type: ignore[arg-type]
        service=None,  # type: ignore[arg-type]
        caller=None,
        params=None,
        body=None,
        content=b"",
    )
    with pytest.raises(AssertionError, match="needs no key"):
        _ = call.tenant
