"""FastAPI dependencies of the routes: the service, the authenticated key and tenant, the request's body.

Routes reach only what their tenant owns; resources of other tenants answer as if they did not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request

from tinsmith.chat.tokenizer import CHARACTERS, Tokenizer, TokenizerCache, write_character_tokenizer
from tinsmith.engine.base import ModelCard
from tinsmith.engine.config import cache_folder
from tinsmith.engine.validation import did_you_mean
from tinsmith.errors import BadRequest, Forbidden, NotFound, Unauthorized
from tinsmith.service.base_models import BaseModels
from tinsmith.service.budgets.disk import DiskMonitor
from tinsmith.service.checkpoints import CheckpointCopies, Checkpoints
from tinsmith.service.config import ServeConfig
from tinsmith.service.engines.queue_view import QueueEntry, reason_of_wait
from tinsmith.service.limits.bodies import SMALL_BYTES, LargeBodies, prompt_limit, read_body
from tinsmith.service.limits.connections import AddressCounts
from tinsmith.service.limits.parsing import Parsers
from tinsmith.service.middleware import Drain
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
from tinsmith.service.wire.protobuf import MAX_BODY_BYTES
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
    connections: AddressCounts
    """Open connections, of front ends too."""
    bodies: LargeBodies
    parsers: Parsers
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

    async def read_prompt(self, request: Request, owner: str) -> AbstractAsyncContextManager[bytes]:
        """The body of a request with prompts, whose limit follows from the largest context that is served."""
        hosts = [worker.host for worker in self.workers.values()]
        cards = [host.latest_card for host in hosts if host.latest_card] or [await hosts[0].card()]
        context = max(card.context_length for card in cards)
        hint = f"No prompt is longer than {context} tokens: send fewer, or shorter, prompts in a request."
        limit = prompt_limit(context, images=any(card.images for card in cards))
        return self.bodies.read(request, owner, limit, hint)

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


async def get_service(request: Request) -> Service:
    """The service of the app."""
    return request.app.state.service


ServiceDep = Annotated[Service, Depends(get_service)]


async def get_api_key(service: ServiceDep, x_api_key: Annotated[str, Header()] = "") -> ApiKey:
    """The record of the key in the X-API-Key header. Raises Unauthorized."""
    return service.authenticate(x_api_key)


CallerKey = Annotated[ApiKey, Depends(get_api_key)]


async def get_tenant(key: CallerKey) -> str:
    """The owner of the key."""
    return key.owner


Tenant = Annotated[str, Depends(get_tenant)]


def require_admin(key: ApiKey) -> None:
    """Raise Forbidden unless the key may read data of all tenants."""
    if not key.admin:
        raise Forbidden(
            f"The key '{key.name}' is not an admin key.", "Use the server's own key, or a key made with --admin."
        )


async def get_admin(key: CallerKey) -> ApiKey:
    """The key, if it is an administrator's. Raises Forbidden."""
    require_admin(key)
    return key


Admin = Annotated[ApiKey, Depends(get_admin)]


async def read_small_body(request: Request) -> bytes:
    """The request's body, of names, ids and settings. Raises TooLarge."""
    return await read_body(request, SMALL_BYTES)


RawBody = Annotated[bytes, Depends(read_small_body)]


async def read_prompt_body(request: Request, tenant: Tenant, service: ServiceDep) -> AsyncIterator[bytes]:
    """The body of a request with a prompt. Raises TooLarge, Busy."""
    async with await service.read_prompt(request, tenant) as body:
        yield body


PromptBody = Annotated[bytes, Depends(read_prompt_body)]


def pass_body(request: Request, tenant: str, service: Service) -> AbstractAsyncContextManager[bytes]:
    """The body of a forward_backward request. Raises TooLarge, Busy."""
    hint = "Send fewer data per request: fwdbwd_max_chunk_bytes_count of the SDK is 5,000,000 bytes."
    return service.bodies.read(request, tenant, MAX_BODY_BYTES, hint)


async def read_pass_body(request: Request, tenant: Tenant, service: ServiceDep) -> AsyncIterator[bytes]:
    """`pass_body` as a dependency."""
    async with pass_body(request, tenant, service) as body:
        yield body


PassBody = Annotated[bytes, Depends(read_pass_body)]

IdempotencyKey = Annotated[str | None, Header(max_length=256)]
"""X-Idempotency-Key, as a parameter with this name."""
