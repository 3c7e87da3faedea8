"""A model in training on a Tinker API server, through the official SDK.

The SDK retries and polls. Errors of the server are raised as TinsmithErrors that name the request.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import tinker
from typing_extensions import override

from tinsmith.errors import Unsupported, UserError
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig, RouterReplay
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.policy.sdk import adam_params, as_datum, translate_errors
from tinsmith.rl.policy.server_watch import ServerWatch
from tinsmith.rl.policy.tinker_models import TinkerModels
from tinsmith.rl.policy.trainer import AuxiliaryAdapter, Trainer, Update, UpdateResult
from tinsmith.rl.policy.training_rows import TrainingRow


class TinkerAuxiliaryAdapter(AuxiliaryAdapter):
    """A second adapter in the session of a TinkerTrainer."""

    def __init__(self, client: tinker.TrainingClient, vocabulary: int) -> None:
        self._client, self._vocabulary = client, vocabulary

    @property
    @override
    def vocabulary(self) -> int:
        return self._vocabulary

    @override
    async def logprobs(self, rows: Sequence[TrainingRow], ids: Sequence[int]) -> list[np.ndarray]:
        data = [_datum(row, ids, np.ones((len(row.tokens), len(ids)), np.float32)) for row in rows]
        async with translate_errors("computing logprobs of the critic"):
            result = await self._client.forward(data, "cross_entropy")
        return [np.asarray(outputs["logprobs"].to_numpy(), np.float32) for outputs in result.loss_fn_outputs]

    @override
    async def fit(
        self,
        rows: Sequence[TrainingRow],
        ids: Sequence[int],
        weights: Sequence[np.ndarray],
        optimizer: OptimizerConfig,
        learning_rate: float,
    ) -> dict[str, float]:
        data = [_datum(row, ids, weights_NK) for row, weights_NK in zip(rows, weights, strict=True)]
        async with translate_errors("training the critic"):
            # Both are submitted before either is awaited, so that the server does not wait between them.
            pending_gradient = self._client.forward_backward(data, "cross_entropy")
            pending_step = self._client.optim_step(adam_params(optimizer, learning_rate))
            gradient, step = await pending_gradient, await pending_step
        return {**gradient.metrics, **(step.metrics or {})}

    @override
    async def save(self, name: str, ttl_seconds: int | None) -> str:
        async with translate_errors(f"saving the critic {name}"):
            return (await self._client.save_state(name, ttl_seconds=ttl_seconds, overwrite=True)).path


def _datum(row: TrainingRow, ids: Sequence[int], weights_NK: np.ndarray) -> tinker.Datum:
    if row.images:
        raise Unsupported("A critic takes no images.", "Use an algorithm without a critic, such as grpo.")
    targets_NK = np.tile(np.asarray(ids, np.int64), (len(row.tokens), 1))
    arrays: dict[str, Any] = {"target_tokens": targets_NK, "weights": weights_NK}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.tokens.tolist()),
        loss_fn_inputs=cast(Any, {name: tinker.TensorData.from_numpy(values) for name, values in arrays.items()}),
    )


log = logging.getLogger(__name__)

_IN_FLIGHT = 3
"""Updates of a batch that are submitted before the result of the first is awaited."""


class TinkerTrainer(Trainer):
    """A LoRA adapter in training on a server. Created by `connect`."""

    def __init__(
        self,
        models: TinkerModels,
        client: tinker.TrainingClient,
        version: int,
        router_replay: RouterReplay,
        address: tuple[str, str],
    ) -> None:
        self._models, self._client, self._version, self._router_replay = models, client, version, router_replay
        self._snapshot: Snapshot | None = None
        self._saving: Awaitable[tinker.SamplingClient] | None = None
        """Sampling client of the current version, requested together with its update."""
        self.address = address
        """Base URL and API key of the server."""
        self.before_step: list[Callable[[], None]] = []
        """Functions to call before the first optimizer step of each batch is submitted; requests that they submit read
        the old weights."""

    @classmethod
    async def connect(
        cls,
        config: ModelConfig,
        base_url: str,
        api_key: str,
        *,
        seed: int,
        state: str = "",
        version: int = 0,
        watch: ServerWatch | None = None,
    ) -> TinkerTrainer:
        """Create a new adapter, or load the one at the path `state` with its optimizer state and `version`.

        Requests wait for the server as long as `watch` says.

        Raises ConfigError if no server responds, UserError if the server rejects the model or the key.
        """
        models, client = await TinkerModels.connect_training(
            config,
            (base_url, api_key),
            watch or ServerWatch(),
            lambda service: _training_client(service, config, seed, state),
            action=f"creating the model {config.name}",
            not_found=_not_served(config, state),
        )
        return cls(models, client, version, config.router_replay, (base_url, api_key))

    @property
    @override
    def models(self) -> TinkerModels:
        return self._models

    @property
    @override
    def version(self) -> int:
        return self._version

    @property
    def client(self) -> tinker.TrainingClient:
        """The SDK's client of the model in training."""
        return self._client

    @override
    async def snapshot(self) -> Snapshot:
        """A sampling session on the current version; calls at the same version return the same object."""
        if self._snapshot is None or self._snapshot.version != self._version:
            async with translate_errors("saving weights for sampling"):
                saving, self._saving = self._saving or self._client.save_weights_and_get_sampling_client(), None
                client = await saving
            self._snapshot = self._models.snapshot(client, self._version)
        return self._snapshot

    @override
    async def accumulate(self, update: Update) -> UpdateResult:
        async with translate_errors(_training_with(update)):
            return _result(await self._gradient(update))

    @override
    async def step(self, optimizer: OptimizerConfig, learning_rate: float) -> Mapping[str, float]:
        """The step and the saving of weights for sampling are submitted together, as in `train`."""
        async with translate_errors("taking an optimizer step"):
            self._prepare_step()
            pending = self._client.optim_step(adam_params(optimizer, learning_rate))
            saving = self._save_for_next_samples()
            metrics = (await pending).metrics or {}
        self._version, self._saving = self._version + 1, saving
        return metrics

    @override
    async def train(
        self, updates: Sequence[Update], optimizer: OptimizerConfig, learning_rate: float
    ) -> list[UpdateResult]:
        """Gradients, steps and the saving of weights for sampling are submitted before the results are awaited, so that
        the server does not wait; at most _IN_FLIGHT updates at once."""
        results: list[UpdateResult] = []
        pending: deque[tuple[Any, Any]] = deque()
        saving = None
        for left, update in zip(range(len(updates) - 1, -1, -1), updates, strict=True):
            async with translate_errors(_training_with(update)):
                gradient = self._gradient(update)
                if left == len(updates) - 1:
                    self._prepare_step()
                pending.append((gradient, self._client.optim_step(adam_params(optimizer, learning_rate))))
                saving = None if left else self._save_for_next_samples()
                while len(pending) >= (_IN_FLIGHT if left else 1):
                    gradient, step = pending.popleft()
                    result, stepped = _result(await gradient), await step
                    results.append(replace(result, metrics={**result.metrics, **(stepped.metrics or {})}))
        self._version, self._saving = self._version + 1, saving
        return results

    def _prepare_step(self) -> None:
        for prepare in self.before_step:
            prepare()

    def _save_for_next_samples(self) -> Any:
        """Submit the saving of weights for sampling if the current version was sampled from; a run on demonstrations
        never is."""
        sampled = self._snapshot is not None and self._snapshot.version == self._version
        return self._client.save_weights_and_get_sampling_client() if sampled else None

    @override
    async def logprobs(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        data = [as_datum(row, {"weights": row.mask.astype(np.float32)}) for row in rows]
        async with translate_errors("computing logprobs of the weights in training"):
            result = await self._client.forward(data, "cross_entropy", self._with_replay({}))
        return list(_logprobs(result))

    @override
    async def auxiliary_adapter(self, rank: int, seed: int, state: str = "") -> TinkerAuxiliaryAdapter:
        models = self._models

        async def create() -> tinker.TrainingClient:
            if state:
                return await models.service.create_training_client_from_state_with_optimizer(state)
            return await models.service.create_lora_training_client(models.base_model, rank=rank, seed=seed)

        async with translate_errors("creating the critic"):
            client = await models.watch.persist(create)
        return TinkerAuxiliaryAdapter(client, models.chat.vocabulary)

    @override
    async def upload_loss(self, loss: Callable[..., Any]) -> str:
        if self._router_replay != "none":
            return ""
        ranks: dict[str, Any] = dict.fromkeys(inspect.signature(loss).parameters, 1)
        try:
            async with translate_errors("uploading the loss"):
                return (await self._models.service.create_custom_loss(loss, ranks)).loss_id or ""
        except (UserError, ValueError) as error:
            log.info("The loss is computed here: %s", error)
            return ""

    def _gradient(self, update: Update) -> Any:
        """Submit forward_backward; returns its future."""
        if (client := update.client) is not None:
            if self._router_replay == "replay":
                raise Unsupported(
                    "model.router_replay: a loss that the client computes is not replayed, because the SDK sends only "
                    "targets and weights for its gradient.",
                    "Set it to none, or use an algorithm whose loss the server computes.",
                )
            return self._client.forward_backward_custom(_client_data(update), lambda _, logprobs: client(logprobs))
        data = [as_datum(row, inputs) for row, inputs in zip(update.rows, update.inputs, strict=True)]
        return self._client.forward_backward(data, cast(Any, update.loss), self._with_replay(update.config))

    def _with_replay(self, config: Mapping[str, float | str]) -> Any:
        """A loss's configuration that says whether the rows' experts are replayed, or only compared."""
        measures = {"router_replay": 0.0} if self._router_replay == "measure" else {}
        return {**config, **measures} or None

    @override
    async def entropies(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        if "return_entropy" not in self._models.extensions:
            raise Unsupported(
                "This server does not return entropies.", "Use an algorithm that does not need entropies."
            )
        data = [as_datum(row, {"weights": row.mask.astype(np.float32)}) for row in rows]
        async with translate_errors("computing entropies"):
            result = await self._client.forward(data, "cross_entropy", self._with_replay({"return_entropy": 1.0}))
        return [np.asarray(outputs["entropy"].to_numpy(), np.float32) for outputs in result.loss_fn_outputs]

    @override
    def set_version(self, version: int) -> None:
        self._version = version

    @override
    async def save(self, name: str, ttl_seconds: int | None, metadata: Mapping[str, str] | None = None) -> str:
        """Save weights and optimizer state; replaces a checkpoint with the same name.

        A server that refuses the metadata stores the checkpoint without.
        """
        try:
            return await self._save_state(name, ttl_seconds, metadata)
        except UserError as error:
            if not metadata:
                raise
            log.warning("Saving the checkpoint %s again without metadata: %s", name, error)
            return await self._save_state(name, ttl_seconds, None)

    async def _save_state(self, name: str, ttl_seconds: int | None, metadata: Mapping[str, str] | None) -> str:
        async with translate_errors(f"saving the checkpoint {name}"):
            saving = self._client.save_state(
                name, ttl_seconds=ttl_seconds, overwrite=True, user_metadata=dict(metadata) if metadata else None
            )
            return (await saving).path

    @override
    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        async with translate_errors(f"saving the weights {name}"):
            return (await self._client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds)).path


def _client_data(update: Update) -> list[tinker.Datum]:
    """The rows for a loss that the client computes."""
    rows = [replace(row, routed_experts=None) for row in update.rows]
    if not update.more_targets:
        return [as_datum(row, {"weights": row.mask.astype(np.float32)}) for row in rows]
    data = []
    for row, more_NK in zip(rows, update.more_targets, strict=True):
        targets = np.concatenate([row.targets[:, None], more_NK], axis=1)
        weights = np.repeat(row.mask[:, None].astype(np.float32), targets.shape[1], axis=1)
        data.append(as_datum(row, {"target_tokens": targets, "weights": weights}))
    return data


def _training_with(update: Update) -> str:
    return f"training with the loss {update.loss or 'of the run'}"


def _result(gradient: tinker.ForwardBackwardOutput) -> UpdateResult:
    return UpdateResult(logprobs=_logprobs(gradient), metrics=gradient.metrics)


def _logprobs(output: tinker.ForwardBackwardOutput) -> tuple[np.ndarray, ...]:
    """Logprobs of the rows' targets; where positions have several, of the first."""
    arrays = (np.asarray(outputs["logprobs"].to_numpy(), np.float32) for outputs in output.loss_fn_outputs)
    return tuple(array if array.ndim == 1 else array[:, 0] for array in arrays)


def _not_served(config: ModelConfig, state: str) -> str:
    """What to do if the server does not know the base model."""
    if state or config.load_from:
        return ""
    return f"Set model.name to a model that it serves, or start it with tinsmith serve --model {config.name}."


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
