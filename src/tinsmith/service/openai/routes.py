"""The OpenAI dialect: models and chat/completions, under /oai/api/v1 and /v1.

For agents and environments that know nothing of the Tinker API. `service.named` says what `model` may be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinsmith.errors import BadRequest
from tinsmith.service.dependencies import RawBody, Service, ServiceDep
from tinsmith.service.openai.requests import (
    Asked,
    Named,
    callable_models,
    named,
    new_id,
    now,
    prompt_of,
    request_of,
    tools_of,
)
from tinsmith.service.openai.responses import Delta, chat_choice, chat_delta, events, head, total, usage, whole_choice
from tinsmith.service.openai.sampling import begun, whole
from tinsmith.service.openai.schemas import ChatBody, parse_exact

router = APIRouter()


async def owner_of(
    service: ServiceDep, x_api_key: Annotated[str, Header()] = "", authorization: Annotated[str, Header()] = ""
) -> str:
    """The owner behind `Authorization: Bearer tml-…` or X-API-Key. Raises Unauthorized."""
    scheme, _, key = authorization.partition(" ")
    return service.authenticate(x_api_key or (key.strip() if scheme.lower() == "bearer" else "")).owner


Owner = Annotated[str, Depends(owner_of)]


@router.get("/models")
async def models(owner: Owner, service: ServiceDep) -> dict[str, Any]:
    """What is served, and the caller's models in training that have saved weights."""
    names = (*service.workers, *callable_models(service, owner))
    found = {name: named(service, name, owner) for name in names}
    return {"object": "list", "data": [await _card(name, one) for name, one in found.items()]}


@router.get("/models/{name:path}")
async def model(name: str, owner: Owner, service: ServiceDep) -> dict[str, Any]:
    """Whatever `model` may be in a request."""
    return await _card(name, named(service, name, owner))


@router.post("/chat/completions")
async def chat(http: Request, owner: Owner, service: ServiceDep, body: RawBody) -> Response:
    """An answer to a conversation, rendered by the model's own chat template."""
    asked = await _asked(service, owner, parse_exact(ChatBody, body))
    more = {"prompt_token_ids": asked.requests[0].prompt.tolist()} if asked.body.return_token_ids else {}
    if asked.body.stream:
        return await stream(http, asked, service, "chat.completion.chunk", chat_delta, _opening(asked), more)
    sampled = await whole(http, service.sampling, asked.calls)
    told = [whole_choice(asked, index, sequence) for index, sequence in enumerate(sampled[0].sequences)]
    reply = {
        **head(asked, "chat.completion"),
        "choices": [chat_choice(asked, one) for one in told],
        "usage": usage(asked, sampled, total(sampled)),
    }
    return JSONResponse(reply | more)


async def stream(
    http: Request,
    asked: Asked,
    service: Service,
    kind: str,
    delta: Delta,
    opening: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any] | None = None,
) -> Response:
    """The answer as server-sent events, from its first token on; `more` is told in the first of them."""
    grown = await begun(http, service.sampling, asked.calls)
    return _Events(events(asked, grown, kind, delta, opening, more or {}))


class _Events(StreamingResponse):
    """Ends what makes the events when the client hangs up between two of them."""

    def __init__(self, told: AsyncGenerator[str]) -> None:
        super().__init__(told, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._told):
            await super().__call__(scope, receive, send)


async def _asked(service: Service, owner: str, body: ChatBody) -> Asked:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs is given without logprobs.", "Set logprobs to true.")
    service.sampling.check_capacity()
    found = named(service, body.model, owner)
    card = await found.worker.host.card()
    words = await service.tokenizers.get(found.base_model, card)
    ids, form = await asyncio.to_thread(prompt_of, body, words)
    longest = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return Asked(
        id=new_id("chatcmpl"),
        created=now(),
        owner=owner,
        named=found,
        card=card,
        words=words,
        body=body,
        requests=(request_of(body, card, found, ids, longest, topk_sample_logprobs=body.top_logprobs),),
        top=body.top_logprobs if body.logprobs else None,
        form=form,
        tools=tools_of(body),
    )


def _opening(asked: Asked) -> list[dict[str, Any]]:
    delta = {"role": "assistant", "content": ""}
    return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(asked.body.n)]


async def _card(name: str, found: Named) -> dict[str, Any]:
    card = await found.worker.host.card()
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "tinsmith",
        "root": found.weights,
        "parent": None if found.version is None else found.base_model,
        "max_model_len": card.context_length,
    }
