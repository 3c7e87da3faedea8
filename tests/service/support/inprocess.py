"""The API in the process and event loop of a test, with fake engines that the test can delay or kill.

`api` runs a service and gives an `Api` for raw calls, without a port or over HTTP. `Factory` starts its engines;
`pass_body` and `loss_in` encode and decode a forward_backward.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.service.support.databases import url_of
from tinsmith.engine.base import AdamParams, OnDelta, Pass, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.training.model_locks import ModelLocks
from tinsmith.errors import EngineDied
from tinsmith.http_common import listen
from tinsmith.service.app import create_app
from tinsmith.service.config import ServeConfig
from tinsmith.service.engines.host import EngineFactory, RunningEngine
from tinsmith.service.http.serving import HttpServer
from tinsmith.service.server import run_service
from tinsmith.service.service import Service
from tinsmith.service.tenancy.keys import create_key

KEY = "tml-test"
Hook = Callable[[str, object], Awaitable[None] | None]


class MortalEngine(FakeEngine):
    """A fake engine that can die: every later call raises EngineDied. `hook(call, argument)` runs before a call."""

    def __init__(self, config: EngineConfig, hook: Hook, died: asyncio.Event) -> None:
        super().__init__(config)
        self._hook = hook
        self._died = died
        self._in_order = ModelLocks()
        self.calls: list[str] = []

    async def _live(self, call: str, argument: object) -> None:
        self.calls.append(call)
        if (waiting := self._hook(call, argument)) is not None:
            await waiting
        await asyncio.sleep(0)
        if self._died.is_set():
            raise EngineDied("The engine is dead.")

    async def run(self, passes: Sequence[Pass]):
        async with self._in_order.of_all(request.model_id for request in passes):
            await self._live("run", passes)
            return await super().run(passes)

    async def step(self, model_id: str, adam: AdamParams):
        async with self._in_order.of(model_id):
            await self._live("step", model_id)
            return await super().step(model_id, adam)

    async def save(self, model_id: str, to: Path, *, optimizer: bool) -> int:
        await self._live("save", to)
        return await super().save(model_id, to, optimizer=optimizer)

    async def load(self, model_id: str, source: Path, *, optimizer: bool) -> None:
        await self._live("load", source)
        await super().load(model_id, source, optimizer=optimizer)

    async def capture(self, model_id: str, version: str) -> None:
        await self._live("capture", model_id)
        await super().capture(model_id, version)

    async def persist(self, version: str, to: Path) -> int:
        await self._live("persist", version)
        return await super().persist(version, to)

    async def release_memory(self) -> None:
        await self._live("release_memory", None)
        await super().release_memory()

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None):
        await self._live("sample", request)
        return await super().sample(request, on_delta)


class Factory:
    """Starts engines with the current `hook` and lists them in `made`; `kill` ends the newest."""

    def __init__(self) -> None:
        self.made: list[RunningEngine] = []
        self.sampler_up: asyncio.Event | None = None
        self.hook: Hook = lambda call, argument: None

    async def __call__(self, config: EngineConfig) -> RunningEngine:
        died = asyncio.Event()
        engine = MortalEngine(config, lambda call, argument: self.hook(call, argument), died)
        self.made.append(RunningEngine(engine=engine, died=died, sampler_up=self.sampler_up))
        return self.made[-1]

    def kill(self) -> None:
        self.made[-1].died.set()


class Api:
    """Raw calls to the app with the key of the server or of a tenant."""

    def __init__(self, http: httpx.AsyncClient, service: Service, key: str | None = None) -> None:
        self.http = http
        self.service = service
        self._headers = {"X-API-Key": key} if key else {}

    async def tenant(self, name: str, owner: str | None = None) -> Api:
        """The same service with a new key of another tenant."""
        key, _ = await create_key(self.service.store.database, name, owner or name)
        await self.service.tenants.reload()
        return Api(self.http, self.service, key)

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self.send("POST", f"/api/v1/{path}", body)

    async def send(self, method: str, path: str, body: object, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.request(method, path, content=content, headers={**self._headers, **headers})

    async def poll(self, promise: dict) -> httpx.Response:
        """The answer of one poll: 408 while there is no result after `hold_s`."""
        return await self.post("retrieve_future", {"request_id": promise["request_id"]})

    async def result(self, promise: dict) -> httpx.Response:
        """The result, however long it takes: it polls again after a 408, as clients do."""
        while (answer := await self.poll(promise)).status_code == 408:
            pass
        return answer

    async def call(self, path: str, body: object) -> dict:
        """Submit, then fetch the JSON result."""
        promise = await self.post(path, body)
        assert promise.status_code == 200, promise.text
        return (await self.result(promise.json())).json()

    async def model(self, session: str | None = None, number: int = 0, **lora) -> str:
        if session is None:
            session = (await self.post("create_session", {"tags": []})).json()["session_id"]
        body = {"session_id": session, "model_seq_id": number, "base_model": "toy", "lora_config": {"rank": 4, **lora}}
        return (await self.call("create_model", body))["model_id"]

    async def step(self, model: str, seq: int, rate: float = 0.02) -> dict:
        return await self.call("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": rate}})


@asynccontextmanager
async def api(
    data: Path, start: EngineFactory | None = None, *, over_http: bool = False, **config
) -> AsyncIterator[Api]:
    """A running service on a data folder, after its engines have started."""
    config = {
        "engine": "fake",
        "models": ("toy",),
        "hold_s": 5.0,
        "database": url_of(data),
        "api_key": KEY,
        "port": 0,
        **config,
    }
    settings = ServeConfig(data=data, **config)
    loaded = asyncio.Event()
    async with run_service(settings, start or Factory(), lambda error: loaded.set()) as service:
        await loaded.wait()
        options: dict[str, Any] = {"headers": {"X-API-Key": KEY}, "timeout": 120}
        if not over_http:
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://t", **options) as http:
                yield Api(http, service)
            return
        async with served_port(service) as url, httpx.AsyncClient(base_url=url, **options) as http:
            yield Api(http, service)


@asynccontextmanager
async def served_port(service: Service) -> AsyncIterator[str]:
    """The URL of a service that runs here, on a port of its own."""
    listener, server = (
        listen(service.config.host, service.config.port),
        HttpServer(create_app(service), service.connections),
    )
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        service.futures.wake_waiters()
        server.stop()
        await serving


def pass_body(model: str, seq: int, tokens: Sequence[int] = (5, 6, 7, 8), **options) -> bytes:
    """A forward_backward body as the SDK sends it."""
    import numpy as np

    from tinsmith.service.wire.protobuf import pb

    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, **{"loss_fn": "cross_entropy", **options})
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], "<i4").tobytes()
    target = datum.loss_fn_inputs["target_tokens"]
    target.dense, target.dtype = np.asarray(tokens[1:], "<i8").tobytes(), pb.DTYPE_INT64
    target.shape.append(len(tokens) - 1)
    return message.SerializeToString()


def loss_in(response: httpx.Response) -> float:
    """`loss:sum` of a forward_backward result."""
    from tinsmith.service.wire.protobuf import pb

    assert response.headers["content-type"] == "application/x-protobuf", response.text
    message = pb.ForwardBackwardOutput()
    message.ParseFromString(response.content)
    return message.metrics["loss:sum"]


async def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds()` is true, a minute at most. Fails after 6,000 looks: time while the machine stands still does
    not count."""
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("The condition did not become true within a minute.")


async def trained(app: Api, model: str, seq: int, steps: int = 1) -> list[float]:
    """Losses of `steps` forward_backward requests, each before an optimizer step, from number `seq` on."""
    losses = []
    for _ in range(steps):
        promise = (await app.post("forward_backward", pass_body(model, seq))).json()
        losses.append(loss_in(await app.result(promise)))
        await app.step(model, seq + 1)
        seq += 2
    return losses
