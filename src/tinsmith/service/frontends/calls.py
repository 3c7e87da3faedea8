"""Requests of a front end as the core serves them: each is a call of the core's ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from tinsmith.chat.errors import as_tinsmith_error
from tinsmith.errors import InternalError, TinsmithError
from tinsmith.service.frontends.messages import (
    BodyPart,
    ForwardedRequest,
    ReadBody,
    ResponseAborted,
    ResponsePart,
    ResponseStart,
)
from tinsmith.service.wire.decoding import DECODED
from tinsmith.service.wire.errors import error_response

UNWRITTEN_PARTS = 8
"""Parts of a response that may be on their way: a client that reads slowly must not fill the core's memory."""

_ASGI = {"version": "3.0", "spec_version": "2.3"}


class ForwardedCall:
    """One call of the application; `send` sends a message to the front end."""

    def __init__(self, request: ForwardedRequest, send: Callable[[Any], None]) -> None:
        self._number, self._send_message = request.number, send
        self._scope: Scope = {**request.head._asdict(), "type": "http", "asgi": _ASGI, "state": {}}
        self._part: BodyPart | None = None
        """A part of the body that the application has not read."""
        self._is_reading = self._is_read = False
        """Whether a part is on its way; whether the application has the last one."""
        self._changed = asyncio.Event()
        """Set by each message of the front end."""
        self._is_gone = False
        self._unwritten = 0
        self._start: Message | None = None
        self._has_started = self._is_complete = False
        if request.body is not None:
            self.add_part(BodyPart(request.number, request.body, more=False, decoded=request.decoded))

    def add_part(self, part: BodyPart) -> None:
        """Take a part of the body."""
        self._part, self._is_reading = part, False
        if part.decoded is not None:
            self._scope[DECODED] = part.decoded
        self._changed.set()

    def note_written(self) -> None:
        """A part of the response has been passed on."""
        self._unwritten -= 1
        self._changed.set()

    def disconnect(self) -> None:
        """The client, or the front end, is gone."""
        self._is_gone = True
        self._changed.set()

    async def run(self, app: ASGIApp) -> None:
        """Call the application. If it fails, the client gets a 500, or its connection closes."""
        failure: TinsmithError = InternalError("The server did not complete this request.")
        try:
            await app(self._scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - it is answered
            failure = as_tinsmith_error(error, "A request")
        finally:
            if not self._is_complete and not self._has_started:
                response = error_response(self._scope["path"], failure)
                self._send_message(
                    ResponseStart(self._number, failure.status, response.raw_headers, bytes(response.body), more=False)
                )
            elif not self._is_complete:
                self._send_message(ResponseAborted(self._number))

    async def _receive(self) -> Message:
        while True:
            if self._part is not None:
                part, self._part = self._part, None
                self._is_read = not part.more
                return {"type": "http.request", "body": part.body, "more_body": part.more}
            if self._is_gone or self._is_complete:
                return {"type": "http.disconnect"}
            if not (self._is_read or self._is_reading):
                self._is_reading = True
                self._send_message(ReadBody(self._number))
            self._changed.clear()
            await self._changed.wait()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._start is not None:
            status, headers = self._start["status"], list(self._start.get("headers", ()))
            self._start, self._has_started = None, True
            self._send_message(ResponseStart(self._number, status, headers, bytes(body), more))
        elif self._has_started and not self._is_complete:
            self._send_message(ResponsePart(self._number, bytes(body), more))
        if not more:
            self._is_complete = True
            self._changed.set()
            return
        self._unwritten += 1
        while self._unwritten > UNWRITTEN_PARTS and not self._is_gone:
            self._changed.clear()
            await self._changed.wait()
