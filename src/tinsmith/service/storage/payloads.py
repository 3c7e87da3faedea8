"""Training requests as the store keeps them: a forward_backward body as it came, all else as JSON of its record."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from tinsmith.engine.base import AdamParams, Pass
from tinsmith.engine.custom_loss.graph import read_text
from tinsmith.engine.training.loss_specs import CUSTOM
from tinsmith.service.storage.records import (
    CreateModel,
    LoadWeights,
    Operation,
    OptimStep,
    QueuedRequest,
    SaveExternal,
    SaveSampler,
    SaveState,
)
from tinsmith.service.wire.protobuf import GRAPH, decode_pass

_STORED: dict[str, type[CreateModel | LoadWeights | SaveState | SaveSampler | SaveExternal]] = {
    "create": CreateModel,
    "load": LoadWeights,
    "save_state": SaveState,
    "save_sampler": SaveSampler,
    "save_external": SaveExternal,
}


def kind_of(work: Operation) -> str:
    """The name under which the store keeps a request's kind."""
    if isinstance(work, Pass):
        return "forward" if work.forward_only else "forward_backward"
    return (
        "step"
        if isinstance(work, OptimStep)
        else next(kind for kind, made in _STORED.items() if isinstance(work, made))
    )


def encode_operation(work: Operation) -> bytes:
    """The payload of any request but forward_backward, whose body is kept as it came."""
    if isinstance(work, OptimStep):
        return json.dumps(asdict(work.adam)).encode()
    if isinstance(work, CreateModel | LoadWeights | SaveState | SaveSampler | SaveExternal):
        return json.dumps(asdict(work)).encode()
    raise TypeError(f"{type(work).__name__} is not stored")


def decode_operation(kind: str, model_id: str, payload: bytes) -> Operation:
    """The request that `stored` (or a forward_backward body) holds."""
    if kind in ("forward", "forward_backward"):
        work = replace(decode_pass(payload)[1], model_id=model_id)
        graph = work.loss_config.get(GRAPH)  # put there by `append_graph` when the request was accepted
        return replace(work, graph=read_text(graph)) if work.loss_fn == CUSTOM and isinstance(graph, str) else work
    values = json.loads(payload)
    return OptimStep(adam=AdamParams(**values)) if kind == "step" else _STORED[kind](**values)


def queued_request(request_id: str, owner: str, model_id: str, seq: int, order: int, work: Operation) -> QueuedRequest:
    """The request as the scheduler weighs it."""
    tokens = sum(len(datum.tokens) for datum in work.data) if isinstance(work, Pass) else 0
    return QueuedRequest(
        id=request_id, owner=owner, model_id=model_id, seq=seq, order=order, operation=work, tokens=tokens
    )
