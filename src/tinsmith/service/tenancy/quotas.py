"""Tenants held to their quotas.

What may go through later is refused as Busy (429, with the time to wait), which the SDK waits out by itself; what no
waiting changes is refused as Forbidden (403), which it tells its user at once.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinsmith.errors import Busy, Forbidden
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.records import Checkpoint, Model
from tinsmith.service.storage.store import Store
from tinsmith.service.tenancy.keys import Tenants

_ASK_AGAIN_S = 1.0
_LONGEST_S = 30.0
"""The SDK does not believe a longer wait than a minute."""


@dataclass(slots=True)
class _Bucket:
    """Tokens that a tenant may still use; what was used beyond them is made up for before the next request."""

    level: float
    at: float


class QuotaEnforcer:
    """What each tenant uses now, against what it may."""

    def __init__(
        self, tenants: Tenants, store: Store, futures: Futures, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tenants = tenants
        self._store = store
        self._futures = futures
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._arriving: Counter[str] = Counter()
        self._creating: Counter[str] = Counter()

    @contextmanager
    def reserve_request(self, owner: str, tokens: int) -> Iterator[None]:
        """A request on its way into the queue, which it joins inside. Raises Busy if there is no room, or no tokens."""
        most = self._tenants.quotas(owner).queued
        if most is not None and self._futures.pending(owner) + self._arriving[owner] >= most:
            told = f"{owner} has {most} requests waiting, which is all it may have."
            raise Busy(told, "Send it again when some are done.", retry_after_ms=int(1000 * _ASK_AGAIN_S))
        self._spend(owner, tokens)
        self._arriving[owner] += 1
        try:
            yield
        finally:
            self._arriving[owner] -= 1

    @contextmanager
    def reserve_model(self, owner: str) -> Iterator[None]:
        """A model that comes into being inside. Raises Forbidden if the tenant has all it may have."""
        most = self._tenants.quotas(owner).models
        if most is not None:
            have = sum(one.owner == owner and one.state in ("pending", "live") for one in self._store.all(Model))
            if have + self._creating[owner] >= most:
                told = f"{owner} has {have} models in training, and may have {most}."
                raise Forbidden(told, "Finish a session that is done with its models.")
        self._creating[owner] += 1
        try:
            yield
        finally:
            self._creating[owner] -= 1

    def check_storage(self, owner: str) -> None:
        """Before one more is written. Raises Forbidden if the tenant's have reached what they may take."""
        most = self._tenants.quotas(owner).checkpoint_bytes
        if most is None:
            return
        have = sum(one.size_bytes for one in self._store.all(Checkpoint) if one.owner == owner)
        if have >= most:
            told = f"The checkpoints of {owner} take {have} bytes, and may take {most}."
            raise Forbidden(told, "Delete some, give them a ttl, or finish sessions that sample from unnamed ones.")

    def charge(self, owner: str, tokens: int) -> None:
        """Tokens that were not known when their request came: sampled ones."""
        if (most := self._tenants.quotas(owner).tokens_per_minute) is not None:
            self._bucket(owner, most).level -= tokens

    def _spend(self, owner: str, tokens: int) -> None:
        if (most := self._tenants.quotas(owner).tokens_per_minute) is None:
            return
        bucket = self._bucket(owner, most)
        if bucket.level <= 0:  # not "less than tokens": a request larger than a minute's would never run
            wait = min(60 * (1 - bucket.level) / most, _LONGEST_S) if most else _LONGEST_S
            told = f"{owner} has used its {most} tokens per minute."
            raise Busy(told, f"Send it again in {math.ceil(wait)} s.", retry_after_ms=math.ceil(1000 * wait))
        bucket.level -= tokens

    def _bucket(self, owner: str, most: int) -> _Bucket:
        """As full as it is now: it fills evenly, up to one minute's tokens."""
        now = self._clock()
        bucket = self._buckets.setdefault(owner, _Bucket(most, now))
        bucket.level = min(bucket.level + (now - bucket.at) * most / 60, most)
        bucket.at = now
        return bucket
