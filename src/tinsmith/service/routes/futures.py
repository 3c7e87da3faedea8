"""Retrieve results. A poll waits until there is one; failures are 200 with an error body; no response is 5xx.

Samples are polled one by one (retrieve_future), or together for a sampling session: retrieve_futures lists what has
finished, then retrieve_future fetches each.
"""

from __future__ import annotations

import json
import logging

from starlette.responses import Response

from tinsmith.errors import Gone, NotFound, TinsmithError
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.results.completion_log import Completion, Target
from tinsmith.service.service import Service
from tinsmith.service.storage.records import CustomLoss, FutureResult, Model, SamplingSession
from tinsmith.service.wire.schemas import FutureBody, FuturesBody

log = logging.getLogger(__name__)

routes = Routes()

INLINE = 2**20
"""Largest result, in bytes, sent without announcing its size first to clients that allow it."""


@routes.post("/retrieve_future", body=FutureBody)
async def retrieve_future(call: Call[FutureBody]) -> Response:
    """The result of a request. It can be fetched again for a while, since a response may be lost."""
    service, tenant, request = call.service, call.tenant, call.body
    add_log_context(request_id=request.request_id)
    service.sessions.polled(request.request_id, tenant)
    try:
        result = await _result(service, request.request_id, tenant)
    except TinsmithError as error:
        if error.status < 500:
            raise
        result = FutureResult.failure(error)
    except Exception as error:  # clients retry a 5xx forever and without pause
        log.exception("The result of %s cannot be read.", request.request_id)
        result = FutureResult.failure(TinsmithError(f"The result cannot be read: {type(error).__name__}."))
    if request.allow_metadata_only and len(result.body) > INLINE:
        result = FutureResult.of({"status": "complete_metadata", "response_payload_size": len(result.body)})
    elif result.status != 408:
        service.futures.mark_fetched(request.request_id)
    return Response(content=result.body, status_code=result.status, media_type=result.media)


async def _result(service: Service, request_id: str, owner: str) -> FutureResult:
    if service.futures.knows(request_id, owner):
        return await service.futures.wait(request_id) or _pending(service, request_id)
    stored = await service.store.result(request_id, owner)
    if stored is not None:
        state, result = stored
        if result is not None:
            return result
        if state == "pending":  # its base model is not served now, so only the end of the hold time ends the poll
            await service.futures.hold()
            return _pending(service, request_id)
    loss = service.store.find(CustomLoss, request_id)
    if loss is not None and loss.owner == owner:
        return FutureResult.of({"loss_id": loss.id, "type": "create_custom_loss"})
    sampler = service.store.find(SamplingSession, request_id.rpartition(":")[0])
    if sampler is not None and sampler.owner == owner:
        service.futures.acknowledge_lost(request_id)
    elif stored is None:
        raise NotFound(f"There is no request {request_id}.", "Poll with the request_id that a request returned.")
    raise Gone(f"The result of {request_id} is not stored any more.", "Submit the request again.")


def _pending(service: Service, request_id: str) -> FutureResult:
    """The response to a poll without a result: the client polls again, and shows its user the reason of a pause."""
    owner_id = request_id.rpartition(":")[0]
    record = service.store.find(SamplingSession, owner_id) or service.store.find(Model, owner_id)
    worker = service.workers.get(record.base_model) if record is not None else None
    if record is not None and worker is None:
        return _paused(f"base model {record.base_model} is not served now")
    if record is None or worker is None:
        return FutureResult(status=408, body=b'{"queue_state": "active"}')
    samples = isinstance(record, SamplingSession)
    if reason := worker.host.pause_reason(samples=samples):
        return _paused(reason)
    entry = service.sampling.queue_entry(worker.host, request_id) if samples else worker.queue_entry(request_id)
    state = {"queue_state": "active"}
    if entry is not None and not entry.running:
        state["queue_state_reason"] = entry.description
    return FutureResult(status=408, body=json.dumps(state).encode())


def _paused(reason: str) -> FutureResult:
    state = {"queue_state": "paused_capacity", "queue_state_reason": reason}
    return FutureResult(status=408, body=json.dumps(state).encode())


@routes.post("/retrieve_futures", body=FuturesBody)
async def retrieve_futures(call: Call[FuturesBody]) -> Response:
    """Requests of a sampling session that finished since the cursor; waits for the first."""
    service, tenant, request = call.service, call.tenant, call.body
    sampler = service.sampler(request.target.sampling_session_id, tenant)
    service.futures.acknowledge(
        (request_id for request_id in request.retrieved_request_ids if request_id.startswith(f"{sampler.id}:")), tenant
    )
    hold_s = service.config.hold_s if request.timeout is None else min(request.timeout, service.config.hold_s)
    completions, target = service.futures.completions, Target(sampler.id, request.target.cloned_sampler_id)
    finished, cursor = await completions.wait_after(target, request.prev_cursor, hold_s)
    if not finished and hold_s > 0 and completions.closed:  # after an empty list the client would poll again at once
        return Response(status_code=408, content=b'{"queue_state": "active"}', media_type="application/json")
    result = FutureResult.of(
        {"completions": [_completion_json(completion) for completion in finished], "cursor": cursor}
    )
    return Response(content=result.body, media_type=result.media)


def _completion_json(completion: Completion) -> dict[str, object]:
    if completion.size is None:
        return {"state": "failed", "request_id": completion.request_id}
    size = completion.size
    return {"state": "finished", "request_id": completion.request_id, "response_payload_uncompressed_size": size}


@routes.post("/cancel_future", body=FutureBody)
async def cancel_future(call: Call[FutureBody]) -> Json:
    """Cancel a sample; unknown ids are ignored.

    Training requests are not cancelled: each has its place in its model's order, and a client could not know which
    gradients were left out.
    """
    request_id = call.body.request_id
    sampler = call.service.store.find(SamplingSession, request_id.rpartition(":")[0])
    if sampler is None or sampler.owner != call.tenant:
        return {"status": "not_cancelled"}
    await call.service.sampling.cancel(request_id)
    return {"status": "cancelled"}
