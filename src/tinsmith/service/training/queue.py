"""The queued training requests of one engine: promised, then stored and published with their results."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from tinsmith.engine.base import Pass
from tinsmith.errors import TinsmithError
from tinsmith.service.engines.queue_view import QueueEntry
from tinsmith.service.observability.metrics import Telemetry
from tinsmith.service.results.futures import Futures
from tinsmith.service.storage.payloads import kind_of
from tinsmith.service.storage.records import FutureResult, Model, QueuedRequest, RestoreModel, UnloadModel
from tinsmith.service.storage.store import FinishedRequest, Store, StoredRecord
from tinsmith.service.training.model_state import ModelState


class RequestQueue:
    """Requests without a result, by id."""

    def __init__(
        self, name: str, store: Store, futures: Futures, telemetry: Telemetry, states: Mapping[str, ModelState]
    ) -> None:
        self._name, self._store, self._futures, self._telemetry = name, store, futures, telemetry
        self._states = states
        self.requests: dict[str, QueuedRequest] = {}
        """Those that run included. Changed by `add`, `replace` and `remove` only."""
        self._of_model: defaultdict[str, dict[str, QueuedRequest]] = defaultdict(dict)
        """Requests by model; a fork is one of both its models."""
        self._alone: set[str] = set()
        """Requests that must run in a batch of their own."""
        self.deaths: Counter[str] = Counter()
        """Points of engine deaths by request id."""
        self.wake = asyncio.Event()
        """Set when there may be more to run."""
        self._order = 0
        self._added: dict[str, float] = {}
        """When each request was added, by the monotonic clock."""

    def next_order(self) -> int:
        """The order of a request that is younger than all others."""
        self._order += 1
        return self._order

    def promise(self, request: QueuedRequest) -> None:
        """Add a client's request, whose result can be awaited from now on."""
        self._futures.open(request.id, request.owner, stored=request.model_id not in self._store.shadows)
        self.add(request)

    def add(self, request: QueuedRequest) -> None:
        """Queue a request."""
        self._order = max(self._order, request.order)
        self.replace(request)
        self._added[request.id] = time.monotonic()
        if not isinstance(request.operation, UnloadModel | RestoreModel):
            self._telemetry.request_accepted(request.id, request.owner, kind_of(request.operation), self._name)
        self.wake.set()

    def replace(self, request: QueuedRequest) -> None:
        """Change a request, whose models stay."""
        self.requests[request.id] = request
        for model_id in _models(request):
            self._of_model[model_id][request.id] = request
        if request.alone:
            self._alone.add(request.id)

    def remove(self, request: QueuedRequest) -> None:
        """Remove a request that has no result of its own."""
        self.requests.pop(request.id, None)
        self._added.pop(request.id, None)
        self._alone.discard(request.id)
        for model_id in _models(request):
            self._of_model[model_id].pop(request.id, None)
            if not self._of_model[model_id]:
                del self._of_model[model_id]

    @property
    def must_isolate(self) -> bool:
        """Whether a request must run in a batch of its own."""
        return bool(self._alone)

    def models(self) -> Iterator[str]:
        """Models with requests of their own."""
        for model_id, requests in self._of_model.items():
            if any(request.model_id == model_id for request in requests.values()):
                yield model_id

    def needs(self, model_id: str) -> bool:
        """Whether there are requests of the model, or forks of it."""
        return model_id in self._of_model

    def count(self, model_id: str) -> int:
        """Number of requests of the model, and forks of it."""
        return len(self._of_model.get(model_id, ()))

    def of_idle_models(self, busy: Collection[str], running: Collection[str] = ()) -> Collection[QueuedRequest]:
        """The requests of the models that are not busy: only these can start, and the others may be many. Those whose
        ids are in `running` are left out."""
        idle = [requests for model_id, requests in self._of_model.items() if model_id not in busy]
        own = (request for requests in idle for request in requests.values() if request.id not in running)
        return {request.id: request for request in own}.values()

    def entries(self, running: Collection[str], now: float) -> Iterator[QueueEntry]:
        """Clients' requests in order of arrival; `running` are the ids of those that run."""
        for request in sorted(self.requests.values(), key=lambda request: (request.order, request.seq)):
            if not isinstance(request.operation, UnloadModel | RestoreModel):
                yield QueueEntry(
                    request_id=request.id,
                    owner=request.owner,
                    model_id=request.model_id,
                    kind=kind_of(request.operation),
                    tokens=request.tokens,
                    running=request.id in running,
                    waited_s=now - self._added[request.id],
                )

    def unfinished(self, requests: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Those of the requests that have no result yet."""
        return [request for request in requests if request.id in self.requests]

    async def finish(self, finished: Sequence[FinishedRequest], *records: StoredRecord) -> None:
        """Store results, then publish them.

        Raises ValueError if a result cannot be stored: the engine's state is then ahead of the database.
        """
        try:
            await self._store.finish(finished, *records)
        except TinsmithError as error:
            raise ValueError(f"A result cannot be stored: {error}") from error
        self._publish(finished)

    async def fail(self, request: QueuedRequest, error: TinsmithError, *records: Model) -> None:
        """Store and publish an error as the result of a request."""
        if isinstance(request.operation, UnloadModel | RestoreModel):
            self.remove(request)
            self._states[request.model_id].load_finished.set()
            return
        finished = [FinishedRequest(request=request, result=FutureResult.failure(error))]
        await self._store.finish(finished, *records)
        self._publish(finished)

    async def fail_all(self, requests: Sequence[QueuedRequest], error: TinsmithError) -> None:
        """Fail those of the requests that have no result yet."""
        for request in self.unfinished(requests):
            await self.fail(request, error)

    def _publish(self, finished: Sequence[FinishedRequest]) -> None:
        for end in finished:
            request, result = end.request, end.result
            self.remove(request)
            self.deaths.pop(request.id, None)
            self._futures.resolve(request.id, result)
            succeeded = isinstance(request.operation, Pass) and not result.failed
            tokens = {kind_of(request.operation): request.tokens} if succeeded else None
            self._telemetry.request_finished(request.id, result, tokens)


def _models(request: QueuedRequest) -> tuple[str, ...]:
    return (request.model_id, request.source) if request.source else (request.model_id,)
