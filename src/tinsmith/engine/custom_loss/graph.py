"""An uploaded loss as data: a torch.fx graph of the SDK's format 1, and what it must be before it counts.

Nothing here runs it and nothing here imports torch: `program` rebuilds it from the names of `allowed` and from nothing
else. Everything that is not among them is refused by name when the loss is uploaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from tinsmith.engine.custom_loss.ops import ATTRIBUTES, DTYPES, FORBIDDEN, METHODS, MODULES
from tinsmith.errors import BadRequest, TooLarge, Unsupported

MAX_BYTES = 256 * 1024
"""Of the whole definition as JSON."""
MAX_NODES = 1024
MAX_INPUTS = 16
MAX_DEPTH = 8
"""Of arguments within arguments."""
MAX_TEXT = 64

_COMPILED = (
    ("torch._C._nn.log_sigmoid", "torch.nn.functional.logsigmoid"),
    ("torch._C._nn.", "torch.nn.functional."),
    ("torch._C._special.special_", "torch.special."),
    ("torch.functional.", "torch."),
)
"""How torch.fx writes some functions, and their public names."""

_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_MARKS = frozenset(("ref", "tuple", "dict", "slice", "ellipsis", "float", "dtype", "device"))

_IN_THE_CLIENT = "Or let the client evaluate it: forward_backward_custom with a plain function."


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One step. Arguments are JSON; what JSON lacks is an object of one key, as {"ref": "an earlier node"}."""

    op: str
    name: str
    target: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None

    @property
    def public(self) -> str:
        """Its target by the name that people write."""
        for written, meant in _COMPILED:
            if self.target.startswith(written):
                return meant + self.target.removeprefix(written)
        return self.target

    def refs(self) -> set[str]:
        """The nodes that it reads."""
        return {ref for value in (*self.args, *(self.kwargs or {}).values()) for ref in _refs(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGraph:
    """A loss of one datum: from its logprobs and inputs to (loss, metrics). Made by `read_graph`, so it is in order."""

    name: str
    inputs: tuple[tuple[str, int], ...]
    """(name, rank) of each, `logprobs` first: the learner's."""
    nodes: tuple[Node, ...]
    """In order; the last is the output."""

    @property
    def text(self) -> str:
        """All of it; `read_text` reads it again."""
        return json.dumps(
            {
                "name": self.name,
                "inputs": self.inputs,
                "nodes": [[one.op, one.name, one.target, one.args, one.kwargs or {}] for one in self.nodes],
            }
        )

    @property
    def loss(self) -> str:
        """The node that is the loss."""
        return self._output[0]["ref"]

    @property
    def metrics(self) -> dict[str, str]:
        """Metric -> its node."""
        return {key: value["ref"] for key, value in self._output[1]["dict"].items()}

    @property
    def _output(self) -> Sequence[Any]:
        return _unpacked(self.nodes[-1].args[0])

    def check_inputs(self, where: str, targets: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
        """Raises BadRequest unless a datum has what the loss reads; what else it has is left alone."""
        for number, (name, rank) in enumerate(self.inputs):
            if number and name not in inputs:
                raise BadRequest(
                    f"{where}: loss {self.name} needs loss_fn_inputs['{name}'].", "Give it to every datum."
                )
            values = inputs[name] if number else targets
            fits = values.size == 1 if rank == 0 else values.ndim == rank
            if not fits:
                what = name if number else "target_tokens"
                raise BadRequest(
                    f"{where}: {what} has shape {values.shape}; loss {self.name} takes {name} with rank {rank}.",
                    "Give the rank that create_custom_loss was told.",
                )


def read_text(text: str) -> LossGraph:
    """What `LossGraph.text` wrote."""
    values = json.loads(text)
    nodes = [
        Node(op=op, name=name, target=target, args=args, kwargs=kwargs)
        for op, name, target, args, kwargs in values["nodes"]
    ]
    return read_graph(values["name"], [tuple(one) for one in values["inputs"]], nodes)


def read_graph(name: str, inputs: Sequence[tuple[str, int]], nodes: Sequence[Node]) -> LossGraph:
    """The graph, if every step of it is allowed. Raises BadRequest, Unsupported or TooLarge that names what is not."""
    if not (0 < len(name) <= MAX_TEXT and name.isprintable()):
        raise BadRequest("The loss has no name that can be printed.", f"Give one of at most {MAX_TEXT} characters.")
    if len(nodes) > MAX_NODES:
        raise TooLarge(f"Loss {name} has {len(nodes)} operations.", f"At most {MAX_NODES}. {_IN_THE_CLIENT}")
    _check_signature(name, inputs, nodes)
    reads_logprobs: dict[str, bool] = {}
    for number, node in enumerate(nodes):
        where = f"Loss {name}, node {node.name!r}"
        last = number == len(nodes) - 1
        if node.name in reads_logprobs or len(node.name) > 4 * MAX_TEXT:
            raise BadRequest(f"{where}: its name is taken or too long.", "Give each node a name of its own.")
        if (node.op == "output") is not last:
            raise BadRequest(f"{where} is a {node.op}.", "A graph ends in its one output.")
        if number >= len(inputs):
            _check_node(where, node)
        for value in (*node.args, *(node.kwargs or {}).values()):
            _check_value(where, value, reads_logprobs, MAX_DEPTH)
        reads_logprobs[node.name] = number == 0 or any(reads_logprobs[ref] for ref in node.refs())
    graph = LossGraph(name=name, inputs=tuple(inputs), nodes=tuple(nodes))
    _check_output(graph, reads_logprobs)
    return graph


def _check_signature(name: str, inputs: Sequence[tuple[str, int]], nodes: Sequence[Node]) -> None:
    names = [one for one, _ in inputs]
    if not 1 <= len(inputs) <= MAX_INPUTS or len(set(names)) < len(names):
        raise BadRequest(f"Loss {name} has inputs {names}.", f"Give 1 to {MAX_INPUTS}, each once.")
    for number, (one, rank) in enumerate(inputs):
        if not _INPUT.fullmatch(one) or rank not in (0, 1, 2) or (number == 0) is not (one == "logprobs"):
            raise BadRequest(f"Loss {name}: input {one!r} has rank {rank}.", "logprobs comes first; ranks are 0, 1, 2.")
    if inputs[0][1] == 0:
        raise BadRequest(f"Loss {name}: logprobs has rank 0.", "They have the rank of target_tokens, 1 or 2.")
    heads = [(node.op, node.target, list(node.args), node.kwargs or {}) for node in nodes[: len(names)]]
    if heads != [("placeholder", one, [], {}) for one in names]:
        raise BadRequest(f"Loss {name} does not begin with its inputs {names}.", "Send one placeholder for each.")


def _check_node(where: str, node: Node) -> None:
    if node.op == "output":
        return
    if node.op not in ("call_function", "call_method"):
        raise Unsupported(f"{where} is a {node.op}.", "A loss reads its inputs and calls functions, nothing else.")
    kwargs = node.kwargs or {}
    if wrong := [key for key in kwargs if key in FORBIDDEN or (key == "inplace" and kwargs[key] is not False)]:
        raise Unsupported(f"{where}: {node.public} is given {wrong[0]}.", "Leave it out.")
    if node.op == "call_method":
        _check_method(where, node)
    elif node.target == "getattr":
        if len(node.args) != 2 or str(node.args[1]) not in ATTRIBUTES or kwargs:
            what = f"{where} reads the attribute {node.args[1:]}."
            raise Unsupported(what, f"Allowed: {', '.join(sorted(ATTRIBUTES))}.")
    else:
        _check_function(where, node)


def _check_method(where: str, node: Node) -> None:
    if node.target not in METHODS:
        raise Unsupported(f"{where} calls the method {node.target!r}.", _cure(node.target, METHODS))
    if not (node.args and _is_ref(node.args[0])):
        raise BadRequest(f"{where} calls {node.target} on no node.", "Its first argument is the tensor.")


def _check_function(where: str, node: Node) -> None:
    module, _, function = node.public.rpartition(".")
    if module not in MODULES:
        raise Unsupported(f"{where} calls {node.target!r}.", f"Allowed: functions of {', '.join(sorted(MODULES))}.")
    if function not in MODULES[module]:
        raise Unsupported(f"{where} calls {node.target!r}.", _cure(function, MODULES[module]))


def _cure(name: str, allowed: frozenset[str]) -> str:
    if close := get_close_matches(name, sorted(allowed), n=1):
        return f"Is '{close[0]}' what you mean? {_IN_THE_CLIENT}"
    return f"It is not among the pure functions that are run here. {_IN_THE_CLIENT}"


def _check_value(where: str, value: Any, known: Mapping[str, bool], depth: int) -> None:
    if depth == 0:
        raise TooLarge(f"{where}: its arguments are nested too deep.", f"At most {MAX_DEPTH} levels.")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise TooLarge(f"{where}: a text of {len(value)} characters.", f"At most {MAX_TEXT}.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise TooLarge(f"{where}: a number beyond 64 bits.", "Send a float.")
    if isinstance(value, dict):
        _check_mark(where, value, known)
    for inner in _inside(value):
        _check_value(where, inner, known, depth - 1)


def _check_mark(where: str, value: Mapping[str, Any], known: Mapping[str, bool]) -> None:
    [kind] = value if len(value) == 1 else ("",)
    if kind not in _MARKS:
        raise Unsupported(f"{where}: an argument is marked {sorted(value)}.", f"Known: {', '.join(sorted(_MARKS))}.")
    inner = value[kind]
    sound = {
        "ref": isinstance(inner, str) and inner in known,
        "tuple": isinstance(inner, list),
        "dict": isinstance(inner, dict),
        "slice": isinstance(inner, list) and len(inner) == 3,
        "ellipsis": inner is True,
        "float": inner in ("inf", "-inf", "nan"),
        "dtype": isinstance(inner, str) and inner in DTYPES,
        "device": isinstance(inner, str),
    }
    if not sound[kind]:
        raise BadRequest(f"{where}: {kind} {str(inner)[:MAX_TEXT]!r} is not known.", "Send it as torch.fx records it.")


def _check_output(graph: LossGraph, reads_logprobs: Mapping[str, bool]) -> None:
    where, output = f"Loss {graph.name}", graph.nodes[-1]
    parts = [*_unpacked(output.args[0])] if len(output.args) == 1 else []
    sound = len(parts) == 2 and _is_ref(parts[0]) and isinstance(parts[1], dict) and list(parts[1]) == ["dict"]
    if not sound or output.kwargs:
        raise BadRequest(f"{where} does not return (loss, metrics).", "Return a tensor and a dict of tensors.")
    for key, value in parts[1]["dict"].items():
        if not _METRIC.fullmatch(key) or not _is_ref(value):
            raise BadRequest(f"{where}: metric {key!r}.", "Name tensors custom/<name>:sum or custom/<name>:mean.")
    if not reads_logprobs[graph.loss]:
        raise BadRequest(f"{where} does not depend on logprobs.", "It has no gradient; use forward instead.")


def _is_ref(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["ref"]


def _unpacked(value: Any) -> Sequence[Any]:
    """A tuple or a list of the graph."""
    return (
        value["tuple"]
        if isinstance(value, dict) and list(value) == ["tuple"]
        else value
        if isinstance(value, list)
        else ()
    )


def _inside(value: Any) -> Sequence[Any]:
    """What a list or a marked object holds."""
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
