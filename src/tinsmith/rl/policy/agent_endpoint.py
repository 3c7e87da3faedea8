"""OpenAI-compatible endpoint of the policy, for agents with their own client.

The endpoint listens on a free port of localhost from the first session to the end of the run, in the run's event loop.
Each rollout has a session with its own URL and key. Every reply is recorded as a Turn with its sampled tokens and
logprobs; an assistant message that a client sends back stands for these tokens, so a conversation becomes one training
row.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from tinsmith.chat.request import (
    ChatRequest,
    describe_errors,
    error_body,
    error_code,
    parse_json_object,
    select_fields,
)
from tinsmith.chat.tool_calls import ToolCallFormat, ToolCallParser, marker_texts, tool_call_format
from tinsmith.errors import BadRequest, NotFound, TinsmithError, Unauthorized, UserError
from tinsmith.rl.policy.base import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.types import Message, Turn

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


MODEL = "policy"
"""Name of the policy; the endpoint accepts any name."""


class AgentChatRequest(ChatRequest):
    """Body of chat/completions; fields that are not set take the run's sampling settings."""

    model: str = MODEL
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: int = Field(0, ge=0, le=0)
    stream_options: dict[str, Any] = Field(default_factory=dict)

    def sampling(self, defaults: SamplingConfig) -> SamplingConfig:
        """The run's settings with those of the request on top. Raises BadRequest."""
        overrides = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
        }
        changed = {key: value for key, value in overrides.items() if value is not None}
        try:
            return SamplingConfig.model_validate({**defaults.model_dump(), **changed})
        except ValidationError as error:
            raise _invalid(error) from error


def parse_request(body: bytes) -> AgentChatRequest:
    """The request in a body. Raises BadRequest, or Unsupported for a field that is not implemented."""

    def unknown(key: str) -> BadRequest:
        return BadRequest(f"'{key}' is not a field of this request.", "Remove it.")

    values = select_fields(parse_json_object(body), AgentChatRequest, unknown)
    try:
        return AgentChatRequest.model_validate(values)
    except ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: ValidationError) -> BadRequest:
    return BadRequest(f"The request is invalid: {describe_errors(error.errors())}", "Correct or remove the field.")


class AgentSession:
    """The endpoint of one rollout: `base_url` and `api_key` configure an OpenAI client."""

    model = MODEL

    def __init__(self, base_url: str, policy: Snapshot, sampling: SamplingConfig, seed: int) -> None:
        self.base_url, self.api_key = base_url, secrets.token_urlsafe(24)
        self._policy, self._sampling, self._seed = policy, sampling, seed
        self._calls = 0
        self._turns: list[Turn] = []
        self._turn_by_conversation: dict[str, Turn] = {}
        """Turn of the last message, by the conversation up to and including it."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All replies, grouped by conversation; the conversation with the newest reply comes last."""
        conversations: list[list[Turn]] = []
        for turn in self._turns:
            extended = [turns for turns in conversations if _extends(turn, turns[-1])]
            longest = max(extended, key=lambda turns: len(turns[-1].prompt), default=[])
            conversations = [*(turns for turns in conversations if turns is not longest), [*longest, turn]]
        return tuple(turn for turns in conversations for turn in turns)

    async def complete(self, request: AgentChatRequest) -> dict[str, Any]:
        """The response of chat/completions. Raises UserError for a request that cannot be served."""
        template = self._policy.chat.template
        tools = request.template_tools()
        call_format = (
            tool_call_format(template, "the policy", "set model.chat_template to a template that supports them")
            if tools
            else None
        )
        messages = request.template_messages(template)
        sampling = request.sampling(self._sampling)
        prompt = self._prompt(messages, tools)
        number, self._calls = self._calls, self._calls + 1
        seed = request_seed(self._seed, number) if request.seed is None else request.seed
        turns = await self._policy.sample(prompt, count=request.n, seed=seed, sampling=sampling)
        choices = []
        for index, turn in enumerate(turns):
            message = self._reply_message(turn, call_format, tools, sampling)
            self._turns.append(turn)
            self._turn_by_conversation[_conversation_key([*messages, message], tools)] = turn
            choices.append(_choice(index, turn, message, request))
        return _response(choices, len(prompt), sum(len(turn.tokens) for turn in turns))

    def _prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Prompt tokens that extend the conversation's last recorded turn, where the template allows it."""
        parts = [_message(message) for message in messages]
        for at in reversed(range(len(messages))):
            if messages[at]["role"] != "assistant":
                continue
            turn = self._turn_by_conversation.get(_conversation_key(messages[: at + 1], tools))
            if turn is not None and at + 1 < len(messages):
                try:
                    return self._policy.chat.prompt([*parts[:at], turn, *parts[at + 1 :]], tools)
                except UserError:  # the template needs the call itself before a tool's result: render all messages
                    break
        return self._policy.chat.prompt(parts, tools)

    def _reply_message(
        self,
        turn: Turn,
        call_format: ToolCallFormat | None,
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingConfig,
    ) -> dict[str, Any]:
        """A reply as an assistant message, tool calls separated from its text."""
        if call_format is None:
            return {"role": "assistant", "content": turn.text}
        parser = ToolCallParser(call_format, tools)
        text, calls = parser.feed(self._policy.chat.text(turn.tokens, sampling.stop, marker_texts(call_format)))
        rest, last_calls = parser.end()
        message: dict[str, Any] = {"role": "assistant", "content": text + rest or None}
        if tool_calls := [call.to_json() for call in (*calls, *last_calls)]:
            message["tool_calls"] = tool_calls
        elif message["content"] is None:
            message["content"] = ""
        return message


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


def _extends(turn: Turn, last: Turn) -> bool:
    tokens = (*last.prompt, *last.tokens)
    return turn.prompt[: len(tokens)] == tokens


def _message(message: Mapping[str, Any]) -> Message:
    more = {key: value for key, value in message.items() if key not in ("role", "content")}
    return Message(role=message["role"], content=message["content"], more=more)


def _conversation_key(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Equal for conversations that differ only in fields that clients add to replies, such as call ids."""
    comparable = [
        {"said": message["content"] or "", "calls": [call["function"] for call in _parsed_calls(message)]}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]
    return json.dumps([comparable, list(tools)], sort_keys=True, default=str)


def _parsed_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The message's tool calls with their arguments as objects, as `parse_messages` returns them."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            with suppress(ValueError):  # arguments that are not JSON are compared as text
                arguments = json.loads(arguments or "{}")
        calls.append({"function": {"name": function["name"], "arguments": arguments}})
    return calls


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


def _response(choices: list[dict[str, Any]], prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
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


class AgentEndpoint:
    """The server of all agent sessions of a run; it starts listening with the first session."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._url = ""
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def session(self, policy: Snapshot, sampling: SamplingConfig, seed: int) -> AsyncIterator[AgentSession]:
        """A session for the duration of the block; `seed` is the rollout's own."""
        if self._server is None:
            self._listen()
        name = secrets.token_hex(8)
        session = self._sessions[name] = AgentSession(f"{self._url}/{name}/v1", policy, sampling, seed)
        try:
            yield session
        finally:
            del self._sessions[name]

    async def close(self) -> None:
        """Stop listening; requests in flight are aborted."""
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
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/{session}/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/{session}/v1/models", self._models, methods=["GET"]),
                Route("/{rest:path}", self._not_found, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    async def _chat_completions(self, http: Request) -> Response:
        from starlette.responses import JSONResponse, Response

        try:
            session = self._authenticate(http)
            request = parse_request(await http.body())
            response = await session.complete(request)
        except TinsmithError as error:
            return _error_response(error)
        if not request.stream:
            return JSONResponse(response)
        chunks = response_chunks(response, usage=bool(request.stream_options.get("include_usage")))
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return Response("".join(events) + "data: [DONE]\n\n", media_type="text/event-stream")

    async def _models(self, http: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            self._authenticate(http)
        except TinsmithError as error:
            return _error_response(error)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "tinsmith"}]})

    async def _not_found(self, http: Request) -> Response:
        return _error_response(NotFound(f"There is no route {http.url.path}.", "Call chat/completions or models."))

    def _authenticate(self, http: Request) -> AgentSession:
        """The session of a request. Raises Unauthorized for a wrong key, and for a rollout that has ended."""
        session = self._sessions.get(http.path_params["session"])
        key = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if session is None or not secrets.compare_digest(key, session.api_key.encode()):
            raise Unauthorized(
                "This key is not valid for a session.", "Use base_url and api_key of a rollout that is running."
            )
        return session


def _error_response(error: TinsmithError) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(error_body(str(error), error.status, error_code(error)), status_code=error.status)
