"""Waiting rows in, the next batch out. Arithmetic on records: no I/O, no clock, no tensors.

A batch is either one barrier (optim_step, a save, a load: anything but forward_backward), or as many forward_backward
rows as fit the token budget, across models and owners. Each model's seq_id order is kept, gaps in it mean nothing, and
owners take turns: the one after the last batch's first owner leads the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tinsmith.service.storage.records import QueuedRequest


def next_batch(rows: Iterable[QueuedRequest], budget: int, last_owner: str = "") -> tuple[QueuedRequest, ...]:
    """The rows to run now, in order; empty only if `rows` is. A row over the budget goes by itself."""
    queues = _by_owner(rows)
    if not queues:
        return ()
    owners = sorted(queues, key=lambda owner: (owner <= last_owner, owner))
    lead = queues[owners[0]][0]
    if not lead.packs or lead.alone:
        return (lead,)
    return _pack([queues[owner] for owner in owners], budget)


def _pack(queues: Sequence[deque[QueuedRequest]], budget: int) -> tuple[QueuedRequest, ...]:
    """One row from each owner in turn until nothing more fits; the first always goes."""
    batch: list[QueuedRequest] = []
    room = budget
    turns = deque(queues)
    while turns:
        queue = turns.popleft()
        while queue and (not queue[0].packs or queue[0].alone):
            queue.popleft()  # a barrier waits for a batch of its own; what follows it in its model is not in the queue
        if queue and (queue[0].tokens <= room or not batch):
            row = queue.popleft()
            batch.append(row)
            room -= row.tokens
            turns.append(queue)
    return tuple(batch)


def _by_owner(rows: Iterable[QueuedRequest]) -> dict[str, deque[QueuedRequest]]:
    """owner -> what may run now, oldest first: of each model its first barrier, or its rows before the first one."""
    models: dict[str, list[QueuedRequest]] = {}
    for row in rows:
        models.setdefault(row.model_id, []).append(row)
    eligible: dict[str, list[tuple[int, int, QueuedRequest]]] = {}
    for line in models.values():
        line.sort(key=lambda row: row.seq)
        oldest = 0
        for index, row in enumerate(line):
            if index and (not row.packs or row.alone or line[0].alone or not line[0].packs):
                break
            oldest = max(oldest, row.order)  # a row is no older than what must run before it
            eligible.setdefault(row.owner, []).append((oldest, row.seq, row))
    return {
        owner: deque(row for *_, row in sorted(found, key=lambda one: one[:2])) for owner, found in eligible.items()
    }
