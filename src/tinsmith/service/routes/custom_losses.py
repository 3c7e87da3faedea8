"""Custom losses: validated and stored for their session, and attached to each request that names them.

An upload is complete when its response is sent. A loss is stored as text; each forward_backward request that uses it
carries a copy in the journal, so replay needs no lookup.
"""

from __future__ import annotations

import time
from dataclasses import replace

from tinsmith.engine.base import Pass
from tinsmith.engine.custom_loss.graph import MAX_BYTES, Node, read_graph, read_text
from tinsmith.engine.training.loss_specs import CUSTOM
from tinsmith.errors import Forbidden, NotFound, TooLarge, Unsupported
from tinsmith.service.http.bodies import JsonBody
from tinsmith.service.http.endpoint import Call, Json, Routes
from tinsmith.service.service import Service
from tinsmith.service.storage.records import CustomLoss, Model
from tinsmith.service.wire.protobuf import GRAPH, append_config
from tinsmith.service.wire.schemas import CustomLossBody

routes = Routes()

MAX_LOSSES = 256
"""Losses of one session."""

_IN_THE_CLIENT = "Use forward_backward_custom with a plain function, which the client evaluates."


def _admit_loss(service: Service, content: bytes) -> None:
    _check_enabled(service)
    if len(content) > MAX_BYTES:
        raise TooLarge(f"The loss is {len(content)} bytes.", f"At most {MAX_BYTES}. {_IN_THE_CLIENT}")


@routes.post("/create_custom_loss", body=JsonBody(CustomLossBody, admit=_admit_loss))
async def create_custom_loss(call: Call[CustomLossBody]) -> Json:
    """Upload a traced loss. Every node must be one of the supported operations."""
    service, tenant, request = call.service, call.tenant, call.body
    session = service.sessions.touch(request.session_id, tenant)
    loss_id = f"{session.id}:loss:{request.custom_loss_seq_id}"
    if service.store.find(CustomLoss, loss_id) is None:
        if sum(loss.session_id == session.id for loss in service.store.all(CustomLoss)) >= MAX_LOSSES:
            raise Forbidden(f"Session {session.id} has {MAX_LOSSES} losses.", "Create another session.")
        service.disk.require(len(call.content))
        nodes = [Node(**node.model_dump()) for node in request.graph.nodes]
        graph = read_graph(request.name, [(tensor.name, tensor.rank) for tensor in request.inputs], nodes)
        loss = CustomLoss(id=loss_id, owner=tenant, session_id=session.id, created=time.time(), graph=graph.text)
        await service.store.put(loss)
    return {"request_id": loss_id}


def attach_custom_loss(service: Service, model: Model, operation: Pass, body: bytes) -> tuple[Pass, bytes]:
    """(operation, body) with the custom loss that the request names. Raises NotFound if its session has none."""
    if operation.loss_fn != CUSTOM:
        return operation, body
    _check_enabled(service)
    loss_id = str(operation.loss_config.get("loss_id", ""))
    loss = service.store.find(CustomLoss, loss_id)
    if loss is None or loss.owner != model.owner or loss.session_id != model.session_id:
        raise NotFound(f"There is no loss '{loss_id}' in this session.", "Upload it with create_custom_loss.")
    return replace(operation, graph=read_text(loss.graph)), append_config(body, {GRAPH: loss.graph})


def _check_enabled(service: Service) -> None:
    if not service.config.custom_losses:
        message = "Custom losses (loss_fn 'custom') are disabled on this server."
        raise Unsupported(message, f"{_IN_THE_CLIENT} Or start the server with custom_losses=true.")
