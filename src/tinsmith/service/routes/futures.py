"""Fetching results. A poll is held until there is one; failures are 200 with an error; nothing here answers 5xx.

Two ways for samples: a poll for each (retrieve_future), or one for all of a sampling session (retrieve_futures), which
says what has ended, and then one fetch for each.
"""

from __future__ import annotations

import json
import logging

from fastapi import APIRouter, Response

from tinsmith.errors import EngineError, Gone, NotFound, TinsmithError
from tinsmith.service.dependencies import RawBody, Service, ServiceDep, Tenant
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.results.completion_log import Completion, Target
from tinsmith.service.storage.records import CustomLoss, FutureResult, Model, SamplingSession
from tinsmith.service.wire.schemas import FutureBody, FuturesBody, parse

log = logging.getLogger(__name__)

router = APIRouter()

INLINE = 2**20
"""Bytes of a result up to which it is sent at once; of a larger one the size first, if the client allows it."""


@router.post("/retrieve_future")
async def retrieve_future(tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """The result of a promise; again and again for a while, since a response may be lost on its way."""
    asked = parse(FutureBody, body)
    add_log_context(request_id=asked.request_id)
    try:
        answer = await _answer(service, asked.request_id, tenant)
    except TinsmithError as error:
        if error.status < 500:
            raise
        answer = FutureResult.failure(error)
    except Exception as error:  # a 5xx would make the client ask again without end or pause
        log.exception("The result of %s cannot be read.", asked.request_id)
        answer = FutureResult.failure(TinsmithError(f"The result cannot be read: {type(error).__name__}."))
    if asked.allow_metadata_only and len(answer.body) > INLINE:
        answer = FutureResult.of({"status": "complete_metadata", "response_payload_size": len(answer.body)})
    elif answer.status != 408:
        service.futures.mark_fetched(asked.request_id)
    return Response(content=answer.body, status_code=answer.status, media_type=answer.media)


async def _answer(service: Service, request_id: str, owner: str) -> FutureResult:
    if service.futures.knows(request_id, owner):
        return await service.futures.wait(request_id) or _pending(service, request_id)
    found = await service.store.result(request_id, owner)
    if found is not None:
        state, answer = found
        if answer is not None:
            return answer
        if state == "pending":  # its base model is not among those served now: nothing will ever wake a poll
            what = f"Request {request_id} waits for a base model that is not served now."
            return FutureResult.failure(EngineError(what, "Start the server with it again."))
    loss = service.store.find(CustomLoss, request_id)
    if loss is not None and loss.owner == owner:
        return FutureResult.of({"loss_id": loss.id, "type": "create_custom_loss"})
    sampler = service.store.find(SamplingSession, request_id.rpartition(":")[0])
    if sampler is not None and sampler.owner == owner:
        service.futures.acknowledge_lost(request_id)
    elif found is None:
        raise NotFound(f"There is no request {request_id}.", "Poll with the request_id of a promise.")
    raise Gone(f"The result of {request_id} is no longer here.", "Submit the request again.")


def _pending(service: Service, request_id: str) -> FutureResult:
    """The client asks again at once; it tells its user about pauses, with the reason given here."""
    owning = request_id.rpartition(":")[0]
    asked = service.store.find(SamplingSession, owning) or service.store.find(Model, owning)
    worker = service.workers.get(asked.base_model) if asked is not None else None
    if asked is None or worker is None:
        return FutureResult(status=408, body=b'{"queue_state": "active"}')
    if worker.host.sampler_is_up if isinstance(asked, SamplingSession) else worker.host.is_up:
        return FutureResult(status=408, body=b'{"queue_state": "active"}')
    reason = f"the engine of {asked.base_model} is loading, or being started again"
    state = {"queue_state": "paused_capacity", "queue_state_reason": reason}
    return FutureResult(status=408, body=json.dumps(state).encode())


@router.post("/retrieve_futures")
async def retrieve_futures(tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """What ended of a sampling session's requests since the cursor; waits for something."""
    asked = parse(FuturesBody, body)
    sampler = service.sampler(asked.target.sampling_session_id, tenant)
    service.futures.acknowledge(
        (one for one in asked.retrieved_request_ids if one.startswith(f"{sampler.id}:")), tenant
    )
    hold_s = service.config.hold_s if asked.timeout is None else min(asked.timeout, service.config.hold_s)
    completions, target = service.futures.completions, Target(sampler.id, asked.target.cloned_sampler_id)
    found, cursor = await completions.wait_after(target, asked.prev_cursor, hold_s)
    if not found and hold_s > 0 and completions.closed:  # an empty answer would be followed by the next poll at once
        return Response(status_code=408, content=b'{"queue_state": "active"}', media_type="application/json")
    answer = FutureResult.of({"completions": [_told(one) for one in found], "cursor": cursor})
    return Response(content=answer.body, media_type=answer.media)


def _told(ended: Completion) -> dict[str, object]:
    if ended.size is None:
        return {"state": "failed", "request_id": ended.request_id}
    size = ended.size
    return {"state": "finished", "request_id": ended.request_id, "response_payload_uncompressed_size": size}


@router.post("/cancel_future")
async def cancel_future(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, str]:
    """Stop a sample that nobody waits for; unknown ones are fine.

    Training requests run all the same: each has its place in its model's order, and the client that leaves one out of a
    gradient would never know what it trained.
    """
    request_id = parse(FutureBody, body).request_id
    sampler = service.store.find(SamplingSession, request_id.rpartition(":")[0])
    if sampler is None or sampler.owner != tenant:
        return {"status": "not_cancelled"}
    await service.sampling.cancel(request_id)
    return {"status": "cancelled"}
