"""Routes of the OpenAI API, for agents and environments that do not use the Tinker SDK.

`routes` (models, chat/completions, completions, responses) is mounted under /v1 and /oai/api/v1, `generate_routes`
under /inference/v1. `requests.resolve_model` lists the names that `model` may be.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinsmith.chat.choice_decoder import TextDelta
from tinsmith.engine.base import SampledSequence, SampleRequest, SampleResult
from tinsmith.routed_experts import to_payload
from tinsmith.service.http.auth import bearer_key
from tinsmith.service.http.bodies import PromptBody
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.openai.requests import (
    EchoedPrompt,
    ModelRef,
    PreparedRequest,
    build_sample_request,
    new_id,
    prepare_chat,
    prepare_completion,
    resolve_model,
    sampleable_models,
)
from tinsmith.service.openai.responses import (
    ChoiceDelta,
    RenderChoice,
    chat_choice,
    chat_delta,
    event_stream,
    json_logprobs,
    response_head,
    sampled_tokens,
    text_choice,
    top_logprobs_of,
    usage,
    whole_choice,
)
from tinsmith.service.openai.responses_api import ResponsesBody, naming_fields, response_events, whole_response
from tinsmith.service.openai.sampling import SampleCalls, sample_all, stream_samples
from tinsmith.service.openai.schemas import ChatBody, CompletionBody, GenerateBody, GenerateParams, naming, parse_exact
from tinsmith.service.results.routed_experts import recorded_experts
from tinsmith.service.service import Service
from tinsmith.service.wire.json_response import SafeJSONResponse
from tinsmith.service.wire.schemas import WireModel

B = TypeVar("B", bound=WireModel)

routes = Routes(authenticate=bearer_key)
generate_routes = Routes(authenticate=bearer_key)


def _exact(model: type[B]) -> PromptBody[B]:
    """A body whose unknown fields are refused."""
    return PromptBody(model, partial(parse_exact, model))


@routes.get("/models")
async def models(call: Call[None]) -> Json:
    """Served base models, and the caller's models in training that have saved weights."""
    service, owner = call.service, call.tenant
    names = (*service.workers, *sampleable_models(service, owner))
    refs = {name: resolve_model(service, name, owner) for name in names}
    return {"object": "list", "data": [await _model_json(name, ref) for name, ref in refs.items()]}


@routes.get("/models/{name:path}")
async def model(call: Call[None]) -> Json:
    """Any name that `model` may be in a request."""
    name = call.path("name")
    return await _model_json(name, resolve_model(call.service, name, call.tenant))


async def _model_json(name: str, ref: ModelRef) -> dict[str, Any]:
    card = await ref.worker.host.card()
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "tinsmith",
        "root": ref.weights,
        "parent": None if ref.version is None else ref.base_model,
        "max_model_len": card.context_length,
    }


@routes.post("/chat/completions", body=_exact(ChatBody))
async def chat_completions(call: Call[ChatBody]) -> Response:
    """Replies to a conversation, rendered by the model's own chat template."""
    http, service = call.http, call.service
    prepared = await prepare_chat(service, call.tenant, call.body, len(call.content))
    fields = {
        "prompt_token_ids": prepared.requests[0].prompt.tolist() if prepared.body.return_token_ids else None,
        "opened_thinking": prepared.opened_thinking or None,
    }
    extra_fields = {name: value for name, value in fields.items() if value is not None}
    if prepared.body.stream:
        opening = _chat_opening(prepared)
        return await _stream(http, prepared, service, "chat.completion.chunk", chat_delta, opening, extra_fields)
    sampled = await sample_all(http, service.sampling, prepared.calls)
    choices = [whole_choice(prepared, index, sequence) for index, sequence in enumerate(sampled[0].sequences)]
    response = {
        **response_head(prepared, "chat.completion"),
        "choices": [chat_choice(prepared, choice) for choice in choices],
        "usage": usage(prepared, sampled, sampled_tokens(sampled)),
    }
    return SafeJSONResponse(response | extra_fields)


def _chat_opening(call: PreparedRequest) -> list[dict[str, Any]]:
    delta = {"role": "assistant", "content": ""}
    return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(call.body.n)]


@routes.post("/completions", body=_exact(CompletionBody))
async def completions(call: Call[CompletionBody]) -> Response:
    """Continuations of each prompt; `max_tokens` 0 with `echo` scores the prompt alone."""
    http, service, text = call.http, call.service, call.body
    prepared = await prepare_completion(service, call.tenant, text, len(call.content))
    if text.stream:
        return await _stream(http, prepared, service, "text_completion", text_choice, _text_opening(prepared, text))
    sampled = await sample_all(http, service.sampling, prepared.calls)
    choices = []
    for at, (request, result) in enumerate(zip(prepared.requests, sampled, strict=True)):
        for number, sequence in enumerate(result.sequences):
            choice = whole_choice(prepared, at * text.n + number, sequence)
            if text.max_tokens == 0:
                choice = ChoiceDelta(index=choice.index, delta=TextDelta(text=""), finish="length")
            if text.echo:
                choice = _with_prompt(prepared.echoed[at], request, result, choice)
            choices.append(text_choice(prepared, choice) | _prompt_ids(text, request))
    counts = usage(prepared, sampled, sampled_tokens(sampled) if text.max_tokens else 0)
    return SafeJSONResponse({**response_head(prepared, "text_completion"), "choices": choices, "usage": counts})


def _with_prompt(
    prompt: EchoedPrompt, request: SampleRequest, result: SampleResult, choice: ChoiceDelta
) -> ChoiceDelta:
    """A choice with its prompt in front."""
    scored = result.prompt_logprobs
    tops = top_logprobs_of(result.topk_prompt) or [()] * len(request.prompt)
    return replace(
        choice,
        delta=TextDelta(text=prompt.text + choice.delta.text),
        tokens=[*request.prompt.tolist(), *choice.tokens],
        logprobs=[*(json_logprobs(scored) if scored is not None else ()), *choice.logprobs],
        top_logprobs=[*tops, *(choice.top_logprobs or [()] * len(choice.tokens))],
        offsets=[*prompt.starts, *(len(prompt.text) + offset for offset in choice.offsets)],
    )


def _text_opening(call: PreparedRequest, text: CompletionBody) -> list[dict[str, Any]]:
    """The first choices of a stream: the prompts' text with `echo`, their tokens with `return_token_ids`."""
    if not text.echo and not text.return_token_ids:
        return []
    choices = []
    for at, request in enumerate(call.requests):
        choice = {
            "text": call.echoed[at].text if text.echo else "",
            "logprobs": None,
            "finish_reason": None,
            **_prompt_ids(text, request),
        }
        choices += [{"index": at * text.n + number, **choice} for number in range(text.n)]
    return choices


def _prompt_ids(text: CompletionBody, request: SampleRequest) -> dict[str, Any]:
    return {"prompt_token_ids": request.prompt.tolist()} if text.return_token_ids else {}


async def _stream(
    http: Request,
    call: PreparedRequest,
    service: Service,
    kind: str,
    render: RenderChoice,
    opening: Sequence[Mapping[str, Any]],
    extra_fields: Mapping[str, Any] | None = None,
) -> Response:
    """A streamed response, begun with the first token; `extra_fields` are in its first chunk."""
    samples = await stream_samples(http, service.sampling, call.calls)
    return _EventResponse(event_stream(call, samples, kind, render, opening, extra_fields or {}))


@routes.post("/responses", body=_exact(ResponsesBody))
async def responses(call: Call[ResponsesBody]) -> Response:
    """The reply to a conversation, as items of the Responses API. Responses are not stored."""
    http, service, body = call.http, call.service, call.body
    with naming_fields():
        prepared = replace(
            await prepare_chat(service, call.tenant, body.to_chat(), len(call.content)), id=new_id("resp")
        )
        if body.stream:
            samples = await stream_samples(http, service.sampling, prepared.calls)
            return _EventResponse(response_events(body, prepared, samples))
        (sampled,) = await sample_all(http, service.sampling, prepared.calls)
    return SafeJSONResponse(whole_response(body, prepared, sampled))


class _EventResponse(StreamingResponse):
    """Closes the generator of events when the client disconnects between two of them."""

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


@generate_routes.post("/generate", body=_exact(GenerateBody))
async def generate(call: Call[GenerateBody]) -> Json:
    """vLLM's generate: `sampling_params.n` continuations of `token_ids`, as tokens and logprobs.

    For clients that render prompts themselves, as verifiers and prime-rl do: sampled tokens are never re-encoded.
    `weights` names the weights that answered. With `sampling_params.return_routed_experts`, each choice of a mixture of
    experts has `routed_experts`: {data, dtype, shape, start}, base64 of the experts [tokens, layers, k] of the prompt
    from position `routed_experts_prompt_start` on and of all sampled tokens but the last.
    """
    service, owner, request_body = call.service, call.tenant, call.body
    params = parse_exact(GenerateParams, request_body.sampling_params, "sampling_params.")
    service.sampling.check_capacity()
    with naming("model"):
        ref = resolve_model(service, request_body.model, owner)
    card = await ref.worker.host.card()
    top_logprobs = params.logprobs or 0
    request = build_sample_request(
        params,
        card,
        ref,
        request_body.token_ids,
        params.max_tokens,
        prompt_field="token_ids",
        topk_sample_logprobs=top_logprobs,
        routed_experts=params.return_routed_experts,
    )
    calls = SampleCalls(owner=owner, base_model=ref.base_model, requests=[request])
    (sampled,) = await sample_all(call.http, service.sampling, calls)
    tokens = sampled_tokens([sampled])
    return {
        "request_id": new_id("generate"),
        "choices": [
            _generate_choice(index, sequence, params) | experts
            for index, (sequence, experts) in enumerate(zip(sampled.sequences, _experts(sampled, params), strict=True))
        ],
        "prompt_token_ids": request_body.token_ids,
        "weights": ref.weights,
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": tokens,
            "total_tokens": len(request.prompt) + tokens,
            "prompt_tokens_details": {"cached_tokens": sampled.prompt_cache_hit_tokens},
        },
    }


def _generate_choice(index: int, sequence: SampledSequence, params: GenerateParams) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": sequence.tokens.tolist(),
        "finish_reason": sequence.stop_reason,
        "logprobs": _generate_logprobs(sequence) if params.logprobs is not None else None,
    }


def _experts(sampled: SampleResult, params: GenerateParams) -> list[dict[str, Any]]:
    """The field `routed_experts` of each choice; empty fields unless the request has return_routed_experts."""
    if not params.return_routed_experts:
        return [{}] * len(sampled.sequences)
    start = params.routed_experts_prompt_start
    return [{"routed_experts": {**to_payload(record[start:]), "start": start}} for record in recorded_experts(sampled)]


def _generate_logprobs(sequence: SampledSequence) -> dict[str, Any]:
    tokens = sequence.tokens.tolist()
    tops = top_logprobs_of(sequence.topk) or [()] * len(tokens)
    entries = zip(tokens, json_logprobs(sequence.logprobs), tops, strict=True)
    return {
        "content": [{**_entry(token, p), "top_logprobs": [_entry(*pair) for pair in top]} for token, p, top in entries]
    }


def _entry(token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob}
