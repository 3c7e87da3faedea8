"""Reading the bodies of requests: each route has its limit, and each tenant one for all of its requests together.

A body that declares too many bytes is refused before any is read. What a client still sends of it is discarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from tinsmith.errors import Busy, Gone, TooLarge

SMALL_BYTES = 2 * 2**20
"""Limit of the bodies that hold names, ids and settings; enough to acknowledge 20,000 samples at once."""
PROMPT_BYTES = 4 * 2**20
PROMPT_BYTES_PER_TOKEN = 512
"""Limit of the bodies that hold prompts: PROMPT_BYTES and this for each token of the context. A token of JSON takes up
to 12 bytes, and in a chunk of its own 60; the rest is for the logprobs of other tokens at its position, 12 to 24 bytes
each, and for messages and lists of prompts."""
IMAGES_BYTES = 64 * 2**20
"""Added to that limit where a model that takes images is served."""
TENANT_BYTES = 512 * 2**20
"""Limit of the large bodies of a tenant that are being received or processed."""


def prompt_limit(context_length: int, *, images: bool = False) -> int:
    """Largest body, in bytes, of a request with a prompt for a model with this context, which may take images."""
    return PROMPT_BYTES + PROMPT_BYTES_PER_TOKEN * context_length + (IMAGES_BYTES if images else 0)


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises TooLarge if it has over `limit` bytes, Gone if the client disconnects."""
    return bytes(await _read(request, limit, "Send less in one request.", Counter(), ""))


class LargeBodies:
    """Bytes of the large bodies of each tenant."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        """Bytes of all tenants."""
        return self._held.total()

    @asynccontextmanager
    async def read(self, request: Request, owner: str, limit: int, hint: str) -> AsyncIterator[bytes]:
        """The request's body, which counts for the owner inside the block.

        Raises TooLarge if it has over `limit` bytes, Busy if the owner has TENANT_BYTES here, Gone if the client
        disconnects.
        """
        body = await _read(request, limit, hint, self._held, owner)
        try:
            yield bytes(body)
        finally:
            _release(self._held, owner, len(body))


async def _read(request: Request, limit: int, hint: str, held: Counter[str], owner: str) -> bytearray:
    """The body, whose bytes are added to `held`. If it is refused, they are not.

    Declared bytes count before they arrive, as they will be here soon.
    """
    declared = int(request.headers.get("content-length", 0))
    if declared > limit:
        raise TooLarge(f"The body has {declared} bytes; at most {limit} are accepted here.", hint)
    body, counted = bytearray(), 0

    def count(size: int) -> None:
        nonlocal counted
        held[owner] += size - counted
        counted = size
        if held[owner] > TENANT_BYTES:
            raise Busy(f"Your requests here have over {TENANT_BYTES} bytes together.", "Submit it again later.")

    try:
        count(declared)
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise TooLarge(f"The body has over {limit} bytes.", hint)
            count(max(declared, len(body)))
        count(len(body))
    except BaseException as error:
        _release(held, owner, counted)
        if isinstance(error, ClientDisconnect):
            raise Gone("The client has disconnected.") from error
        raise
    return body


def _release(held: Counter[str], owner: str, size: int) -> None:
    held[owner] -= size
    if held[owner] <= 0:
        del held[owner]
