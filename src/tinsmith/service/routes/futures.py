"""Fetching results. A poll is held until there is one; failures are 200 with an error; nothing here answers 5xx."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Response

from tinsmith.errors import EngineError, Gone, NotFound, TinsmithError
from tinsmith.service.bodies import FutureBody, parse
from tinsmith.service.deps import RawBody, Service, ServiceDep, Tenant
from tinsmith.service.records import Answer, Sampler

log = logging.getLogger(__name__)

router = APIRouter()

PENDING = Answer(status=408, body=b'{"queue_state": "active"}')
"""Still pending: the client asks again at once and says nothing."""


@router.post("/retrieve_future")
async def retrieve_future(tenant: Tenant, service: ServiceDep, body: RawBody) -> Response:
    """The result of a promise; again and again for a while, since a response may be lost on its way."""
    request_id = parse(FutureBody, body).request_id
    try:
        answer = await _answer(service, request_id, tenant)
    except TinsmithError:
        raise
    except Exception as error:  # a 5xx would make the client ask again without end or pause
        log.exception("The result of %s cannot be read.", request_id)
        answer = Answer.failure(TinsmithError(f"The result cannot be read: {type(error).__name__}."))
    return Response(content=answer.body, status_code=answer.status, media_type=answer.media)


async def _answer(service: Service, request_id: str, owner: str) -> Answer:
    if service.futures.knows(request_id, owner):
        return await service.futures.wait(request_id) or PENDING
    found = await service.store.answer(request_id, owner)
    if found is not None:
        state, answer = found
        if answer is not None:
            return answer
        if state == "pending":  # its base model is not among those served now: nothing will ever wake a poll
            what = f"Request {request_id} waits for a base model that is not served now."
            return Answer.failure(EngineError(what, "Start the server with it again."))
    sampler = service.store.find(Sampler, request_id.rpartition(":")[0])
    if found is not None or (sampler is not None and sampler.owner == owner):
        raise Gone(f"The result of {request_id} is no longer here.", "Submit the request again.")
    raise NotFound(f"There is no request {request_id}.", "Poll with the request_id of a promise.")


@router.post("/cancel_future")
async def cancel_future(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, str]:
    """Stop a sample that nobody waits for; training requests are not cancelled, and unknown ones are fine."""
    request_id = parse(FutureBody, body).request_id
    sampler = service.store.find(Sampler, request_id.rpartition(":")[0])
    if sampler is not None and sampler.owner == tenant:
        await service.sampling.cancel(sampler, request_id)
    return {"status": "cancelled"}
