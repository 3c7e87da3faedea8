"""Pages of a service: what it serves, who waits and for how long, who holds what, how fast it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinsmith.dashboard.access import Access
from tinsmith.dashboard.pages import Pages
from tinsmith.dashboard.service_state import ServiceClient, ServiceState, Throughput
from tinsmith.errors import TinsmithError
from tinsmith.plurals import counted

_QUEUED = 200
"""Requests of the queues that are shown."""
_SESSIONS = 200


class ServicePages:
    """Endpoints of the pages of a service."""

    def __init__(self, client: ServiceClient, access: Access, pages: Pages) -> None:
        self._client, self._access, self._pages = client, access, pages

    @property
    def routes(self) -> list[Route]:
        """The routes."""
        return [Route("/service", self.show), Route("/service/throughput", self.throughput)]

    async def show(self, request: Request) -> Response:
        """The service now."""
        try:
            state = await self._client.state(self._access.key_of(request.headers))
        except TinsmithError as error:
            return self._pages.message(request, "The service cannot be read", error.message, error.hint, 502)
        queue = [
            {"base_model": queue["base_model"], "queue": queue["queue"], **entry}
            for queue in state.queues
            for entry in queue["requests"]
        ]
        return self._pages.render(
            request,
            "service.html",
            url=self._client.url,
            cards=_cards(state, queue),
            models=_models(state, self._client.throughput),
            queue=queue[:_QUEUED],
            queued=len(queue),
            tenants=[{**each, "tokens": state.tenant_tokens.get(each["owner"], 0.0)} for each in state.tenants],
            sessions=state.sessions[:_SESSIONS],
        )

    async def throughput(self, request: Request) -> Response:
        """Tokens per second as a chart; each call of `show` takes a sample."""
        chart = self._client.throughput.chart()
        return JSONResponse({"charts": [chart] if chart["lines"] else []})


def _models(state: ServiceState, throughput: Throughput) -> list[dict[str, Any]]:
    """Base models with their processes; names with one source share them, and follow each other."""
    processes = {each["base_model"]: each["processes"] for each in state.processes}
    return [
        {
            "name": model["name"],
            "source": model["source"],
            "state": model["state"],
            "error": model["error"] or "",
            "processes": processes.get(model["name"], []),
            "sampled_per_s": throughput.per_second(model["name"], "sample"),
            "trained_per_s": throughput.per_second(model["name"], "forward_backward"),
        }
        for model in state.base_models
    ]


def _cards(state: ServiceState, queue: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    running = sum(each["running"] for each in queue)
    waits = [each["waited_s"] for each in queue if not each["running"]]
    failed = state.requests.get("failed", 0.0)
    return [
        {"name": "base models", "value": str(len(state.base_models)), "note": "served or loading"},
        {
            "name": "requests",
            "value": f"{running} running, {len(waits)} waiting",
            "note": f"the oldest waits for {max(waits):.0f} s" if waits else "nothing waits",
        },
        {
            "name": "finished requests",
            "value": f"{sum(state.requests.values()):,.0f}",
            "note": f"{failed:,.0f} failed, since the start of the server",
        },
        {
            "name": "tokens",
            "value": f"{sum(count for (_, kind), count in state.tokens.items() if kind != 'prompt_cached'):,.0f}",
            "note": "since the start of the server",
        },
        {"name": "sessions", "value": str(len(state.sessions)), "note": counted(len(state.tenants), "tenant")},
    ]
