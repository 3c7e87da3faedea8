"""The policy of a run: a model in training on a server of the Tinker API, reached through the official SDK.

Leaves out retries and polling, which the SDK does. Errors of the server come out as errors of ours that say what was
asked of whom.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import tinker

from tinsmith.errors import ConfigError, TinsmithError, UserError
from tinsmith.rl.policy import Loss, ModelConfig, OptimizerConfig, SamplingConfig, Updated
from tinsmith.rl.samples import Sample
from tinsmith.rl.types import Message, Turn

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0


class Chat:
    """The model's tokenizer and chat template: messages to tokens, tokens to text."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a transformers tokenizer."""
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The chat so far and the start of the reply; a model without a template gets the bare text."""
        if not self._tokenizer.chat_template:
            return self._tokenizer.encode("\n\n".join(message.content for message in messages))
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)

    def text(self, tokens: Sequence[int], stop: Sequence[str | int] | None) -> str:
        """A reply without special tokens and without the string that ended it."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        for one in stop or ():
            if isinstance(one, str) and one in text:
                return text[: text.index(one)]
        return text


class TinkerSnapshot:
    """A sampling session at one version."""

    def __init__(self, client: tinker.SamplingClient, chat: Chat, version: int) -> None:
        self._client, self._chat, self._version = client, chat, version

    @property
    def version(self) -> int:
        """Updates seen."""
        return self._version

    async def sample(
        self, prompt: Sequence[Message] | Sequence[int], *, count: int, seed: int, sampling: SamplingConfig
    ) -> tuple[Turn, ...]:
        """One request for all `count` replies."""
        tokens = _tokens(prompt, self._chat)
        params = tinker.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop=cast(Any, None if sampling.stop is None else list(sampling.stop)),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        async with _boundary("sampling"):
            answer = await self._client.sample(tinker.ModelInput.from_ints(tokens), count, params)
        return tuple(
            Turn(
                prompt=tuple(tokens),
                tokens=tuple(sequence.tokens),
                logprobs=tuple(sequence.logprobs or ()),
                text=self._chat.text(sequence.tokens, sampling.stop),
                stop="stop" if sequence.stop_reason == "stop" else "length",
                version=self._version,
            )
            for sequence in answer.sequences
        )


class TinkerPolicy:
    """A LoRA adapter in training. Made by `connect`."""

    def __init__(self, service: tinker.ServiceClient, client: tinker.TrainingClient, chat: Chat, version: int) -> None:
        self._service, self._client, self._chat = service, client, chat
        self._version = version
        self._snapshot: TinkerSnapshot | None = None
        self._saving: Awaitable[tinker.SamplingClient] | None = None
        """Weights of the present version for sampling, asked for by the update that made it."""

    @classmethod
    async def connect(
        cls, config: ModelConfig, base_url: str, api_key: str, *, seed: int, state: str = "", version: int = 0
    ) -> TinkerPolicy:
        """A fresh adapter, or the one saved under the path `state` with its optimizer, as of `version`.

        Raises ConfigError where no server answers, UserError where it refuses the model or the key.
        """
        await _reach(base_url)
        async with _boundary(f"making the model {config.name} at {base_url}"):
            service = await asyncio.to_thread(tinker.ServiceClient, base_url=base_url, api_key=api_key)
            try:
                client = await _training_client(service, config, seed, state)
                chat = Chat(await asyncio.to_thread(_tokenizer, config, client))
            except BaseException:
                service.close("errored")
                raise
        return cls(service, client, chat, version)

    @property
    def version(self) -> int:
        """Updates made."""
        return self._version

    async def snapshot(self) -> TinkerSnapshot:
        """One sampling session for each version; asked again, it is the same one."""
        if self._snapshot is None or self._snapshot.version != self._version:
            async with _boundary("saving weights for sampling"):
                saving, self._saving = self._saving or self._client.save_weights_and_get_sampling_client(), None
                client = await saving
            self._snapshot = TinkerSnapshot(client, self._chat, self._version)
        return self._snapshot

    async def update(
        self, samples: Sequence[Sample], loss: Loss, optimizer: OptimizerConfig, learning_rate: float
    ) -> Updated:
        """Gradient, step and the weights to sample from next are submitted together: the server runs them without a
        pause."""
        adam = tinker.AdamParams(
            learning_rate=learning_rate,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            grad_clip_norm=optimizer.grad_clip_norm,
        )
        data = [sample.datum() for sample in samples]
        async with _boundary(f"training with the loss {loss.name}"):
            gradient = self._client.forward_backward(data, cast(Any, loss.name), dict(loss.config))
            step = self._client.optim_step(adam)
            saving = self._client.save_weights_and_get_sampling_client()
            passed, stepped = await gradient, await step
        self._version, self._saving = self._version + 1, saving
        logprobs = tuple(np.asarray(one["logprobs"].to_numpy(), np.float32) for one in passed.loss_fn_outputs)
        return Updated(logprobs=logprobs, metrics={**passed.metrics, **(stepped.metrics or {})})

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """A state checkpoint; overwrites one of that name."""
        async with _boundary(f"saving the checkpoint {name}"):
            return (await self._client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True)).path

    async def save_for_sampling(self, name: str) -> str:
        """Sampler weights without a time to live."""
        async with _boundary(f"saving the weights {name}"):
            return (await self._client.save_weights_for_sampler(name)).path

    async def close(self) -> None:
        """Ends the session at the server; its checkpoints stay. A server that is gone is not waited for."""
        try:
            async with _boundary("ending the session"), asyncio.timeout(CLOSE_SECONDS):
                await self._service.close("success")
        except (TinsmithError, TimeoutError) as error:  # whatever ended the run is the thing to tell
            log.warning("The session could not be ended: %s", error)


async def _training_client(
    service: tinker.ServiceClient, config: ModelConfig, seed: int, state: str
) -> tinker.TrainingClient:
    if state:
        return await service.create_training_client_from_state_with_optimizer(state)
    if config.load_from:
        return await service.create_training_client_from_state(config.load_from)
    return await service.create_lora_training_client(
        base_model=config.name,
        rank=config.rank,
        seed=seed if config.seed is None else config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )


@asynccontextmanager
async def _boundary(what: str) -> AsyncIterator[None]:
    """Errors of the SDK leave as ours, with what was being asked."""
    try:
        yield
    except tinker.AuthenticationError as error:
        raise UserError(f"The server refused the key while {what}.", "Set TINKER_API_KEY to one it knows.") from error
    except tinker.RequestFailedError as error:
        kind = UserError if str(error.category) == "user" else TinsmithError
        raise kind(f"The server failed at {what}: {error.message}") from error
    except tinker.APIStatusError as error:
        kind = UserError if error.status_code < 500 else TinsmithError
        raise kind(f"The server answered {error.status_code} while {what}: {error.message}") from error
    except tinker.TinkerError as error:
        raise TinsmithError(f"No answer from the server while {what}: {error}") from error


async def _reach(base_url: str) -> None:
    """The SDK waits for a server for hours; a wrong address should be told at once."""
    url = urlsplit(base_url)
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        if not url.hostname:
            raise ConfigError(f"'{base_url}' is no address of a server.", "Write http://HOST:PORT.")
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(url.hostname, port)
        writer.close()
        await writer.wait_closed()
    except (OSError, ValueError, TimeoutError) as error:
        cure = "Start one with tinsmith serve, or leave out the base URL and one is started for the run."
        raise ConfigError(f"No server answers at {base_url}.", cure) from error


def _tokenizer(config: ModelConfig, client: tinker.TrainingClient) -> Any:
    from transformers import AutoTokenizer

    try:
        if config.tokenizer:
            return AutoTokenizer.from_pretrained(config.tokenizer)
        return client.get_tokenizer()
    except (OSError, ValueError) as error:
        what = config.tokenizer or f"the server's for {config.name}"
        raise ConfigError(f"The tokenizer ({what}) cannot be loaded: {error}", "Set model.tokenizer.") from error


def _tokens(prompt: Sequence[Message] | Sequence[int], chat: Chat) -> list[int]:
    messages = [part for part in prompt if isinstance(part, Message)]
    return chat.prompt(messages) if messages else [int(cast(int, part)) for part in prompt]
