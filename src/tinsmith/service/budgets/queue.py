"""Queued requests of clients that have gone run after those of all others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tinsmith.service.storage.records import QueuedRequest


def attended_first(
    requests: Collection[QueuedRequest], abandoned: frozenset[str], models: Iterable[str]
) -> Collection[QueuedRequest]:
    """The requests that may start whose sessions are not `abandoned`; all of them if every queued request is.

    `models` have queued requests, which may not start now. Requests that may have killed an engine stay: samples wait
    until they have run.
    """
    if not abandoned:
        return requests
    # A fork of a model in training waits for requests of that model.
    abandoned -= {_session(request.source) for request in requests if request.source}
    attended = [each for each in requests if each.alone or _session(each.model_id) not in abandoned]
    return attended if attended or any(_session(model) not in abandoned for model in models) else requests


def _session(model_id: str) -> str:
    return model_id.partition(":")[0]
