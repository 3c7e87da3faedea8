"""An uploaded loss as data: a torch.fx graph in the SDK's format 1, and its validation.

Nothing here runs the graph or imports torch: `runner` rebuilds it from the names in `ops` and from nothing else. An
operation that is not listed there is refused by name when the loss is uploaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.engine.custom_loss.ops import ATTRIBUTES, DTYPES, FORBIDDEN, METHODS, MODULES
from tinsmith.errors import BadRequest, TooLarge, Unsupported
from tinsmith.settings import nearest_name

MAX_BYTES = 256 * 1024
"""Of the whole definition as JSON."""
MAX_NODES = 1024
MAX_INPUTS = 16
MAX_DEPTH = 8
"""Nesting depth of arguments."""
MAX_TEXT = 64
MAX_SECONDS = 30.0
"""Time for all losses of one request."""

_COMPILED = (
    ("torch._C._nn.log_sigmoid", "torch.nn.functional.logsigmoid"),
    ("torch._C._nn.", "torch.nn.functional."),
    ("torch._C._special.special_", "torch.special."),
    ("torch.functional.", "torch."),
)
"""Names that torch.fx records for some functions, and their public names."""

_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_MARKERS = frozenset(("ref", "tuple", "dict", "slice", "ellipsis", "float", "dtype", "device"))

_IN_THE_CLIENT = "Or evaluate the loss in the client: forward_backward_custom with a plain function."


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation. Arguments are JSON; other types are objects of one key, such as {"ref": "name of a node"}."""

    op: str
    name: str
    target: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None

    @property
    def public(self) -> str:
        """The public name of its target."""
        for recorded, public in _COMPILED:
            if self.target.startswith(recorded):
                return public + self.target.removeprefix(recorded)
        return self.target

    def refs(self) -> set[str]:
        """Names of the nodes that it reads."""
        return {ref for value in (*self.args, *(self.kwargs or {}).values()) for ref in _refs(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGraph:
    """The loss of one datum: logprobs and inputs -> (loss, metrics). Created by `read_graph`, so it is valid."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    """(name, rank) of each; the first is `logprobs`, those of the trained model."""
    nodes: tuple[Node, ...]
    """In order of execution; the last is the output."""

    @property
    def text(self) -> str:
        """The graph as JSON text, which `read_text` parses."""
        return json.dumps(
            {
                "name": self.name,
                "inputs": self.inputs,
                "nodes": [[node.op, node.name, node.target, node.args, node.kwargs or {}] for node in self.nodes],
            }
        )

    @property
    def loss(self) -> str:
        """Name of the node that is the loss."""
        return self._output[0]["ref"]

    @property
    def metrics(self) -> dict[str, str]:
        """Metric -> name of its node."""
        return {key: value["ref"] for key, value in self._output[1]["dict"].items()}

    @property
    def _output(self) -> Sequence[Any]:
        return _unpacked(self.nodes[-1].args[0])

    def check_inputs(self, where: str, targets: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
        """Raises BadRequest unless a datum has the inputs that the loss reads; others are ignored."""
        for number, (name, rank) in enumerate(self.inputs):
            if number and name not in inputs:
                raise BadRequest(
                    f"{where}: loss {self.name} needs loss_fn_inputs['{name}'].", "Give it to every datum."
                )
            values = inputs[name] if number else targets
            fits = values.size == 1 if rank == 0 else values.ndim == rank
            if not fits:
                field = name if number else "target_tokens"
                raise BadRequest(
                    f"{where}: {field} has shape {values.shape}; loss {self.name} takes {name} with rank {rank}.",
                    "Give the rank declared in create_custom_loss.",
                )


def read_text(text: str) -> LossGraph:
    """Parse the text of `LossGraph.text`."""
    values = json.loads(text)
    nodes = [
        Node(op=op, name=name, target=target, args=args, kwargs=kwargs)
        for op, name, target, args, kwargs in values["nodes"]
    ]
    return read_graph(values["name"], [(input_name, rank) for input_name, rank in values["inputs"]], nodes)


def read_graph(name: str, inputs: Sequence[tuple[str, int]], nodes: Sequence[Node]) -> LossGraph:
    """The graph, if every operation is allowed. Raises BadRequest, Unsupported or TooLarge for one that is not."""
    if not (0 < len(name) <= MAX_TEXT and name.isprintable()):
        raise BadRequest("The loss has no printable name.", f"Give a name of at most {MAX_TEXT} characters.")
    if len(nodes) > MAX_NODES:
        raise TooLarge(f"Loss {name} has {len(nodes)} operations.", f"At most {MAX_NODES}. {_IN_THE_CLIENT}")
    _check_signature(name, inputs, nodes)
    reads_logprobs: dict[str, bool] = {}
    for number, node in enumerate(nodes):
        where = f"Loss {name}, node {node.name!r}"
        last = number == len(nodes) - 1
        if node.name in reads_logprobs or len(node.name) > 4 * MAX_TEXT:
            raise BadRequest(f"{where}: the name is taken or too long.", "Give each node a unique name.")
        if (node.op == "output") is not last:
            raise BadRequest(f"{where} is a {node.op}.", "The output must be the last node, and the only one.")
        if number >= len(inputs):
            _check_node(where, node)
        for value in (*node.args, *(node.kwargs or {}).values()):
            _check_value(where, value, reads_logprobs, MAX_DEPTH)
        reads_logprobs[node.name] = number == 0 or any(reads_logprobs[ref] for ref in node.refs())
    graph = LossGraph(name=name, inputs=tuple(inputs), nodes=tuple(nodes))
    _check_output(graph, reads_logprobs)
    return graph


def _check_signature(name: str, inputs: Sequence[tuple[str, int]], nodes: Sequence[Node]) -> None:
    names = [input_name for input_name, _ in inputs]
    if not 1 <= len(inputs) <= MAX_INPUTS or len(set(names)) < len(names):
        raise BadRequest(f"Loss {name} has inputs {names}.", f"Give 1 to {MAX_INPUTS} different inputs.")
    for number, (input_name, rank) in enumerate(inputs):
        first = (number == 0) is (input_name == "logprobs")
        if not (_INPUT.fullmatch(input_name) and rank in (0, 1, 2) and first):
            raise BadRequest(
                f"Loss {name}: input {input_name!r} has rank {rank}.", "logprobs comes first; ranks are 0, 1, 2."
            )
    if inputs[0][1] == 0:
        raise BadRequest(f"Loss {name}: logprobs has rank 0.", "Give the rank of target_tokens, 1 or 2.")
    placeholders = [(node.op, node.target, list(node.args), node.kwargs or {}) for node in nodes[: len(names)]]
    if placeholders != [("placeholder", input_name, [], {}) for input_name in names]:
        raise BadRequest(f"Loss {name} does not begin with its inputs {names}.", "Send one placeholder for each.")


def _check_node(where: str, node: Node) -> None:
    if node.op == "output":
        return
    if node.op not in ("call_function", "call_method"):
        raise Unsupported(f"{where} is a {node.op}.", "A loss may only read its inputs and call functions.")
    kwargs = node.kwargs or {}
    if forbidden := [key for key in kwargs if key in FORBIDDEN or (key == "inplace" and kwargs[key] is not False)]:
        raise Unsupported(f"{where}: {node.public} has the argument {forbidden[0]}.", "Remove it.")
    if node.op == "call_method":
        _check_method(where, node)
    elif node.target == "getattr":
        if len(node.args) != 2 or str(node.args[1]) not in ATTRIBUTES or kwargs:
            message = f"{where} reads the attribute {node.args[1:]}."
            raise Unsupported(message, f"Allowed: {', '.join(sorted(ATTRIBUTES))}.")
    else:
        _check_function(where, node)


def _check_method(where: str, node: Node) -> None:
    if node.target not in METHODS:
        raise Unsupported(f"{where} calls the method {node.target!r}.", _hint(node.target, METHODS))
    if not (node.args and _is_ref(node.args[0])):
        raise BadRequest(f"{where} calls {node.target} without a tensor.", "Its first argument must be a node.")


def _check_function(where: str, node: Node) -> None:
    module, _, function = node.public.rpartition(".")
    if module not in MODULES:
        raise Unsupported(f"{where} calls {node.target!r}.", f"Allowed: functions of {', '.join(sorted(MODULES))}.")
    if function not in MODULES[module]:
        raise Unsupported(f"{where} calls {node.target!r}.", _hint(function, MODULES[module]))


def _hint(name: str, allowed: frozenset[str]) -> str:
    if nearest := nearest_name(name, sorted(allowed)):
        return f"Did you mean '{nearest}'? {_IN_THE_CLIENT}"
    return f"It is not among the pure functions that are supported. {_IN_THE_CLIENT}"


def _check_value(where: str, value: Any, nodes: Mapping[str, bool], depth: int) -> None:
    if depth == 0:
        raise TooLarge(f"{where}: its arguments are nested too deeply.", f"At most {MAX_DEPTH} levels.")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise TooLarge(f"{where}: an argument is a text of {len(value)} characters.", f"At most {MAX_TEXT}.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise TooLarge(f"{where}: an argument is an integer of more than 64 bits.", "Use a float.")
    if isinstance(value, dict):
        _check_marker(where, value, nodes)
    for inner in _inside(value):
        _check_value(where, inner, nodes, depth - 1)


def _check_marker(where: str, value: Mapping[str, Any], nodes: Mapping[str, bool]) -> None:
    [kind] = value if len(value) == 1 else ("",)
    if kind not in _MARKERS:
        raise Unsupported(
            f"{where}: an argument has the type {sorted(value)}.", f"Known: {', '.join(sorted(_MARKERS))}."
        )
    inner = value[kind]
    valid = {
        "ref": isinstance(inner, str) and inner in nodes,
        "tuple": isinstance(inner, list),
        "dict": isinstance(inner, dict),
        "slice": isinstance(inner, list) and len(inner) == 3,
        "ellipsis": inner is True,
        "float": inner in ("inf", "-inf", "nan"),
        "dtype": isinstance(inner, str) and inner in DTYPES,
        "device": isinstance(inner, str),
    }
    if not valid[kind]:
        raise BadRequest(f"{where}: {kind} {str(inner)[:MAX_TEXT]!r} is unknown.", "Send it as torch.fx records it.")


def _check_output(graph: LossGraph, reads_logprobs: Mapping[str, bool]) -> None:
    where, output = f"Loss {graph.name}", graph.nodes[-1]
    parts = [*_unpacked(output.args[0])] if len(output.args) == 1 else []
    valid = len(parts) == 2 and _is_ref(parts[0]) and isinstance(parts[1], dict) and list(parts[1]) == ["dict"]
    if not valid or output.kwargs:
        raise BadRequest(f"{where} does not return (loss, metrics).", "Return a tensor and a dict of tensors.")
    for key, value in parts[1]["dict"].items():
        if not _METRIC.fullmatch(key) or not _is_ref(value):
            raise BadRequest(
                f"{where}: metric {key!r} is invalid.",
                "Name metrics custom/<name>:sum or custom/<name>:mean; values are tensors.",
            )
    if not reads_logprobs[graph.loss]:
        raise BadRequest(f"{where} does not depend on logprobs.", "It has no gradient: use forward instead.")


def _is_ref(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["ref"]


def _unpacked(value: Any) -> Sequence[Any]:
    """The items of a tuple or list of the graph; empty for other values."""
    return (
        value["tuple"]
        if isinstance(value, dict) and list(value) == ["tuple"]
        else value
        if isinstance(value, list)
        else ()
    )


def _inside(value: Any) -> Sequence[Any]:
    """The items of a list or of a typed object."""
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        [(kind, inner)] = value.items()
        return list(inner.values()) if kind == "dict" else inner if kind in ("tuple", "slice") else ()
    return ()


def _refs(value: Any) -> Iterator[str]:
    if _is_ref(value):
        yield value["ref"]
    for inner in _inside(value):
        yield from _refs(inner)
