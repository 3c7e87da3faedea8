"""A request of the OpenAI dialect, understood: what is to be sampled from which weights, and how it will be told."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.engine.base import ModelCard, SampleRequest
from tinsmith.engine.checks import check_sample
from tinsmith.errors import BadRequest
from tinsmith.openai.toolcalls import Form, Reading, marks_of
from tinsmith.service.openai.bodies import Drawing, Telling
from tinsmith.service.openai.choices import Choice
from tinsmith.service.openai.direct import Calls
from tinsmith.service.openai.errors import TooLong
from tinsmith.service.openai.named import Named
from tinsmith.service.openai.texts import Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call: its prompts, each `n` times."""

    id: str
    created: int
    owner: str
    named: Named
    card: ModelCard
    words: Words
    body: Telling
    requests: tuple[SampleRequest, ...]
    top: int | None
    """Likeliest tokens to tell of beside each; None: no logprobs at all."""
    form: Form | None = None
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def calls(self) -> Calls:
        """What is to be sampled."""
        return Calls(owner=self.owner, base_model=self.named.base_model, requests=self.requests)

    def choice(self) -> Choice:
        """An answer that has not begun."""
        hidden = self.words.special if self.body.skip_special_tokens else frozenset[int]()
        if not self.body.include_stop_str_in_output:
            hidden |= frozenset(_ends(self.body, self.card))
        return Choice(
            growing=self.words.growing(hidden - self.words.marks(marks_of(self.form))),
            stops=self.body.stops,
            stops_stay=self.body.include_stop_str_in_output,
            reading=Reading(self.form, self.tools) if self.form else None,
        )


def new_id(kind: str) -> str:
    """A name for a call."""
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def request_of(
    body: Drawing, card: ModelCard, named: Named, ids: Sequence[int], max_tokens: int | None, **asks: Any
) -> SampleRequest:
    """One prompt's request. Raises BadRequest; TooLong if it does not fit the context."""
    room = card.context_length
    if len(ids) + (max_tokens or 1) - 1 > room:
        raise TooLong(
            f"The context of {named.base_model} is {room} tokens, the prompt has {len(ids)}; max_tokens: {max_tokens}.",
            "Shorten the prompt or lower max_tokens.",
        )
    if "" in body.stops:
        raise BadRequest("A stop string is empty.", "Give text.")
    try:
        prompt = np.asarray(ids, dtype=np.int32)
    except OverflowError as error:
        raise BadRequest("The prompt holds a number that is no token id.", "Use the model's own tokenizer.") from error
    request = SampleRequest(
        request_id=new_id("direct"),
        prompt=prompt,
        version=named.version,
        num_samples=body.n,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=body.top_k or -1,
        top_p=body.top_p,
        seed=body.seed,
        stop_tokens=_ends(body, card),
        stop_strings=body.stops,
        **asks,
    )
    check_sample(request, card)
    return request


def _ends(body: Drawing, card: ModelCard) -> tuple[int, ...]:
    """Tokens that end an answer."""
    return (*(() if body.ignore_eos else card.eos_token_ids), *body.stop_token_ids)
