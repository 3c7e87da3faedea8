"""An HTTP/1.1 proxy between SDK clients and the service, with faults for the next requests.

The proxy keeps its port while services come and go. Each request has a connection of its own to the service.
While the service is away, a request waits for it, is answered 502 as by a usual reverse proxy, or loses its connection.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import Counter, deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

AWAY_S = 1.0
"""Longest time that a request waits for a service that is away."""
MAX_HEAD = 1 << 16
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\nretry-after: 0\r\n\r\n"
_UNCOUNTED = re.compile(rb"^(POST|PUT) [^ ]*/(session_heartbeat|telemetry|client/)")
"""Requests that faults leave alone: their loss is nothing to a client."""


class _CutError(Exception):
    """The client's connection is to be closed without an answer."""


class Proxy:
    """The proxy, in a thread with an event loop of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._port: int | None = None
        self._armed: deque[tuple[str, float]] = deque()
        self._clients: set[asyncio.StreamWriter] = set()
        self.done: Counter[str] = Counter()
        """Faults that have happened to a request, by kind."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD, backlog=512))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def forward_to(self, port: int | None) -> None:
        """Send requests to this port from now on; None: the service is away."""
        self._port = port

    def arm(self, kind: str, requests: int, lasts_s: float) -> None:
        """Let a fault happen to the next requests."""
        self._loop.call_soon_threadsafe(self._armed.extend, [(kind, lasts_s)] * requests)

    def disarm(self) -> None:
        """Forget faults that have not happened yet."""
        self._loop.call_soon_threadsafe(self._armed.clear)

    def cut_all(self) -> None:
        """Close the connections of all clients."""

        def cut() -> None:
            for writer in self._clients:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(cut)

    def close(self) -> None:
        """Close the port and end the thread."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, _CutError):
            while True:
                head, body = await _read_request(reader)
                await self._answer(head, body, writer)
        self._clients.discard(writer)
        self._tasks.discard(task)
        writer.transport.abort() if writer.transport.get_write_buffer_size() == 0 else writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        kind, lasts_s = "", 0.0
        if self._armed and not _UNCOUNTED.match(head):
            kind, lasts_s = self._armed.popleft()
            self.done[kind] += 1
        if kind == "delay":
            await asyncio.sleep(lasts_s)
        if kind == "cut_before":
            raise _CutError
        if kind == "truncate_request":
            await self._send_part(head, body)
            raise _CutError
        if kind in ("duplicate", "duplicate_later"):
            self._start(self._repeat(head, body, lasts_s))
        answer = await self._exchange(head, body)
        if kind == "cut_after":
            raise _CutError
        if kind == "truncate_response":
            writer.write(answer[: self._random.randrange(1, len(answer))])
            await writer.drain()
            writer.close()
            raise _CutError
        writer.write(answer)
        await writer.drain()

    async def _exchange(self, head: bytes, body: bytes) -> bytes:
        """The service's answer; 502, or a cut connection, if there is none."""
        for _ in range(int(AWAY_S / 0.05)):
            with suppress(ConnectionError, OSError):
                reader, writer = await self._connect()
                break
            await asyncio.sleep(0.05)
        else:
            return self._away()
        try:
            writer.write(_with_close(head) + body)
            await writer.drain()
            answer = await reader.read(-1)
        except OSError:
            return self._away()
        finally:
            writer.transport.abort()
        return answer if _is_complete(answer) else self._away()

    def _away(self) -> bytes:
        if self._random.random() < 0.2:
            raise _CutError
        return BAD_GATEWAY

    async def _send_part(self, head: bytes, body: bytes) -> None:
        with suppress(OSError):
            _, writer = await self._connect()
            content = head + body
            writer.write(content[: self._random.randrange(1, len(content))])
            await writer.drain()
            writer.close()

    async def _repeat(self, head: bytes, body: bytes, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with suppress(_CutError):
            await self._exchange(head, body)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._port is None:
            raise ConnectionRefusedError
        return await asyncio.open_connection("127.0.0.1", self._port)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    return head, await reader.readexactly(_length(head))


def _length(head: bytes) -> int:
    if re.search(rb"(?i)\r\ntransfer-encoding:", head):
        raise _CutError  # the SDK sends none
    match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(match[1]) if match else 0


def _with_close(head: bytes) -> bytes:
    """The head of a request after whose answer the service closes the connection."""
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"connection: close", b"", b""])


def _is_complete(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    if re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= _length(head + end)
