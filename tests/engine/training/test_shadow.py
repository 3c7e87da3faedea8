"""Virtual optimizer steps against transformers, PEFT and torch.optim in float64, and what they leave unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.data import datum_for, pass_for, replace_inputs
from tests.engine.reference import Reference
from tinsmith.engine.base import AdamParams, Datum, Pass, PassResult
from tinsmith.engine.training import shadow
from tinsmith.errors import BadRequest

ADAM = {"shadow/beta1": 0.8, "shadow/beta2": 0.9, "shadow/eps": 1e-3}
CONFIGS: dict[str, dict[str, float | str]] = {
    "sgd": {"shadow/lr": 1e-3},
    "adam": {"shadow/opt": "adam", "shadow/lr": 1e-3, **ADAM},
    "adam with decay and clip": {
        "shadow/opt": "adam", "shadow/lr": 1e-3, **ADAM, "shadow/weight_decay": 0.1, "shadow/grad_clip_norm": 0.5
    },
    "adam_inherit": {"shadow/opt": "adam_inherit", "shadow/lr": 1e-3, **ADAM, "shadow/weight_decay": 0.1},
}  # fmt: skip
TRAINED = AdamParams(learning_rate=1e-3, beta1=0.7, beta2=0.9, eps=1e-4)


def member(datum: Datum, group: int, role: int) -> Datum:
    """The datum as train data (role 0) or as a probe (role 1) of a group."""
    length = len(datum.tokens) if group % 2 else 1  # both accepted shapes
    return replace_inputs(
        datum,
        shadow_group=np.full(length, group, np.float32),
        shadow_role=np.full(length, role, np.float32),
    )


def shadow_data(groups: int = 4, probes: int = 3, seed: int = 0) -> tuple[Datum, ...]:
    """Groups of one or two train data and up to `probes` probes, some of which several groups share."""
    draw = np.random.default_rng(seed)
    shared = [datum_for("cross_entropy", draw, 5 + 3 * number) for number in range(probes)]
    data: list[Datum] = []
    for group in range(groups):
        trained = [datum_for("cross_entropy", draw, 6 + 4 * number) for number in range(1 + group % 2)]
        data += [member(datum, group, 0) for datum in trained]
        data += [member(datum, group, 1) for datum in shared[: 1 + group % probes]]
    return tuple(data)


def shadow_pass(model_id: str, data: Sequence[Datum], **config: float | str) -> Pass:
    settings = {key.replace("__", "/"): value for key, value in config.items()}
    return Pass(model_id=model_id, data=tuple(data), loss_fn="shadow", loss_config=settings, forward_only=True)


def run(engine: Any, wait: Any, request: Pass) -> PassResult:
    [result] = wait(engine.run([request]))
    assert isinstance(result, PassResult), result
    return result


def train_both(engine: Any, model_id: str, oracle: Reference, wait: Any) -> None:
    """Take two steps on both, so that there are moments; leave a pending gradient in the engine's model."""
    for seed in (7, 8):
        request = replace(pass_for("cross_entropy", seed=seed), model_id=model_id)
        wait(engine.run([request]))
        wait(engine.step(model_id, TRAINED))
        oracle.backward(request)
        oracle.step(TRAINED)
    wait(engine.run([replace(pass_for("cross_entropy", seed=9), model_id=model_id)]))


class ReferenceStep:
    """A group's virtual step in float64, by torch's optimizers; the oracle is as before afterwards."""

    def __init__(self, oracle: Reference, train: Sequence[Datum], config: dict[str, float | str]) -> None:
        self.oracle, self.parameters = oracle, list(oracle.parameters.values())
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        oracle.backward(Pass(model_id="", data=tuple(map(plain, train)), loss_fn="cross_entropy"))
        optimizer = self._optimizer(config)
        if limit := config.get("shadow/grad_clip_norm"):
            torch.nn.utils.clip_grad_norm_(self.parameters, float(limit))
        optimizer.step()
        self.end = [parameter.detach().clone() for parameter in self.parameters]
        self._set(self.start)

    def _optimizer(self, config: dict[str, float | str]) -> torch.optim.Optimizer:
        lr, kind = float(config["shadow/lr"]), config.get("shadow/opt", "sgd")
        if kind == "sgd":
            return torch.optim.SGD(self.parameters, lr=lr)
        optimizer = torch.optim.AdamW(self.parameters)
        if kind == "adam_inherit":
            assert self.oracle.optimizer is not None
            optimizer.load_state_dict(deepcopy(self.oracle.optimizer.state_dict()))
        betas = (float(config["shadow/beta1"]), float(config["shadow/beta2"]))
        decay = float(config.get("shadow/weight_decay", 0.0))
        optimizer.param_groups[0].update(lr=lr, betas=betas, eps=float(config["shadow/eps"]), weight_decay=decay)
        return optimizer

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)
                parameter.grad = None

    def logprobs_after(self, probe: Datum) -> np.ndarray:
        self._set(self.end)
        [logprobs] = self.oracle.logprobs([probe])
        self._set(self.start)
        return logprobs.detach().numpy()

    def first_order(self, probe: Datum) -> float:
        """The directional derivative of sum w p along the step."""
        [logprobs] = self.oracle.logprobs([probe])
        total = (torch.from_numpy(probe.inputs["weights"]).double() * logprobs).sum()
        gradients = torch.autograd.grad(total, self.parameters)
        moves = [end - start for end, start in zip(self.end, self.start, strict=True)]
        return float(sum((move * gradient).sum() for move, gradient in zip(moves, gradients, strict=True)))


def plain(datum: Datum) -> Datum:
    return Datum(tokens=datum.tokens, targets=datum.targets, inputs={"weights": datum.inputs["weights"]})


def groups_of(data: Sequence[Datum]) -> dict[int, tuple[list[int], list[int]]]:
    """Indices of each group's train data and probes."""
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for index, datum in enumerate(data):
        members = groups.setdefault(int(datum.inputs["shadow_group"][0]), ([], []))
        members[int(datum.inputs["shadow_role"][0])].append(index)
    return groups


@pytest.mark.parametrize("mode", ["exact", "first_order"])
@pytest.mark.parametrize("name", CONFIGS)
def test_virtual_steps_match_torch_optimizers(name: str, mode: str, pair: Any, wait: Any) -> None:
    engine, model_id, oracle = pair()
    train_both(engine, model_id, oracle, wait)
    data, config = shadow_data(), CONFIGS[name]
    result = run(engine, wait, shadow_pass(model_id, data, **config, shadow__mode=mode))
    for train, probes in groups_of(data).values():
        step = ReferenceStep(oracle, [data[index] for index in train], config)
        for index in train + probes:
            [before] = oracle.logprobs([data[index]])
            np.testing.assert_allclose(result.logprobs[index], before.detach().numpy(), atol=3e-5)
        for index in probes:
            change, weights = result.probes[index], data[index].inputs["weights"].astype(np.float64)
            if mode == "first_order":
                assert change.logprobs_post is None
                assert change.delta == pytest.approx(step.first_order(data[index]), rel=1e-3, abs=1e-6)
                continue
            after = step.logprobs_after(data[index])
            np.testing.assert_allclose(change.logprobs_post, after, atol=3e-5)
            [before] = oracle.logprobs([data[index]])
            wanted = float((weights * (after - before.detach().numpy())).sum())
            assert change.delta == pytest.approx(wanted, abs=1e-5 * np.abs(weights).sum())
    assert result.probes.keys() == {index for _, probes in groups_of(data).values() for index in probes}
    assert result.metrics["shadow/groups:sum"] == 4


def test_fresh_adam_with_tiny_eps_takes_the_sign(pair: Any, wait: Any) -> None:
    engine, model_id, oracle = pair()
    data, config = shadow_data(groups=2), {"shadow/opt": "adam", "shadow/lr": 1e-5}
    result = run(engine, wait, shadow_pass(model_id, data, **config))
    for train, probes in groups_of(data).values():
        step = ReferenceStep(oracle, [data[i] for i in train], {**config, **ADAM, "shadow/eps": 1e-12})
        for index in probes:
            assert result.probes[index].delta == pytest.approx(step.first_order(data[index]), rel=0.02, abs=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_first_order_approaches_exact_as_lr_falls(name: str, pair: Any, wait: Any) -> None:
    engine, model_id, oracle = pair()
    train_both(engine, model_id, oracle, wait)
    errors = []
    for rate in (4e-4, 1e-4):
        config = {**CONFIGS[name], "shadow/lr": rate}
        exact, linear = (
            run(engine, wait, shadow_pass(model_id, shadow_data(), **config, shadow__mode=mode)).probes
            for mode in ("exact", "first_order")
        )
        errors.append(max(abs(exact[index].delta - linear[index].delta) for index in exact))
    assert errors[1] < errors[0] / 6  # the error is quadratic in lr


def test_steps_in_small_batches_equal_steps_together(pair: Any, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model_id, _ = pair()
    data = shadow_data(groups=9)
    for mode in ("exact", "first_order"):
        request = shadow_pass(model_id, data, shadow__lr=1e-3, shadow__mode=mode)
        together = run(engine, wait, request)
        monkeypatch.setattr(shadow, "MAX_SLOTS", 2)
        apart = run(engine, wait, request)
        monkeypatch.undo()
        for index, change in together.probes.items():
            assert change.delta == pytest.approx(apart.probes[index].delta, abs=3e-5)
            alone = run(engine, wait, replace(request, data=group_of(data, index)))
            assert change.delta == pytest.approx(alone.probes[max(alone.probes)].delta, abs=3e-5)


def group_of(data: Sequence[Datum], probe: int) -> tuple[Datum, ...]:
    """A probe with the train data of its group."""
    group = data[probe].inputs["shadow_group"][0]
    train = [d for d in data if d.inputs["shadow_group"][0] == group and d.inputs["shadow_role"][0] == 0]
    return (*train, data[probe])


def state_of(engine: Any, model_id: str) -> list[torch.Tensor]:
    model = engine.trainer._models[model_id]
    moments = model.moments()
    tensors = [model.master.detach(), model.gradient, moments.exp_avg, moments.exp_avg_sq]
    return [tensor.clone() for tensor in tensors] + [torch.tensor(moments.steps)]


@pytest.mark.parametrize("name", CONFIGS)
def test_model_is_bit_identical_after_shadow_passes(name: str, pair: Any, wait: Any) -> None:
    engine, model_id, oracle = pair()
    train_both(engine, model_id, oracle, wait)
    before = state_of(engine, model_id)
    for mode in ("exact", "first_order"):
        run(engine, wait, shadow_pass(model_id, shadow_data(), **CONFIGS[name], shadow__mode=mode))
    after = state_of(engine, model_id)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert float(before[1].abs().max()) > 0  # a gradient was pending


def test_shadow_between_passes_leaves_the_step_unchanged(pair: Any, wait: Any) -> None:
    states = []
    for shadows in (0, 2):
        engine, model_id, _ = pair()
        for seed in (1, 2):
            wait(engine.run([replace(pass_for("ppo", seed=seed), model_id=model_id)]))
            for _ in range(shadows):
                run(engine, wait, shadow_pass(model_id, shadow_data(), **CONFIGS["adam_inherit"]))
        wait(engine.step(model_id, TRAINED))
        states.append(state_of(engine, model_id))
    assert all(torch.equal(*tensors) for tensors in zip(*states, strict=True))


def test_equal_requests_give_equal_bits(pair: Any, wait: Any) -> None:
    engine, model_id, _ = pair()
    request = shadow_pass(model_id, shadow_data(groups=6), **CONFIGS["adam"])
    first, second = run(engine, wait, request), run(engine, wait, request)
    assert [change.delta for change in first.probes.values()] == [change.delta for change in second.probes.values()]
    same = (member(d, int(d.inputs["shadow_group"][0]) + 6, int(d.inputs["shadow_role"][0])) for d in request.data)
    doubled = run(engine, wait, replace(request, data=(*request.data, *same)))
    deltas = [change.delta for change in doubled.probes.values()]
    assert deltas[: len(deltas) // 2] == deltas[len(deltas) // 2 :]


def test_fault_fails_its_request_alone(pair: Any, wait: Any) -> None:
    engine, model_id, _ = pair()
    good, bad = shadow_pass(model_id, shadow_data(), shadow__lr=1e-3), shadow_data()
    huge = replace_inputs(bad[0], weights=np.full(len(bad[0].tokens), 3e38, np.float32))
    faulty = [
        replace(good, data=(huge, *bad[1:])),
        replace(good, loss_config={"shadow/lr": 1e38}),
        replace(good, loss_config={"shadow/lr": 1e38, "shadow/mode": "first_order"}),
        replace(good, model_id="unknown"),
    ]
    trained = replace(pass_for("ppo"), model_id=model_id)
    before = state_of(engine, model_id)
    *errors, passed, shadowed = wait(engine.run([*faulty, trained, good]))
    assert [type(error).__name__ for error in errors] == ["BadRequest", "BadRequest", "BadRequest", "NotFound"]
    assert all(isinstance(result, PassResult) for result in (passed, shadowed))
    assert torch.equal(before[0], state_of(engine, model_id)[0])
    assert isinstance(errors[0], BadRequest)
    assert "after a virtual step" in str(errors[1])
    assert "shadow/lr" in str(errors[2])


def test_starts_from_a_saved_adapter(pair: Any, wait: Any, tmp_path: Path) -> None:
    engine, model_id, oracle = pair()
    train_both(engine, model_id, oracle, wait)
    request = shadow_pass(model_id, shadow_data(), **CONFIGS["adam_inherit"])
    live = run(engine, wait, request)
    wait(engine.save(model_id, tmp_path / "state", optimizer=True))
    wait(engine.step(model_id, TRAINED))
    saved = run(engine, wait, replace(request, start=tmp_path / "state"))
    moved = run(engine, wait, request)
    assert [change.delta for change in saved.probes.values()] == [change.delta for change in live.probes.values()]
    assert [change.delta for change in moved.probes.values()] != [change.delta for change in live.probes.values()]


def test_training_goes_on_between_micro_batches(pair: Any, wait: Any) -> None:
    engine, model_id, _ = pair()
    ended: list[str] = []

    async def timed(name: str, work: Any) -> None:
        await work
        ended.append(name)

    async def shadow_beside_training() -> None:
        data = shadow_data(groups=80)  # several chunks of slots
        beside = asyncio.create_task(timed("shadow", engine.run([shadow_pass(model_id, data, shadow__lr=1e-3)])))
        await asyncio.sleep(0)
        for step in range(2):
            trained = replace(pass_for("ppo"), model_id=model_id)
            await timed(f"train {step}", engine.run([trained]))
            await timed(f"step {step}", engine.step(model_id, TRAINED))
        await beside

    wait(shadow_beside_training())
    assert ended == ["train 0", "step 0", "train 1", "step 1", "shadow"]
