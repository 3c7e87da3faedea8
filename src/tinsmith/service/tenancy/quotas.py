"""Enforcement of tenants' quotas.

A request that may succeed later is refused with Busy (429, with the time to wait), and the SDK retries it. A request
that would not succeed later either is refused with Forbidden (403), which the SDK raises.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinsmith.errors import Busy, Forbidden
from tinsmith.plurals import counted
from tinsmith.service.budgets.disk import DiskMonitor
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.records import Model
from tinsmith.service.storage.store import Store
from tinsmith.service.tenancy.keys import Tenants

_RETRY_S = 1.0
"""Time after which a client retries when too many of its requests wait."""
_MAX_RETRY_S = 30.0
"""Maximum time to wait; the SDK ignores waits longer than a minute."""


@dataclass(frozen=True, slots=True)
class ShadowLimits:
    """The shadows of one tenant."""

    count: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.count} of {counted(self.size_bytes, 'byte')}"


@dataclass(slots=True)
class _Bucket:
    """Token bucket of a tenant. `level` is negative after a request that used more than was left."""

    level: float
    at: float


class QuotaEnforcer:
    """Current use of each tenant, checked against its quotas."""

    def __init__(
        self,
        tenants: Tenants,
        store: Store,
        futures: Futures,
        clock: Callable[[], float] = time.monotonic,
        shadow_limits: ShadowLimits | None = None,
        disk: DiskMonitor | None = None,
        samplers: int | None = None,
    ) -> None:
        """`samplers`: sampling sessions that one session may have.

        Without `shadow_limits`, any number of shadows is accepted; without `disk`, no disk is full.
        """
        self._samplers = samplers
        self._disk = disk
        self._shadow_limits = shadow_limits
        self._tenants = tenants
        self._store = store
        self._futures = futures
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._arriving: Counter[str] = Counter()
        self._creating: Counter[str] = Counter()

    @contextmanager
    def reserve_request(self, owner: str, tokens: int) -> Iterator[None]:
        """Charge tokens, and reserve a queued request for the duration of the block. Raises Busy over a quota."""
        limit = self._tenants.quotas(owner).queued
        if limit is not None and self._futures.pending(owner) + self._arriving[owner] >= limit:
            problem = f"{owner} has {counted(limit, 'request')} without a result, its quota."
            raise Busy(problem, "Retry when some are finished.", retry_after_ms=int(1000 * _RETRY_S))
        self._spend(owner, tokens)
        self._arriving[owner] += 1
        try:
            yield
        finally:
            self._arriving[owner] -= 1

    @contextmanager
    def reserve_model(self, owner: str) -> Iterator[None]:
        """Reserve one more model in training for the duration of the block. Raises Forbidden over the quota."""
        limit = self._tenants.quotas(owner).models
        if limit is not None:
            used = sum(
                record.owner == owner and record.state in ("pending", "live") for record in self._store.all(Model)
            )
            if used + self._creating[owner] >= limit:
                problem = f"{owner} has {used} models in training; its quota is {limit}."
                raise Forbidden(problem, "End a session whose models are no longer needed.")
        self._creating[owner] += 1
        try:
            yield
        finally:
            self._creating[owner] -= 1

    def check_shadow(self, owner: str) -> None:
        """Raise Forbidden if the tenant has as many shadows, or as much memory in them, as one tenant may have."""
        if (limits := self._shadow_limits) is None:
            return
        own = [shadow for shadow in self._store.shadows.values() if shadow.model.owner == owner]
        size = sum(shadow.size_bytes for shadow in own)
        if len(own) >= limits.count or size >= limits.size_bytes:
            problem = (
                f"{owner} has {counted(len(own), 'shadow')} of {counted(size, 'byte')}; a tenant may have {limits}."
            )
            raise Forbidden(problem, "End a session of shadows, or wait until some were idle for their ttl.")

    def check_sampling_session(self, session_id: str) -> None:
        """Raise Forbidden if a session has as many sampling sessions as one may have."""
        limit = self._samplers
        if limit is not None and self._store.count_sampling_sessions(session_id) >= limit:
            sessions = counted(limit, "sampling session")
            problem = f"Session {session_id} has {sessions}, as many as one may have (sampling_sessions)."
            raise Forbidden(problem, "Begin another session, and load a checkpoint into it.")

    def check_storage(self, owner: str) -> None:
        """Raise Forbidden if the tenant's checkpoints have reached the quota of bytes, Busy if the disk is low."""
        if self._disk is not None:
            self._disk.require()
        limit = self._tenants.quotas(owner).checkpoint_bytes
        if limit is None:
            return
        used = self._store.checkpoint_bytes(owner)
        if used >= limit:
            problem = f"The checkpoints of {owner} take {counted(used, 'byte')}; its quota is {limit}."
            raise Forbidden(problem, "Delete some, set a ttl, or end sessions that sample from unnamed ones.")

    def check_payload(self, size: int) -> None:
        """Raise Busy if the disk has no room for a training request of this many bytes."""
        if self._disk is not None:
            self._disk.require_for_training(size)

    def charge(self, owner: str, tokens: int) -> None:
        """Charge sampled tokens, whose number is known only after sampling."""
        if (limit := self._tenants.quotas(owner).tokens_per_minute) is not None:
            self._bucket(owner, limit).level -= tokens

    def _spend(self, owner: str, tokens: int) -> None:
        if (limit := self._tenants.quotas(owner).tokens_per_minute) is None:
            return
        bucket = self._bucket(owner, limit)
        if bucket.level <= 0:  # not `< tokens`: a request larger than the quota of a minute would never run
            wait = min(60 * (1 - bucket.level) / limit, _MAX_RETRY_S) if limit else _MAX_RETRY_S
            problem = f"{owner} has used its {counted(limit, 'token')} per minute."
            raise Busy(problem, f"Retry in {math.ceil(wait)} s.", retry_after_ms=math.ceil(1000 * wait))
        bucket.level -= tokens

    def _bucket(self, owner: str, limit: int) -> _Bucket:
        """The tenant's bucket, refilled at a constant rate up to the quota of one minute."""
        now = self._clock()
        bucket = self._buckets.setdefault(owner, _Bucket(limit, now))
        bucket.level = min(bucket.level + (now - bucket.at) * limit / 60, limit)
        bucket.at = now
        return bucket
