"""The service's records: frozen, each with its owner. No I/O.

A Session has Models (adapters in training), which have requests, and SamplingSessions, which sample from versions. A
Checkpoint is a saved adapter; its `id` is also the name of its folder and of its version in the engine. Times are
seconds since 1970, UTC.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import to_json

from tinsmith.engine.base import AdamParams, LoraSpec, Pass
from tinsmith.engine.training.loss_specs import SHADOW
from tinsmith.errors import TinsmithError

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A client's session. Everything that it made ends with it, except named checkpoints."""

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
    """The detail that the client gave at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An adapter in training. `id` is `{session}:train:{n}`, which the client computes too."""

    id: str
    owner: str
    session_id: str
    base_model: str
    lora: LoraSpec
    created: float
    metadata: dict[str, Any] | None = None
    state: Literal["pending", "live", "failed", "ended"] = "pending"
    captured: str | None = None
    """Folder, under the journal, of the last captured state; None if the model is created from `lora` again."""
    captured_optimizer: bool = False
    captured_digest: str | None = None
    """The state's object in the object store, if there is one."""
    covered: int = 0
    """The captured state holds the effect of every request up to this seq_id."""
    used: float | None = None
    """When its last request came; set when the model ends, since its requests are deleted after that."""
    inflight: str | None = None
    """The version that its inflight sampling sessions use; each inflight save replaces it."""


@dataclass(slots=True, kw_only=True)
class Shadow:
    """A model for hypothetical steps, in memory only. Nothing lists it, and it ends with its session or its engine."""

    model: Model
    ttl_s: float
    """Seconds without a request after which it is freed."""
    used: float = field(default_factory=time.monotonic)
    """When its last request came or ended, by the monotonic clock."""
    size_bytes: int = 0
    """Memory that it takes after its first step."""

    @property
    def idle(self) -> bool:
        """Whether its time to live is over."""
        return time.monotonic() - self.used > self.ttl_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSession:
    """A sampling session. `version` is the checkpoint that it samples from, None for the base model."""

    id: str
    owner: str
    session_id: str
    base_model: str
    created: float
    model_path: str | None = None
    version: str | None = None
    inflight_of: str | None = None
    """The model whose current `inflight` version it samples from, in place of a fixed one."""
    joined: int = 0
    """Number of clients that joined it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved adapter. Unnamed ones (kind `ephemeral`) live as long as their session and are never listed."""

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
    """Whether its folder is on disk; False while an unnamed version is only in the engine's memory."""
    deleted: bool = False
    """Whether its path is free again. The folder stays while a living sampling session uses it."""
    public: bool = False
    """Whether all tenants may read it."""
    size_bytes: int = 0
    expires: float | None = None
    metadata: dict[str, str] | None = None
    digest: str | None = None
    """Its object in the object store, if there is one: the folder is a copy of it then, and may be missing."""

    @property
    def path(self) -> str:
        """Its tinker:// path."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object of the object store, noted before it is uploaded. `id` is its digest."""

    id: str
    created: float
    """When it was last published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """A loss that a client uploaded, as the text of its graph. It ends with its session."""

    id: str
    owner: str
    session_id: str
    created: float
    graph: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """create_model: initialize the model from its LoraSpec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """load_weights: load a checkpoint into the model, which it also creates if `creates`."""

    path: str
    checkpoint: str
    optimizer: bool
    creates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkModel:
    """load_weights of a shadow: share the weights of a checkpoint, or of a model in training. Never stored."""

    path: str
    checkpoint: str = ""
    source: str = ""
    """The model in training."""
    optimizer: bool = False


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
    """save_weights_for_sampler: into a named checkpoint, or into a sampling session."""

    name: str | None = None
    sampler_id: str | None = None
    inflight: bool = False
    """Whether the sampling session follows the model's inflight version, in place of keeping these weights."""
    ttl_seconds: int | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveExternal:
    """save_weights_external: weights in PEFT's layout, encrypted if there are recipients."""

    name: str
    ttl_seconds: int | None = None
    recipients: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """End a model, after all of its queued requests. Never stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreModel:
    """Restore the model in the engine, for a version that only a replay can make again. Never stored."""


Operation = (
    CreateModel
    | LoadWeights
    | ForkModel
    | Pass
    | OptimStep
    | SaveState
    | SaveSampler
    | SaveExternal
    | UnloadModel
    | RestoreModel
)


def request_id_of(model_id: str, seq: int) -> str:
    """The id of a training request, which the client computes by itself."""
    return f"{model_id}:{seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A training request that waits for its engine."""

    id: str
    owner: str
    model_id: str
    seq: int
    order: int
    """Order of arrival: larger is later."""
    operation: Operation
    tokens: int = 0
    alone: bool = False
    """Run it in a batch of its own: an engine died while it ran."""
    yields: bool = False
    """Whether the owner's other requests run first: it is of a shadow."""
    source: str = ""
    """The model in training that it forks: it runs after the requests of that model up to `source_seq`."""
    source_seq: int = 0

    def place(self, model_id: str) -> tuple[int, int]:
        """Its place among the requests of its model, or of the model that it forks."""
        return (self.seq, 0) if model_id == self.model_id else (self.source_seq, 1)

    @property
    def packs(self) -> bool:
        """Whether it can share a batch; all other requests are barriers for their model."""
        return isinstance(self.operation, Pass) and not self.is_shadow

    @property
    def is_shadow(self) -> bool:
        """Whether it is a pass of virtual optimizer steps, which runs beside the batches of other models."""
        return isinstance(self.operation, Pass) and self.operation.loss_fn == SHADOW

    @property
    def in_background(self) -> bool:
        """Whether it runs beside the batches."""
        return self.is_shadow and not self.alone


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRequest:
    """A finished request that the journal replays."""

    id: str
    seq: int
    kind: str
    batch: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureResult:
    """The response to a poll for a request's result."""

    body: bytes
    media: str = JSON
    status: int = 200
    failed: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FutureResult:
        """A successful result with a JSON body."""
        return cls(body=to_json(values))

    @classmethod
    def failure(cls, error: TinsmithError) -> FutureResult:
        """A failed request in the protocol: status 200 with the error and its category. No client retries it."""
        body = json.dumps({"error": str(error), "category": error.category}).encode()
        return cls(body=body, failed=True)
