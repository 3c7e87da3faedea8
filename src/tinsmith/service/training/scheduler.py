"""Batch selection: queued requests in, the next batch out. Arithmetic on records: no I/O, no clock, no tensors.

A batch is either one barrier (optim_step, a save, a load: anything but forward_backward), or as many forward_backward
requests as fit the token budget, across models and owners. Requests of a model run in the order of seq_id, where gaps
mean nothing. Owners take turns: the owner after the last batch's first owner leads the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tinsmith.service.storage.records import QueuedRequest


def next_batch(requests: Iterable[QueuedRequest], budget: int, last_owner: str = "") -> tuple[QueuedRequest, ...]:
    """The requests to run now, in order; empty only if `requests` is. A request over the budget runs by itself."""
    queues = _by_owner(requests)
    if not queues:
        return ()
    owners = sorted(queues, key=lambda owner: (owner <= last_owner, owner))
    first = queues[owners[0]][0]
    if not first.packs or first.alone:
        return (first,)
    return _pack([queues[owner] for owner in owners], budget)


def _pack(queues: Sequence[deque[QueuedRequest]], budget: int) -> tuple[QueuedRequest, ...]:
    """Take one request from each owner in turn until nothing more fits. The first request always fits."""
    batch: list[QueuedRequest] = []
    remaining = budget
    turns = deque(queues)
    while turns:
        queue = turns.popleft()
        while queue and (not queue[0].packs or queue[0].alone):
            queue.popleft()  # a barrier waits for a batch of its own; later requests of its model are not in the queue
        if queue and (queue[0].tokens <= remaining or not batch):
            request = queue.popleft()
            batch.append(request)
            remaining -= request.tokens
            turns.append(queue)
    return tuple(batch)


def _by_owner(requests: Iterable[QueuedRequest]) -> dict[str, deque[QueuedRequest]]:
    """Requests that may run now by owner, oldest first: of each model its first barrier, or the requests before it."""
    models: dict[str, list[QueuedRequest]] = {}
    for request in requests:
        models.setdefault(request.model_id, []).append(request)
    eligible: dict[str, list[tuple[int, int, QueuedRequest]]] = {}
    for queue in models.values():
        queue.sort(key=lambda request: request.seq)
        oldest = 0
        for index, request in enumerate(queue):
            if index and (not request.packs or request.alone or queue[0].alone or not queue[0].packs):
                break
            oldest = max(oldest, request.order)  # a request is no older than those that must run before it
            eligible.setdefault(request.owner, []).append((oldest, request.seq, request))
    return {
        owner: deque(request for *_, request in sorted(entries, key=lambda entry: entry[:2]))
        for owner, entries in eligible.items()
    }
