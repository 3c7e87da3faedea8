"""Queued requests of clients that have gone run after those of all others."""

from __future__ import annotations

from collections.abc import Collection

from tinsmith.service.budgets.activity import SessionActivity
from tinsmith.service.storage.records import QueuedRequest


def attended_first(requests: Collection[QueuedRequest], activity: SessionActivity) -> Collection[QueuedRequest]:
    """The requests whose sessions were active within ABANDONED_S; all requests if there are none.

    Requests that may have killed an engine stay: samples wait until they have run.
    """
    abandoned = activity.abandoned()
    if not abandoned:
        return requests
    # A fork of a model in training waits for requests of that model.
    abandoned -= {request.source.partition(":")[0] for request in requests if request.source}
    attended = [each for each in requests if each.alone or each.model_id.partition(":")[0] not in abandoned]
    return attended or requests
