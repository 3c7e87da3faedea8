"""The policy behind a local endpoint in OpenAI's dialect, for agents that bring a client of their own.

It listens on a free port of this machine, from the first line that is opened to the end of the run, in the run's own
event loop. Each rollout has a line, with an address and a key of its own. What a line answers is in `line.py`.
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

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinsmith.chat.messages import FIELDS, let_through, plain_messages, plain_tools
from tinsmith.chat.tool_calls import Call, Form, Reading, form_of, marks_of
from tinsmith.errors import BadRequest, NotFound, TinsmithError, Unauthorized, UserError
from tinsmith.rl.policy.base import SamplingConfig, Snapshot, request_seed
from tinsmith.rl.policy.chat import PromptTooLong
from tinsmith.rl.types import Message, Turn

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


MODEL = "policy"
"""What the policy is called; agents may send any name."""
CALL_ID = 9
"""Letters and digits of a tool call's id: Mistral's templates take nothing else back."""


class Asked(BaseModel):
    """chat/completions, as far as it is done here."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = MODEL
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = "auto"
    n: int = Field(1, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=0)
    return_token_ids: bool = False
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)

    def sampling(self, ours: SamplingConfig) -> SamplingConfig:
        """The run's settings with what was asked laid on. Raises ValidationError."""
        length = self.max_completion_tokens or self.max_tokens
        asked = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "max_tokens": length}
        asked["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop  # type: ignore[assignment]
        changed = {key: value for key, value in asked.items() if value is not None}
        return SamplingConfig.model_validate({**ours.model_dump(), **changed})


def asked_of(body: bytes) -> Asked:
    """Raises BadRequest, or Unsupported for a field that is not done here."""
    try:
        values = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"The body is not JSON: {error}", "Send a JSON object.") from error
    if not isinstance(values, dict):
        raise BadRequest("The body is no JSON object.", "Send one.")
    for key in [key for key in values if key in FIELDS and key not in Asked.model_fields]:
        let_through(key, values.pop(key))
    try:
        return Asked.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        raise BadRequest(f"The request is not in order: {_sentence(error)}", "Leave it out or mend it.") from error


class AgentSession:
    """Open for one rollout; `base_url` and `api_key` are what a client of OpenAI's dialect wants."""

    model = MODEL

    def __init__(self, base_url: str, policy: Snapshot, sampling: SamplingConfig, seed: int) -> None:
        self.base_url, self.api_key = base_url, secrets.token_urlsafe(24)
        self._policy, self._sampling, self._seed = policy, sampling, seed
        self._calls = 0
        self._turns: list[Turn] = []
        self._answered: dict[str, Turn] = {}
        """By the conversation up to and with the answer."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every reply, conversation by conversation; the one that was spoken in last comes last."""
        chains: list[list[Turn]] = []
        for turn in self._turns:
            mine = [chain for chain in chains if _extends(turn, chain[-1])]
            chain = max(mine, key=lambda one: len(one[-1].prompt), default=[])
            chains = [*(one for one in chains if one is not chain), [*chain, turn]]
        return tuple(turn for chain in chains for turn in chain)

    async def complete(self, asked: Asked) -> dict[str, Any]:
        """The answer to chat/completions. Raises UserError for what cannot be asked."""
        chat = self._policy.chat
        tools = plain_tools(asked.tools, asked.tool_choice)
        form = form_of(chat.template, "the policy", "set model.chat_template to one that takes them") if tools else None
        messages = plain_messages(asked.messages, knows_developer="developer" in chat.template)
        try:
            sampling = asked.sampling(self._sampling)
        except ValidationError as error:
            raise BadRequest(f"The request is not in order: {_sentence(error)}", "Mend it.") from error
        prompt = self._prompt(messages, tools)
        number, self._calls = self._calls, self._calls + 1
        seed = request_seed(self._seed, number) if asked.seed is None else asked.seed
        turns = await self._policy.sample(prompt, count=asked.n, seed=seed, sampling=sampling)
        choices = []
        for index, turn in enumerate(turns):
            message = self._read(turn, form, tools, sampling)
            self._turns.append(turn)
            self._answered[_key([*messages, message], tools)] = turn
            choices.append(_choice(index, turn, message, asked))
        return _reply(choices, len(prompt), sum(len(turn.tokens) for turn in turns))

    def _prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens that extend the last reply of ours in the conversation, where the template allows."""
        plain = [_message(one) for one in messages]
        for at in reversed(range(len(messages))):
            if messages[at]["role"] != "assistant":
                continue
            if (turn := self._answered.get(_key(messages[: at + 1], tools))) is not None and at + 1 < len(messages):
                try:
                    return self._policy.chat.prompt([*plain[:at], turn, *plain[at + 1 :]], tools)
                except UserError:  # a template that wants the call itself before a tool's answer: spelled anew below
                    break
        return self._policy.chat.prompt(plain, tools)

    def _read(
        self, turn: Turn, form: Form | None, tools: Sequence[Mapping[str, Any]], sampling: SamplingConfig
    ) -> dict[str, Any]:
        """A reply as a message, its tool calls apart from its text."""
        if form is None:
            return {"role": "assistant", "content": turn.text}
        reading = Reading(form, tools)
        said, calls = reading.feed(self._policy.chat.text(turn.tokens, sampling.stop, marks_of(form)))
        rest, more = reading.end()
        message: dict[str, Any] = {"role": "assistant", "content": said + rest or None}
        if made := [_call(call) for call in (*calls, *more)]:
            message["tool_calls"] = made
        elif message["content"] is None:
            message["content"] = ""
        return message


def chunks(reply: Mapping[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """A whole reply as the chunks of a stream: each choice in one."""
    head = {key: value for key, value in reply.items() if key not in ("choices", "usage")}
    made = []
    for choice in reply["choices"]:
        delta = {**choice["message"]}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        last = {key: value for key, value in choice.items() if key != "message"}
        made += [[{**last, "finish_reason": None, "delta": delta}], [{**last, "logprobs": None, "delta": {}}]]
    told = [{**head, "object": "chat.completion.chunk", "choices": choices} for choices in made]
    return [*told, *([{**told[0], "choices": [], "usage": reply["usage"]}] if usage else [])]


def _extends(turn: Turn, last: Turn) -> bool:
    said = (*last.prompt, *last.tokens)
    return turn.prompt[: len(said)] == said


def _message(given: Mapping[str, Any]) -> Message:
    more = {key: value for key, value in given.items() if key not in ("role", "content")}
    return Message(role=given["role"], content=given["content"], more=more)


def _key(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Equal for conversations that differ only in what a client adds to our answers on their way back."""
    plain = [
        {"said": one["content"] or "", "calls": [call["function"] for call in _called(one)]}
        if one["role"] == "assistant"
        else one
        for one in messages
    ]
    return json.dumps([plain, list(tools)], sort_keys=True, default=str)


def _called(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its tool calls with the arguments as an object, as they come from `plain_messages`."""
    made = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            with suppress(ValueError):  # not JSON: compared as text
                arguments = json.loads(arguments or "{}")
        made.append({"function": {"name": function["name"], "arguments": arguments}})
    return made


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": secrets.token_hex(CALL_ID)[:CALL_ID], "type": "function", "function": function}


def _choice(index: int, turn: Turn, message: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    finish = "tool_calls" if turn.stop == "stop" and "tool_calls" in message else turn.stop
    choice: dict[str, Any] = {"index": index, "message": dict(message), "finish_reason": finish, "logprobs": None}
    if asked.logprobs:
        pairs = zip(turn.tokens, turn.logprobs, strict=True)
        content = [
            {"token": f"token_id:{token}", "logprob": p, "bytes": None, "top_logprobs": []} for token, p in pairs
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    if asked.return_token_ids:
        choice["token_ids"] = list(turn.tokens)
    return choice


def _reply(choices: list[dict[str, Any]], prompt: int, said: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said},
    }


def _sentence(error: ValidationError) -> str:
    return "; ".join(f"'{'.'.join(map(str, one['loc']))}': {one['msg']}" for one in error.errors()) + "."


BACKLOG = 1024
"""Connections that may wait to be taken."""


class AgentEndpoint:
    """Lines to the policy. Nothing listens before the first is opened."""

    def __init__(self) -> None:
        self._lines: dict[str, AgentSession] = {}
        self._url = ""
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def session(self, policy: Snapshot, sampling: SamplingConfig, seed: int) -> AsyncIterator[AgentSession]:
        """Open for as long as the block runs; `seed` is the rollout's own."""
        if self._server is None:
            self._listen()
        name = secrets.token_hex(8)
        line = self._lines[name] = AgentSession(f"{self._url}/{name}/v1", policy, sampling, seed)
        try:
            yield line
        finally:
            del self._lines[name]

    async def close(self) -> None:
        """Stops listening; requests under way are broken off."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
            self._server = self._serving = None

    def _listen(self) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            """Leaves signals to the run."""

            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        place = socket.socket()
        place.bind(("127.0.0.1", 0))
        place.listen(BACKLOG)
        self._url = f"http://127.0.0.1:{place.getsockname()[1]}"
        config = uvicorn.Config(self._app(), log_level="warning", access_log=False, lifespan="off")
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[place]), name="agent-endpoint")

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/{line}/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/{line}/v1/models", self._models, methods=["GET"]),
                Route("/{rest:path}", self._nothing, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, Response

        try:
            line = self._of(request)
            asked = asked_of(await request.body())
            reply = await line.complete(asked)
        except TinsmithError as error:
            return JSONResponse(_fault(error), status_code=error.status)
        if not asked.stream:
            return JSONResponse(reply)
        told = chunks(reply, usage=bool(asked.stream_options.get("include_usage")))
        events = [f"data: {json.dumps(one)}\n\n" for one in told]
        return Response("".join(events) + "data: [DONE]\n\n", media_type="text/event-stream")

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            self._of(request)
        except TinsmithError as error:
            return JSONResponse(_fault(error), status_code=error.status)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "tinsmith"}]})

    async def _nothing(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        error = NotFound(f"{request.url.path} is not here.", "There are chat/completions and models.")
        return JSONResponse(_fault(error), status_code=error.status)

    def _of(self, request: Request) -> AgentSession:
        """Raises Unauthorized for the wrong key, and for a rollout that is over."""
        line = self._lines.get(request.path_params["line"])
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if line is None or not secrets.compare_digest(given, line.api_key.encode()):
            raise Unauthorized("This key opens no line.", "Use base_url and api_key of a rollout that is under way.")
        return line


def _fault(error: TinsmithError) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return {"error": {"message": str(error), "type": kind, "code": code, "param": None}}
