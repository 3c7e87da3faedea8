"""First-order virtual SGD steps by forward passes, against torch in float64 and against backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.data import datum_for, replace_inputs, tokens_of
from tests.engine.training.test_shadow import (
    TRAINED,
    ReferenceStep,
    groups_of,
    member,
    run,
    shadow_data,
    shadow_pass,
    state_of,
    train_both,
)
from tinsmith.engine.base import Datum, Pass, PassResult
from tinsmith.engine.training import shadow_differences
from tinsmith.engine.training.shadow_plan import ShadowPlan, shadow_settings

SGD: dict[str, float | str] = {"shadow/lr": 1e-3, "shadow/mode": "first_order"}
TOLERANCE = 3e-3
"""Of the largest change of a probe."""


def replies(prompts: int = 2, each: int = 6, probes: int = 1, seed: int = 3) -> tuple[Datum, ...]:
    """Groups with a reply to one of some prompts, whose probes are those of the prompt and one prompt's next."""
    draw = np.random.default_rng(seed)
    pool = [datum_for("cross_entropy", draw, 6 + 2 * number) for number in range(prompts + probes - 1)]
    data: list[Datum] = []
    for prompt in range(prompts):
        start = tokens_of(draw, 30)
        for reply in range(each):
            text = datum_for("cross_entropy", draw, 0, np.append(start, tokens_of(draw, 3 + reply)))
            group = prompt * each + reply
            data.append(member(text, group, 0))
            data += [member(probe, group, 1) for probe in pool[prompt : prompt + probes]]
    return tuple(data)


def pays_off(request: Pass) -> bool:
    return shadow_differences.pays_off(shadow_settings(request), ShadowPlan(request))


def deltas(result: PassResult) -> np.ndarray:
    return np.array([change.delta for change in result.probes.values()])


def by_backward(monkeypatch: pytest.MonkeyPatch, engine: Any, wait: Any, request: Pass) -> PassResult:
    with monkeypatch.context() as patch:
        patch.setattr(shadow_differences, "pays_off", lambda *_: False)
        return run(engine, wait, request)


def backward_rows(monkeypatch: pytest.MonkeyPatch, engine: Any, wait: Any, request: Pass) -> int:
    """Rows with a gradient in a request."""
    from tinsmith.engine.training.run_rows import RunRows

    counted, rows_of = [], RunRows.of

    def counting(passes: Sequence[Pass], **settings: Any) -> RunRows:
        counted.append(len((rows := rows_of(passes, **settings)).rows[True]))
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(RunRows, "of", counting)
        run(engine, wait, request)
    return sum(counted)


@pytest.mark.parametrize("probes", [1, 3])
def test_differences_match_float64(probes: int, pair: Any, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model_id, oracle = pair()
    train_both(engine, model_id, oracle, wait)
    monkeypatch.setattr(shadow_differences, "pays_off", lambda *_: True)
    data = replies(probes=probes)
    request = shadow_pass(model_id, data, **SGD)
    result = run(engine, wait, request)
    wanted: dict[int, float] = {}
    for train, members in groups_of(data).values():
        step = ReferenceStep(oracle, [data[index] for index in train], SGD)
        for index in train + members:
            [before] = oracle.logprobs([data[index]])
            np.testing.assert_allclose(result.logprobs[index], before.detach().numpy(), atol=3e-5)
        wanted |= {index: step.first_order(data[index]) for index in members}
    largest = max(map(abs, wanted.values()))
    assert all(abs(result.probes[index].delta - value) < TOLERANCE * largest for index, value in wanted.items())
    assert backward_rows(monkeypatch, engine, wait, request) == len(ShadowPlan(request).probes)  # and no text


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_differences_match_backward_passes(
    kind: str, pair: Any, wait: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, model_id, oracle = pair(kind)
    train_both(engine, model_id, oracle, wait)
    wait(engine.save(model_id, tmp_path / "state", optimizer=False))
    live = shadow_pass(model_id, replies(prompts=3), **SGD)
    for request in (live, replace(live, start=tmp_path / "state")):
        assert pays_off(request)
        forward, backward = run(engine, wait, request), by_backward(monkeypatch, engine, wait, request)
        np.testing.assert_allclose(deltas(forward), deltas(backward), atol=TOLERANCE * np.abs(deltas(backward)).max())
        for left, right in zip(forward.logprobs, backward.logprobs, strict=True):
            np.testing.assert_allclose(left, right, atol=3e-5)
    wait(engine.step(model_id, TRAINED))
    saved = run(engine, wait, replace(live, start=tmp_path / "state"))
    assert deltas(saved).tolist() == deltas(forward).tolist()


def test_path_is_the_cheaper_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = shadow_pass("m", replies(), **SGD)
    assert pays_off(shared)
    assert not pays_off(shadow_pass("m", replies(), **{**SGD, "shadow/opt": "adam"}))
    assert not pays_off(shadow_pass("m", replies(probes=3), **SGD))
    assert not pays_off(shadow_pass("m", shadow_data(), **SGD))  # different texts


def test_distance_is_corrected(pair: Any, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model_id, oracle = pair()
    train_both(engine, model_id, oracle, wait)
    request = shadow_pass(model_id, replies(), **SGD)
    wanted = deltas(by_backward(monkeypatch, engine, wait, request))
    for wrong in (1e-4, 30.0, 1e12, 0.0):  # of 1e12 and 0, the texts are trained on instead
        with monkeypatch.context() as patch:
            patch.setattr(shadow_differences, "FIRST_AIM", wrong)
            np.testing.assert_allclose(
                deltas(run(engine, wait, request)), wanted, atol=TOLERANCE * np.abs(wanted).max()
            )


def test_data_without_gradient_change_nothing(pair: Any, wait: Any) -> None:
    engine, model_id, _ = pair()
    data = replies()
    blank = [replace_inputs(datum, weights=np.zeros(len(datum.tokens), np.float32)) for datum in data]
    for role in (0, 1):
        mixed = tuple(
            other if datum.inputs["shadow_role"][0] == role else datum for datum, other in zip(data, blank, strict=True)
        )
        request = shadow_pass(model_id, mixed, **SGD)
        assert pays_off(request)
        assert not deltas(run(engine, wait, request)).any()


def test_model_is_bit_identical_and_results_repeat(pair: Any, wait: Any) -> None:
    engine, model_id, oracle = pair()
    train_both(engine, model_id, oracle, wait)
    before, request = state_of(engine, model_id), shadow_pass(model_id, replies(), **SGD)
    first, second = run(engine, wait, request), run(engine, wait, request)
    assert deltas(first).tolist() == deltas(second).tolist()
    assert all((old == new).all() for old, new in zip(before, state_of(engine, model_id), strict=True))


def test_bfloat16_trains_on_each_text(
    engine_of: Any, wait: Any, model_id: str, adapter_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama", dtype="bfloat16")
    wait(engine.load(model_id, adapter_of("llama"), optimizer=False))
    request = shadow_pass(model_id, replies(), **SGD)
    assert backward_rows(monkeypatch, engine, wait, request) == len(ShadowPlan(request).probes) + 12
    wait(engine.drop(model_id))
