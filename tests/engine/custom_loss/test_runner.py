"""Uploaded losses compute what torch.fx computes; dangerous losses are refused before they run."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.custom_loss.traced_losses import DISTILLED_RANKS, LOSSES, RANKS, distilled, traced, uploaded
from tinsmith.engine.custom_loss.graph import Node, read_graph
from tinsmith.engine.custom_loss.ops import FUNCTIONAL, METHODS, SPECIAL, TORCH
from tinsmith.engine.custom_loss.runner import MAX_ELEMENTS, CustomLoss
from tinsmith.errors import BadRequest, TooLarge, UserError


def inputs_of(seed: int, length: int) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    mask = (np.arange(length) % 3 != 0).astype(np.float32)
    logprobs = torch.tensor(draw.normal(-3, 1, length), dtype=torch.float32)
    return logprobs, {"advantages": draw.normal(size=length).astype(np.float32), "mask": mask}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_and_metrics_match_traced_function(name: str) -> None:
    handle = traced(LOSSES[name], RANKS)
    custom_loss = CustomLoss(uploaded(handle))
    for seed, length in enumerate((12, 7, 12)):
        logprobs, inputs = inputs_of(seed, length)
        loss, grad, metrics = custom_loss.run(logprobs, inputs)
        leaf = logprobs.clone().requires_grad_()
        wanted, wanted_metrics = handle.graph(
            leaf, *(torch.from_numpy(inputs[name]) for name in ("advantages", "mask"))
        )
        wanted.backward()
        assert leaf.grad is not None
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-6)
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-6, atol=1e-8)
        assert metrics == pytest.approx({key: float(value.detach()) for key, value in wanted_metrics.items()}, rel=1e-6)


def test_several_targets_per_position_with_scalar_input() -> None:
    handle = traced(distilled, DISTILLED_RANKS)
    draw = np.random.default_rng(0)
    logprobs = torch.tensor(draw.normal(-3, 1, (5, 4)), dtype=torch.float32)
    inputs = {"teacher": draw.random((5, 4)).astype(np.float32), "temperature": np.asarray([2.0], np.float32)}
    loss, grad, metrics = CustomLoss(uploaded(handle)).run(logprobs, inputs)
    leaf = logprobs.clone().requires_grad_()
    wanted, wanted_metrics = handle.graph(leaf, torch.tensor(inputs["teacher"]), torch.tensor(2.0))
    wanted.backward()
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-6)
    torch.testing.assert_close(grad, leaf.grad)
    assert metrics == {"custom/agree:mean": float(wanted_metrics["custom/agree:mean"])}


def test_integer_inputs_stay_integers() -> None:
    def gathered(logprobs, places):
        return logprobs[places].sum() + torch.gather(logprobs, 0, places).sum(), {}

    places = np.asarray([0, 2, 2], np.int64)
    _, grad, _ = CustomLoss(uploaded(traced(gathered, {"logprobs": 1, "places": 1}))).run(
        torch.zeros(3), {"places": places}
    )
    assert grad.tolist() == [2.0, 0.0, 4.0]


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def loss_of(*steps: tuple[str, Any, list[Any]], **kwargs: Any) -> CustomLoss:
    """A loss with the nodes s0, s1, … over logprobs and w. Keyword arguments go to the first node."""
    nodes = [Node(op="placeholder", name=name, target=name) for name in ("logprobs", "w")]
    for number, (target, _, args) in enumerate(steps):
        op = "call_function" if "." in target or target == "getattr" else "call_method"
        nodes.append(Node(op=op, name=f"s{number}", target=target, args=args, kwargs=kwargs if number == 0 else {}))
    nodes.append(Node(op="call_method", name="summed", target="sum", args=[ref("logprobs")]))
    nodes.append(Node(op="output", name="output", target="output", args=[{"tuple": [ref("summed"), {"dict": {}}]}]))
    return CustomLoss(read_graph("hostile", [("logprobs", 1), ("w", 1)], nodes))


def step(target: str, *args: Any) -> tuple[str, Any, list[Any]]:
    return target, None, list(args)


N = 2**24
L = ref("logprobs")
LARGE = {
    "repeat": [step("repeat", L, 2**40)],
    "repeat of repeat": [step("repeat", L, 4096), step("repeat", ref("s0"), 4096)],
    "expand": [step("unsqueeze", L, 1), step("expand", ref("s0"), -1, 2**30)],
    "zeros": [step("torch.zeros", 2**50)],
    "zeros in two dimensions": [step("torch.zeros", 2**20, 2**20)],
    "ones of a float": [step("torch.ones", 1e18)],
    "arange": [step("torch.arange", 2**45)],
    "arange backwards": [step("torch.arange", 0, 1e15, 0.5)],
    "eye": [step("torch.eye", 2**20)],
    "linspace": [step("torch.linspace", 0, 1, 2**40)],
    "full": [step("torch.full", {"tuple": [2**40]}, 1.0)],
    "outer": [step("torch.zeros", N), step("torch.outer", ref("s0"), ref("s0"))],
    "broadcast": [step("unsqueeze", L, 1), step("torch.zeros", N), step("operator.add", ref("s0"), ref("s1"))],
    "tile": [step("torch.tile", L, {"tuple": [2**20, 2**20]})],
    "pad": [step("torch.nn.functional.pad", L, [0, 2**50])],
    "meshgrid": [step("torch.meshgrid", *([L] * 8))],
    "new_zeros": [step("new_zeros", L, 2**45)],
    "matmul": [step("torch.zeros", N, 1), step("torch.zeros", 1, N), step("torch.matmul", ref("s0"), ref("s1"))],
    "many small": [step("torch.zeros", N // 4)] + [step("operator.add", ref("s0"), 1.0)] * 9,
    "unbind": [step("torch.zeros", N), step("unbind", ref("s0"))],
    "split": [step("torch.zeros", N), step("split", ref("s0"), 1)],
    "integers": [step("size", L, 0), *(step("operator.pow", ref(f"s{i}"), 2**62) for i in range(3))],
    "integers by steps": [step("size", L, 0), *(step("operator.mul", ref(f"s{i}"), 2**40) for i in range(3))],
    "shape of a selection": [
        step("operator.gt", L, 0.0), step("operator.getitem", L, ref("s0")), step("size", ref("s1"), 0),
        step("operator.sub", 40, ref("s2")), step("operator.mul", ref("s3"), 2**30), step("torch.zeros", ref("s4")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
def test_huge_sizes_are_refused_before_allocation(case: str) -> None:
    custom_loss = loss_of(*LARGE[case])
    start = time.process_time()  # it does not count while the machine stands still
    with pytest.raises(UserError):
        custom_loss.run(torch.full((40,), -1.0), {"w": np.ones(40, np.float32)})
    assert time.process_time() - start < 2.0


WRONG = {
    "text times a number": [step("operator.mul", "a", 2**40)],
    "tuple times a number": [step("operator.mul", {"tuple": [1]}, 2**40)],
    "formatting": [step("operator.mod", "%1000000000d", 1)],
    "text indexed": [step("operator.getitem", "abc", 0)],
    "numbers beyond": [step("operator.pow", 10, 10**6)],
    "math of a tensor": [step("math.exp", L)],
    "truth of a tensor": [step("operator.not_", L)],
    "bytes of a method": [step("getattr", L, "values")],
    "index out of range": [step("operator.getitem", L, 4000)],
    "indices out of range": [step("to", ref("w"), {"dtype": "int64"}), step("operator.mul", ref("s0"), 10**9),
                             step("operator.getitem", L, ref("s1"))],
    "mask of another shape": [step("operator.gt", L, 0.0), step("operator.getitem", L, {"slice": [0, 3, None]}),
                              step("operator.getitem", ref("s1"), ref("s0"))],
    "a mask among other indices": [step("operator.gt", L, 0.0), step("operator.getitem", L, {"tuple": [ref("s0"), 0]})],
    "positions of a condition": [step("torch.where", L)],
    "shapes that do not fit": [step("reshape", L, 7, 7)],
    "no such argument": [step("exp", L, 1, 2, 3)],
    "batches by matmul": [step("reshape", L, 2, 2, 10), step("reshape", L, 2, 10, 2),
                          step("torch.matmul", ref("s0"), ref("s1"))],
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_in_a_graph_are_user_errors_that_name_it(case: str) -> None:
    with pytest.raises(UserError, match="hostile"):
        loss_of(*WRONG[case]).run(torch.full((40,), -1.0), {"w": np.ones(40, np.float32)})


def test_device_arguments_are_replaced() -> None:
    for device in ({"device": "cuda:7"}, "cuda"):
        loss_of(step("torch.zeros", 3), device=device).run(torch.zeros(4), {"w": np.ones(4, np.float32)})
    loss_of(step("to", L, "cuda")).run(torch.zeros(4), {"w": np.ones(4, np.float32)})


def test_time_of_a_request_is_limited() -> None:
    custom_loss = loss_of(step("exp", L))
    custom_loss.seconds = 1e9
    with pytest.raises(TooLarge, match="took over"):
        custom_loss.run(torch.zeros(4), {"w": np.ones(4, np.float32)})


def test_loss_must_be_a_scalar_with_a_gradient() -> None:
    def vector(logprobs):
        return logprobs * 2, {}

    def flat(logprobs):
        return logprobs.detach().sum(), {}

    def steps(logprobs):
        return torch.floor_divide(logprobs, 2.0).sum() + logprobs.sum(), {}

    def metric(logprobs):
        return logprobs.sum(), {"custom/all:sum": logprobs}

    for fn, says in ((vector, "shape"), (flat, "gradient"), (metric, "custom/all:sum"), (steps, "floor_divide")):
        with pytest.raises(BadRequest, match=says):
            CustomLoss(uploaded(traced(fn, {"logprobs": 1}))).run(torch.zeros(4), {})


def test_allowed_names_exist_and_large_sizes_pass() -> None:
    assert all(hasattr(torch, name) for name in TORCH)
    assert all(hasattr(torch.nn.functional, name) for name in FUNCTIONAL)
    assert all(hasattr(torch.special, name) for name in SPECIAL)
    assert all(hasattr(torch.Tensor, name) for name in METHODS)
    assert not any(name.startswith("_") or name.endswith("_") for name in TORCH | FUNCTIONAL | SPECIAL | METHODS)
    pairs = [step("unsqueeze", L, 1), step("operator.sub", L, ref("s0"))]
    loss_of(*pairs).run(torch.zeros(4096), {"w": np.ones(1, np.float32)})  # half of the limit
    assert MAX_ELEMENTS // 2 == 4096**2
