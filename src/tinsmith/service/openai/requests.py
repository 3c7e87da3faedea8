"""Prepare requests of the OpenAI API: resolve the model's name, render the prompt, build the engine's requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.chat.choice_decoder import ChoiceDecoder, StopStrings
from tinsmith.chat.rendering import content_text
from tinsmith.chat.request import PromptTooLong
from tinsmith.chat.tokenizer import Tokenizer
from tinsmith.chat.tool_calls.formats import ToolCallFormat, marker_texts, opened_thinking, tool_call_format
from tinsmith.chat.tool_calls.parser import ToolCallParser
from tinsmith.engine.base import InputImage, ModelCard, SampleRequest
from tinsmith.engine.sample_validation import MAX_SAMPLES, check_sample
from tinsmith.engine.validation import did_you_mean
from tinsmith.errors import BadRequest, NotFound, Unsupported
from tinsmith.service.openai.images import place_images
from tinsmith.service.openai.sampling import SampleCalls
from tinsmith.service.openai.schemas import ChatBody, CompletionBody, OutputOptions, SamplingOptions, naming
from tinsmith.service.service import Service
from tinsmith.service.storage.records import Checkpoint, Model, SamplingSession
from tinsmith.service.training.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """The weights that a model name stands for at this moment."""

    base_model: str
    worker: Worker
    version: str | None
    """None: the base model itself."""
    weights: str
    """Unique name of the weights: a checkpoint's path, or the base model's name."""


def resolve_model(service: Service, name: str, owner: str) -> ModelRef:
    """The weights that `name` stands for. Raises NotFound for unknown names and for other tenants' weights.

    A name is one of: a served base model; `tinker://RUN/KIND/NAME`, owned or published, alone or as
    `BASE;tinker://…`; the id of a sampling session; the id of a model in training, `SESSION:train:N`, which stands for
    the newest weights saved by save_weights_for_sampler or save_weights. Updates since then are not included, so every
    response comes from weights that can be named again.
    """
    if name in service.workers:
        return _model_ref(service, name, None)
    base_model, semicolon, path = name.partition(";")
    if not semicolon:
        base_model, path = "", name
    if path.startswith("tinker://"):
        return _resolve_path(service, base_model, path, owner)
    sampler = service.store.find(SamplingSession, name)
    if sampler is not None and sampler.owner == owner:
        return ModelRef(
            base_model=sampler.base_model,
            worker=service.worker(sampler.base_model),
            version=service.sampling.current_version(sampler),
            weights=sampler.model_path or sampler.id,
        )
    model = service.store.find(Model, name)
    if model is not None and model.owner == owner:
        return _model_ref(service, None, newest_weights(service, model))
    raise NotFound(
        f"There is no model {name}.",
        f"{did_you_mean(name, service.workers)} A tinker:// path and the id of a model in training are names too.",
    )


def _resolve_path(service: Service, base_model: str, path: str, owner: str) -> ModelRef:
    checkpoint = service.checkpoints.readable(path, owner)
    if checkpoint.kind == "external_weights":
        raise BadRequest(f"{path} holds external weights.", "Give a tinker://RUN/sampler_weights/NAME path.")
    ref = _model_ref(service, None, checkpoint)
    if base_model and service.worker(base_model) is not ref.worker:
        raise BadRequest(f"{path} belongs to {ref.base_model}, not to {base_model}.", "Give the path alone.")
    return ref


def _model_ref(service: Service, base_model: str | None, checkpoint: Checkpoint | None) -> ModelRef:
    name = base_model or (checkpoint.base_model if checkpoint else "")
    return ModelRef(
        base_model=name,
        worker=service.worker(name),
        version=checkpoint.id if checkpoint else None,
        weights=checkpoint.path if checkpoint else name,
    )


def sampleable_models(service: Service, owner: str) -> list[str]:
    """Ids of the owner's models in training that `resolve_model` accepts: served base model, saved weights."""
    models = [model for model in service.store.all(Model) if model.owner == owner]
    return [model.id for model in models if model.base_model in service.workers and _saved_weights(service, model)]


def newest_weights(service: Service, model: Model) -> Checkpoint:
    """The model's most recently saved weights. Raises NotFound if there are none."""
    saved = _saved_weights(service, model)
    if not saved:
        raise NotFound(f"Model {model.id} has no saved weights.", "Call save_weights_for_sampler first.")
    return max(saved, key=lambda checkpoint: checkpoint.created)


def _saved_weights(service: Service, model: Model) -> list[Checkpoint]:
    return [
        checkpoint
        for checkpoint in service.store.checkpoints_of_run(model.id)
        if checkpoint.kind != "external_weights"
        and not checkpoint.deleted
        and (checkpoint.expires is None or checkpoint.expires > time.time())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt as the response begins with it."""

    text: str
    starts: Sequence[int]
    """Character of the text at which each token begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A validated call: its prompts, each sampled `n` times."""

    id: str
    created: int
    owner: str
    model: ModelRef
    card: ModelCard
    tokenizer: Tokenizer
    body: OutputOptions
    requests: tuple[SampleRequest, ...]
    top_logprobs: int | None
    """Most likely tokens to return for each position; None returns no logprobs at all."""
    echoed: tuple[EchoedPrompt, ...] = ()
    """Each prompt, where `echo` returns them."""
    call_format: ToolCallFormat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    opened_thinking: str = ""
    """The mark that ends the thinking in which the chat template leaves the reply; empty if there is none."""

    @property
    def calls(self) -> SampleCalls:
        """The engine's requests."""
        return SampleCalls(owner=self.owner, base_model=self.model.base_model, requests=self.requests)

    def decoder(self, index: int) -> ChoiceDecoder:
        """A decoder for the choice with this index."""
        tokenizer, stops, body = self.tokenizer, self.body.stop_strings, self.body
        hidden = tokenizer.special_ids if body.skip_special_tokens else frozenset[int]()
        ends = frozenset(_stop_tokens(body, self.card))
        if not body.include_stop_str_in_output:
            hidden |= ends
        request = index // body.n
        previous = int(self.requests[request].prompt[-1])
        # A stop string may hold a token that ends the sequence, but not a part of its text.
        unseen = frozenset(token for token in ends if not any(tokenizer.texts.of(token)[0] in stop for stop in stops))
        return ChoiceDecoder(
            detokenizer=tokenizer.detokenizer(
                hidden - tokenizer.token_ids(marker_texts(self.call_format)),
                after=previous if self.echoed and self.echoed[request].text else None,
            ),
            stops=StopStrings(stops, tokenizer.detokenizer(unseen, after=previous)) if stops else None,
            include_stop=body.include_stop_str_in_output,
            parser=ToolCallParser(self.call_format, self.tools) if self.call_format else None,
        )


def new_id(kind: str) -> str:
    """A unique id that begins with `kind`."""
    return f"{kind}-{uuid.uuid4().hex}"


async def prepare_chat(service: Service, owner: str, body: ChatBody, size: int) -> PreparedRequest:
    """Validate a chat completion, whose body had `size` bytes, and render its prompt."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs requires logprobs.", "Set logprobs to true.", field="logprobs")
    model, card, tokenizer = await _open_model(service, owner, body)
    with naming("messages"):
        ids, images, call_format, thinking = await service.decoders.run_in_thread(
            size, render_prompt, body, tokenizer, card
        )
    sample = build_sample_request(
        body,
        card,
        model,
        ids,
        body.most_tokens,
        prompt_field="messages",
        topk_sample_logprobs=body.top_logprobs,
        images=images,
    )
    return PreparedRequest(
        id=new_id("chatcmpl"),
        created=int(time.time()),
        owner=owner,
        model=model,
        card=card,
        tokenizer=tokenizer,
        body=body,
        requests=(sample,),
        top_logprobs=body.top_logprobs if body.logprobs else None,
        call_format=call_format,
        tools=body.template_tools(),
        opened_thinking=thinking,
    )


async def prepare_completion(service: Service, owner: str, body: CompletionBody, size: int) -> PreparedRequest:
    """Validate a completion, whose body had `size` bytes, and encode its prompts."""
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens is 0.", "Give at least 1, or set echo to score the prompt.", field="max_tokens")
    if body.stream and body.echo and (body.logprobs is not None or not body.max_tokens):
        raise Unsupported("Logprobs of the prompt are not streamed.", "Remove stream or echo.", field="stream")
    model, card, tokenizer = await _open_model(service, owner, body)
    with naming("prompt"):
        prompts = await service.decoders.run_in_thread(size, _encode_prompts, body, tokenizer, card)
    logprobs = {
        "topk_sample_logprobs": body.logprobs or 0,
        "prompt_logprobs": body.echo and body.logprobs is not None,
        "topk_prompt_logprobs": body.logprobs or 0 if body.echo else 0,
    }
    return PreparedRequest(
        id=new_id("cmpl"),
        created=int(time.time()),
        owner=owner,
        model=model,
        card=card,
        tokenizer=tokenizer,
        body=body,
        requests=tuple(
            build_sample_request(body, card, model, ids, body.max_tokens or 1, **logprobs) for ids, _ in prompts
        ),
        top_logprobs=body.logprobs,
        echoed=tuple(echoed for _, echoed in prompts if echoed),
    )


async def _open_model(service: Service, owner: str, body: OutputOptions) -> tuple[ModelRef, ModelCard, Tokenizer]:
    service.sampling.check_capacity()
    with naming("model"):
        model = resolve_model(service, body.model, owner)
    card = await model.worker.host.card()
    return model, card, await service.tokenizer(model.base_model, card)


def render_prompt(
    body: ChatBody, tokenizer: Tokenizer, card: ModelCard
) -> tuple[list[int], tuple[InputImage, ...], ToolCallFormat | None, str]:
    """(token ids of the prompt, its images, format of the tool calls to parse, mark that ends the thinking in which the
    prompt leaves the reply). Run it in a thread."""
    tools = body.template_tools()
    template = tokenizer.template(tools)
    call_format = tool_call_format(template, tokenizer.name) if tools else None
    is_explicit = body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set
    if body.continue_final_message and is_explicit:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other.",
            "Set add_generation_prompt to false, or remove it.",
            field="continue_final_message",
        )
    urls: list[str] | None = None if card.images is None else []
    messages = body.template_messages(template, urls)
    text = tokenizer.render_text(
        messages,
        tools,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        values=body.chat_template_kwargs,
    )
    (ids, _), images = _encode(text, tokenizer, card, add_special_tokens=False), ()
    if urls and card.images is not None:
        if body.return_token_ids:
            raise Unsupported(
                "return_token_ids is not supported with images.",
                "Use the Tinker API, whose chunks hold tokens and images.",
                field="return_token_ids",
            )
        ids, images = place_images(ids, urls, card.images)
    continued = messages[-1]["content"] if body.continue_final_message else ""
    form = call_format.after(text, content_text(continued)) if call_format else None
    return ids, images, form, opened_thinking(text)


def _encode(
    text: str, tokenizer: Tokenizer, card: ModelCard, *, add_special_tokens: bool
) -> tuple[list[int], list[int]]:
    """Token ids, and the character at which each begins.

    Raises PromptTooLong, without encoding the text, if it is certain to exceed the context.
    """
    least = tokenizer.least_tokens(text)
    if least > card.context_length:
        raise PromptTooLong(
            f"The context is {card.context_length} tokens, and a prompt of {len(text)} characters has {least} or more.",
            "Shorten the prompt.",
        )
    return tokenizer.encode_with_starts(text, add_special_tokens=add_special_tokens)


def _encode_prompts(
    body: CompletionBody, tokenizer: Tokenizer, card: ModelCard
) -> list[tuple[list[int], EchoedPrompt | None]]:
    """Token ids of each prompt, and the prompt as it is returned with `echo`."""
    prompts: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    if not 1 <= len(prompts) <= MAX_SAMPLES:
        raise BadRequest(f"There are {len(prompts)} prompts.", f"Give 1 to {MAX_SAMPLES}, of text or tokens.")
    return [_encode_prompt(prompt, body, tokenizer, card) for prompt in prompts]


def _encode_prompt(
    prompt: str | list[int], body: CompletionBody, tokenizer: Tokenizer, card: ModelCard
) -> tuple[list[int], EchoedPrompt | None]:
    if isinstance(prompt, str):
        ids, starts = _encode(prompt, tokenizer, card, add_special_tokens=body.add_special_tokens)
        return ids, EchoedPrompt(text=prompt, starts=starts) if body.echo else None
    if not body.echo:
        return prompt, None
    if any(not 0 <= token < card.vocab_size for token in prompt):
        return prompt, EchoedPrompt(text="", starts=())  # refused with the request
    decoder = tokenizer.detokenizer()
    text = "".join([*(decoder.feed(token) for token in prompt), decoder.end()])
    return prompt, EchoedPrompt(text=text, starts=decoder.starts)


def build_sample_request(
    options: SamplingOptions,
    card: ModelCard,
    model: ModelRef,
    ids: Sequence[int],
    max_tokens: int | None,
    *,
    prompt_field: str = "prompt",
    **fields: Any,
) -> SampleRequest:
    """The engine's request for one prompt, which the body has in `prompt_field`, with further fields.

    Raises BadRequest; PromptTooLong if the request exceeds the context.
    """
    context = card.context_length
    if len(ids) + (max_tokens or 1) - 1 > context:
        raise PromptTooLong(
            f"The context of {model.base_model} is {context} tokens, the prompt has {len(ids)}; "
            f"max_tokens: {max_tokens}.",
            "Shorten the prompt or lower max_tokens.",
            field=prompt_field,
        )
    if "" in options.stop_strings:
        raise BadRequest("A stop string is empty.", "Give text.", field="stop")
    try:
        prompt = np.asarray(ids, dtype=np.int32)
    except OverflowError as error:
        raise BadRequest(
            "The prompt holds a number that is not a token id.", "Use the model's own tokenizer.", field=prompt_field
        ) from error
    request = SampleRequest(
        request_id=new_id("direct"),
        prompt=prompt,
        version=model.version,
        num_samples=options.n,
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_k=options.top_k or -1,
        top_p=options.top_p,
        seed=options.seed,
        stop_tokens=_stop_tokens(options, card),
        stop_strings=options.stop_strings,
        **fields,
    )
    check_sample(request, card)
    return request


def _stop_tokens(options: SamplingOptions, card: ModelCard) -> tuple[int, ...]:
    return (*(() if options.ignore_eos else card.eos_token_ids), *options.stop_token_ids)
