"""Weights of a server of the Tinker API to sample from, of a base model or by their paths; nothing is trained.

For processes that only sample: explorers of a two-process run, and the comparison of checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import tinker

from tinsmith.errors import ConfigError
from tinsmith.rl.policy.base import ModelConfig, Prompt, SamplingConfig, check_prompt_length
from tinsmith.rl.policy.chat import Chat, read_template
from tinsmith.rl.policy.sdk import end_session, open_session, translate_errors
from tinsmith.rl.types import Turn


class TinkerSnapshot:
    """A sampling session at one version."""

    def __init__(self, client: tinker.SamplingClient, chat: Chat, version: int, others: TinkerSamplingClients) -> None:
        self._client, self._chat, self._version, self._others = client, chat, version, others

    @property
    def version(self) -> int:
        """Updates seen."""
        return self._version

    @property
    def chat(self) -> Chat:
        """The model's tokenizer and template."""
        return self._chat

    async def sample(self, prompt: Prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        """One request for all `count` replies."""
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

    async def open_model(self, name: str) -> TinkerSnapshot:
        """As of the session."""
        return await self._others.open_model(name)

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """One request; the first token has no logprob and is left out."""
        async with translate_errors("asking for logprobs"):
            logprobs = await self._client.compute_logprobs(tinker.ModelInput.from_ints(list(tokens)))
        return np.array(logprobs[1:], np.float32)


class TinkerSamplingClients:
    """A session at the server, and sampling sessions in it."""

    def __init__(self, service: tinker.ServiceClient, chat: Chat, base_model: str) -> None:
        self._service, self._chat, self._base_model = service, chat, base_model
        self._peers: dict[str, TinkerSnapshot] = {}

    @classmethod
    async def connect(cls, config: ModelConfig, base_url: str, api_key: str) -> TinkerSamplingClients:
        """Raises ConfigError where no server answers, UserError where it refuses the model or the key."""
        async with open_session(f"opening the model {config.name}", base_url, api_key) as service:
            # Create a training model: a server names the tokenizer of those only, and the model name may be an alias.
            client = await service.create_lora_training_client(base_model=config.name, rank=1)
            return cls(service, await load_chat(config, client), config.name)

    @property
    def chat(self) -> Chat:
        """The model's tokenizer and template."""
        return self._chat

    async def open_model(self, name: str) -> TinkerSnapshot:
        """A base model by its name, or a tinker:// path; repeated calls return the same one. Another base has
        its own tokenizer."""
        if name not in self._peers:
            async with translate_errors(f"opening {name} for sampling"):
                path = name if name.startswith("tinker://") else None
                base = None if path else name
                if path and "/weights/" in path:  # a state: servers sample from weights that were saved for it alone
                    trained = await self._service.create_training_client_from_state(path)
                    client = await trained.save_weights_and_get_sampling_client()
                else:
                    client = await self._service.create_sampling_client(model_path=path, base_model=base)
                same = path or name == self._base_model
                chat = self._chat if same else Chat(await self._tokenizer(name, client))
            self._peers[name] = TinkerSnapshot(client, chat, 0, self)
        return self._peers[name]

    async def _tokenizer(self, name: str, client: tinker.SamplingClient) -> Any:
        """Of another base, by its name; where that is an alias, by what the server says of a model in training."""
        try:
            return await asyncio.to_thread(client.get_tokenizer)
        except (OSError, ValueError):
            training = await self._service.create_lora_training_client(base_model=name, rank=1)
            return await asyncio.to_thread(training.get_tokenizer)

    async def open_checkpoint(self, path: str, version: int) -> TinkerSnapshot:
        """A sampling session of its own."""
        async with translate_errors(f"opening {path} for sampling"):
            client = await self._service.create_sampling_client(model_path=path)
        return TinkerSnapshot(client, self._chat, version, self)

    async def close(self) -> None:
        """Ends the session at the server; its checkpoints stay. A server that is gone is not waited for."""
        await end_session(self._service, "success")


async def load_chat(config: ModelConfig, client: tinker.TrainingClient) -> Chat:
    """By the configured tokenizer and template, or those that the server names. Raises ConfigError."""
    tokenizer = await asyncio.to_thread(_tokenizer, config, client)
    return Chat(tokenizer, read_template(config.chat_template), config.chat_template_values)


def _tokenizer(config: ModelConfig, client: tinker.TrainingClient) -> Any:
    from transformers import AutoTokenizer

    try:
        if config.tokenizer:
            return AutoTokenizer.from_pretrained(config.tokenizer)
        return client.get_tokenizer()
    except (OSError, ValueError) as error:
        name = config.tokenizer or f"the server's for {config.name}"
        raise ConfigError(f"The tokenizer ({name}) cannot be loaded: {error}", "Set model.tokenizer.") from error


def _tokens(prompt: Prompt, chat: Chat) -> list[int]:
    parts = [part for part in prompt if not isinstance(part, int)]
    return chat.prompt(parts) if parts else [int(cast(int, part)) for part in prompt]
