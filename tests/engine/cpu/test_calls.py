"""Compiled attention of packed passes against attention written out in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.cpu.processor import each_kind
from tinsmith.engine.cpu import calls as compiled_calls
from tinsmith.engine.cpu.calls import AttentionCall, CompiledCalls, KeyRun

pytest.importorskip("numba")


KEYS = 150
SCALE = 0.2


@dataclass(frozen=True)
class Case:
    """Query and key heads, widths of keys and values, and calls over 150 keys."""

    heads: tuple[int, int]
    widths: tuple[int, int]
    calls: tuple[AttentionCall, ...]


def mask(queries: int, keys: int, seed: int = 0) -> np.ndarray:
    """Random, with at least one key for each query."""
    draw = np.random.default_rng(seed)
    visible = draw.random((queries, keys)) < 0.4
    visible[np.arange(queries), draw.integers(0, keys, queries)] = True
    return visible


CASES = {
    "causal": Case((9, 3), (64, 64), (AttentionCall(0, KEYS, (KeyRun(0, KEYS),)),)),
    "parts of a row": Case(
        (4, 4), (32, 16), tuple(AttentionCall(at, at + 50, (KeyRun(0, at + 50),)) for at in (0, 50, 100))
    ),
    "after a shared prefix": Case(
        (6, 2),
        (16, 16),
        (
            AttentionCall(0, 40, (KeyRun(0, 40),)),
            AttentionCall(40, 77, (KeyRun(0, 40), KeyRun(40, 77))),
            AttentionCall(77, KEYS, (KeyRun(0, 40), KeyRun(77, KEYS))),
        ),
    ),
    "masked": Case((4, 2), (24, 80), (AttentionCall(0, KEYS, (KeyRun(0, KEYS),), mask(KEYS, KEYS)),)),
    "partly masked": Case(
        (2, 1), (7, 5), (AttentionCall(3, 20, (KeyRun(0, 90), KeyRun(100, KEYS)), mask(17, 33)), AttentionCall(
            50, 51, (KeyRun(7, 8),), np.ones((1, 1), bool)))
    ),
}  # fmt: skip


def drawn(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the output's gradient, each in memory as a projection leaves it."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(case.heads[0], case.widths[0]), *((case.heads[1], width) for width in case.widths)]
    sizes.append((case.heads[0], case.widths[1]))
    return [torch.randn(1, KEYS, *size, generator=draw).to(dtype).transpose(1, 2) for size in sizes]


def seen(call: AttentionCall) -> Tensor:
    """bool [Q, KEYS]."""
    count, keys = call.stop - call.start, np.concatenate([np.arange(run.start, run.stop) for run in call.runs])
    visible = np.ones((count, len(keys)), bool)
    if call.visible is None:
        visible = np.tri(count, len(keys), len(keys) - count, dtype=bool)
    else:
        visible[:, len(keys) - call.visible.shape[1] :] = call.visible
    whole = np.zeros((count, KEYS), bool)
    whole[:, keys] = visible
    return torch.from_numpy(whole)


def by_definition(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """float64 [1, Hq, KEYS, D], 0 where no call has queries."""
    group = case.heads[0] // case.heads[1]
    query, key, value = query[0], key[0].repeat_interleave(group, 0), value[0].repeat_interleave(group, 0)
    output = query.new_zeros(*query.shape[:2], value.shape[2])
    for call in case.calls:
        scores = (query[:, call.start : call.stop] @ key.mT * SCALE).masked_fill(~seen(call), float("-inf"))
        output = torch.cat([output[:, : call.start], scores.softmax(-1) @ value, output[:, call.stop :]], 1)
    return output[None]


def error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("threads", [1, 3])
@each_kind
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(name: str, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledCalls, "_threads", lambda *_: threads)
    monkeypatch.setattr(compiled_calls, "kind_of", lambda _: kind)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    case, bound = CASES[name], 1e-6 if dtype == torch.float32 else 1e-2
    query, key, value, output_grad = drawn(case, dtype)
    calls, queries = CompiledCalls.of(case.calls), torch.zeros(KEYS, dtype=torch.bool)
    for call in case.calls:
        queries[call.start : call.stop] = True
    output = calls.forward(query, [(key, value)], SCALE)
    grads = calls.backward(output_grad, query, key, value, SCALE)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    wanted = by_definition(case, *leaves)
    wanted_grads = torch.autograd.grad(wanted, leaves, output_grad.double())
    assert error(output[:, :, queries], wanted[:, :, queries].detach()) < bound
    assert error(grads[0][:, :, queries], wanted_grads[0][:, :, queries]) < bound
    for grad, wanted_grad in zip(grads[1:], wanted_grads[1:], strict=True):
        assert grad.dtype == torch.float32
        assert error(grad, wanted_grad) < bound
    assert output.transpose(1, 2).is_contiguous()
    again = calls.backward(output_grad, query, key, value, SCALE)
    assert all(torch.equal(left, right) for left, right in zip(grads[1:], again[1:], strict=True))


def test_keys_of_several_sources_are_those_of_one() -> None:
    case = CASES["after a shared prefix"]
    query, key, value, _ = drawn(case, torch.float32)
    apart = [
        AttentionCall(call.start, call.stop, (KeyRun(0, 40, 1), KeyRun(call.start - 40, call.stop - 40)))
        for call in case.calls[1:]
    ]
    wanted = CompiledCalls.of(case.calls).forward(query, [(key, value)], SCALE)
    sources = [(key[:, :, 40:], value[:, :, 40:]), (key[:, :, :60].contiguous(), value[:, :, :60].contiguous())]
    actual = CompiledCalls.of(apart).forward(query, sources, SCALE)
    assert torch.equal(actual[:, :, 40:], wanted[:, :, 40:])


def test_nan_stays_with_those_who_see_it() -> None:
    case = CASES["after a shared prefix"]
    query, key, value, _ = drawn(case, torch.float32)
    calls = CompiledCalls.of(case.calls)
    wanted = calls.forward(query, [(key, value)], SCALE)
    query[:, :, 45] = float("nan")
    key[:, :, 100] = float("nan")
    output = calls.forward(query, [(key, value)], SCALE)
    is_nan = output.isnan().all(3).all(1)[0]
    assert is_nan.nonzero().flatten().tolist() == [45, *range(100, KEYS)]
    assert torch.equal(output[:, :, ~is_nan], wanted[:, :, ~is_nan])
