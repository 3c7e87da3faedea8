"""The ASGI application of a front end: reads and decodes bodies, and has the core respond.

A body of up to SENT_BYTES is sent with its request. A larger one is read when the core wants it, which is after the
core has authenticated the request: whole and decoded where a route's body is costly to decode, else part by part.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from tinsmith.errors import TinsmithError
from tinsmith.service.concurrency import run_in_thread_if_large
from tinsmith.service.frontends.channel import Channel
from tinsmith.service.frontends.messages import (
    BodyPart,
    ClientGone,
    ForwardedRequest,
    FromCore,
    Head,
    PartWritten,
    ReadBody,
    ResponseAborted,
    ResponsePart,
    ResponseStart,
)
from tinsmith.service.limits.parsing import Parsers
from tinsmith.service.wire.decoding import decode_pass_body, pack
from tinsmith.service.wire.errors import error_json
from tinsmith.service.wire.protobuf import MAX_BODY_BYTES
from tinsmith.service.wire.sample_request import decode_sample

SENT_BYTES = 64 * 2**10
WATCH_S = 0.1
"""Time after which a request is watched for the end of its connection; most end sooner."""

Decode = Callable[[bytes, str | None], Awaitable[tuple[bytes, bytes]]]
"""From a body and its Content-Encoding to the plain body and its packed content."""


class CoreEnded(Exception):
    """The core ended before it had responded."""


class Forwarder:
    """ASGI application: every request goes over `channel` to the core."""

    def __init__(self, parsers: Parsers) -> None:
        self.channel: Channel | None = None
        self._parsers = parsers
        self._numbers = itertools.count()
        self._exchanges: dict[int, _Exchange] = {}
        self._decoders: dict[str, Decode] = {
            "/api/v1/forward_backward": self._decode_pass,
            "/api/v1/asample": self._decode_sample,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.channel is None or not self.channel.is_open:
            await _unavailable(scope, receive, send)
            return
        exchange = _Exchange(next(self._numbers), self.channel, scope, receive, send)
        self._exchanges[exchange.number] = exchange
        try:
            await exchange.run(self._decoders.get(scope["path"]))
        except CoreEnded:
            if exchange.has_started:
                raise
            await _unavailable(scope, receive, send)
        finally:
            del self._exchanges[exchange.number]

    def receive(self, message: FromCore) -> None:
        """Take a message of the core about a request."""
        exchange = self._exchanges.get(message.number)
        if exchange is not None:
            exchange.put(message)

    def end(self) -> None:
        """The core is gone: answer every request 503, so that its client sends it again."""
        for exchange in self._exchanges.values():
            exchange.put(None)

    async def _decode_pass(self, body: bytes, encoding: str | None) -> tuple[bytes, bytes]:
        size = MAX_BODY_BYTES if encoding else len(body)
        return await run_in_thread_if_large(size, _packed_pass, body, encoding)

    async def _decode_sample(self, body: bytes, _encoding: str | None) -> tuple[bytes, bytes]:
        try:
            return b"", pack(await self._parsers.run(len(body), decode_sample, body))
        except TinsmithError as error:
            return b"", pack(error)


def _packed_pass(body: bytes, encoding: str | None) -> tuple[bytes, bytes]:
    try:
        plain, decoded = decode_pass_body(body, encoding)
    except TinsmithError as error:
        return b"", pack(error)
    return plain, pack(decoded)


class _Exchange:
    """One request and its response."""

    def __init__(self, number: int, channel: Channel, scope: Scope, receive: Receive, send: Send) -> None:
        self.number = number
        self.has_started = False
        self._channel, self._scope, self._receive, self._send = channel, scope, receive, send
        self._messages: deque[FromCore | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_read = False
        """Whether the core has the whole body."""
        self._is_complete = self._is_gone = False
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None

    def put(self, message: FromCore | None) -> None:
        """Take the next message; None means that the core is gone."""
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def run(self, decode: Decode | None) -> None:
        """Forward the request and send what the core responds. Raises CoreEnded."""
        size = _declared_size(self._scope)
        body = packed = None
        if size is not None and size <= SENT_BYTES:
            body = await self._whole_body()
            if body is None:
                return
            if decode is not None:
                body, packed = await decode(body, self._encoding())
            self._is_read = True
        self._channel.send(ForwardedRequest(self.number, _head(self._scope), body, packed))
        self._watch_later()
        try:
            while not self._is_complete:
                await self._follow(await self._next(), decode if size is not None else None)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._watch is not None:
                self._watch.cancel()
            if not self._is_complete:
                self._channel.send(ClientGone(self.number))

    async def _follow(self, message: FromCore | None, decode: Decode | None) -> None:
        if isinstance(message, ResponseStart):
            self.has_started = True
            await self._send({"type": "http.response.start", "status": message.status, "headers": message.headers})
            await self._send_body(message.body, more=message.more)
        elif isinstance(message, ResponsePart):
            await self._send_body(message.body, more=message.more)
        elif isinstance(message, ReadBody):
            await self._send_part(decode)
        elif isinstance(message, ResponseAborted):
            self._is_complete = True
            if not self._is_gone:
                raise RuntimeError("The core could not complete the response.")
        else:
            raise CoreEnded

    async def _next(self) -> FromCore | None:
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft()

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        if more:
            self._channel.send(PartWritten(self.number))
        self._is_complete = not more

    async def _send_part(self, decode: Decode | None) -> None:
        """Reply to ReadBody. If the client is gone, ClientGone is the reply."""
        if decode is not None:
            body = await self._whole_body()
            if body is not None:
                self._is_read = True
                plain, packed = await decode(body, self._encoding())
                self._channel.send(BodyPart(self.number, plain, more=False, decoded=packed))
                return
        elif (message := await self._receive())["type"] == "http.request":
            more = message.get("more_body", False)
            self._is_read = not more
            self._channel.send(BodyPart(self.number, message.get("body", b""), more=more, decoded=None))
            return
        self._note_gone()

    def _note_gone(self) -> None:
        self._is_gone = True
        self._channel.send(ClientGone(self.number))

    async def _whole_body(self) -> bytes | None:
        """The body; None if the client disconnects."""
        parts: list[bytes] = []
        while True:
            message: Message = await self._receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    def _watch_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._begin_watch)

    def _begin_watch(self) -> None:
        if self._is_read:
            self._watch = asyncio.get_running_loop().create_task(self._watch_client())
        else:  # the reading of the body sees the end
            self._watch_later()

    async def _watch_client(self) -> None:
        """Notify the core if the client disconnects while the core works on the response."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_complete:
            self._note_gone()

    def _encoding(self) -> str | None:
        values = [value for name, value in self._scope["headers"] if name == b"content-encoding"]
        return values[0].decode("latin-1") if values else None


def _declared_size(scope: Scope) -> int | None:
    """Bytes of the body by its headers; None if only its end shows them."""
    size = 0
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            size = int(value)
    return size


def _head(scope: Scope) -> Head:
    return Head(
        scope["method"],
        scope["path"],
        scope["raw_path"],
        scope["query_string"],
        scope["headers"],
        scope["http_version"],
        scope["scheme"],
        scope["root_path"],
        scope["client"],
        scope["server"],
    )


async def _unavailable(scope: Scope, receive: Receive, send: Send) -> None:
    body = error_json(scope["path"], "The server is restarting. Retry.", 503, category="server")
    await JSONResponse(body, status_code=503, headers={"retry-after": "1"})(scope, receive, send)
