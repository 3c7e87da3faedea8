"""What routes are given: the service's parts, the tenant behind a key, bodies within their limits.

A route may touch only what its tenant owns: whatever is another's answers as if it did not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request

from tinsmith.chat.tokenizer import TokenizerCache
from tinsmith.engine.validation import did_you_mean
from tinsmith.errors import BadRequest, Forbidden, NotFound, TooLarge, Unauthorized
from tinsmith.service.checkpoints import CheckpointCopies, Checkpoints
from tinsmith.service.config import ServeConfig
from tinsmith.service.middleware import Drain
from tinsmith.service.observability.audit import AuditLog
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.observability.perfetto import TraceExporter
from tinsmith.service.observability.usage import Usage
from tinsmith.service.results.futures import Futures
from tinsmith.service.sampling import Sampling
from tinsmith.service.sessions import Sessions
from tinsmith.service.storage.records import Model, SamplingSession
from tinsmith.service.storage.store import Store
from tinsmith.service.tenancy.keys import ApiKey, Tenants, generate_key
from tinsmith.service.tenancy.quotas import QuotaEnforcer
from tinsmith.service.tenancy.signing import TOKEN_PREFIX, Signer, write_private_file
from tinsmith.service.training.journal import Journal
from tinsmith.service.training.worker import Worker
from tinsmith.service.wire.protobuf import MAX_BODY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The parts of a running service."""

    config: ServeConfig
    key: str | None
    """The server's own; None where only keys of `tinsmith keys` open it."""
    tenants: Tenants
    quotas: QuotaEnforcer
    store: Store
    futures: Futures
    checkpoints: Checkpoints
    journal: Journal
    sessions: Sessions
    sampling: Sampling
    signer: Signer
    audit_log: AuditLog
    usage: Usage
    traces: TraceExporter
    copies: CheckpointCopies
    telemetry: Telemetry
    drain: Drain
    tokenizers: TokenizerCache
    workers: dict[str, Worker]
    """Served name -> the worker of its engine."""

    def authenticate(self, credential: str) -> ApiKey:
        """The record of a key, or of the key that a token stands for.

        Raises Unauthorized if it is unknown, revoked or over its time.
        """
        key = self._find_key(credential)
        if key is None:
            what = "The X-API-Key is not known here." if credential else "There is no X-API-Key."
            raise Unauthorized(what, "Set TINKER_API_KEY to the server's key, or to one of `tinsmith keys create`.")
        add_log_context(owner=key.owner)
        return key

    def token(self, key: ApiKey) -> str:
        """A token in place of a key."""
        return self.signer.issue_token(key.owner, key.id, self._token_binding(key))

    def _find_key(self, credential: str) -> ApiKey | None:
        if not credential.startswith(TOKEN_PREFIX):
            return self.tenants.authenticate(credential)
        number, bound = self.signer.read_token(credential) or (-1, "")
        key = self.tenants.key_by_id(number)
        return key if key is not None and bound == self._token_binding(key) else None

    def _token_binding(self, key: ApiKey) -> str:
        """The server's own key may be another one tomorrow, under the same number."""
        return self.signer.fingerprint(self.key) if self.key is not None and key.id == 0 else ""

    def token_owner(self, token: str | None, path: str) -> str | None:
        """Whose checkpoint a weights_access_token lets read: it is a loan, or a credential of the owner."""
        if token is None:
            return None
        key = self._find_key(token)
        owner = key.owner if key is not None else self.signer.lender(token, path)
        if owner is None:
            raise BadRequest(
                f"The weights_access_token opens nothing at {path}, or its time is over.", "Ask its owner for another."
            )
        return owner

    def signed_link(self, request: Request, path: str, expires: int) -> str:
        """A link to one of this server's files."""
        base = self.config.public_url or str(request.base_url)
        return f"{base.rstrip('/')}/api/v1/files/{path}?{self.signer.link(path, expires)}"

    def is_broken(self, model: Model) -> bool:
        """The engine cannot have the model, and why is in the log."""
        worker = self.workers.get(model.base_model)
        return worker is not None and worker.is_broken(model.id)

    def worker(self, base_model: str) -> Worker:
        """The worker of a base model. Raises NotFound with the nearest name."""
        if base_model not in self.workers:
            raise NotFound(f"Base model {base_model} is not served here.", did_you_mean(base_model, self.workers))
        return self.workers[base_model]

    def model(self, model_id: str, owner: str) -> Model:
        """A model of this tenant, in whatever state. Raises NotFound."""
        model = self.store.find(Model, model_id)
        if model is None or model.owner != owner:
            raise NotFound(f"There is no model {model_id}.", "Create one, or load a checkpoint.")
        return model

    def trainable_model(self, model_id: str, owner: str) -> Model:
        """A model that can take requests; its session stays alive by this. Raises NotFound or BadRequest."""
        model = self.model(model_id, owner)
        self.sessions.touch(model.session_id, owner)
        if model.state in ("failed", "ended"):
            raise BadRequest(f"Model {model_id} is {model.state}.", "Create another and load a checkpoint into it.")
        return model

    def sampler(self, sampler_id: str, owner: str) -> SamplingSession:
        """A sampling session of this tenant. Raises NotFound."""
        sampler = self.store.find(SamplingSession, sampler_id)
        if sampler is None or sampler.owner != owner:
            raise NotFound(f"There is no sampling session {sampler_id}.", "Create one.")
        return sampler


def server_key(config: ServeConfig) -> tuple[str | None, bool]:
    """(the server's own key, whether it was made just now): the given one, else the folder's, else a new one.

    Where others can connect only keys open the server that were given or made for it: then there may be none.
    """
    if config.api_key is not None or not config.is_loopback:
        return config.api_key, False
    if not config.makes_key:
        return config.key_file.read_text().strip(), False
    key = generate_key()
    write_private_file(config.key_file, key)
    return key, True


async def get_service(request: Request) -> Service:
    """The service behind the app."""
    return request.app.state.service


ServiceDep = Annotated[Service, Depends(get_service)]


async def caller(service: ServiceDep, x_api_key: Annotated[str, Header()] = "") -> ApiKey:
    """What is known of the key in the X-API-Key header. Raises Unauthorized."""
    return service.authenticate(x_api_key)


Caller = Annotated[ApiKey, Depends(caller)]


async def tenant(key: Caller) -> str:
    """The owner behind the key."""
    return key.owner


Tenant = Annotated[str, Depends(tenant)]


async def admin(key: Caller) -> ApiKey:
    """A key that may see what concerns all tenants. Raises Forbidden."""
    if not key.admin:
        raise Forbidden(
            f"The key '{key.name}' is not an admin's.", "Use the server's own key, or one made with --admin."
        )
    return key


Admin = Annotated[ApiKey, Depends(admin)]


async def read_body(request: Request) -> bytes:
    """The body as it came. Raises TooLarge before it is read whole."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"The body is over {MAX_BODY_BYTES} bytes.", "Send fewer data per request.")
    return bytes(body)


RawBody = Annotated[bytes, Depends(read_body)]
