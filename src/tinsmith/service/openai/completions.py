"""The OpenAI dialect's completions: what follows a text, several texts, or tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from tinsmith.chat.tokenizer import Words
from tinsmith.engine.base import SampleRequest, SampleResult
from tinsmith.engine.validation import MAX_SAMPLES
from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.dependencies import RawBody, Service, ServiceDep
from tinsmith.service.openai.requests import Asked, named, new_id, now, request_of
from tinsmith.service.openai.responses import Told, finite, head, rows, text_choice, total, usage, whole_choice
from tinsmith.service.openai.routes import Owner, stream
from tinsmith.service.openai.sampling import Grown, whole
from tinsmith.service.openai.schemas import CompletionBody, parse_exact

router = APIRouter()


@router.post("/completions")
async def completions(http: Request, owner: Owner, service: ServiceDep, body: RawBody) -> Response:
    """Each prompt's continuations; `max_tokens` 0 with `echo` scores the prompt alone."""
    text = parse_exact(CompletionBody, body)
    asked, shown = await _asked(service, owner, text)
    if text.stream:
        return await stream(http, asked, service, "text_completion", text_choice, _opening(asked, text, shown))
    sampled = await whole(http, service.sampling, asked.calls)
    choices = []
    for at, (request, answer) in enumerate(zip(asked.requests, sampled, strict=True)):
        for number, sequence in enumerate(answer.sequences):
            told = whole_choice(asked, at * text.n + number, sequence)
            if text.max_tokens == 0:
                told = Told(index=told.index, grown=Grown(text=""), finish="length")
            told = _after(shown[at], request, answer, told) if text.echo else told
            choices.append(text_choice(asked, told) | _ids(text, request))
    said = total(sampled) if text.max_tokens else 0
    return JSONResponse({**head(asked, "text_completion"), "choices": choices, "usage": usage(asked, sampled, said)})


async def _asked(service: Service, owner: str, text: CompletionBody) -> tuple[Asked, list[str]]:
    """The call, and its prompts as texts; those are needed for `echo` alone."""
    if text.max_tokens == 0 and not text.echo:
        raise BadRequest("max_tokens is 0.", "Give at least 1, or set echo to score the prompt.")
    if text.stream and text.echo and (text.logprobs is not None or not text.max_tokens):
        raise Unsupported("A stream does not score its prompt.", "Leave stream out, or echo.")
    service.sampling.check_capacity()
    found = named(service, text.model, owner)
    card = await found.worker.host.card()
    words = await service.tokenizers.get(found.base_model, card)
    prompts = await asyncio.to_thread(_prompts, text, words)
    asks = {
        "topk_sample_logprobs": text.logprobs or 0,
        "prompt_logprobs": text.echo and text.logprobs is not None,
        "topk_prompt_logprobs": text.logprobs or 0 if text.echo else 0,
    }
    requests = tuple(request_of(text, card, found, ids, text.max_tokens or 1, **asks) for ids, _ in prompts)
    asked = Asked(
        id=new_id("cmpl"),
        created=now(),
        owner=owner,
        named=found,
        card=card,
        words=words,
        body=text,
        requests=requests,
        top=text.logprobs,
    )
    return asked, [shown for _, shown in prompts]


def _prompts(text: CompletionBody, words: Words) -> list[tuple[list[int], str]]:
    """(tokens, text) of each prompt."""
    given: list[Any] = [text.prompt] if isinstance(text.prompt, str) else list(text.prompt)
    if given and isinstance(given[0], int):
        given = [given]
    if not 1 <= len(given) <= MAX_SAMPLES:
        raise BadRequest(f"There are {len(given)} prompts.", f"Give 1 to {MAX_SAMPLES}, of text or tokens.")
    return [
        (words.encode(one, marked=text.add_special_tokens), one)
        if isinstance(one, str)
        else (one, words.decode(one) if text.echo else "")
        for one in given
    ]


def _after(shown: str, request: SampleRequest, answer: SampleResult, told: Told) -> Told:
    """A choice with its prompt before it."""
    scored = answer.prompt_logprobs
    tops = rows(answer.topk_prompt) or [()] * len(request.prompt)
    return replace(
        told,
        grown=Grown(text=shown + told.grown.text),
        tokens=[*request.prompt.tolist(), *told.tokens],
        logprobs=[*(finite(scored) if scored is not None else ()), *told.logprobs],
        tops=[*tops, *(told.tops or [()] * len(told.tokens))],
    )


def _opening(asked: Asked, text: CompletionBody, shown: list[str]) -> list[dict[str, Any]]:
    """What a stream begins with: the prompts, as text if they are to be echoed, as tokens if those are asked for."""
    if not text.echo and not text.return_token_ids:
        return []
    choices = []
    for at, request in enumerate(asked.requests):
        choice = {
            "text": shown[at] if text.echo else "",
            "logprobs": None,
            "finish_reason": None,
            **_ids(text, request),
        }
        choices += [{"index": at * text.n + number, **choice} for number in range(text.n)]
    return choices


def _ids(text: CompletionBody, request: SampleRequest) -> dict[str, Any]:
    return {"prompt_token_ids": request.prompt.tolist()} if text.return_token_ids else {}
