"""The parts of a running service, as its routes reach them.

A route reaches only what its tenant owns; resources of other tenants answer as if they did not exist.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tinsmith.chat.tokenizer import CHARACTERS, Tokenizer, TokenizerCache, write_character_tokenizer
from tinsmith.engine.base import ModelCard
from tinsmith.engine.config import cache_folder
from tinsmith.engine.validation import did_you_mean
from tinsmith.errors import BadRequest, NotFound, Unauthorized
from tinsmith.service.base_models import BaseModels
from tinsmith.service.budgets.disk import DiskMonitor
from tinsmith.service.checkpoints import CheckpointCopies, Checkpoints
from tinsmith.service.config import ServeConfig
from tinsmith.service.drain import Drain
from tinsmith.service.engines.queue_view import QueueEntry, reason_of_wait
from tinsmith.service.limits.bodies import LargeBodies
from tinsmith.service.limits.connections import Connections
from tinsmith.service.limits.decoders import Decoders
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.observability.perfetto import TraceExporter
from tinsmith.service.observability.usage import Usage
from tinsmith.service.results.futures import Futures
from tinsmith.service.sampling import Sampling
from tinsmith.service.sessions import Sessions
from tinsmith.service.storage.object_copies import ObjectCopies
from tinsmith.service.storage.records import Model, SamplingSession
from tinsmith.service.storage.store import Store
from tinsmith.service.tenancy.keys import ApiKey, Tenants, generate_key
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.tenancy.signing import TOKEN_PREFIX, Signer, write_private_file
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.worker import Worker
from tinsmith.service.wire.provenance import SequenceRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The parts of a running service."""

    config: ServeConfig
    key: str | None
    """The server's own key; None where only keys of `tinsmith keys` are valid."""
    tenants: Tenants
    quotas: QuotaEnforcer
    store: Store
    disk: DiskMonitor
    futures: Futures
    checkpoints: Checkpoints
    journal: Journal
    sessions: Sessions
    sampling: Sampling
    sequences: SequenceRegistry
    signer: Signer
    audit_log: AuditLog
    usage: Usage
    traces: TraceExporter
    copies: CheckpointCopies
    object_copies: ObjectCopies
    telemetry: Telemetry
    drain: Drain
    tokenizers: TokenizerCache
    connections: Connections
    bodies: LargeBodies
    decoders: Decoders
    base_models: BaseModels

    @property
    def workers(self) -> dict[str, Worker]:
        """Worker of each base model, by served name."""
        return self.base_models.workers

    def authenticate(self, credential: str, header: str = "X-API-Key") -> ApiKey:
        """The record of a key, or of the key that a token was issued for.

        Raises Unauthorized, which names the `header` that it was sent in, if it is unknown, revoked or expired.
        """
        key = self._find_key(credential)
        if key is None:
            message = f"The {header} is not valid." if credential else f"The request has no {header}."
            raise Unauthorized(message, "Set TINKER_API_KEY to the server's key, or to one of `tinsmith keys create`.")
        add_log_context(owner=key.owner)
        return key

    def issue_token(self, key: ApiKey) -> str:
        """A token that authenticates in place of the key."""
        return self.signer.issue_token(key.owner, key.id, self._token_binding(key))

    def _find_key(self, credential: str) -> ApiKey | None:
        if not credential.startswith(TOKEN_PREFIX):
            return self.tenants.authenticate(credential)
        number, binding = self.signer.read_token(credential) or (-1, "")
        key = self.tenants.key_by_id(number)
        return key if key is not None and binding == self._token_binding(key) else None

    def _token_binding(self, key: ApiKey) -> str:
        """Ties tokens of the server's own key to its value: another value keeps the same id, 0."""
        return self.signer.fingerprint(self.key) if self.key is not None and key.id == 0 else ""

    def token_owner(self, token: str | None, path: str) -> str | None:
        """The owner whose checkpoint `path` a weights_access_token makes readable.

        The token may also be a key or an access token of the owner. None without a token. Raises BadRequest for a token
        that is invalid for the path.
        """
        if token is None:
            return None
        key = self._find_key(token)
        owner = key.owner if key is not None else self.signer.checkpoint_owner(token, path)
        if owner is None:
            raise BadRequest(
                f"The weights_access_token is not valid for {path}, or it has expired.",
                "Get another one from the checkpoint's owner.",
            )
        return owner

    def signed_link(self, request: Request, path: str, expires: int) -> str:
        """A signed URL of one of this server's files."""
        base = self.config.public_url or str(request.base_url)
        return f"{base.rstrip('/')}/api/v1/files/{path}?{self.signer.link(path, expires)}"

    def is_broken(self, model: Model) -> bool:
        """Whether the engine cannot load the model; the log has the reason."""
        worker = self.workers.get(model.base_model)
        return worker is not None and worker.is_broken(model.id)

    def worker(self, base_model: str) -> Worker:
        """The worker of a base model. Raises NotFound, with the closest served name."""
        if base_model not in self.workers:
            raise NotFound(f"Base model {base_model} is not served here.", did_you_mean(base_model, self.workers))
        return self.workers[base_model]

    def queues(self) -> list[tuple[Worker, str, list[QueueEntry]]]:
        """The queues of each worker by name, "training" and "sampling": all unfinished requests of all tenants."""
        distinct = {id(worker): worker for worker in self.workers.values()}  # several served names may share a worker
        return [
            (worker, name, entries)
            for worker in distinct.values()
            for name, entries in (("training", worker.queue()), ("sampling", self.sampling.queue(worker.host)))
        ]

    def waits(self, session_id: str) -> list[dict[str, Any]]:
        """What a session waits for: for each queue in which it has requests and none of them runs, the wait of the next
        one in seconds, and the reason."""
        waits = []
        for worker, name, entries in self.queues():
            own = [entry for entry in entries if entry.model_id.startswith(f"{session_id}:")]
            reason = worker.host.pause_reason(samples=name == "sampling")
            if own and (reason or not any(entry.running for entry in own)):
                waits.append(
                    {
                        "queue": name,
                        "waited_s": round(own[0].waited_s, 1),
                        "reason": reason or reason_of_wait(own[0], entries),
                    }
                )
        return waits

    async def tokenizer(self, base_model: str, card: ModelCard) -> Tokenizer:
        """The tokenizer of a base model. Raises Unsupported if it has none."""
        return await self.tokenizers.get(base_model, card.tokenizer)

    async def tokenizer_id(self, card: ModelCard) -> str | None:
        """The tokenizer's hub id, or its folder for clients of this machine; None for others, which have no folder."""
        source = card.tokenizer
        if source.startswith(CHARACTERS):
            source = str(await asyncio.to_thread(write_character_tokenizer, source, cache_folder()))
        return source if self.config.is_loopback or not source.startswith("/") else None

    def model(self, model_id: str, owner: str) -> Model:
        """A model of this tenant, in any state. Raises NotFound."""
        model = self.store.find(Model, model_id)
        if model is None or model.owner != owner:
            raise NotFound(
                f"There is no model {model_id}.",
                "Create a model, or load a checkpoint. Shadows are freed when they were idle for their ttl.",
            )
        return model

    def trainable_model(self, model_id: str, owner: str) -> Model:
        """A model that accepts requests; keeps its session alive. Raises NotFound, or BadRequest if the model ended."""
        model = self.model(model_id, owner)
        self.sessions.touch(model.session_id, owner)
        if model.state in ("failed", "ended"):
            raise BadRequest(
                f"Model {model_id} is {model.state}.", "Create another model and load a checkpoint into it."
            )
        return model

    def sampler(self, sampler_id: str, owner: str) -> SamplingSession:
        """A sampling session of this tenant. Raises NotFound."""
        sampler = self.store.find(SamplingSession, sampler_id)
        if sampler is None or sampler.owner != owner:
            raise NotFound(
                f"There is no sampling session {sampler_id}.",
                "Create one. One on unnamed weights ends when they were replaced by newer ones and not used for long: "
                "save the weights again, under a name if they are to stay (docs/serve/operate.md#unnamed-versions).",
            )
        return sampler


def server_key(config: ServeConfig) -> tuple[str | None, bool]:
    """(the server's own key, whether it was generated now): the configured key, else the data folder's, else a new one.

    A server that is not bound to localhost generates no key; its own key may then be None.
    """
    if config.api_key is not None or not config.is_loopback:
        return config.api_key, False
    if not config.makes_key:
        return config.key_file.read_text().strip(), False
    key = generate_key()
    write_private_file(config.key_file, key)
    return key, True
