"""Uploaded losses are refused by name unless every operation is allowed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.engine.custom_loss.traced_losses import LOSSES, RANKS, traced, uploaded
from tinsmith.engine.custom_loss.graph import MAX_NODES, LossGraph, Node, read_graph, read_text
from tinsmith.errors import UserError

INPUTS = [("logprobs", 1), ("w", 1)]
L = {"ref": "logprobs"}


def nodes_with(*middle: Node, output: Any = None) -> list[Node]:
    """A valid graph with these nodes inserted."""
    if output is None:
        output = {"tuple": [{"ref": "total"}, {"dict": {"custom/total:sum": {"ref": "total"}}}]}
    return [
        Node(op="placeholder", name="logprobs", target="logprobs"),
        Node(op="placeholder", name="w", target="w"),
        *middle,
        Node(op="call_method", name="total", target="sum", args=[L]),
        Node(op="output", name="output", target="output", args=[output]),
    ]


def function(target: str, *args: Any, **kwargs: Any) -> Node:
    return Node(op="call_function", name="x", target=target, args=list(args), kwargs=kwargs)


def method(target: str, *args: Any, **kwargs: Any) -> Node:
    return Node(op="call_method", name="x", target=target, args=list(args), kwargs=kwargs)


def test_graph_round_trips_through_text() -> None:
    for fn in LOSSES.values():
        graph = uploaded(traced(fn, RANKS))
        assert isinstance(graph, LossGraph)
        assert read_text(graph.text) == graph
    assert graph.inputs == (("logprobs", 1), ("advantages", 1), ("mask", 1))
    assert graph.metrics.keys() == {"custom/x.y-z/0:mean"}


def test_plain_losses_are_allowed() -> None:
    read_graph("plain", INPUTS, nodes_with(function("torch.exp", L), Node(op="call_method", name="y", target="mean",
                                                                         args=[{"ref": "x"}])))  # fmt: skip


FORBIDDEN = {
    "eval": function("eval", "1"),
    "exec": function("builtins.exec", "1"),
    "import": function("__import__", "os"),
    "os": function("os.system", "true"),
    "open": function("builtins.open", "/etc/passwd"),
    "load": function("torch.load", "/etc/passwd"),
    "save": function("torch.save", L, "/tmp/x"),
    "from file": function("torch.from_file", "/etc/passwd"),
    "ops": function("torch.ops.aten.add", L, L),
    "classes": function("torch.classes.load_library", "x"),
    "jit": function("torch.jit.load", "x"),
    "hub": function("torch.hub.load", "x", "y"),
    "inner names": function("torch._C._jit_set_profiling_mode", True),
    "compiled": function("torch._C._nn.__class__"),
    "special": function("torch._C._special.special___class__"),
    "dunder": function("torch.__class__"),
    "dunder of functional": function("torch.nn.functional.__builtins__"),
    "random": function("torch.rand", 3),
    "dropout": function("torch.nn.functional.dropout", L),
    "settings": function("torch.set_num_threads", 10**6),
    "manual_seed": function("torch.manual_seed", 0),
    "einsum": function("torch.functional.einsum", "i,j,k->", L, L, L),
    "nonzero": function("torch.nonzero", L),
    "one_hot": function("torch.nn.functional.one_hot", L),
    "vmap": function("torch.vmap", L),
    "setattr": function("setattr", L, "grad", L),
    "attrgetter": function("operator.attrgetter", "__class__"),
    "methodcaller": function("operator.methodcaller", "backward"),
    "call": function("operator.call", L),
    "setitem": function("operator.setitem", L, 0, 1.0),
    "iadd": function("operator.iadd", L, L),
    "lshift": function("operator.lshift", 1, 2**40),
    "factorial": function("math.factorial", 10**7),
    "comb": function("math.comb", 10**7, 10**6),
    "no module": function("exp", L),
    "attribute of a class": function("getattr", L, "__class__"),
    "attribute grad_fn": function("getattr", L, "grad_fn"),
    "attribute data": function("getattr", L, "data"),
    "attribute with a default": function("getattr", L, "shape", 1),
    "attribute by a node": function("getattr", L, L),
    "attribute by keyword": function("getattr", L, "shape", default=1),
    "item": method("item", L),
    "tolist": method("tolist", L),
    "numpy": method("numpy", L),
    "backward": method("backward", L),
    "register_hook": method("register_hook", L, L),
    "apply_": method("apply_", L, L),
    "in place": method("add_", L, 1.0),
    "requires_grad_": method("requires_grad_", L),
    "set_": method("set_", L),
    "dunder method": method("__class__", L),
    "reduce": method("__reduce_ex__", L, 2),
    "share_memory_": method("share_memory_", L),
    "cuda": method("cuda", L),
    "method of text": method("upper", "a"),
    "method of nothing": method("exp"),
    "out": function("torch.exp", L, out=L),
    "inplace": function("torch.nn.functional.relu", L, inplace=True),
    "inplace by a node": function("torch.nn.functional.relu", L, inplace=L),
    "generator": function("torch.exp", L, generator=1),
    "module": Node(op="call_module", name="x", target="linear", args=[L]),
    "captured": Node(op="get_attr", name="x", target="_tensor_constant0"),
    "a second output": Node(op="output", name="x", target="output", args=[L]),
    "a second input": Node(op="placeholder", name="x", target="x"),
    "unknown op": Node(op="call_anything", name="x", target="torch.exp", args=[L]),
    "unknown node": function("torch.exp", {"ref": "y"}),
    "itself": function("torch.exp", {"ref": "x"}),
    "later": function("torch.exp", {"ref": "total"}),
    "name taken": Node(op="call_function", name="w", target="torch.exp", args=[L]),
    "unknown mark": function("torch.exp", {"code": "print()"}),
    "two marks": function("torch.exp", {"ref": "w", "tuple": []}),
    "no mark": function("torch.exp", {}),
    "mark of another kind": function("torch.exp", {"tuple": "abc"}),
    "unhashable mark": function("torch.exp", {"ref": ["w"]}),
    "dtype by name": function("torch.zeros", 3, dtype={"dtype": "__class__"}),
    "complex": function("torch.zeros", 3, dtype={"dtype": "complex64"}),
    "float": function("torch.exp", {"float": "1e5"}),
    "layout": function("torch.zeros", 3, layout={"layout": "sparse_coo"}),
    "long text": function("torch.exp", "x" * 65),
    "large number": function("torch.exp", 2**63),
    "deep": function("torch.cat", [[[[[[[[[L]]]]]]]]]),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_unlisted_operations_are_refused(case: str) -> None:
    with pytest.raises(UserError, match="Loss bad") as refused:
        read_graph("bad", INPUTS, nodes_with(FORBIDDEN[case]))
    assert 400 <= refused.value.status < 500


OUTPUTS = {
    "nothing": [],
    "a tensor": {"ref": "total"},
    "three": {"tuple": [{"ref": "total"}, {"dict": {}}, 1]},
    "a number": {"tuple": [1.0, {"dict": {}}]},
    "metrics as a list": {"tuple": [{"ref": "total"}, []]},
    "a name of its own": {"tuple": [{"ref": "total"}, {"dict": {"loss:sum": {"ref": "total"}}}]},
    "no reduction": {"tuple": [{"ref": "total"}, {"dict": {"custom/x": {"ref": "total"}}}]},
    "a number as metric": {"tuple": [{"ref": "total"}, {"dict": {"custom/x:sum": 1.0}}]},
    "not of logprobs": {"tuple": [{"ref": "w"}, {"dict": {}}]},
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_loss_must_return_loss_and_metrics(case: str) -> None:
    with pytest.raises(UserError, match="Loss bad"):
        read_graph("bad", INPUTS, nodes_with(output=OUTPUTS[case]))


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [("w", 1), ("logprobs", 1)],
        [("logprobs", 0), ("w", 1)],
        [("logprobs", 3), ("w", 1)],
        [("logprobs", 1), ("logprobs", 1)],
        [("logprobs", 1), ("__class__.x", 1)],
        [("logprobs", 1)],
        [("logprobs", 1), ("w", 1), ("more", 1)],
    ],
    ids=str,
)
def test_declared_inputs_must_match_the_graph(inputs: Any) -> None:
    with pytest.raises(UserError, match="Loss bad"):
        read_graph("bad", inputs, nodes_with())


def test_graph_must_have_output_and_unique_names() -> None:
    long = [Node(op="call_method", name=f"n{i}", target="exp", args=[L]) for i in range(MAX_NODES)]
    for name, nodes in (("bad", nodes_with(*long)), ("bad", []), ("bad", nodes_with()[:-1]), ("", nodes_with())):
        with pytest.raises(UserError):
            read_graph(name, INPUTS, nodes)
    with pytest.raises(UserError):
        read_graph("a\nb", INPUTS, nodes_with())


def test_reading_a_graph_changes_nothing() -> None:
    nodes = nodes_with(function("torch.nn.functional.softmax", L, dim=-1, _stacklevel=3, dtype=None))
    before = copy.deepcopy(nodes)
    read_graph("plain", INPUTS, nodes)
    assert nodes == before
