"""OpenAI-compatible endpoint of the policy, for agents with their own client.

The endpoint listens on a free port of localhost from the first session to the end of the run, in the run's event loop.
Each rollout has a session with its own URL and key; a client that many rollouts share names the session of a request in
the header X-Session-ID. Every reply is recorded as a Turn with its sampled tokens and logprobs; an assistant message
that a client sends back stands for these tokens, so a conversation becomes one training row.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from tinsmith.chat.completions import ScoredToken, TextRequest, text_choice
from tinsmith.chat.errors import ENDINGS, as_tinsmith_error, error_headers, openai_error, openai_error_of
from tinsmith.chat.request import ChatRequest, parse_json_object, select_fields
from tinsmith.chat.strict_json import encode_json
from tinsmith.errors import BadRequest, TinsmithError, Unauthorized
from tinsmith.rl.policy.chat_session import MODEL, AgentChatRequest, ChatSession, invalid_request, sampling_of
from tinsmith.rl.policy.sampling import SamplingConfig, Snapshot
from tinsmith.rl.types import Turn

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


B = TypeVar("B", bound=BaseModel)


def parse_request(body: bytes, kind: type[B]) -> B:
    """The request in a body. Raises BadRequest, or Unsupported for a field that is not implemented."""

    def unknown(key: str) -> BadRequest:
        return BadRequest(f"'{key}' is not a field of this request.", "Remove it.", field=key)

    values = select_fields(parse_json_object(body), kind, unknown)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise invalid_request(error) from error


class AgentSession(ChatSession):
    """The endpoint of one rollout: `base_url` and `api_key` configure an OpenAI client."""

    model = MODEL

    def __init__(
        self,
        base_url: str,
        policy: Snapshot,
        sampling: SamplingConfig,
        seed: int,
        *,
        open_url: bool,
        limit: int | None = None,
    ) -> None:
        """With `open_url`, the URL is the only secret, and any key is valid. With `limit`, only this many of the newest
        replies are recorded."""
        super().__init__(policy, sampling, seed, limit=limit)
        self.base_url, self.open_url, self.api_key = base_url, open_url, secrets.token_urlsafe(24)

    async def complete(self, request: AgentChatRequest) -> dict[str, Any]:
        """The response of chat/completions. Raises UserError for a request that cannot be served."""
        replies = await self.replies(request)
        choices = [_choice(index, turn, message, request) for index, (turn, message) in enumerate(replies)]
        prompt_tokens = len(replies[0][0].prompt) if replies else 0
        return _response("chat.completion", choices, prompt_tokens, sum(len(turn.tokens) for turn, _ in replies))

    async def complete_text(self, request: TextRequest) -> dict[str, Any]:
        """The response of completions, which are not recorded as turns. Raises UserError as `complete`."""
        prompts = request.prompts(self._policy.chat.encode_document)
        done = await asyncio.gather(*(self._continuations(prompt, request) for prompt in prompts))
        choices = [
            text_choice(at * request.n + number, *parts)
            for at, (each, _) in enumerate(done)
            for number, parts in enumerate(each)
        ]
        return _response("text_completion", choices, sum(map(len, prompts)), sum(sampled for _, sampled in done))

    async def _continuations(
        self, prompt: list[int], request: TextRequest
    ) -> tuple[list[tuple[str, str, list[ScoredToken] | None]], int]:
        """Text, finish reason and tokens of each choice of a prompt, and the number of tokens sampled."""
        wanted = request.logprobs is not None
        echoed = await self._scored(prompt, request.logprobs or 0) if wanted and request.echo else []
        begin = self._policy.chat.decode(prompt) if request.echo else ""
        if request.max_tokens == 0:
            return [(begin, "length", echoed if wanted else None)] * request.n, 0
        seed = self._next_seed() if request.seed is None else request.seed
        sampling = sampling_of(request, self._sampling)
        turns = await self._policy.sample(prompt, count=request.n, seed=seed, sampling=sampling)
        parts = [(begin + turn.text, turn.stop, [*echoed, *self._sampled(turn)] if wanted else None) for turn in turns]
        return parts, sum(len(turn.tokens) for turn in turns)

    def _sampled(self, turn: Turn) -> list[ScoredToken]:
        text = self._policy.chat.token_text
        pairs = zip(turn.tokens, turn.logprobs, strict=True)
        return [ScoredToken(token=token, text=text(token), logprob=p) for token, p in pairs]

    async def _scored(self, prompt: list[int], likeliest: int) -> list[ScoredToken]:
        """The tokens of a prompt with their logprobs, and with the likeliest tokens in their places."""
        text = self._policy.chat.token_text
        first = [ScoredToken(token=token, text=text(token), logprob=None) for token in prompt[:1]]
        if len(prompt) < 2:
            return first
        logprobs_N = (await self._policy.logprobs(prompt)).tolist()
        tops: list[list[tuple[int, str, float]]] = [[] for _ in logprobs_N]
        if likeliest:
            ids_NK, top_NK = await self._policy.top_prompt_logprobs(prompt, likeliest)
            tops = [
                [(token, text(token), p) for token, p in zip(ids, row, strict=True)]
                for ids, row in zip(ids_NK.tolist(), top_NK.tolist(), strict=True)
            ]
        return [
            *first,
            *(
                ScoredToken(token=token, text=text(token), logprob=p, likeliest=top)
                for token, p, top in zip(prompt[1:], logprobs_N, tops, strict=True)
            ),
        ]


def response_chunks(response: Mapping[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """A whole response as the chunks of a stream: two for each choice, and `usage` in one more."""
    head = {key: value for key, value in response.items() if key not in ("choices", "usage")}
    parts = []
    for choice in response["choices"]:
        delta = {**choice["message"]}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        last = {key: value for key, value in choice.items() if key != "message"}
        parts += [[{**last, "finish_reason": None, "delta": delta}], [{**last, "logprobs": None, "delta": {}}]]
    chunks = [{**head, "object": "chat.completion.chunk", "choices": choices} for choices in parts]
    return [*chunks, *([{**chunks[0], "choices": [], "usage": response["usage"]}] if usage else [])]


def _choice(index: int, turn: Turn, message: Mapping[str, Any], request: ChatRequest) -> dict[str, Any]:
    finish = "tool_calls" if turn.stop == "stop" and "tool_calls" in message else turn.stop
    choice: dict[str, Any] = {"index": index, "message": dict(message), "finish_reason": finish, "logprobs": None}
    if request.logprobs:
        pairs = zip(turn.tokens, turn.logprobs, strict=True)
        content = [
            {"token": f"token_id:{token}", "logprob": p, "bytes": None, "top_logprobs": []} for token, p in pairs
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    if request.return_token_ids:
        choice["token_ids"] = list(turn.tokens)
    return choice


def _response(
    kind: str, choices: Sequence[Mapping[str, Any]], prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


BACKLOG = 1024
"""Connections that may wait to be accepted."""

SESSION_HEADER = "x-session-id"
"""Request header with the name of a session, for requests to `base_url`."""


class AgentEndpoint:
    """The server of all agent sessions of a run; it starts listening with the first session."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._url = ""
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._services: dict[str, _Service] = {}

    @property
    def base_url(self) -> str:
        """URL for clients that several sessions share; a request names its session in the header X-Session-ID."""
        if self._server is None:
            self._listen()
        return f"{self._url}/v1"

    @contextmanager
    def named_session(self, name: str, policy: Snapshot, sampling: SamplingConfig, seed: int) -> Iterator[AgentSession]:
        """A session of this name at `base_url` for the duration of the block. The name is the only secret."""
        session = self._sessions[name] = AgentSession(self.base_url, policy, sampling, seed, open_url=True)
        try:
            yield session
        finally:
            del self._sessions[name]

    async def serve(self, name: str, open_service: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        """Enter a service that agents use, once for each name; it is left when the endpoint closes."""
        if name not in self._services:
            self._services[name] = _Service(open_service())
        await self._services[name].ready

    @asynccontextmanager
    async def session(
        self,
        policy: Snapshot,
        sampling: SamplingConfig,
        seed: int,
        *,
        open_url: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[AgentSession]:
        """A session for the duration of the block; `seed` is the rollout's own.

        With `open_url`, the URL is the only secret, and any key is valid: for agents that send a fixed key. With
        `limit`, only this many of the newest replies are recorded.
        """
        if self._server is None:
            self._listen()
        name = secrets.token_hex(16)
        url = f"{self._url}/{name}/v1"
        session = self._sessions[name] = AgentSession(url, policy, sampling, seed, open_url=open_url, limit=limit)
        try:
            yield session
        finally:
            del self._sessions[name]

    async def close(self) -> None:
        """Leave the services and stop listening; requests in flight are aborted."""
        services, self._services = self._services, {}
        await asyncio.gather(*(service.close() for service in services.values()))
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            self._server = self._serving = None

    def _listen(self) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            """A server that leaves signals to the run."""

            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="warning", access_log=False, lifespan="off")
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="agent-endpoint")

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/{session}/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/{session}/v1/completions", self._completions, methods=["POST"]),
                Route("/{session}/v1/models", self._models, methods=["GET"]),
            ],
            middleware=[Middleware(_ErrorMiddleware)],
            exception_handlers={TinsmithError: _on_error, 404: _on_unknown_path, 405: _on_other_method},
        )

    async def _chat_completions(self, http: Request) -> Response:
        from starlette.responses import Response

        session = self._authenticate(http)
        request = parse_request(await http.body(), AgentChatRequest)
        response = await session.complete(request)
        if not request.stream:
            return _json_response(response)
        chunks = response_chunks(response, usage=request.stream_options.include_usage)
        events = [f"data: {encode_json(chunk)}\n\n" for chunk in chunks]
        return Response("".join(events) + "data: [DONE]\n\n", media_type="text/event-stream")

    async def _completions(self, http: Request) -> Response:
        session = self._authenticate(http)
        return _json_response(await session.complete_text(parse_request(await http.body(), TextRequest)))

    async def _models(self, http: Request) -> Response:
        self._authenticate(http)
        return _json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "tinsmith"}]})

    def _authenticate(self, http: Request) -> AgentSession:
        """The session of a request. Raises Unauthorized for a wrong key, and for a rollout that has ended."""
        name = http.path_params.get("session") or http.headers.get(SESSION_HEADER, "")
        session = self._sessions.get(name)
        key = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if session is None or not (session.open_url or secrets.compare_digest(key, session.api_key.encode())):
            raise Unauthorized(
                "This key is not valid for a session.", "Use base_url and api_key of a rollout that is running."
            )
        return session


class _Service:
    """Something to use with `async with` that must be entered and left in one task: it has one of its own."""

    def __init__(self, service: AbstractAsyncContextManager[Any]) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._run(service), name="agent-service")

    async def _run(self, service: AbstractAsyncContextManager[Any]) -> None:
        try:
            async with service:
                self.ready.set_result(None)
                await self._end.wait()
        except Exception as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)

    async def close(self) -> None:
        self._end.set()
        await self._task


class _ErrorMiddleware:
    """ASGI middleware: answers exceptions that nothing handled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import ClientDisconnect

        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            return
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001 - the last that sees it: uvicorn would answer in plain text
            response = _error_response(error)
            if not has_started:
                await response(scope, receive, send)


def _json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(encode_json(body), status, headers, media_type="application/json")


def _error_response(error: BaseException) -> Response:
    failure = as_tinsmith_error(error, "A request of an agent", log_name="log.txt of the run folder")
    return _json_response(openai_error_of(failure), failure.status, error_headers(failure))


async def _on_error(_: Request, error: Exception) -> Response:
    return _error_response(error)


async def _on_unknown_path(http: Request, _: Exception) -> Response:
    message = f"There is no route {http.url.path}. Call chat/completions, completions or models."
    return _json_response(openai_error(message, 404), 404)


async def _on_other_method(http: Request, _: Exception) -> Response:
    message = f"{http.url.path} does not take {http.method}. Send POST to completions, GET to models."
    return _json_response(openai_error(message, 405), 405)
