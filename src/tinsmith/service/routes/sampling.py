"""Sampling sessions, and asample, which samples from them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from tinsmith.engine.sample_validation import check_sample
from tinsmith.engine.training.loss_specs import ROUTED_EXPERTS
from tinsmith.errors import BadRequest
from tinsmith.service.http.bodies import PromptBody
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.observability.logs import add_log_context
from tinsmith.service.service import Service
from tinsmith.service.storage.records import SamplingSession
from tinsmith.service.wire.sample_request import AsampleRequest, decode_sample
from tinsmith.service.wire.schemas import Id, JoinBody, SampleBody, SamplingSessionBody, WireModel

routes = Routes()

RECORD = "record"
"""The value of `routed_experts` in the user_metadata of a session that records its samples' experts."""


@routes.post("/create_sampling_session", body=SamplingSessionBody)
async def create_sampling_session(call: Call[SamplingSessionBody]) -> Json:
    """Create a sampling session on a base model, or on a training or sampler checkpoint. Its weights never change."""
    service, tenant, request = call.service, call.tenant, call.body
    session = service.sessions.touch(request.session_id, tenant)
    sampler_id = f"{session.id}:sample:{request.sampling_session_seq_id}"
    if service.store.find(SamplingSession, sampler_id) is None:
        service.quotas.check_sampling_session(session.id)
        await service.store.put(_new_sampling_session(service, tenant, request, sampler_id))
    return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}


def _new_sampling_session(
    service: Service, tenant: str, request: SamplingSessionBody, sampler_id: str
) -> SamplingSession:
    version = None
    base_model = request.base_model
    if request.model_path is not None:
        checkpoint = service.checkpoints.readable(request.model_path, tenant)
        if checkpoint.kind == "external_weights":
            raise BadRequest(
                f"{request.model_path} holds external weights.", "Give a tinker://RUN/sampler_weights/NAME path."
            )
        version = checkpoint.id
        base_model = base_model or checkpoint.base_model
        if service.worker(base_model) is not service.worker(checkpoint.base_model):
            raise BadRequest(
                f"{request.model_path} belongs to {checkpoint.base_model}, not to {base_model}.", "Omit base_model."
            )
        service.audit_log.checkpoint_read(checkpoint, tenant, "sampling")
    if base_model is None:
        raise BadRequest("create_sampling_session has neither model_path nor base_model.", "Give one of them.")
    service.worker(base_model)
    return SamplingSession(
        id=sampler_id,
        owner=tenant,
        session_id=request.session_id,
        base_model=base_model,
        created=time.time(),
        model_path=request.model_path,
        version=version,
    )


@routes.get("/samplers/{sampler_id}")
async def get_sampler(call: Call[None]) -> Json:
    """The weights of a sampling session; clients load a tokenizer by `base_model`."""
    service = call.service
    sampler = service.sampler(call.path("sampler_id"), call.tenant)
    name = sampler.base_model
    card = await service.worker(name).host.card()
    if service.config.is_loopback and card.tokenizer.startswith("/"):
        # A client of this machine can read the folder, while the name may be an alias known only to this server. The
        # SDK truncates names with exactly two slashes, hence the last segment.
        name = f"{card.tokenizer}/."
    return {"sampler_id": sampler.id, "base_model": name, "model_path": sampler.model_path}


@routes.post("/join_sampling_session", body=JoinBody)
async def join_sampling_session(call: Call[JoinBody]) -> Json:
    """Number a client that shares a sampling session; its seq_ids begin at 10^9 times the number."""
    sampler = call.service.sampler(call.body.sampling_session_id, call.tenant)
    call.service.sessions.touch(sampler.session_id, call.tenant)
    return {"client_counter": await call.service.sampling.join(sampler), "type": "join_sampling_session"}


def _check_capacity(service: Service, _content: bytes) -> None:
    service.sampling.check_capacity()


@routes.post("/asample", body=PromptBody(SampleBody, decode_sample, admit=_check_capacity))
async def asample(call: Call[AsampleRequest]) -> Json:
    """Start sampling; returns the promise and the id of each sequence."""
    service, tenant, asample_request = call.service, call.tenant, call.body
    add_log_context(request_id=f"{asample_request.sampler_id}:{asample_request.seq}")
    sampler = service.sampler(asample_request.sampler_id, tenant)
    session = service.sessions.touch(sampler.session_id, tenant)
    card = await service.worker(sampler.base_model).host.card()
    if session.metadata.get(ROUTED_EXPERTS) == RECORD and card.router is not None:
        asample_request = replace(asample_request, request=replace(asample_request.request, routed_experts=True))
    check_sample(asample_request.request, card)
    request_id = f"{sampler.id}:{asample_request.seq}"
    service.sampling.submit(sampler, asample_request, request_id)
    ids = [f"{request_id}:{index}" for index in range(asample_request.request.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


class RoutedExpertsBody(WireModel):
    """routed_experts."""

    sequence_ids: Annotated[list[Id], Field(max_length=1024, fail_fast=True)]


@routes.post("/routed_experts", body=RoutedExpertsBody)
async def routed_experts(call: Call[RoutedExpertsBody]) -> Json:
    """The experts that the tokens of sampled sequences were routed to, base64 of a NumPy array [tokens, layers, k].

    The tokens are those of the prompt and of the sequence without its last one. null for a sequence that recorded none,
    or whose record was dropped for newer ones. Recorded are requests with `return_routed_experts`, and those of
    sessions whose user_metadata has `routed_experts: record`, on mixtures of experts.
    """
    experts, tenant = call.service.sampling.routed_experts, call.tenant
    return {"routed_experts": [experts.text(sequence_id, tenant) for sequence_id in call.body.sequence_ids]}
