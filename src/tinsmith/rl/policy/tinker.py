"""The policy of a run: a model in training on a server of the Tinker API, reached through the official SDK.

Leaves out retries and polling, which the SDK does. Errors of the server become TinsmithErrors that name the
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, cast

import numpy as np
import tinker

from tinsmith.errors import Unsupported, UserError
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.base import ModelConfig, Update, UpdateResult
from tinsmith.rl.policy.chat import Chat
from tinsmith.rl.policy.sdk import adam_params, extensions, open_session, translate_errors
from tinsmith.rl.policy.tinker_sampling import TinkerSamplingClients, TinkerSnapshot, load_chat
from tinsmith.rl.policy.training_rows import TrainingRow


class TinkerAuxiliaryAdapter:
    """Implements `policy.AuxiliaryAdapter`."""

    def __init__(self, client: tinker.TrainingClient, vocabulary: int) -> None:
        self._client, self._vocabulary = client, vocabulary

    @property
    def vocabulary(self) -> int:
        """The tokenizer's."""
        return self._vocabulary

    async def logprobs(self, rows: Sequence[TrainingRow], ids: Sequence[int]) -> list[np.ndarray]:
        """One forward pass."""
        data = [_datum(row, ids, np.ones((len(row.tokens), len(ids)), np.float32)) for row in rows]
        async with translate_errors("asking the critic"):
            passed = await self._client.forward(data, "cross_entropy")
        return [np.asarray(output["logprobs"].to_numpy(), np.float32) for output in passed.loss_fn_outputs]

    async def fit(
        self,
        rows: Sequence[TrainingRow],
        ids: Sequence[int],
        weights: Sequence[np.ndarray],
        optimizer: OptimizerConfig,
        learning_rate: float,
    ) -> dict[str, float]:
        """One gradient and one step, submitted together."""
        data = [_datum(row, ids, row_weights) for row, row_weights in zip(rows, weights, strict=True)]
        async with translate_errors("teaching the critic"):
            gradient = self._client.forward_backward(data, "cross_entropy")
            step = self._client.optim_step(adam_params(optimizer, learning_rate))
            passed, stepped = await gradient, await step
        return {**passed.metrics, **(stepped.metrics or {})}

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """A state checkpoint."""
        async with translate_errors(f"saving the critic {name}"):
            return (await self._client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True)).path


def _datum(row: TrainingRow, ids: Sequence[int], weights_NK: np.ndarray) -> tinker.Datum:
    targets_NK = np.tile(np.asarray(ids, np.int64), (len(row.tokens), 1))
    arrays: dict[str, Any] = {"target_tokens": targets_NK, "weights": weights_NK}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.tokens.tolist()),
        loss_fn_inputs=cast(Any, {name: tinker.TensorData.from_numpy(values) for name, values in arrays.items()}),
    )


log = logging.getLogger(__name__)


class TinkerPolicy:
    """A LoRA adapter in training. Made by `connect`."""

    def __init__(
        self,
        service: tinker.ServiceClient,
        rest: tinker.RestClient,
        client: tinker.TrainingClient,
        chat: Chat,
        version: int,
        base_model: str,
        offered: frozenset[str],
    ) -> None:
        self._service, self._rest, self._client, self._chat = service, rest, client, chat
        self._others = TinkerSamplingClients(service, chat, base_model)
        self._version, self._base_model, self._extensions = version, base_model, offered
        self._snapshot: TinkerSnapshot | None = None
        self._saving: Awaitable[tinker.SamplingClient] | None = None
        """Weights of the current version for sampling, requested by the update that made it."""

    @classmethod
    async def connect(
        cls, config: ModelConfig, base_url: str, api_key: str, *, seed: int, state: str = "", version: int = 0
    ) -> TinkerPolicy:
        """A fresh adapter, or the one saved under the path `state` with its optimizer, as of `version`.

        Raises ConfigError where no server answers, UserError where it refuses the model or the key.
        """
        async with open_session(f"making the model {config.name}", base_url, api_key) as service:
            rest = await asyncio.to_thread(tinker.RestClient, base_url=base_url, api_key=api_key)
            client = await _training_client(service, config, seed, state)
            chat, offered = await load_chat(config, client), await extensions(base_url, api_key)
            return cls(service, rest, client, chat, version, config.name, offered)

    @property
    def version(self) -> int:
        """Updates made."""
        return self._version

    @property
    def chat(self) -> Chat:
        """The model's tokenizer and template."""
        return self._chat

    async def snapshot(self) -> TinkerSnapshot:
        """One sampling session for each version; repeated calls return the same one."""
        if self._snapshot is None or self._snapshot.version != self._version:
            async with translate_errors("saving weights for sampling"):
                saving, self._saving = self._saving or self._client.save_weights_and_get_sampling_client(), None
                client = await saving
            self._snapshot = TinkerSnapshot(client, self._chat, self._version, self._others)
        return self._snapshot

    async def update(self, update: Update, optimizer: OptimizerConfig, learning_rate: float) -> UpdateResult:
        """Gradient, step and the weights to sample from next are submitted together: the server runs them without a
        pause. Where the present weights were not sampled from, as in a run on data alone, the next are not saved."""
        sampled = self._snapshot is not None and self._snapshot.version == self._version
        async with translate_errors(f"training with the loss {update.loss or 'of the run'}"):
            gradient = self._gradient(update)
            step = self._client.optim_step(adam_params(optimizer, learning_rate))
            saving = self._client.save_weights_and_get_sampling_client() if sampled else None
            passed, stepped = await gradient, await step
        self._version, self._saving = self._version + 1, saving
        logprobs = tuple(np.asarray(output["logprobs"].to_numpy(), np.float32) for output in passed.loss_fn_outputs)
        return UpdateResult(logprobs=logprobs, metrics={**passed.metrics, **(stepped.metrics or {})})

    async def auxiliary_adapter(self, rank: int, seed: int, state: str = "") -> TinkerAuxiliaryAdapter:
        """A second adapter on the same base, fresh or as saved under `state`, in the same session."""
        async with translate_errors("making the critic"):
            if state:
                client = await self._service.create_training_client_from_state_with_optimizer(state)
            else:
                client = await self._service.create_lora_training_client(self._base_model, rank=rank, seed=seed)
        return TinkerAuxiliaryAdapter(client, self._chat.vocabulary)

    def _gradient(self, update: Update) -> Any:
        if (client := update.client) is not None:
            data = [row.datum({"weights": row.mask.astype(np.float32)}) for row in update.rows]
            return self._client.forward_backward_custom(data, lambda _, logprobs: client(logprobs))
        data = [row.datum(inputs) for row, inputs in zip(update.rows, update.inputs, strict=True)]
        return self._client.forward_backward(data, cast(Any, update.loss), cast(Any, dict(update.config)))

    @property
    def extensions(self) -> frozenset[str]:
        """What get_server_capabilities lists under `extensions`; a server that lists none has none."""
        return self._extensions

    async def open_model(self, name: str) -> TinkerSnapshot:
        """A sampling session on other weights; repeated calls return the same one."""
        return await self._others.open_model(name)

    async def entropies(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """One forward pass with the extension `return_entropy`."""
        if "return_entropy" not in self._extensions:
            raise Unsupported("This server does not return entropies.", "Use an algorithm that does not read them.")
        data = [row.datum({"weights": row.mask.astype(np.float32)}) for row in rows]
        async with translate_errors("asking for entropies"):
            passed = await self._client.forward(data, "cross_entropy", cast(Any, {"return_entropy": 1.0}))
        return [np.asarray(output["entropy"].to_numpy(), np.float32) for output in passed.loss_fn_outputs]

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """Save a state checkpoint, over an earlier one of that name."""
        async with translate_errors(f"saving the checkpoint {name}"):
            return (await self._client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True)).path

    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        """A sampler checkpoint."""
        async with translate_errors(f"saving the weights {name}"):
            return (await self._client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)).path

    async def open_checkpoint(self, path: str, version: int) -> TinkerSnapshot:
        """A sampling session of its own."""
        return await self._others.open_checkpoint(path, version)

    async def delete_checkpoint(self, path: str) -> None:
        """One that is gone already is passed over."""
        try:
            async with translate_errors(f"deleting {path}"):
                await self._rest.delete_checkpoint_from_tinker_path(path)
        except UserError as error:
            log.warning("Old weights could not be deleted: %s", error)

    async def close(self) -> None:
        """Ends the session at the server; its checkpoints stay. A server that is gone is not waited for."""
        await self._others.close()


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
