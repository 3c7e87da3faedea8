"""The models of a server: base models and checkpoints, to sample from.

`tinker_models.TinkerModels` is a session at a server of the Tinker API; `tinsmith.testing` has models without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field, model_validator

from tinsmith.rl.ending.duration import seconds_of
from tinsmith.rl.policy.chat import ChatCodec
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.settings import Settings

RouterReplay = Literal["none", "measure", "replay"]


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
    router_replay: RouterReplay = "none"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What the server stores about a checkpoint.

    Example: CheckpointInfo(adapter={"name": "tiny", "rank": 4, "train_mlp": True}, metadata={"by": "me"})
    """

    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Base model and shape of the adapter, by the names of ModelConfig; without what the server does not return."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata that was saved with it."""


class Models(Protocol):
    """The models and checkpoints of a server."""

    @property
    def chat(self) -> ChatCodec:
        """The chat codec of the configured model."""
        ...

    @property
    def extensions(self) -> frozenset[str]:
        """Names of the server's extensions of the Tinker API: losses, settings and inputs of losses."""
        ...

    async def open_model(self, name: str) -> Snapshot:
        """Open a base model by name, or a tinker:// path; with an empty name, the configured base model."""
        ...

    async def open_checkpoint(self, path: str, version: int) -> Snapshot:
        """Open saved sampling weights, which are those of `version`."""
        ...

    async def delete_checkpoint(self, path: str) -> None:
        """Delete saved sampling weights. Snapshots that use them already remain valid."""
        ...

    async def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Return what the server stores about a checkpoint. Raises UserError if there is none."""
        ...

    def on_outage(self, notify: Callable[[bool], None]) -> None:
        """Call `notify` with True when the server is away, and with False when it responds again."""
        del notify  # unless there is a server

    async def close(self) -> None:
        """End the session."""
        ...
