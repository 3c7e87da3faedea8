"""Replies of a server's OpenAI API, in pieces as they are sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from tinsmith.chat.strict_json import encode_json
from tinsmith.errors import ConfigError, EngineError, TinsmithError, UserError
from tinsmith.http_common import refusal

Messages = Sequence[Mapping[str, str]]
"""A conversation: role and content of each message."""
CONNECT_S = 10.0
ROUTE = "oai/api/v1"
"""Where servers of the Tinker API have their OpenAI API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """How replies are sampled; what is not set has the server's default.

    Example: ReplySettings(max_tokens=256, temperature=0.7)
    """

    max_tokens: int | None = None
    temperature: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters of the OpenAI API."""
    template_values: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of a request."""
        values = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "chat_template_kwargs": self.template_values or None,
        }
        return {**self.more, **{name: value for name, value in values.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """A piece of a reply; the last one says why the reply ended.

    Example: ReplyPiece(" 52", "stop")
    """

    text: str
    ended: str = ""
    """`stop`, or `length` for the limit of tokens; empty: the reply goes on."""
    opened_thinking: str = ""
    """Of the first piece: the mark that ends the thinking in which the prompt leaves the reply."""


class ReplyStream:
    """Samples replies to conversations from weights at a server."""

    def __init__(
        self,
        client: httpx.Client,
        model: str,
        settings: ReplySettings,
        encode: Callable[[Messages], Sequence[int]] | None = None,
    ) -> None:
        """`encode`: renders a conversation as tokens; None: the server does, with the model's chat template."""
        self._client, self._model, self._encode = client, model, encode
        self.settings = settings

    def reply(self, messages: Messages) -> Generator[ReplyPiece]:
        """The reply to a conversation. Closing the generator stops it.

        Raises UserError for what the server refuses, EngineError if it fails.
        """
        body: dict[str, Any] = {"model": self._model, "stream": True, **self.settings.parameters}
        if self._encode is None:
            body["messages"] = list(messages)
        else:
            body["prompt"] = list(self._encode(messages))
        route = "completions" if self._encode else "chat/completions"
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.stream(
                "POST", f"{ROUTE}/{route}", content=encode_json(body).encode(), headers=headers
            ) as response:
                if response.is_error:
                    response.read()
                    raise _refused(response)
                yield from _pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    def check(self, missing: str = "") -> None:
        """Raise UserError if no server responds, or if it does not have the weights.

        `missing`: what to do about a model that it does not serve.
        """
        try:
            response = self._client.get(f"{ROUTE}/models/{quote(self._model, safe='')}")
            served = self._served() if response.status_code == httpx.codes.NOT_FOUND else []
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if served and not self._model.startswith("tinker://"):
            raise ConfigError(
                f"The server at {self._url} has no model {self._model}; it serves {', '.join(served)}.", missing
            )
        if response.is_error:
            raise _refused(response)

    def _served(self) -> list[str]:
        """Names of the base models that the server lists; none if it has no such list."""
        response = self._client.get(f"{ROUTE}/models")
        models = response.json()["data"] if response.is_success else ()
        return [each["id"] for each in models if not each.get("parent")]

    @property
    def _url(self) -> str:
        return str(self._client.base_url).rstrip("/")

    def _lost(self, error: httpx.HTTPError) -> TinsmithError:
        """The error for a server that does not respond, or not to the end."""
        url = self._url
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ConfigError(f"No server responds at {url}: {error}.", "Start one: tinsmith serve")
        return EngineError(
            f"{url} ended the reply: {error or type(error).__name__}.", "The log of the server says why."
        )


def server_client(url: str, key: str) -> httpx.Client:
    """A client that waits for each token as long as it takes."""
    headers = {"Authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    return httpx.Client(base_url=f"{url.rstrip('/')}/", headers=headers, timeout=timeout, follow_redirects=True)


def _pieces(lines: Iterator[str]) -> Iterator[ReplyPiece]:
    """The pieces in a stream of events. Raises EngineError if it breaks off."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if error := event.get("error"):
            raise EngineError(str(error.get("message", error)))
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            ended = choice.get("finish_reason") or ""
            opened = event.get("opened_thinking", "")
            if text or ended or opened:
                yield ReplyPiece(text or "", ended, opened)
    raise EngineError("The server ended the reply before it was complete.", "Its log says more.")


def _refused(response: httpx.Response) -> TinsmithError:
    """The error for a response that is none."""
    message = refusal(response, str(response.url))
    return UserError(message) if response.is_client_error else EngineError(message)
