"""TinkerEngine: samples a model or a checkpoint of any server of the Tinker API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tinker
from typing_extensions import override

from tinsmith.chat.request import PromptTooLong
from tinsmith.errors import ConfigError, UserError
from tinsmith.integrations.rllm.engines.base import SnapshotEngine, parameters_by_mode, random_seed, sampling_config
from tinsmith.plurals import counted
from tinsmith.rl.policy.chat import Chat
from tinsmith.rl.policy.chat_session import ChatSession
from tinsmith.rl.policy.sampling import Middleware, Sample, SampleRequest, SampleResult
from tinsmith.rl.policy.sdk import capabilities, check_reachable, end_session, translate_errors
from tinsmith.rl.policy.server_watch import ServerWatch
from tinsmith.rl.policy.tinker_models import TinkerModels, load_tokenizer

RECORDED_REPLIES = 16_384
"""Replies that an engine remembers, to extend their conversations without encoding them again."""


def length_limit(max_length: int) -> Middleware:
    """Prompts and replies have at most `max_length - 1` tokens together."""

    async def limited(request: SampleRequest, sample: Sample) -> SampleResult:
        room = max_length - 1 - len(request.prompt)
        if not request.count:
            return await sample(request)
        if room < 1:
            raise PromptTooLong(
                f"The prompt has {counted(len(request.prompt), 'token')}, max_model_length is {max_length}."
            )
        sampling = request.sampling.model_copy(update={"max_tokens": min(request.sampling.max_tokens, room)})
        return await sample(replace(request, sampling=sampling))

    return limited


class TinkerEngine(SnapshotEngine):
    """Samples `model_name`, or the weights that `set_sampling_client` sets, through the Tinker API.

    Without `service_client`, the engine connects to `base_url`; without that, to the SDK's default: $TINKER_BASE_URL,
    else the hosted service. `tokenizer` is a transformers tokenizer; without it, the one that the server names.
    """

    def __init__(
        self,
        base_url: str | None = None,
        model_name: str = "",
        tokenizer: Any = None,
        service_client: tinker.ServiceClient | None = None,
        max_prompt_length: int = 4096,
        max_response_length: int = 4096,
        max_model_length: int | None = 32768,
        sampling_params: Mapping[str, Any] | None = None,
        bypass_render_with_parser: bool = False,
        processor: Any = None,
        image_processor: Any = None,
        disable_thinking: bool = False,
        accumulate_reasoning: bool = False,
        reasoning_effort: str | None = None,
        renderer_name: str | None = None,
        api_key: str | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        """`sampling_params`: temperature, top_p, top_k, max_tokens and stop, or `{train: …, val: …}` of these.

        `disable_thinking` and `reasoning_effort` set enable_thinking and reasoning_effort of the chat template.
        Prompts are rendered by the tokenizer's chat template with either value of `bypass_render_with_parser`. `seed`
        makes replies reproducible. Raises UserError for an argument that is not supported.
        """
        unsupported = {"processor": processor, "image_processor": image_processor, "renderer_name": renderer_name}
        unsupported |= kwargs
        if refused := [name for name, value in unsupported.items() if value is not None]:
            hint = "Pass a tokenizer with the chat template." if refused[0] == "renderer_name" else "Remove it."
            raise UserError(f"TinkerEngine: {refused[0]} is not supported.", hint)
        if not (model_name or tokenizer):
            raise UserError("TinkerEngine needs model_name.", "Pass the name of a model of the server.")
        by_mode = parameters_by_mode(sampling_params)
        train, val = (sampling_config(by_mode[mode], max_prompt_length, max_response_length) for mode in (False, True))
        super().__init__(train, val, accumulate_reasoning=accumulate_reasoning, limit=RECORDED_REPLIES)
        self.model = self.model_name = model_name
        self.tokenizer, self.service_client, self.max_model_length = tokenizer, service_client, max_model_length
        self._template_values: dict[str, Any] = {"enable_thinking": False} if disable_thinking else {}
        if reasoning_effort is not None:
            self._template_values["reasoning_effort"] = reasoning_effort
        self._base_url, self._api_key = base_url, api_key
        self._seed = random_seed() if seed is None else seed
        self._client: tinker.SamplingClient | None = None
        self._owns_service = service_client is None
        self._opening = asyncio.Lock()

    def set_sampling_client(self, sampling_client: tinker.SamplingClient) -> None:
        """Sample these weights from now on."""
        self._client, self._session, self._opening = sampling_client, None, asyncio.Lock()

    async def close(self) -> None:
        """End the session that the engine opened; one that was passed in stays open."""
        if self._owns_service and self.service_client is not None:
            await end_session(self.service_client, "success")
            self.service_client = self._client = self._session = None

    async def compute_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Logprobs of tokens 1 to N at temperature 1, for N + 1 tokens."""
        await self._bound_session()
        assert self._snapshot is not None
        return [float(value) for value in await self._snapshot.logprobs(list(ids))]

    @override
    async def _bound_session(self) -> ChatSession:
        if self._session is None:
            async with self._opening:
                if self._session is None:
                    await self._open()
        assert self._session is not None
        return self._session

    async def _open(self) -> None:
        async with translate_errors(f"opening {self.model_name} for sampling"):
            service = self.service_client = self.service_client or await self._connect()
            client = self._client or await service.create_sampling_client(base_model=self.model_name)
            self.tokenizer = self.tokenizer or await _tokenizer(service, self.model_name, client)
        self._client = client
        chat = Chat(self.tokenizer, values=self._template_values)
        clients = TinkerModels(service, chat, self.model_name, ServerWatch())
        snapshot = clients.snapshot(client, self.weight_version)
        if self.max_model_length is not None:
            snapshot = snapshot.around(length_limit(self.max_model_length))
        self.bind(snapshot, self._seed)

    async def _connect(self) -> tinker.ServiceClient:
        url = self._base_url or os.environ.get("TINKER_BASE_URL", "")
        if url:
            await check_reachable(url)
            key = self._api_key or os.environ.get("TINKER_API_KEY", "")
            (await capabilities(url, key)).warn(self.model_name)
        options = {"base_url": url or None, "api_key": self._api_key}
        arguments: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        return await asyncio.to_thread(tinker.ServiceClient, **arguments)


async def _tokenizer(service: tinker.ServiceClient, name: str, client: tinker.SamplingClient) -> Any:
    try:
        return await load_tokenizer(service, name, client)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot load the tokenizer of {name}: {error}", "Pass tokenizer.") from error
