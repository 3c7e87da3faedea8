"""Uploaded losses: checked and kept for their session, and put beside each request that names them.

The promise of an upload is kept when it is given: checking is reading. What is kept is the definition as text; a
forward_backward request takes a copy of it along into the journal, so it is replayed without looking anything up.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter

from tinsmith.engine.base import Pass
from tinsmith.engine.custom_loss.graph import MAX_BYTES, Node, read_graph, read_text
from tinsmith.engine.training.loss_specs import CUSTOM
from tinsmith.errors import Forbidden, NotFound, TooLarge, Unsupported
from tinsmith.service.dependencies import RawBody, Service, ServiceDep, Tenant
from tinsmith.service.storage.records import CustomLoss, Model
from tinsmith.service.wire.protobuf import append_graph
from tinsmith.service.wire.schemas import CustomLossBody, parse

router = APIRouter()

MAX_LOSSES = 256
"""Of one session."""

_IN_THE_CLIENT = "Use forward_backward_custom with a plain function, which the client evaluates."


@router.post("/create_custom_loss")
async def create_custom_loss(tenant: Tenant, service: ServiceDep, body: RawBody) -> dict[str, Any]:
    """A traced loss as data. Refused by name unless every step of it is allowed."""
    _check_served(service)
    if len(body) > MAX_BYTES:
        raise TooLarge(f"The loss is {len(body)} bytes.", f"At most {MAX_BYTES}. {_IN_THE_CLIENT}")
    asked = parse(CustomLossBody, body)
    session = service.sessions.touch(asked.session_id, tenant)
    loss_id = f"{session.id}:loss:{asked.custom_loss_seq_id}"
    if service.store.find(CustomLoss, loss_id) is None:
        if sum(one.session_id == session.id for one in service.store.all(CustomLoss)) >= MAX_LOSSES:
            raise Forbidden(f"Session {session.id} has {MAX_LOSSES} losses.", "Create another session.")
        nodes = [Node(**one.model_dump()) for one in asked.graph.nodes]
        graph = read_graph(asked.name, [(one.name, one.rank) for one in asked.inputs], nodes)
        made = CustomLoss(id=loss_id, owner=tenant, session_id=session.id, created=time.time(), graph=graph.text)
        await service.store.put(made)
    return {"request_id": loss_id}


def with_uploaded(service: Service, model: Model, work: Pass, body: bytes) -> tuple[Pass, bytes]:
    """A custom request and its body with the loss that it names. Raises NotFound if its session has no such loss."""
    if work.loss_fn != CUSTOM:
        return work, body
    _check_served(service)
    loss_id = str(work.loss_config.get("loss_id", ""))
    made = service.store.find(CustomLoss, loss_id)
    if made is None or made.owner != model.owner or made.session_id != model.session_id:
        raise NotFound(f"There is no loss '{loss_id}' in this session.", "Upload it with create_custom_loss.")
    return replace(work, graph=read_text(made.graph)), append_graph(body, made.graph)


def _check_served(service: Service) -> None:
    if not service.config.custom_losses:
        what = "Uploaded losses (loss_fn 'custom') are not run on this server."
        raise Unsupported(what, f"{_IN_THE_CLIENT} Or start the server with custom_losses=true.")
