"""What the service remembers: frozen records, each with its owner. No I/O here.

Session > Model (an adapter in training) > Request (one call on it); Session > Sampler (a sampling session) > version.
A Checkpoint is a saved adapter; its `id` is also the name of its folder and of its version in the engine.
Times are seconds since 1970, UTC.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tinsmith.engine.base import AdamParams, LoraSpec, Pass
from tinsmith.errors import TinsmithError

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One client's connection; everything it made ends with it, but for named checkpoints."""

    id: str
    owner: str
    created: float
    seen: float
    idempotency_key: str | None = None
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    project_id: str | None = None
    display_name: str | None = None
    ended: str | None = None
    """Why it ended: success, errored, interrupted, silence; None while it lives."""
    detail: str | None = None
    """What its client said at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An adapter in training; `id` is `{session}:train:{n}`, which the client computes by itself."""

    id: str
    owner: str
    session_id: str
    base_model: str
    lora: LoraSpec
    created: float
    metadata: dict[str, Any] | None = None
    state: Literal["pending", "live", "failed", "ended"] = "pending"
    captured: str | None = None
    """Folder (under the journal) of its last captured state; None: it is made anew from `lora`."""
    captured_optimizer: bool = False
    covered: int = 0
    """The captured state holds the effect of every request up to this seq_id."""
    used: float | None = None
    """When its last request came; set when it ends, since its requests are forgotten after that."""
    inflight: str | None = None
    """The version that its inflight sampling sessions share; each inflight save puts a newer one here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSession:
    """A sampling session; `version` is the checkpoint it samples from for ever, None for the base model."""

    id: str
    owner: str
    session_id: str
    base_model: str
    created: float
    model_path: str | None = None
    version: str | None = None
    inflight_of: str | None = None
    """The model whose `inflight` version it samples from, whichever that is at the moment."""
    joined: int = 0
    """Clients that were given a number of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved adapter. Unnamed ones (kind `ephemeral`) live as long as their session and are not listed."""

    id: str
    owner: str
    run: str
    kind: Literal["weights", "sampler_weights", "external_weights", "ephemeral"]
    name: str
    base_model: str
    lora: LoraSpec
    created: float
    made_by: str
    """The request that saved it."""
    optimizer: bool = False
    ready: bool = True
    """Its folder is on disk; False while an unnamed version is still only in the engine's memory."""
    deleted: bool = False
    """No longer to be had by its path; the folder stays while a living sampling session uses it."""
    public: bool = False
    """Whoever has a key may read it."""
    size_bytes: int = 0
    expires: float | None = None
    metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        """Its tinker:// name."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """A loss that a client uploaded; `graph` is what `engine.graph` reads. It ends with its session."""

    id: str
    owner: str
    session_id: str
    created: float
    graph: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """Make the model from its LoraSpec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Put a checkpoint into the model; `creates` when it takes the place of Create."""

    path: str
    checkpoint: str
    optimizer: bool
    creates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """optim_step."""

    adam: AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """save_weights."""

    name: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSampler:
    """save_weights_for_sampler: named into a checkpoint, unnamed into a sampling session."""

    name: str | None = None
    sampler_id: str | None = None
    inflight: bool = False
    """The sampling session samples from what the model's inflight clients share, not from these weights for ever."""
    ttl_seconds: int | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveExternal:
    """save_weights_external: weights for use elsewhere, encrypted if there are recipients."""

    name: str
    ttl_seconds: int | None = None
    recipients: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """The end of a model, queued behind what is still waiting. Never stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreModel:
    """Have the model in the engine again, for a version that only its replay can bring back. Never stored."""


Operation = (
    CreateModel | LoadWeights | Pass | OptimStep | SaveState | SaveSampler | SaveExternal | UnloadModel | RestoreModel
)


def request_id_of(model_id: str, seq: int) -> str:
    """The id of a training request, which the client computes by itself."""
    return f"{model_id}:{seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request waiting for its engine, as the scheduler sees it."""

    id: str
    owner: str
    model_id: str
    seq: int
    order: int
    """Arrival: larger is later."""
    operation: Operation
    tokens: int = 0
    alone: bool = False
    """An engine died while it ran: run it by itself, so that it can take no other down."""

    @property
    def packs(self) -> bool:
        """Rows that pack share a pass; all others are barriers for their own model."""
        return isinstance(self.operation, Pass)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRequest:
    """A finished request as the journal replays it."""

    id: str
    seq: int
    kind: str
    batch: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureResult:
    """The final body of a future."""

    body: bytes
    media: str = JSON
    status: int = 200
    failed: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FutureResult:
        """A JSON result."""
        return cls(body=json.dumps(values).encode())

    @classmethod
    def failure(cls, error: TinsmithError) -> FutureResult:
        """How the protocol fails a request: 200 with the error and its category, which no client retries."""
        body = json.dumps({"error": str(error), "category": error.category}).encode()
        return cls(body=body, failed=True)
