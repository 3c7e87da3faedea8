"""Bodies of requests: how each kind is received, and decoded away from the event loop if it is large."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from tinsmith.service.limits.bodies import SMALL_BYTES, prompt_limit, read_body
from tinsmith.service.service import Service
from tinsmith.service.tenancy.keys import ApiKey
from tinsmith.service.wire.passes import DecodedPass, decode_pass_body
from tinsmith.service.wire.protobuf import MAX_BODY_BYTES
from tinsmith.service.wire.schemas import WireModel, parse

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)
M = TypeVar("M", bound=WireModel)
Admit = Callable[[Service, bytes], None]
"""Called before a body is decoded. Raises if the request is refused whatever its body says."""


class Body(Protocol[B_co]):
    """A kind of body."""

    @property
    def model(self) -> type[BaseModel] | None:
        """The class of a JSON body; None for other content."""
        ...

    async def receive(self, request: Request, service: Service, caller: ApiKey | None, stack: AsyncExitStack) -> bytes:
        """The body's bytes. What they count for their sender is released when `stack` ends. Raises TooLarge, Gone."""
        ...

    async def decode(self, request: Request, service: Service, content: bytes) -> B_co:
        """The body's content. Raises BadRequest and other errors of the user."""
        ...


def admit_all(_service: Service, _content: bytes) -> None:
    """Every body is decoded."""


class JsonBody(Generic[M]):
    """JSON of names, ids and settings. With `optional`, no body is an empty object."""

    def __init__(self, model: type[M], *, optional: bool = False, admit: Admit = admit_all) -> None:
        self.model: type[M] = model
        self._optional, self._admit = optional, admit

    async def receive(self, request: Request, service: Service, caller: ApiKey | None, stack: AsyncExitStack) -> bytes:
        return await read_body(request, SMALL_BYTES)

    async def decode(self, request: Request, service: Service, content: bytes) -> M:
        self._admit(service, content)
        return parse(self.model, content or b"{}" if self._optional else content)


class PromptBody(Generic[B]):
    """JSON of a request with prompts, as what `decode` makes of it: a function that a decoder process can import."""

    def __init__(self, model: type[WireModel], decode: Callable[[bytes], B], *, admit: Admit = admit_all) -> None:
        self.model: type[WireModel] = model
        self._decode, self._admit = decode, admit

    async def receive(self, request: Request, service: Service, caller: ApiKey | None, stack: AsyncExitStack) -> bytes:
        """The bytes; their limit follows from the largest context that is served. Raises Busy too."""
        assert caller is not None
        hosts = [worker.host for worker in service.workers.values()]
        cards = [host.latest_card for host in hosts if host.latest_card] or [await hosts[0].card()]
        context = max(card.context_length for card in cards)
        hint = f"No prompt is longer than {context} tokens: send fewer, or shorter, prompts in a request."
        limit = prompt_limit(context, images=any(card.images for card in cards))
        return await stack.enter_async_context(service.bodies.read(request, caller.owner, limit, hint))

    async def decode(self, request: Request, service: Service, content: bytes) -> B:
        self._admit(service, content)
        return await service.decoders.run(len(content), self._decode, content)


class PassBody:
    """The protobuf message of forward_backward, which may be compressed."""

    model = None

    async def receive(self, request: Request, service: Service, caller: ApiKey | None, stack: AsyncExitStack) -> bytes:
        """The bytes. Raises Busy too."""
        assert caller is not None
        hint = "Send fewer data per request: fwdbwd_max_chunk_bytes_count of the SDK is 5,000,000 bytes."
        return await stack.enter_async_context(service.bodies.read(request, caller.owner, MAX_BODY_BYTES, hint))

    async def decode(self, request: Request, service: Service, content: bytes) -> DecodedPass:
        encoding = request.headers.get("content-encoding")
        size = MAX_BODY_BYTES if encoding else len(content)
        return await service.decoders.run(size, decode_pass_body, content, encoding)
