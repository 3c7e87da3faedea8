"""A request of the OpenAI dialect, understood: what is to be sampled from which weights, and how it will be told."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.chat.messages import plain_messages, plain_tools
from tinsmith.chat.tokenizer import Words
from tinsmith.chat.tool_calls import Form, Reading, form_of, marks_of
from tinsmith.engine.base import ModelCard, SampleRequest
from tinsmith.engine.validation import check_sample, did_you_mean
from tinsmith.errors import BadRequest, NotFound
from tinsmith.service.dependencies import Service
from tinsmith.service.openai.sampling import Calls, Choice
from tinsmith.service.openai.schemas import ChatBody, Drawing, Telling, TooLong
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession
from tinsmith.service.training.worker import Worker


def tools_of(asked: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model is told of. Raises BadRequest or Unsupported."""
    return plain_tools(asked.tools, asked.tool_choice)


def prompt_of(asked: ChatBody, words: Words) -> tuple[list[int], Form | None]:
    """(the prompt's tokens, the form of the tool calls to look for). Takes milliseconds: not for the event loop."""
    tools = tools_of(asked)
    template = words.template(tools)
    form = form_of(template, words.name) if tools else None
    begins = asked.add_generation_prompt and "add_generation_prompt" in asked.model_fields_set
    if asked.continue_final_message and begins:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other.",
            "Set add_generation_prompt to false, or leave it out.",
        )
    ids = words.render(
        plain_messages(asked.messages, knows_developer="developer" in template),
        tools,
        begin=asked.add_generation_prompt and not asked.continue_final_message,
        go_on=asked.continue_final_message,
        values=asked.chat_template_kwargs,
    )
    return ids, form


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What answers under a name at this moment."""

    base_model: str
    worker: Worker
    version: str | None
    """None: the base model itself."""
    weights: str
    """What tells these weights from all others: a checkpoint's path, or the base model's name."""


def named(service: Service, name: str, owner: str) -> Named:
    """Raises NotFound for what is not there and for what is another's."""
    if name in service.workers:
        return _of(service, name, None)
    base_model, semicolon, path = name.partition(";")
    if not semicolon:
        base_model, path = "", name
    if path.startswith("tinker://"):
        checkpoint = service.checkpoints.readable(path, owner)
        if checkpoint.kind == "external_weights":
            raise BadRequest(f"{path} is for use elsewhere.", "Give a tinker://RUN/sampler_weights/NAME path.")
        found = _of(service, None, checkpoint)
        if base_model and service.worker(base_model) is not found.worker:
            raise BadRequest(f"{path} belongs to {found.base_model}, not to {base_model}.", "Give the path alone.")
        return found
    sampler = service.store.find(SamplingSession, name)
    if sampler is not None and sampler.owner == owner:
        return Named(
            base_model=sampler.base_model,
            worker=service.worker(sampler.base_model),
            version=service.sampling.current_version(sampler),
            weights=sampler.model_path or sampler.id,
        )
    model = service.store.find(Model, name)
    if model is not None and model.owner == owner:
        return _of(service, None, newest(service, model))
    raise NotFound(
        f"There is no model {name}.",
        f"{did_you_mean(name, service.workers)} Or give a tinker:// path, or the id of a model in training.",
    )


def callable_models(service: Service, owner: str) -> list[str]:
    """Ids of the owner's models that `named` finds: their base model is served, and they have saved weights."""
    mine = (one for one in service.store.all(Model) if one.owner == owner and one.base_model in service.workers)
    return [one.id for one in mine if _saved(service, one)]


def newest(service: Service, model: Model) -> Checkpoint:
    """The weights that were saved last. Raises NotFound."""
    saved = _saved(service, model)
    if not saved:
        raise NotFound(f"Model {model.id} has saved no weights yet.", "Call save_weights_for_sampler first.")
    return max(saved, key=lambda one: one.created)


def _saved(service: Service, model: Model) -> list[Checkpoint]:
    made = service.store.checkpoints_of_run(model.id)
    return [one for one in made if one.kind != "external_weights" and not one.deleted and _lasts(one)]


def _lasts(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires is None or checkpoint.expires > time.time()


def _of(service: Service, base_model: str | None, checkpoint: Checkpoint | None) -> Named:
    name = base_model or (checkpoint.base_model if checkpoint else "")
    return Named(
        base_model=name,
        worker=service.worker(name),
        version=checkpoint.id if checkpoint else None,
        weights=checkpoint.path if checkpoint else name,
    )


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
