"""A watch over the server of a run. While the server does not respond, the run waits; nothing fails or is repeated.
While it responds and serves other tenants, `QueueNotice` says so.

The SDK repeats polls for results without end, but gives up submitting a request after five minutes. `ServerWatch` makes
it go on, with the same sequence number, so that the server executes a request once. A server is away if its health
check fails and no request of the run succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from tinsmith.errors import TinsmithError
from tinsmith.rl.policy.queue_notice import QueueNotice
from tinsmith.rl.policy.sampling import Sample, SampleRequest, SampleResult

if TYPE_CHECKING:  # a run starts its service before it imports the SDK, which imports PyTorch
    from tinker.lib.internal_client_holder import InternalClientHolder

PING_SECONDS = 5.0
"""Time between two health checks, and their time limit."""
PATIENCE_SECONDS = 15.0
"""Time without a response after which the server counts as away."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class ServerWatch:
    """Says whether the server responds, and ends the run if it is away for too long."""

    def __init__(self, wait: float = 0.0, *, ping: float = PING_SECONDS, patience: float = PATIENCE_SECONDS) -> None:
        """`wait`: seconds that the server may be away; 0: no limit."""
        self._wait, self._ping, self._patience = wait, ping, patience
        self._url, self._queue = "", None
        self._responded = self._last_away = time.monotonic()
        self._lost: TinsmithError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """That of `watching`; requests succeed in the SDK's."""
        self.is_away = False
        self.on_change: list[Callable[[bool], None]] = []
        """Functions to call with True when the server is away, and with False when it responds again."""

    def attend(self, base_url: str, *holders: InternalClientHolder, queue: QueueNotice | None = None) -> None:
        """Watch the server at `base_url`, and make the SDK's `holders` of connections submit until it responds.

        `queue` says what the run's requests wait for.
        """
        self._url, self._queue = base_url.rstrip("/"), queue
        self._responded = time.monotonic()
        for holder in holders:
            retry = type(holder).execute_with_retries.__get__(holder)  # a holder may be shared with an earlier run
            vars(holder)["execute_with_retries"] = self._patient(retry)

    def succeeded(self) -> None:
        """Report that a request of the run succeeded, from any thread."""
        self._responded = time.monotonic()
        if self.is_away and (loop := self._loop) is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._return)

    async def report(self, request: SampleRequest, sample: Sample) -> SampleResult:
        """Middleware: reports requests that succeed."""
        result = await sample(request)
        self.succeeded()
        return result

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call`, which is repeated while the server is away; it may be executed twice."""
        return await self._patient(call)()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch during a block. If the server is away for longer than `wait`, cancels the block, and raises
        TinsmithError."""
        owner = asyncio.current_task()
        assert owner is not None
        self._loop = asyncio.get_running_loop()
        pings = asyncio.create_task(self._watch(owner), name="server watch")
        try:
            with _quiet_sdk():
                yield
        except asyncio.CancelledError:
            if self._lost is None:
                raise
            owner.uncancel()
            raise self._lost from None
        finally:
            self._loop = None
            pings.cancel()
            with suppress(asyncio.CancelledError):
                await pings

    async def _watch(self, owner: asyncio.Task[Any]) -> None:
        async with httpx.AsyncClient(timeout=self._ping) as client:
            while True:
                await asyncio.sleep(self._ping)
                fault = await self._fault(client) if self._url else ""
                now = time.monotonic()
                if not fault:
                    self._responded = now
                    if self._queue is not None:
                        await self._queue.look(client, self._url)
                away = now - self._responded
                if self.is_away:
                    self._last_away = now  # also when it is back: until now it may have been away
                if (away >= self._patience) != self.is_away:
                    self._change(fault)
                if self.is_away and self._wait and away >= self._wait:
                    self._lost = TinsmithError(
                        f"The server at {self._url} has not responded for {_length(away)} ({fault}), longer than "
                        f"model.wait ({_length(self._wait)}).",
                        "Start it again; the same command then continues from the last checkpoint, if there is one.",
                    )
                    owner.cancel()
                    return

    def _return(self) -> None:
        """Say that the server responds, before the next health check: a short run may have ended by then."""
        now = time.monotonic()
        if self.is_away and now - self._responded < self._patience:
            self._last_away = now
            self._change("")

    def _was_here_since(self, begin: float) -> bool:
        return not self.is_away and self._last_away < begin

    async def _present_fault(self) -> str:
        async with httpx.AsyncClient(timeout=self._ping) as client:
            return await self._fault(client)

    async def _fault(self, client: httpx.AsyncClient) -> str:
        """Why the health check failed; empty if the server responded."""
        try:
            response = await client.get(f"{self._url}/api/v1/healthz")
        except (httpx.HTTPError, OSError) as error:
            return type(error).__name__
        return f"status {response.status_code}" if response.status_code >= 500 else ""

    def _change(self, fault: str) -> None:
        self.is_away = not self.is_away
        if self.is_away:
            self._since = self._responded
            limit = f"up to {_length(self._wait)} (model.wait)" if self._wait else "as long as it takes"
            log.warning("The server at %s does not respond (%s); the run waits for it, %s", self._url, fault, limit)
        else:
            log.warning("The server responds again after %s", _length(time.monotonic() - self._since))
        for notify in self.on_change:
            notify(self.is_away)

    def _patient(self, retry: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        """`retry`, called again if it failed while the server was away."""

        async def patient(*args: Any, **kwargs: Any) -> T:
            while True:
                begin = time.monotonic()
                try:
                    result = await retry(*args, **kwargs)
                except Exception as error:
                    if self._lost is not None or not _is_transient(error):
                        raise
                    was_here = self._was_here_since(begin)
                    if was_here and not await self._present_fault() and self._was_here_since(begin):
                        raise
                    await asyncio.sleep(min(1.0, self._ping))
                else:
                    self.succeeded()
                    return result

        return patient


@contextmanager
def _quiet_sdk() -> Iterator[None]:
    """Leave out the SDK's own warnings of an outage, one every 10 seconds with a traceback."""
    loggers = [logging.getLogger(f"tinker.lib.{name}") for name in ("internal_client_holder", "telemetry")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _is_transient(error: Exception) -> bool:
    """Whether the SDK repeats a request after this error."""
    import tinker

    if isinstance(error, tinker.APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    return isinstance(error, tinker.APIConnectionError | TimeoutError | httpx.TimeoutException)


def _length(seconds: float) -> str:
    """A length of time in words, such as 10 min."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
