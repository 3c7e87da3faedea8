"""Sampling from base models and checkpoints of a Tinker API server.

Modes explore and bench use this without a model in training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tinker
from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.policy.base import (
    ModelConfig,
    Prompt,
    SamplingClients,
    SamplingConfig,
    Snapshot,
    check_prompt_length,
)
from tinsmith.rl.policy.chat import Chat, read_template
from tinsmith.rl.policy.sdk import end_session, open_session, translate_errors
from tinsmith.rl.types import Turn


class TinkerSnapshot(Snapshot):
    """A sampling session on one version of the weights."""

    def __init__(self, client: tinker.SamplingClient, chat: Chat, version: int, clients: TinkerSamplingClients) -> None:
        self._client, self._chat, self._version, self._clients = client, chat, version, clients

    @property
    @override
    def version(self) -> int:
        return self._version

    @property
    @override
    def chat(self) -> Chat:
        return self._chat

    @override
    async def sample(self, prompt: Prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        tokens = _tokens(prompt, self._chat)
        check_prompt_length(tokens, sampling)
        params = tinker.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop=cast(Any, None if sampling.stop is None else list(sampling.stop)),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        async with translate_errors("sampling"):
            response = await self._client.sample(tinker.ModelInput.from_ints(tokens), count, params)
        return tuple(
            Turn(
                prompt=tuple(tokens),
                tokens=tuple(sequence.tokens),
                logprobs=tuple(sequence.logprobs or ()),
                text=self._chat.text(sequence.tokens, sampling.stop),
                stop="stop" if sequence.stop_reason == "stop" else "length",
                version=self._version,
            )
            for sequence in response.sequences
        )

    @override
    async def open_model(self, name: str) -> TinkerSnapshot:
        return await self._clients.open_model(name)

    @override
    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        async with translate_errors("computing logprobs"):
            logprobs = await self._client.compute_logprobs(tinker.ModelInput.from_ints(list(tokens)))
        return np.array(logprobs[1:], np.float32)  # the first token has no logprob


class TinkerSamplingClients(SamplingClients):
    """A session at the server, and sampling sessions in it."""

    def __init__(self, service: tinker.ServiceClient, chat: Chat, base_model: str) -> None:
        self._service, self._chat, self._base_model = service, chat, base_model
        self._peers: dict[str, TinkerSnapshot] = {}

    @classmethod
    async def connect(cls, config: ModelConfig, base_url: str, api_key: str) -> TinkerSamplingClients:
        """Open a session. Raises ConfigError if no server responds, UserError if it rejects the model or the key."""
        async with open_session(f"opening the model {config.name}", base_url, api_key) as service:
            # The SDK reports the tokenizer of an aliased model only for training clients.
            client = await service.create_lora_training_client(base_model=config.name, rank=1)
            return cls(service, await load_chat(config, client), config.name)

    @property
    @override
    def chat(self) -> Chat:
        return self._chat

    @override
    async def open_model(self, name: str) -> TinkerSnapshot:
        """Weights to sample from, by name or tinker:// path; later calls with the same name return the same object."""
        if name not in self._peers:
            async with translate_errors(f"opening {name} for sampling"):
                path = name if name.startswith("tinker://") else None
                base = None if path else name
                if path and "/weights/" in path:  # a training state, which must be saved for sampling first
                    training = await self._service.create_training_client_from_state(path)
                    client = await training.save_weights_and_get_sampling_client()
                else:
                    client = await self._service.create_sampling_client(model_path=path, base_model=base)
                same_base = path or name == self._base_model
                chat = self._chat if same_base else Chat(await load_tokenizer(self._service, name, client))
            self._peers[name] = TinkerSnapshot(client, chat, 0, self)
        return self._peers[name]

    @override
    async def open_checkpoint(self, path: str, version: int) -> TinkerSnapshot:
        async with translate_errors(f"opening {path} for sampling"):
            client = await self._service.create_sampling_client(model_path=path)
        return TinkerSnapshot(client, self._chat, version, self)

    @override
    async def close(self) -> None:
        await end_session(self._service, "success")


async def load_tokenizer(service: tinker.ServiceClient, name: str, client: tinker.SamplingClient) -> Any:
    """Tokenizer of the base model `name`, by this name or, if it is an alias, from a training client."""
    try:
        return await asyncio.to_thread(client.get_tokenizer)
    except (OSError, ValueError):
        training = await service.create_lora_training_client(base_model=name, rank=1)
        return await asyncio.to_thread(training.get_tokenizer)


async def load_chat(config: ModelConfig, client: tinker.TrainingClient) -> Chat:
    """The configured tokenizer and chat template, or those of the server. Raises ConfigError."""
    tokenizer = await asyncio.to_thread(_tokenizer, config, client)
    return Chat(tokenizer, read_template(config.chat_template), config.chat_template_values)


def _tokenizer(config: ModelConfig, client: tinker.TrainingClient) -> Any:
    from transformers import AutoTokenizer

    try:
        if config.tokenizer:
            return AutoTokenizer.from_pretrained(config.tokenizer)
        return client.get_tokenizer()
    except (OSError, ValueError) as error:
        source = config.tokenizer or f"the tokenizer that the server names for {config.name}"
        raise ConfigError(f"Cannot load {source}: {error}", "Set model.tokenizer.") from error


def _tokens(prompt: Prompt, chat: Chat) -> list[int]:
    parts = [part for part in prompt if not isinstance(part, int)]
    return chat.prompt(parts) if parts else [int(cast(int, part)) for part in prompt]
