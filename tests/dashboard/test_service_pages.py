"""Pages of a service: of its own HTTP API, inside `tinsmith serve`, and what they need a key for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from tests.service.support.inprocess import KEY, Api, api, pass_body
from tinsmith.cli.serve import mounted_dashboard
from tinsmith.dashboard.service_state import ServiceClient, Throughput
from tinsmith.errors import ConfigError
from tinsmith.service.app import create_app
from tinsmith.service.tenancy.keys import create_key

LOCAL = {"host": "127.0.0.1:8000", "accept": "text/html"}


def with_service(tmp_path: Path, use: Callable[[Api, httpx.AsyncClient], Awaitable[None]], **config: str) -> None:
    """Use a service with a dashboard in the process of the test."""

    async def run() -> None:
        async with api(tmp_path / "data", database=None, **config) as app:
            served = create_app(app.service, lambda service, http: mounted_dashboard(tmp_path, service, http))
            transport = httpx.ASGITransport(served, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=LOCAL) as http:
                await use(app, http)

    asyncio.run(run())


def test_page_shows_models_tenants_and_sessions(tmp_path: Path) -> None:
    async def use(app: Api, http: httpx.AsyncClient) -> None:
        model = await app.model()
        await app.result((await app.send("POST", "/api/v1/forward_backward", pass_body(model, 1))).json())
        page = (await http.get("/dashboard/service")).text
        assert "<td>toy</td>" in page
        assert '<th class="num">trained/s</th>' in page
        assert model.partition(":")[0] in page
        [tenant] = (await ServiceClient("http://t", KEY, httpx.ASGITransport(create_app(app.service))).state()).tenants
        assert (tenant["owner"], tenant["models"]) == ("local", 1)
        assert "<td>local</td>" in page

    with_service(tmp_path, use)


def test_mounted_pages_link_to_their_path(tmp_path: Path) -> None:
    async def use(app: Api, http: httpx.AsyncClient) -> None:
        for path, target in (("/dashboard", "/dashboard/"), ("/dashboard/", "/dashboard/runs")):
            assert (await http.get(path)).headers["location"] == target
        page = (await http.get("/dashboard/runs")).text
        links = [part.partition('"')[0] for part in page.split('href="')[1:] + page.split('src="')[1:]]
        assert all(link.startswith(("/dashboard/", "data:")) for link in links)
        assert (await http.get("/dashboardx")).json()["detail"].startswith("GET /dashboardx is not served here")
        assert (await http.get("/dashboard/static/htmx.min.js")).status_code == 200
        metrics = (await http.get("/metrics")).text
        assert 'route="/dashboard"' in metrics
        assert 'route="/dashboard/' not in metrics

    with_service(tmp_path, use)


def test_service_with_tenants_needs_an_admin_key(tmp_path: Path) -> None:
    async def use(app: Api, http: httpx.AsyncClient) -> None:
        assert (await http.get("/dashboard/service")).status_code == 200
        plain, _ = await create_key(app.service.store.database, "alice", "alice")
        await app.service.tenants.reload()
        assert (await http.get("/dashboard/service")).headers["location"].startswith("/dashboard/login")
        assert (await http.post("/dashboard/login", data={"key": plain})).status_code == 401
        login = await http.post("/dashboard/login", data={"key": KEY, "next": "/service"})
        assert login.headers["location"] == "/dashboard/service"
        assert (await http.get("/dashboard/service")).status_code == 200

    with_service(tmp_path, use)


def test_public_service_needs_an_admin_key(tmp_path: Path) -> None:
    async def use(app: Api, http: httpx.AsyncClient) -> None:
        assert (await http.get("/dashboard/runs")).status_code == 303
        headers = {"x-api-key": KEY, "host": "example.org"}
        assert (await http.get("/dashboard/runs", headers=headers)).status_code == 200

    with_service(tmp_path, use, host="0.0.0.0")


def test_names_of_tenants_and_sessions_are_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"

    async def use(app: Api, http: httpx.AsyncClient) -> None:
        await app.post("create_session", {"tags": [], "display_name": hostile})
        page = (await http.get("/dashboard/service")).text
        assert hostile not in page
        assert "&lt;script&gt;" in page

    with_service(tmp_path, use)


def test_service_that_does_not_answer_is_said(dashboard: Callable[..., TestClient]) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = ServiceClient("http://nowhere:1", "key", httpx.MockTransport(refuse))
    response = dashboard(service=client).get("/service")
    assert response.status_code == 502
    assert "No server responds at http://nowhere:1: refused." in response.text


def test_refused_keys_are_said() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(403, json={"detail": "The key is not an admin key."}))
    with pytest.raises(ConfigError, match=r"The key is not an admin key\."):
        asyncio.run(ServiceClient("http://t", "key", transport).state())


def test_throughput_is_the_difference_of_samples() -> None:
    throughput = Throughput()
    for now, tokens in ((0.0, 100.0), (1.0, 500.0), (10.0, 600.0), (20.0, 1600.0)):
        throughput.add(now, {("a", "sample"): tokens, ("b", "sample"): 2 * tokens, ("b", "forward_backward"): tokens})
    chart = throughput.chart()
    assert (chart["steps"], chart["lines"][1]["values"]) == ([10.0, 20.0], [150.0, 300.0])
    assert [throughput.per_second(model, "sample") for model in ("a", "b", "none")] == [75.0, 150.0, 0.0]
    assert throughput.per_second("b", "forward_backward") == 75.0
    throughput.add(100.0, {("a", "sample"): 2400.0, ("b", "sample"): 3200.0, ("b", "forward_backward"): 1600.0})
    assert throughput.per_second("a", "sample") == 10.0  # between the last two, which are over a minute apart
    throughput.add(30.0, {("b", "sample"): 5.0})  # a server that was started again
    assert throughput.chart()["lines"] == []
    assert throughput.per_second("b", "sample") is None
