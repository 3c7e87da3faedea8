"""Uploaded losses in their own process: equal numbers; a fault, a hang or a death there is one request's alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.custom_loss.traced_losses import LOSSES, RANKS, traced, uploaded
from tinsmith.engine.custom_loss import process
from tinsmith.engine.custom_loss.graph import LossGraph, Node, read_graph
from tinsmith.engine.custom_loss.process import LossProcess, RequestLoss
from tinsmith.engine.custom_loss.runner import CustomLoss
from tinsmith.errors import BadRequest, EngineError, TooLarge, Unsupported


@pytest.fixture(scope="module")
def losses(forked_programs: str) -> Iterator[LossProcess]:
    made = LossProcess(1)
    yield made
    made.close()


def inputs_of(seed: int, length: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    mask = (np.arange(length) % 3 != 0).astype(np.float32)
    logprobs = draw.normal(-3, 1, length).astype(np.float32)
    return logprobs, {"advantages": draw.normal(size=length).astype(np.float32), "mask": mask}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def graph_of(*steps: tuple[str, list[Any], dict[str, Any]]) -> LossGraph:
    """A loss with the nodes s0, s1, … over logprobs, which returns their sum."""
    nodes = [Node(op="placeholder", name="logprobs", target="logprobs")]
    for number, (target, args, kwargs) in enumerate(steps):
        op = "call_function" if "." in target else "call_method"
        nodes.append(Node(op=op, name=f"s{number}", target=target, args=args, kwargs=kwargs))
    nodes.append(Node(op="call_method", name="summed", target="sum", args=[ref("logprobs")]))
    nodes.append(Node(op="output", name="output", target="output", args=[{"tuple": [ref("summed"), {"dict": {}}]}]))
    return read_graph("hostile", [("logprobs", 1)], nodes)


LEAST = -(2**63)
FAULT = graph_of(
    ("torch.zeros", [4], {"dtype": {"dtype": "int64"}}),
    ("operator.sub", [ref("s0"), 2**63 - 1], {}),
    ("operator.sub", [ref("s1"), 1], {}),
    ("torch.div", [ref("s2"), -1], {"rounding_mode": "trunc"}),
)
"""The least 64-bit integer divided by -1 is a fault of the processor: SIGFPE."""
GOOD = graph_of(("exp", [ref("logprobs")], {}))
DATA = [(np.zeros(4, np.float32), {})]


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_equal_those_of_the_same_process(name: str, losses: LossProcess) -> None:
    graph = uploaded(traced(LOSSES[name], RANKS))
    data = [inputs_of(seed, length) for seed, length in enumerate((12, 7, 12))]
    program = CustomLoss(graph)
    for end, (logprobs, inputs) in zip(RequestLoss(losses, graph).run(data), data, strict=True):
        loss, grad, metrics = program.run(torch.from_numpy(logprobs), inputs)
        assert end.loss == loss
        assert end.metrics == metrics
        np.testing.assert_array_equal(end.grad, grad.numpy())


def test_fault_ends_the_child_and_refuses_the_loss(losses: LossProcess) -> None:
    """Fails if losses are evaluated in the engine's process: this test's process then dies of SIGFPE."""
    assert losses.evaluate(GOOD, DATA, 0.0)[0][0].loss == 0.0
    first = losses.pid
    with pytest.raises(Unsupported, match=r"Loss hostile ended its process \(SIGFPE"):
        losses.evaluate(FAULT, DATA, 0.0)
    assert losses.pid is None
    with pytest.raises(Unsupported, match="is refused: it ended its process"):
        losses.evaluate(FAULT, DATA, 0.0)
    assert losses.pid is None, "a refused loss starts no child"
    assert losses.evaluate(GOOD, DATA, 0.0)[0][0].loss == 0.0
    assert losses.pid not in (None, first)


def test_loss_that_takes_too_long_is_ended(losses: LossProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the time-out of the connection."""
    losses.evaluate(GOOD, DATA, 0.0)
    monkeypatch.setattr(process, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    square = [("torch.zeros", [4000, 4000], {}), ("torch.matmul", [ref("s0"), ref("s0")], {})]
    with pytest.raises(TooLarge, match="took over"):
        losses.evaluate(graph_of(*square), DATA, 0.0)
    monkeypatch.undo()
    assert losses.evaluate(GOOD, DATA, 0.0)[0][0].loss == 0.0


def test_errors_keep_their_types_and_times_add_up(losses: LossProcess) -> None:
    loss = RequestLoss(losses, GOOD)
    loss.run(DATA)
    assert loss.seconds > 0
    with pytest.raises(BadRequest, match="hostile"):
        losses.evaluate(graph_of(("reshape", [ref("logprobs"), 7, 7], {})), DATA, 0.0)
    with pytest.raises(TooLarge, match="took over 30 s"):
        losses.evaluate(GOOD, DATA, 31.0)
    assert losses.pid is not None


def test_kill_from_outside_is_not_the_fault_of_a_loss(losses: LossProcess) -> None:
    """Fails if every end of the child refuses the loss."""
    losses.evaluate(GOOD, DATA, 0.0)
    assert losses.pid is not None
    os.kill(losses.pid, signal.SIGKILL)
    assert losses.evaluate(GOOD, DATA, 0.0)[0][0].loss == 0.0


def test_child_that_does_not_start_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(EngineError, match="did not start"):
        LossProcess().evaluate(GOOD, DATA, 0.0)
