"""Policy protocols, and the settings of the model.

A Policy is a model in training; `sampling.Snapshot` is the model at one version, for sampling. A run uses
`tinker.TinkerPolicy`; `scripted.ScriptedPolicy` is a policy without a model, for tests without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from tinsmith.rl.ending.duration import seconds_of
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.chat import ChatCodec
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.settings import Settings


class ModelConfig(Settings):
    """The base model, its LoRA adapter, and the server."""

    name: str
    """Name of the base model on the server."""
    rank: int = Field(default=32, ge=1)
    """Rank of the LoRA adapter."""
    seed: int | None = None
    """Seed of the adapter's initial weights. Not set: the run's seed."""
    train_attn: bool = True
    """Adapt the attention layers."""
    train_mlp: bool = True
    """Adapt the MLP layers."""
    train_unembed: bool = True
    """Adapt the output layer."""
    base_url: str = ""
    """Server of the Tinker API. Empty: the environment variable TINKER_BASE_URL, else a service for this run."""
    api_key_env: str = "TINKER_API_KEY"
    """Environment variable with the API key of the server."""
    tokenizer: str = ""
    """Tokenizer: a hub id or a folder. Empty: the one that the server names."""
    chat_template: str = ""
    """Chat template: Jinja text, the path of a file, or `hermes`: ChatML with tools, for models such as SmolLM2 whose
    own template takes none. Empty: the tokenizer's template."""
    chat_template_values: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false}."""
    router_replay: Literal["none", "measure", "replay"] = "none"
    """Routed experts of a mixture: `replay` trains with the experts that the sampler chose, `measure` reports how often
    the trainer's own choice differs (optim/expert_mismatch), `none` records nothing. Needs a Tinsmith server."""
    wait: Annotated[float, BeforeValidator(seconds_of), Field(ge=0)] = 3600.0
    """How long the run waits for a server that does not respond, in seconds or as 2h, before it ends; 0: no limit."""
    load_from: str = ""
    """tinker:// path of a state checkpoint to start from, with a new optimizer. Empty: a new adapter."""

    @model_validator(mode="after")
    def _check_load_from(self) -> ModelConfig:
        shape = {"rank", "seed", "train_attn", "train_mlp", "train_unembed"} & self.model_fields_set
        if self.load_from and shape:
            raise ValueError(f"load_from determines the adapter; remove {', '.join(sorted(shape))}")
        return self


ClientLoss = Callable[[Sequence[Any]], tuple[Any, dict[str, float]]]
"""Maps the logprobs of each row (torch tensors [N]) to the loss (a scalar tensor) and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A batch of an algorithm: training rows, and one loss over all of them.

    Example: Update(rows=(row,), inputs=({"logprobs": q, "advantages": a},), loss="ppo", config={})
    """

    rows: tuple[TrainingRow, ...]
    inputs: tuple[Mapping[str, np.ndarray], ...] = ()
    """Inputs of the server's loss for each row besides the targets: arrays [N]."""
    loss: str = ""
    """Name of the server's loss. Empty if `client` computes the loss."""
    config: Mapping[str, float | str] = field(default_factory=dict)
    """Configuration of the server's loss."""
    client: ClientLoss | None = None
    """Custom loss, for algorithms whose loss the server does not have. It costs another forward pass."""
    measure: Callable[[Sequence[np.ndarray]], dict[str, float]] | None = None
    """Metrics of a loss that the server computes, from the logprobs of the rows that it returns."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of an update."""

    logprobs: tuple[np.ndarray, ...]
    """Logprobs of each row's targets before the step, float32 [N]."""
    metrics: Mapping[str, float]
    """Metrics of the server's loss and optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What the server stores about a checkpoint.

    Example: CheckpointInfo(adapter={"name": "tiny", "rank": 4, "train_mlp": True}, metadata={"by": "me"})
    """

    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Base model and shape of the adapter, by the names of ModelConfig; without what the server does not return."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata that was saved with it."""


class AuxiliaryAdapter(Protocol):
    """A second adapter in training that predicts the logprobs of K tokens at every position."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    async def logprobs(self, rows: Sequence[TrainingRow], ids: Sequence[int]) -> list[np.ndarray]:
        """Return the logprobs of `ids` at each position of each row, float32 [N, K]."""
        ...

    async def fit(
        self,
        rows: Sequence[TrainingRow],
        ids: Sequence[int],
        weights: Sequence[np.ndarray],
        optimizer: OptimizerConfig,
        learning_rate: float,
    ) -> dict[str, float]:
        """Take one optimizer step on the loss -sum(weights * logprobs); weights float32 [N, K] of each row."""
        ...

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """Save weights and optimizer. Returns the path of the checkpoint."""
        ...


class SamplingClients(Protocol):
    """Models of a server for sampling, without training."""

    @property
    def chat(self) -> ChatCodec:
        """The chat codec of the model."""
        ...

    async def open_model(self, name: str) -> Snapshot:
        """Open a base model by name, or a tinker:// path."""
        ...

    async def open_checkpoint(self, path: str, version: int) -> Snapshot:
        """Open saved sampling weights, which are those of `version`."""
        ...

    def on_outage(self, notify: Callable[[bool], None]) -> None:
        """Call `notify` with True when the server is away, and with False when it responds again."""
        del notify  # unless there is a server

    async def close(self) -> None:
        """End the session."""
        ...


class Policy(Protocol):
    """A model in training.

    The version counts batches trained on, not optimizer steps: sampling only ever sees the weights after the last
    optimizer step of a batch, so that differences of versions are staleness in steps of the run.
    """

    @property
    def version(self) -> int:
        """Number of batches trained on."""
        ...

    @property
    def chat(self) -> ChatCodec:
        """The chat codec of the model."""
        ...

    async def snapshot(self) -> Snapshot:
        """Return the current weights for sampling."""
        ...

    @property
    def extensions(self) -> frozenset[str]:
        """Names of the server's extensions of the Tinker API: losses, settings and inputs of losses."""
        ...

    async def open_model(self, name: str) -> Snapshot:
        """Open another model of this server: a base model by name, or a tinker:// path."""
        ...

    async def accumulate(self, update: Update) -> UpdateResult:
        """Add the gradient of the rows to the gradient of the next optimizer step."""
        ...

    async def step(self, optimizer: OptimizerConfig, learning_rate: float) -> Mapping[str, float]:
        """Take one optimizer step with the accumulated gradient, which ends a batch; returns the server's metrics."""
        ...

    async def train(
        self, updates: Sequence[Update], optimizer: OptimizerConfig, learning_rate: float
    ) -> list[UpdateResult]:
        """Take one optimizer step for each of the updates of a batch, without waiting between them."""
        ...

    async def update(self, update: Update, optimizer: OptimizerConfig, learning_rate: float) -> UpdateResult:
        """Compute one gradient over all rows and take one optimizer step: `train` with one update."""
        return (await self.train([update], optimizer, learning_rate))[0]

    async def logprobs(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Return logprobs of the rows' targets by the weights in training, float32 [N] per row, by a forward pass."""
        ...

    async def auxiliary_adapter(self, rank: int, seed: int, state: str = "") -> AuxiliaryAdapter:
        """Open a second adapter on the same base model, new or from the checkpoint `state`."""
        ...

    async def entropies(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Return the entropy of the full distribution at each position, float32 [N] per row.

        Raises Unsupported if the server does not return entropies.
        """
        ...

    def set_version(self, version: int) -> None:
        """Set the version of weights that were loaded from a checkpoint."""
        ...

    async def save(self, name: str, ttl_seconds: int | None, metadata: Mapping[str, str] | None = None) -> str:
        """Save weights and optimizer on the server. Returns the path of the checkpoint."""
        ...

    async def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Return what the server stores about a checkpoint. Raises UserError if there is none."""
        ...

    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        """Save the weights for sampling. Returns the path. Without `ttl_seconds` they do not expire."""
        ...

    async def open_checkpoint(self, path: str, version: int) -> Snapshot:
        """Open saved sampling weights, which are those of `version`."""
        ...

    async def delete_checkpoint(self, path: str) -> None:
        """Delete saved sampling weights. Snapshots that use them already remain valid."""
        ...

    def on_outage(self, notify: Callable[[bool], None]) -> None:
        """Call `notify` with True when the server is away, and with False when it responds again."""
        del notify  # unless there is a server

    async def close(self) -> None:
        """End the session."""
        ...
