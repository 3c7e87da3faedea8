"""Selection of the requests to start: queued and running requests in, groups out.

Arithmetic on records: no I/O, no clock, no tensors. A group is either one barrier (optim_step, a save, a load: anything
but forward_backward), or forward_backward requests of one model. Groups of different models run side by side, and the
engine computes them in turn, by tokens of their owners. The requests of a model run in the order of seq_id, where gaps
mean nothing. The limits here are each owner's own, so no owner waits for another.

The optimizer step after passes starts while the engine computes them: it is given to the engine, which takes the calls
of a model in their order, before their results are back.

Shadow passes run one at a time; the later requests of their model wait for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from tinsmith.service.storage.records import OptimStep, QueuedRequest

MAX_BARRIERS = 8
"""Barriers of an owner that run at the same time: the steps of one model overlap the commits of others."""

Group = tuple[QueuedRequest, ...]


def next_groups(
    requests: Iterable[QueuedRequest],
    running: Sequence[Group],
    budget: int,
    last_shadow_owner: str = "",
    passing: Collection[str] = (),
) -> list[Group]:
    """The groups to start beside those that run, in order. `requests` do not run.

    An owner's running forward_backward requests hold up to `budget` tokens, and one request over the budget.
    `last_shadow_owner` is the owner of the last shadow pass. `passing` are models whose passes the engine computes, and
    which run nothing else.
    """
    waiting = list(requests)
    groups = _candidates(waiting, running, budget, passing)
    if any(request.alone for request in waiting):  # one at a time, so that the next death has one possible cause
        return [] if running else sorted(groups, key=lambda group: (not group[0].alone, *_age(group)))[:1]
    groups.sort(key=_age)
    limits = _Limits(running, budget)
    started = [group for group in groups if not group[0].in_background and limits.take(group)]
    shadows = [group for group in groups if group[0].in_background]
    if shadows and not any(group[0].in_background for group in running):
        started.append(_next_in_turn(shadows, last_shadow_owner))
    return started


def _next_in_turn(groups: Sequence[Group], last_owner: str) -> Group:
    """The oldest group of the owner after `last_owner`."""
    return min(groups, key=lambda group: (group[0].owner <= last_owner, group[0].owner))


def _age(group: Group) -> tuple[bool, int, int]:
    """Oldest first, but those of shadows after all others."""
    return group[0].yields, group[0].order, group[0].seq


class _Limits:
    """What each owner may still start."""

    def __init__(self, running: Iterable[Group], budget: int) -> None:
        self._budget = budget
        self._tokens: Counter[str] = Counter()
        self._barriers: Counter[str] = Counter()
        self._over_budget: set[str] = set()
        self._full: set[str] = set()
        """Owners whose next requests wait for room, so that later ones do not pass them."""
        for group in running:
            self._add(group)

    def take(self, group: Group) -> bool:
        """Whether the group can start; it then counts as running."""
        owner, tokens = group[0].owner, _tokens(group)
        if not group[0].packs:
            fits = self._barriers[owner] < MAX_BARRIERS
        elif tokens > self._budget:
            fits = owner not in self._over_budget
        else:
            fits = owner not in self._full and self._tokens[owner] + tokens <= self._budget
            if not fits:
                self._full.add(owner)
        if fits:
            self._add(group)
        return fits

    def _add(self, group: Group) -> None:
        owner, tokens = group[0].owner, _tokens(group)
        if group[0].packs and tokens > self._budget:
            self._over_budget.add(owner)
        elif group[0].packs:
            self._tokens[owner] += tokens
        elif not group[0].is_shadow:
            self._barriers[owner] += 1


def _tokens(group: Group) -> int:
    return sum(request.tokens for request in group)


def _candidates(
    requests: Sequence[QueuedRequest], running: Iterable[Group], budget: int, passing: Collection[str]
) -> list[Group]:
    """The next group of each model that runs nothing, and the next step of each that is `passing`.

    A fork of a model in training is a barrier of both models.
    """
    busy = {name for group in running for request in group for name in (request.model_id, request.source)}
    models: dict[str, list[QueuedRequest]] = {}
    for request in requests:
        models.setdefault(request.model_id, []).append(request)
        if request.source:
            models.setdefault(request.source, []).append(request)
    first_forks: Counter[str] = Counter()
    groups: list[Group] = []
    for model_id, queue in models.items():
        queue.sort(key=lambda request: request.place(model_id))
        first = queue[0]
        if model_id in busy and not (model_id in passing and isinstance(first.operation, OptimStep)):
            continue
        if first.source:
            first_forks[first.id] += 1
            if first_forks[first.id] < 2:  # it is not yet the first of both queues
                continue
        groups.append(_passes(queue, budget) if first.packs and not first.alone else (first,))
    return groups


def _passes(queue: Iterable[QueuedRequest], budget: int) -> Group:
    """The first forward_backward requests of a model within the budget; the first request always fits."""
    group: list[QueuedRequest] = []
    for request in queue:
        budget -= request.tokens
        if group and (not request.packs or request.alone or budget < 0):
            break
        group.append(request)
    return tuple(group)
