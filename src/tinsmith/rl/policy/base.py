"""What a policy is to the rest of the harness: protocols, and the settings of model and sampling.

A Policy is weights in training; a Snapshot is those weights as they were at one version, to sample from. The policy of
a run is `tinker_policy.TinkerPolicy`; `scripted.ScriptedPolicy` is the same in arithmetic, for tests without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from pydantic import Field, field_validator, model_validator

from tinsmith.chat.request import PromptTooLong
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.chat import Conversation
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.rl.types import Message, Turn
from tinsmith.settings import Settings


class ModelConfig(Settings):
    """The base model, the adapter on it, and where they are served."""

    name: str
    """The base model under the name that the server gives it."""
    rank: int = Field(default=32, ge=1)
    """Of the LoRA adapter."""
    seed: int | None = None
    """Of the adapter's first weights; the run's seed if not set."""
    train_attn: bool = True
    """Adapt the attention layers."""
    train_mlp: bool = True
    """Adapt the MLP layers."""
    train_unembed: bool = True
    """Adapt the output layer."""
    base_url: str = ""
    """A server of the Tinker API; empty: TINKER_BASE_URL, and without that a service started for this run."""
    tokenizer: str = ""
    """A hub id or folder in place of the tokenizer that the server names."""
    chat_template: str = ""
    """Chat template: Jinja text, or the path of a file. Empty: the tokenizer's template."""
    chat_template_values: dict[str, Any] = Field(default_factory=dict)
    """What the chat template reads beside the messages, as {enable_thinking: false}."""
    load_from: str = ""
    """A tinker:// state path whose weights to start from, with a fresh optimizer; empty: a fresh adapter."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        shape = {"rank", "seed", "train_attn", "train_mlp", "train_unembed"} & self.model_fields_set
        if self.load_from and shape:
            raise ValueError(f"load_from brings its own adapter; leave out {', '.join(sorted(shape))}")
        return self


class SamplingConfig(Settings):
    """How replies are drawn."""

    max_tokens: int = Field(default=512, ge=1)
    """Longest reply."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Rollouts with a longer prompt fail, with the reason. Not set: the limit of the server."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy. Training wants 1, where sampled logprobs are the trainer's own."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the likeliest tokens that make up this share."""
    top_k: int = Field(default=-1, ge=-1)
    """Keep this many likeliest tokens; -1 is all."""
    stop: tuple[str | int, ...] | None = None
    """Strings, or token ids, that end a reply; not set: the model's own end; empty: nothing but max_tokens."""

    @field_validator("stop")
    @classmethod
    def _one_kind(cls, stop: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        if stop and len({type(text_or_token) for text_or_token in stop}) > 1:
            raise ValueError("stop takes strings or token ids, not both")
        return stop


ClientLoss = Callable[[Sequence[Any]], tuple[Any, dict[str, float]]]
"""From the logprobs of each row (torch tensors [N]) to the loss (a scalar tensor) and numbers worth a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A batch of an algorithm: training rows, and one loss over all of them.

    Example: Update(rows=(row,), inputs=({"logprobs": q, "advantages": a},), loss="ppo", config={})
    """

    rows: tuple[TrainingRow, ...]
    inputs: tuple[Mapping[str, np.ndarray], ...] = ()
    """What the server's loss reads of each row, beside its targets: arrays [N]."""
    loss: str = ""
    """Of the server; empty where `client` computes it."""
    config: Mapping[str, float | str] = field(default_factory=dict)
    """Of the server's loss."""
    client: ClientLoss | None = None
    """Custom loss, for algorithms whose loss the server does not have. It costs another forward pass."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What an update answered."""

    logprobs: tuple[np.ndarray, ...]
    """float32 [N] for each sample's targets, from before the step."""
    metrics: Mapping[str, float]
    """The server's, from the loss and from the optimizer."""


class AuxiliaryAdapter(Protocol):
    """A second adapter in training, for the logprobs of K tokens at every position."""

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        ...

    async def logprobs(self, rows: Sequence[TrainingRow], ids: Sequence[int]) -> list[np.ndarray]:
        """float32 [N, K] of each row."""
        ...

    async def fit(
        self,
        rows: Sequence[TrainingRow],
        ids: Sequence[int],
        weights: Sequence[np.ndarray],
        optimizer: OptimizerConfig,
        learning_rate: float,
    ) -> dict[str, float]:
        """One step down -sum weights logprobs; weights float32 [N, K] of each row."""
        ...

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """Keep weights and optimizer; returns the path to go on from."""
        ...


class ChatCodec(Protocol):
    """Chats as tokens; `chat.Chat` does it by a tokenizer and its template."""

    @property
    def template(self) -> str:
        """The chat template; empty if there is none."""
        ...

    def with_template_values(self, values: Mapping[str, Any]) -> ChatCodec:
        """Return a codec whose chat template also gets these variables."""
        ...

    def prompt(self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The conversation so far and the start of a reply."""
        ...

    def encode_with_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, every: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a chat and their loss mask: its last assistant message, or all of them with `every`."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Text, with nothing put around it."""
        ...

    def text(self, tokens: Sequence[int], stop: Sequence[str | int] | None, keep: Sequence[str] = ()) -> str:
        """A reply without special tokens, but for those in `keep`, and without the string that ended it."""
        ...


Prompt = Conversation | Sequence[int]


class Snapshot(Protocol):
    """The weights of a policy at one version, for sampling. Immutable."""

    @property
    def version(self) -> int:
        """Updates seen."""
        ...

    @property
    def chat(self) -> ChatCodec:
        """How its chats are spelled."""
        ...

    async def sample(self, prompt: Prompt, *, count: int, seed: int, sampling: SamplingConfig) -> tuple[Turn, ...]:
        """`count` replies to a chat or to tokens; the same seed again gives the same replies.

        A Turn in the chat stands for its own tokens: the prompt extends it. Raises PromptTooLong.
        """
        ...

    async def open_model(self, name: str) -> Snapshot:
        """Other weights of this server to ask: a base model by its name, or a tinker:// path."""
        ...

    async def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Return logprobs of tokens 1 to N at temperature 1, float32 [N], for N + 1 tokens."""
        ...


class SamplingClients(Protocol):
    """Weights of a server to sample from, by name; nothing is trained."""

    @property
    def chat(self) -> ChatCodec:
        """How its chats are spelled."""
        ...

    async def open_model(self, name: str) -> Snapshot:
        """A base model by its name, or a tinker:// path."""
        ...

    async def open_checkpoint(self, path: str, version: int) -> Snapshot:
        """Open saved sampling weights, which are those of `version`."""
        ...

    async def close(self) -> None:
        """End the session."""
        ...


class Policy(Protocol):
    """Weights in training. `update` adds 1 to the version."""

    @property
    def version(self) -> int:
        """Updates made."""
        ...

    @property
    def chat(self) -> ChatCodec:
        """How its chats are spelled."""
        ...

    async def snapshot(self) -> Snapshot:
        """The weights of this moment, to sample from."""
        ...

    @property
    def extensions(self) -> frozenset[str]:
        """What this server offers beyond the protocol, by name: losses, settings and inputs of losses."""
        ...

    async def open_model(self, name: str) -> Snapshot:
        """Other weights of this server to ask: a base model by its name, or a tinker:// path."""
        ...

    async def update(self, update: Update, optimizer: OptimizerConfig, learning_rate: float) -> UpdateResult:
        """Compute one gradient over all rows and take one optimizer step."""
        ...

    async def auxiliary_adapter(self, rank: int, seed: int, state: str = "") -> AuxiliaryAdapter:
        """A second adapter on the same base, fresh or as saved under `state`."""
        ...

    async def entropies(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """float32 [N] of each row: the whole softmax's, now. Raises Unsupported if the server does not return them."""
        ...

    async def save(self, name: str, ttl_seconds: int | None) -> str:
        """Keep weights and optimizer on the server; returns the path to go on from."""
        ...

    async def save_for_sampling(self, name: str, ttl_seconds: int | None = None) -> str:
        """Keep the weights alone, for good or so long; returns the path to sample from."""
        ...

    async def open_checkpoint(self, path: str, version: int) -> Snapshot:
        """Open saved sampling weights, which are those of `version`."""
        ...

    async def delete_checkpoint(self, path: str) -> None:
        """Delete saved sampling weights. Snapshots that use them already remain valid."""
        ...

    async def close(self) -> None:
        """End the session."""
        ...


def request_seed(run_seed: int, *place: int) -> int:
    """A seed of its own for each sampling request: 31 bits from the run's seed and the request's place in the run."""
    return int(np.random.SeedSequence((run_seed, *place)).generate_state(1)[0] & 0x7FFFFFFF)


def check_prompt_length(prompt: Sequence[int], sampling: SamplingConfig) -> None:
    """Raises PromptTooLong where the prompt is longer than the run allows."""
    if sampling.max_prompt_tokens is not None and len(prompt) > sampling.max_prompt_tokens:
        raise PromptTooLong(
            f"The prompt has {len(prompt)} tokens, sampling.max_prompt_tokens is {sampling.max_prompt_tokens}.",
            "Raise it, or shorten the task.",
        )
