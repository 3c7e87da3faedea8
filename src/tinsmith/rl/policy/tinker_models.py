"""A session at a server of the Tinker API: its base models and checkpoints, to sample from.

Modes explore and bench use this without a model in training.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import tinker
from typing_extensions import override

from tinsmith.errors import ConfigError, Unsupported, UserError
from tinsmith.rl.policy.chat import Chat, read_template
from tinsmith.rl.policy.images import ImageEncoder
from tinsmith.rl.policy.models import CheckpointInfo, ModelConfig, Models
from tinsmith.rl.policy.queue_notice import QueueNotice
from tinsmith.rl.policy.router_replay import SESSION_METADATA, RoutedExperts, check_routers
from tinsmith.rl.policy.sampling import (
    Middleware,
    ModelVersion,
    NextLogprobs,
    PromptLogprobs,
    SampleRequest,
    SampleResult,
    Snapshot,
    TopPromptLogprobs,
    check_prompt_length,
    rendering,
    through,
)
from tinsmith.rl.policy.sdk import Capabilities, capabilities, end_session, model_input, open_session, translate_errors
from tinsmith.rl.policy.server_watch import ServerWatch
from tinsmith.rl.types import EncodedPrompt, Turn

log = logging.getLogger(__name__)


def sampling_model(
    client: tinker.SamplingClient,
    chat: Chat,
    version: int,
    open_model: Callable[[str], Awaitable[Snapshot]],
    *middleware: Middleware,
) -> Snapshot:
    """A sampling session of the SDK, whose requests pass through `middleware` once they are encoded and checked."""

    async def send(request: SampleRequest) -> SampleResult:
        prompt = request.prompt
        assert isinstance(prompt, EncodedPrompt)
        match request.logprobs:
            case PromptLogprobs(last=last):
                return await _prompt_logprobs(client, prompt, last)
            case NextLogprobs(ids=ids) if ids:
                return await _next_logprobs(client, prompt.tokens, ids)
            case NextLogprobs(top=count):
                return await _top_logprobs(client, prompt.tokens, min(count, chat.vocabulary))
            case TopPromptLogprobs(top=count):
                return await _top_prompt_logprobs(client, prompt, min(count, chat.vocabulary))
            case None:
                return await _replies(client, chat, version, prompt, request)

    sample = through(send, rendering(chat), check_prompt_length, *middleware)
    return Snapshot(ModelVersion(version=version, chat=chat, sample=sample, open_model=open_model))


async def _replies(
    client: tinker.SamplingClient, chat: Chat, version: int, prompt: EncodedPrompt, request: SampleRequest
) -> SampleResult:
    sampling = request.sampling
    params = tinker.SamplingParams(
        max_tokens=sampling.max_reply(len(prompt)),
        seed=request.seed,
        stop=cast(Any, None if sampling.stop is None else list(sampling.stop)),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    async with translate_errors("sampling"):
        response = await client.sample(model_input(prompt), request.count, params)
    turns = tuple(
        Turn(
            prompt=prompt.tokens,
            tokens=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs or ()),
            text=chat.text(sequence.tokens, sampling.stop),
            stop="stop" if sequence.stop_reason == "stop" else "length",
            version=version,
            images=prompt.images,
        )
        for sequence in response.sequences
    )
    return SampleResult(turns=turns, sequence_ids=tuple(sequence.sequence_id for sequence in response.sequences))


async def _prompt_logprobs(client: tinker.SamplingClient, prompt: EncodedPrompt, last: int | None) -> SampleResult:
    async with translate_errors("computing logprobs"):
        logprobs = await client.compute_logprobs(model_input(prompt), prompt_logprobs_last_n=last)
    logprobs = logprobs[1:] if last is None else logprobs[-last:]  # the first token has none
    return SampleResult(logprobs=np.array([0.0 if logprob is None else logprob for logprob in logprobs], np.float32))


async def _next_logprobs(client: tinker.SamplingClient, tokens: Sequence[int], ids: Sequence[int]) -> SampleResult:
    """One prefill: a token is appended, and the ids are scored at its position."""
    prompt = tinker.ModelInput.from_ints([*tokens, tokens[-1]])
    targets = tinker.TensorData(
        data=list(ids),
        dtype="int64",
        shape=[len(tokens), len(ids)],
        sparse_crow_indices=[0] * len(tokens) + [len(ids)],
        sparse_col_indices=list(range(len(ids))),
    )
    params = tinker.SamplingParams(max_tokens=1)
    async with translate_errors("computing logprobs of given tokens"):
        response = await client.sample(prompt, 1, params, target_prompt_logprobs=targets)
    if response.target_prompt_logprobs is None:
        raise _not_returned("target_prompt_logprobs")
    return SampleResult(logprobs=response.target_prompt_logprobs.to_numpy()[-1].astype(np.float32))


async def _top_logprobs(client: tinker.SamplingClient, tokens: Sequence[int], count: int) -> SampleResult:
    prompt, params = tinker.ModelInput.from_ints(list(tokens)), tinker.SamplingParams(max_tokens=1)
    async with translate_errors("computing the likeliest tokens"):
        response = await client.sample(prompt, 1, params, topk_sample_logprobs=count)
    top = response.sequences[0].topk_logprobs
    if not top or not top[0]:
        raise _not_returned("topk_sample_logprobs")
    ids, logprobs = zip(*top[0], strict=True)
    return SampleResult(ids=np.array(ids, np.int64), logprobs=np.array(logprobs, np.float32))


async def _top_prompt_logprobs(client: tinker.SamplingClient, prompt: EncodedPrompt, count: int) -> SampleResult:
    params = tinker.SamplingParams(max_tokens=1)
    async with translate_errors("computing the likeliest tokens of a prompt"):
        response = await client.sample(model_input(prompt), 1, params, topk_prompt_logprobs=count)
    top = (response.topk_prompt_logprobs or [])[1:]  # the first token has none
    if not all(top):
        raise _not_returned("topk_prompt_logprobs")
    pairs = np.array(top, np.float64).reshape(len(top), count, 2)
    return SampleResult(ids=pairs[..., 0].astype(np.int64), logprobs=pairs[..., 1].astype(np.float32))


class TinkerModels(Models):
    """A session at the server, and sampling sessions in it."""

    def __init__(
        self,
        service: tinker.ServiceClient,
        chat: Chat,
        base_model: str,
        watch: ServerWatch,
        *,
        rest: tinker.RestClient | None = None,
        experts: RoutedExperts | None = None,
        server: Capabilities = Capabilities(),  # noqa: B008 - frozen
    ) -> None:
        """`rest`: for checkpoints. `experts`: where the routed experts of samples are fetched, if they are recorded.
        `server`: what the server says of itself, which is logged if it speaks against a base model that is opened."""
        self.service, self._chat, self.base_model, self.watch = service, chat, base_model, watch
        self._rest, self._experts, self._server = rest, experts, server
        self._peers: dict[str, Snapshot] = {}

    @classmethod
    async def connect(
        cls, config: ModelConfig, base_url: str, api_key: str, watch: ServerWatch | None = None, *, not_found: str = ""
    ) -> TinkerModels:
        """Open a session, whose requests wait for the server as long as `watch` says.

        `not_found` is the hint of a model that the server does not have. Raises ConfigError if no server responds,
        UserError if it rejects the model or the key.
        """
        # The SDK reports the tokenizer of an aliased model only for training clients.
        models, _ = await cls.connect_training(
            config,
            (base_url, api_key),
            watch or ServerWatch(),
            lambda service: service.create_lora_training_client(config.name, rank=1),
            action=f"opening the model {config.name}",
            not_found=not_found,
        )
        return models

    @classmethod
    async def connect_training(
        cls,
        config: ModelConfig,
        address: tuple[str, str],
        watch: ServerWatch,
        create: Callable[[tinker.ServiceClient], Awaitable[tinker.TrainingClient]],
        *,
        action: str,
        not_found: str = "",
    ) -> tuple[TinkerModels, tinker.TrainingClient]:
        """Open a session at `address`, a URL and a key, and create a model in training in it.

        Errors name `action`; `not_found` is the hint of a model that the server does not have.
        """
        routed, base_url = config.router_replay != "none", address[0]
        async with open_session(action, *address, SESSION_METADATA if routed else None) as service:
            if routed:
                await check_routers(*address, config.name)
            rest = await asyncio.to_thread(tinker.RestClient, base_url=base_url, api_key=address[1])
            queue = QueueNotice(service.holder.get_session_id(), address[1])
            watch.attend(base_url, service.holder, rest.holder, queue=queue)
            async with translate_errors(f"{action} at {base_url}", not_found=not_found):
                client = await watch.persist(lambda: create(service))
            server = await capabilities(*address)
            server.warn(config.name)
            chat = await load_chat(config, client, server.images.get(config.name))
            experts = RoutedExperts(*address) if routed else None
            return cls(service, chat, config.name, watch, rest=rest, experts=experts, server=server), client

    def snapshot(self, client: tinker.SamplingClient, version: int, chat: Chat | None = None) -> Snapshot:
        """A sampling session of this session; `chat` is that of another base model."""
        records = () if self._experts is None else (self._experts.add_records,)
        return sampling_model(client, chat or self._chat, version, self.open_model, *records, self.watch.report)

    @property
    @override
    def chat(self) -> Chat:
        return self._chat

    @property
    @override
    def extensions(self) -> frozenset[str]:
        return self._server.extensions

    @override
    async def open_model(self, name: str) -> Snapshot:
        """Weights to sample from, by name or tinker:// path; later calls with the same name return the same object."""
        name = name or self.base_model
        if name not in self._peers:
            async with translate_errors(f"opening {name} for sampling"):
                client = await self.watch.persist(lambda: self._open(name))
                same_base = name.startswith("tinker://") or name == self.base_model
                chat = self._chat if same_base else await _own_chat(await load_tokenizer(self.service, name, client))
            self._peers[name] = self.snapshot(client, 0, chat)
            if name != self.base_model:
                self._server.warn(name)
        return self._peers[name]

    async def _open(self, name: str) -> tinker.SamplingClient:
        if not name.startswith("tinker://"):
            return await self.service.create_sampling_client(base_model=name)
        if "/weights/" not in name:
            return await self.service.create_sampling_client(model_path=name)
        training = await self.service.create_training_client_from_state(name)  # a state must be saved for sampling
        return await training.save_weights_and_get_sampling_client()

    @override
    async def open_checkpoint(self, path: str, version: int) -> Snapshot:
        async with translate_errors(f"opening {path} for sampling"):
            client = await self.watch.persist(lambda: self.service.create_sampling_client(model_path=path))
        return self.snapshot(client, version)

    @override
    async def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Metadata is empty if the training run of the checkpoint belongs to somebody else."""
        assert self._rest is not None
        async with translate_errors(f"looking up {path}"):
            info = await self._rest.get_weights_info_by_tinker_path(path)
            adapter = {
                "name": info.base_model,
                "rank": info.lora_rank,
                "train_attn": info.train_attn,
                "train_mlp": info.train_mlp,
                "train_unembed": info.train_unembed,
            }
            try:
                of_run = await self._rest.list_checkpoints(path.removeprefix("tinker://").partition("/")[0])
            except tinker.APIStatusError:
                metadata = {}
            else:
                same = (checkpoint for checkpoint in of_run.checkpoints if checkpoint.tinker_path == path)
                metadata = next((checkpoint.user_metadata or {} for checkpoint in same), {})
        set_values = {name: value for name, value in adapter.items() if value is not None}
        return CheckpointInfo(adapter=set_values, metadata=metadata)

    @override
    async def delete_checkpoint(self, path: str) -> None:
        """Delete weights saved for sampling; logs a warning if the server rejects the request."""
        assert self._rest is not None
        try:
            async with translate_errors(f"deleting {path}"):
                await self._rest.delete_checkpoint_from_tinker_path(path)
        except UserError as error:
            log.warning("Could not delete old weights: %s", error)

    @override
    def on_outage(self, notify: Callable[[bool], None]) -> None:
        self.watch.on_change.append(notify)

    @override
    async def close(self) -> None:
        if self._experts is not None:
            await self._experts.close()
        await end_session(self.service, "success")


async def base_model_of(path: str, base_url: str, api_key: str) -> str:
    """Name of the base model of a checkpoint. Raises UserError if the server has no such checkpoint."""
    rest = await asyncio.to_thread(tinker.RestClient, base_url=base_url, api_key=api_key)
    async with translate_errors(f"looking up {path}"):
        info = await rest.get_weights_info_by_tinker_path(path)
    return info.base_model


def _not_returned(field: str) -> Unsupported:
    return Unsupported(
        f"The server accepts {field} and returns none.",
        "Use a server that returns them, or an environment that does not read the policy's distribution.",
    )


async def load_tokenizer(service: tinker.ServiceClient, name: str, client: tinker.SamplingClient) -> Any:
    """Tokenizer of the base model `name`, by this name or, if it is an alias, from a training client."""
    try:
        return await asyncio.to_thread(client.get_tokenizer)
    except (OSError, ValueError):
        training = await service.create_lora_training_client(base_model=name, rank=1)
        return await asyncio.to_thread(training.get_tokenizer)


async def load_chat(config: ModelConfig, client: tinker.TrainingClient, served_images: bool | None = None) -> Chat:
    """The configured tokenizer and chat template, or those of the server. Raises ConfigError.

    `served_images`: whether the server takes images for the model; None if it does not say.
    """
    tokenizer = await asyncio.to_thread(_tokenizer, config, client)
    template = read_template(config.chat_template)
    if served_images is False:
        refusal = Unsupported(
            f"The server takes no images for {config.name}.",
            "Serve a vision-language model, on the fast path and not in 4 bits, from a folder with its "
            "preprocessor_config.json (docs/train/images.md), or remove the images.",
        )
        return Chat(tokenizer, template, config.chat_template_values, refusal)
    return await _own_chat(tokenizer, template, config.chat_template_values)


async def _own_chat(tokenizer: Any, template: str = "", values: Mapping[str, Any] | None = None) -> Chat:
    """The chat of a tokenizer; with an encoder of images, from its folder, if its template takes images."""
    takes_images = "image" in str(template or tokenizer.chat_template)
    images = await asyncio.to_thread(ImageEncoder.load, tokenizer.name_or_path) if takes_images else None
    return Chat(tokenizer, template, values, images)


def _tokenizer(config: ModelConfig, client: tinker.TrainingClient) -> Any:
    from transformers import AutoTokenizer

    try:
        if config.tokenizer:
            return AutoTokenizer.from_pretrained(config.tokenizer)
        return client.get_tokenizer()
    except (OSError, ValueError) as error:
        source = config.tokenizer or f"the tokenizer that the server names for {config.name}"
        raise ConfigError(f"Cannot load {source}: {error}", "Set model.tokenizer.") from error
