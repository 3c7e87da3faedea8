"""The completion request of the OpenAI API as the agent endpoint takes it, the choices of its response, and the names
of tokens that the service's responses have too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tinsmith.errors import Unsupported


class TextRequest(BaseModel):
    """Body of completions; fields that are not set take the settings of the session."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str = ""
    prompt: str | list[str] | list[int] | list[list[int]]
    n: int = Field(1, ge=1)
    max_tokens: int = Field(16, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    stream: Literal[False] = False

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a continuation."""
        return self.max_tokens

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """The tokens of each prompt. Raises Unsupported for likeliest tokens of a reply, which are not computed."""
        if self.logprobs and not self.echo:
            raise Unsupported(
                "logprobs above 0 is supported only with echo, for the tokens of the prompt.", "Send logprobs: 0."
            )
        prompt = self.prompt
        if isinstance(prompt, str):
            return [encode(prompt)]
        several = [[token] if isinstance(token, int) else token for token in prompt]
        if prompt and isinstance(prompt[0], int):
            return [[token for part in several for token in part if isinstance(token, int)]]
        return [encode(each) if isinstance(each, str) else each for each in several]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token of a choice.

    Example: ScoredToken(token=37, text="5", logprob=-0.2, likeliest=((37, "5", -0.2),))
    """

    token: int
    text: str
    logprob: float | None
    """None for the first token of a prompt."""
    likeliest: Sequence[tuple[int, str, float]] = ()
    """Likeliest tokens in its place: id, text, logprob."""


def text_choice(index: int, text: str, finish: str, tokens: Sequence[ScoredToken] | None) -> dict[str, Any]:
    """A choice of a completion; `tokens` are those of its text if the request has logprobs."""
    return {
        "index": index,
        "text": text,
        "finish_reason": finish,
        "logprobs": None if tokens is None else _logprobs(tokens),
    }


def _logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    offsets, length = list[int](), 0
    for each in tokens:
        offsets.append(length)
        length += len(each.text)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [
            None if each.logprob is None else by_text([(each.token, each.text, each.logprob), *each.likeliest])
            for each in tokens
        ],
        "text_offset": offsets,
    }


def by_text(entries: Iterable[tuple[int, str, float]]) -> Mapping[str, float]:
    """Logprobs by text, the token itself first. Of tokens with the same text, all but the first go by their id."""
    named: dict[str, tuple[int, float]] = {}
    for token, text, logprob in entries:
        name = text if named.get(text, (token,))[0] == token else f"token_id:{token}"
        named.setdefault(name, (token, logprob))
    return {name: logprob for name, (_, logprob) in named.items()}
