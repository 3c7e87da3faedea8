"""Payloads of training requests in the store: a forward_backward body as received, any other operation as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from pydantic_core import to_json

from tinsmith.engine.base import AdamParams, Pass
from tinsmith.engine.custom_loss.graph import read_text
from tinsmith.engine.training.loss_specs import CUSTOM
from tinsmith.service.storage.records import (
    CreateModel,
    ForkModel,
    LoadWeights,
    Operation,
    OptimStep,
    QueuedRequest,
    SaveExternal,
    SaveSampler,
    SaveState,
)
from tinsmith.service.wire.protobuf import GRAPH, decode_pass

_KINDS: dict[str, type[CreateModel | LoadWeights | ForkModel | SaveState | SaveSampler | SaveExternal]] = {
    "create": CreateModel,
    "load": LoadWeights,
    "fork": ForkModel,
    "save_state": SaveState,
    "save_sampler": SaveSampler,
    "save_external": SaveExternal,
}


def kind_of(operation: Operation) -> str:
    """The kind of an operation, as it is stored."""
    if isinstance(operation, Pass):
        return "forward" if operation.forward_only else "forward_backward"
    if isinstance(operation, OptimStep):
        return "step"
    return next(kind for kind, operation_type in _KINDS.items() if isinstance(operation, operation_type))


def encode_operation(operation: Operation) -> bytes:
    """The payload of any operation except a pass, whose body is stored as received."""
    if isinstance(operation, OptimStep):
        return to_json(operation.adam)
    if isinstance(operation, CreateModel | LoadWeights | ForkModel | SaveState | SaveSampler | SaveExternal):
        return json.dumps(asdict(operation)).encode()
    raise TypeError(f"{type(operation).__name__} is not stored")


def decode_operation(kind: str, model_id: str, payload: bytes) -> Operation:
    """The operation in a payload."""
    if kind in ("forward", "forward_backward"):
        operation = replace(decode_pass(payload)[1], model_id=model_id)
        graph = operation.loss_config.get(GRAPH)  # put there when the request was accepted
        if operation.loss_fn == CUSTOM and isinstance(graph, str):
            return replace(operation, graph=read_text(graph))
        return operation
    values = json.loads(payload)
    return OptimStep(adam=AdamParams(**values)) if kind == "step" else _KINDS[kind](**values)


def queued_request(
    request_id: str, owner: str, model_id: str, seq: int, order: int, operation: Operation
) -> QueuedRequest:
    """A request with the number of its tokens, for the scheduler."""
    tokens = sum(len(datum.tokens) for datum in operation.data) if isinstance(operation, Pass) else 0
    return QueuedRequest(
        id=request_id, owner=owner, model_id=model_id, seq=seq, order=order, operation=operation, tokens=tokens
    )
