"""Training requests as the store keeps them: a forward_backward body as it came, all else as JSON of its record."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from tinsmith.engine.base import AdamParams, Pass
from tinsmith.engine.custom_loss.graph import read_text
from tinsmith.engine.training.loss_specs import CUSTOM
from tinsmith.service.storage.records import Create, Load, Row, SaveExternal, SaveSampler, SaveState, Step, Work
from tinsmith.service.wire.protobuf import GRAPH, decode_pass

_STORED: dict[str, type[Create | Load | SaveState | SaveSampler | SaveExternal]] = {
    "create": Create,
    "load": Load,
    "save_state": SaveState,
    "save_sampler": SaveSampler,
    "save_external": SaveExternal,
}


def stored_kind(work: Work) -> str:
    """The name under which the store keeps a request's kind."""
    if isinstance(work, Pass):
        return "forward" if work.forward_only else "forward_backward"
    return "step" if isinstance(work, Step) else next(kind for kind, made in _STORED.items() if isinstance(work, made))


def stored(work: Work) -> bytes:
    """The payload of any request but forward_backward, whose body is kept as it came."""
    if isinstance(work, Step):
        return json.dumps(asdict(work.adam)).encode()
    if isinstance(work, Create | Load | SaveState | SaveSampler | SaveExternal):
        return json.dumps(asdict(work)).encode()
    raise TypeError(f"{type(work).__name__} is not stored")


def restored(kind: str, model_id: str, payload: bytes) -> Work:
    """The request that `stored` (or a forward_backward body) holds."""
    if kind in ("forward", "forward_backward"):
        work = replace(decode_pass(payload)[1], model_id=model_id)
        graph = work.loss_config.get(GRAPH)  # put there by `append_graph` when the request was accepted
        return replace(work, graph=read_text(graph)) if work.loss_fn == CUSTOM and isinstance(graph, str) else work
    values = json.loads(payload)
    return Step(adam=AdamParams(**values)) if kind == "step" else _STORED[kind](**values)


def row_of(request_id: str, owner: str, model_id: str, seq: int, order: int, work: Work) -> Row:
    """The request as the scheduler weighs it."""
    tokens = sum(len(datum.tokens) for datum in work.data) if isinstance(work, Pass) else 0
    return Row(id=request_id, owner=owner, model_id=model_id, seq=seq, order=order, work=work, tokens=tokens)
