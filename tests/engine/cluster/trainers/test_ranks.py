"""Ranks of a group against one engine: results, weights and moments; faults on one rank; bits in deterministic mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.cluster.trainers.threads import ThreadGroup
from tests.engine.custom_loss.traced_losses import RANKS, reinforce, traced, uploaded
from tests.engine.data import LOSSES, pass_for
from tinsmith.engine.base import AdamParams, LoraSpec, Pass, PassResult
from tinsmith.engine.cluster.config import ClusterConfig, RankConfig
from tinsmith.engine.cluster.trainers import ranks as ranks_module
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import BadRequest, ConfigError, NotFound

LENGTHS = (30, 1, 22, 17, 9, 14, 25)
ADAM = AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def group(tiny_llama: Path) -> Iterator[ThreadGroup]:
    group = ThreadGroup(tiny_llama, 2)
    yield group
    group.close()


def engine_and_group(group: ThreadGroup, engine: Any, wait: Any) -> Sequence[tuple[Any, Callable[..., Any]]]:
    return ((engine, wait), (group.leader, group.wait))


def assert_close(actual: PassResult, expected: PassResult) -> None:
    for ours, theirs in zip(actual.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert actual.metrics == pytest.approx(dict(expected.metrics), rel=1e-5, abs=1e-4)
    assert (actual.entropies is None) is (expected.entropies is None)
    for ours, theirs in zip(actual.entropies or (), expected.entropies or (), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def saved(engine: Any, wait: Any, model_id: str, folder: Path) -> dict[str, torch.Tensor]:
    wait(engine.save(model_id, folder, optimizer=True))
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_same_weights(group: ThreadGroup, engine: Any, wait: Any, model_id: str, tmp_path: Path) -> None:
    (expected, actual) = (
        saved(target, run, model_id, tmp_path / f"{model_id}-{number}")
        for number, (target, run) in enumerate(engine_and_group(group, engine, wait))
    )
    for name, tensor in expected.items():
        if name == "steps":
            assert tensor == actual[name]
        else:
            assert float((tensor - actual[name]).norm()) <= 1e-5 * float(tensor.norm()) + 1e-12, name
    ours, theirs = (member.trainer._models[model_id].master for member in group.engines)
    assert torch.equal(ours, theirs)


def test_every_loss_gives_the_results_and_weights_of_one_engine(
    group: ThreadGroup, engine: Any, wait: Any, model_id: str, tmp_path: Path
):
    passes = [pass_for(loss, model_id, seed=seed, lengths=LENGTHS) for seed, loss in enumerate(LOSSES)]
    passes.append(pass_for("ppo", model_id, seed=20, lengths=LENGTHS, config={"return_entropy": 1.0}))
    passes.append(pass_for("cross_entropy", model_id, seed=21, lengths=LENGTHS, forward_only=True))
    outcomes = []
    for target, run in engine_and_group(group, engine, wait):
        run(target.create(model_id, LoraSpec(rank=4, seed=1)))
        outcomes.append([])
        for _ in range(2):
            outcomes[-1] += run(target.run(passes))
            run(target.step(model_id, ADAM))
    for expected, actual in zip(*outcomes, strict=True):
        assert_close(actual, expected)
    assert_same_weights(group, engine, wait, model_id, tmp_path)


def test_ten_models_in_one_pass_and_fewer_rows_than_ranks(
    group: ThreadGroup, engine: Any, wait: Any, model_id: str, tmp_path: Path
):
    names = [f"{model_id}-{number}" for number in range(10)]
    passes = [
        pass_for("cross_entropy", name, seed=number, lengths=(11, 7)[: 1 + number % 2])
        for number, name in enumerate(names)
    ]
    outcomes = []
    for target, run in engine_and_group(group, engine, wait):
        for number, name in enumerate(names):
            run(target.create(name, LoraSpec(rank=4, seed=number)))
        outcomes.append(run(target.run(passes)))
        for name in names:
            run(target.step(name, ADAM))
    for expected, actual in zip(*outcomes, strict=True):
        assert_close(actual, expected)
    for name in (names[0], names[9]):
        assert_same_weights(group, engine, wait, name, tmp_path)


def test_fault_on_one_rank_fails_its_request_alone(
    group: ThreadGroup, engine: Any, wait: Any, model_id: str, tmp_path: Path
):
    good = pass_for("ppo", model_id, seed=1, lengths=LENGTHS)
    bad = pass_for("ppo", model_id, seed=2, lengths=(40, 41))
    inputs = {**bad.data[1].inputs, "logprobs": np.full_like(bad.data[1].inputs["logprobs"], -1e30)}
    bad = replace(bad, data=(bad.data[0], replace(bad.data[1], inputs=inputs)))
    outcomes = []
    for target, run in engine_and_group(group, engine, wait):
        run(target.create(model_id, LoraSpec(rank=4, seed=1)))
        outcomes.append(run(target.run([good, bad])))
        run(target.step(model_id, ADAM))
    for results in outcomes:
        assert isinstance(results[1], BadRequest)
    assert_close(outcomes[1][0], outcomes[0][0])
    assert_same_weights(group, engine, wait, model_id, tmp_path)


def test_refused_step_keeps_the_gradient_once(
    group: ThreadGroup, engine: Any, wait: Any, model_id: str, tmp_path: Path
):
    for target, run in engine_and_group(group, engine, wait):
        run(target.create(model_id, LoraSpec(rank=4, seed=1)))
        run(target.run([pass_for("ppo", model_id, lengths=LENGTHS)]))
        with pytest.raises(BadRequest):
            run(target.step(model_id, AdamParams(learning_rate=1e38)))
        run(target.run([pass_for("ppo", model_id, seed=3, lengths=LENGTHS)]))
        run(target.step(model_id, ADAM))
    assert_same_weights(group, engine, wait, model_id, tmp_path)


def test_saved_states_are_read_by_one_rank(group: ThreadGroup, engine: Any, wait: Any, model_id: str, tmp_path: Path):
    wait(engine.create(model_id, LoraSpec(rank=4, seed=1)))
    wait(engine.run([pass_for("ppo", model_id, lengths=LENGTHS)]))
    wait(engine.step(model_id, ADAM))
    wait(engine.save(model_id, tmp_path / "state", optimizer=True))
    group.wait(group.leader.load(model_id, tmp_path / "state", optimizer=True))
    group.wait(group.leader.fork(f"{model_id}-fork", tmp_path / "state", optimizer=True))
    wait(engine.fork(f"{model_id}-fork", model_id, optimizer=True))
    for name in (model_id, f"{model_id}-fork"):
        for target, run in engine_and_group(group, engine, wait):
            run(target.run([pass_for("ppo", name, seed=5, lengths=LENGTHS)]))
            run(target.step(name, ADAM))
        assert_same_weights(group, engine, wait, name, tmp_path)
    with pytest.raises(NotFound, match="nothing"):
        group.wait(group.leader.load("other", tmp_path / "nothing", optimizer=False))
    assert isinstance(group.wait(group.leader.run([pass_for("ppo", "nobody")]))[0], NotFound)


def test_runs_that_wait_become_one_but_none_overtakes_a_step(group: ThreadGroup, model_id: str):
    group.wait(group.leader.create(model_id, LoraSpec(rank=4, seed=1)))
    group.wait(group.leader.create("beside", LoraSpec(rank=4, seed=1)))
    first, second = pass_for("ppo", model_id, seed=1), pass_for("ppo", model_id, seed=2)

    async def all_at_once() -> list[Any]:
        tasks = [
            group.leader.run([first]),
            group.leader.run([pass_for("ppo", "beside")]),
            group.leader.step(model_id, ADAM),
            group.leader.run([second]),
            group.leader.run([pass_for("ppo", "beside", seed=3)]),
        ]
        return await asyncio.gather(*map(asyncio.ensure_future, tasks))

    before = group.table.exchanges
    results = group.wait(all_at_once())
    together = group.table.exchanges - before
    before = group.table.exchanges
    (again,) = group.wait(group.leader.run([second]))
    assert_close(results[3][0], again)  # after the step
    # Two runs and a step, where five commands would take five times as many exchanges.
    assert together <= 3 * (group.table.exchanges - before) + 2


def test_cancelled_command_leaves_the_group_working(group: ThreadGroup, model_id: str):
    """Its result has no reader. Break `_work`: set it all the same."""

    async def cancel() -> list[Any]:
        command = asyncio.create_task(group.leader.step(model_id, ADAM))
        await asyncio.sleep(0)  # it is queued
        command.cancel()
        return await asyncio.gather(command, group.leader.run([pass_for("ppo", model_id)]), return_exceptions=True)

    group.wait(group.leader.create(model_id, LoraSpec(rank=4, seed=1)))
    cancelled, results = group.wait(cancel())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(results[0], PassResult)


def test_weights_that_differ_end_the_rank(group: ThreadGroup, model_id: str, monkeypatch: pytest.MonkeyPatch):
    class EndedError(Exception):
        pass

    def end(reason: str) -> None:
        raise EndedError(reason)

    group.wait(group.leader.create(model_id, LoraSpec(rank=4, seed=1)))
    monkeypatch.setattr(ranks_module, "CHECK_STEPS", 1)
    monkeypatch.setattr(ranks_module, "end_process", end)
    group.wait(group.leader.step(model_id, ADAM))
    group.engines[1].trainer._models[model_id].master.data[0] += 1e-6
    with pytest.raises(EndedError, match="weights differ"):
        group.wait(group.leader.step(model_id, ADAM))


def deterministic_state(folder: Path, trainers: int, tmp_path: Path) -> dict[str, bytes]:
    group = ThreadGroup(folder, trainers, deterministic=True, shards=4)
    passes = [
        [pass_for("ppo", "m", seed=1, lengths=LENGTHS), pass_for("cross_entropy", "m", seed=2, lengths=(9,))],
        [pass_for("gspo", "m", seed=3, lengths=LENGTHS), pass_for("ppo", "other", seed=4, lengths=(8, 8))],
    ]
    results: list[PassResult] = []
    try:
        for name in ("m", "other"):
            group.wait(group.leader.create(name, LoraSpec(rank=4, seed=1)))
        for requests in passes:
            results += group.wait(group.leader.run(requests))
            group.wait(group.leader.step("m", ADAM))
        target = tmp_path / str(trainers)
        group.wait(group.leader.save("m", target, optimizer=True))
    finally:
        group.close()
    state = {file.name: file.read_bytes() for file in target.glob("*.safetensors")}
    state["logprobs"] = b"".join(array.tobytes() for result in results for array in result.logprobs)
    state["metrics"] = repr([result.metrics for result in results]).encode()
    return state


def test_deterministic_mode_has_the_same_bits_on_1_2_and_4_ranks(tiny_llama: Path, tmp_path: Path):
    states = [deterministic_state(tiny_llama, trainers, tmp_path) for trainers in (1, 2, 4)]
    assert set(states[0]) == {"adapter_model.safetensors", "optimizer.safetensors", "logprobs", "metrics"}
    assert states[0] == states[1] == states[2]


@pytest.mark.cluster
def test_uploaded_loss_is_shared_out_by_datum(
    group: ThreadGroup, engine: Any, wait: Any, model_id: str, tmp_path: Path
):
    draw = np.random.default_rng(0)
    data = tuple(
        replace(
            datum,
            inputs={
                "advantages": draw.normal(size=len(datum.tokens)).astype(np.float32),
                "mask": np.ones(len(datum.tokens), np.float32),
            },
        )
        for datum in pass_for("cross_entropy", lengths=LENGTHS).data
    )
    request = Pass(model_id=model_id, data=data, loss_fn="custom", graph=uploaded(traced(reinforce, RANKS)))
    outcomes = []
    for target, run in engine_and_group(group, engine, wait):
        run(target.create(model_id, LoraSpec(rank=4, seed=1)))
        outcomes.append(run(target.run([request]))[0])
        run(target.step(model_id, ADAM))
    assert_close(outcomes[1], outcomes[0])
    assert_same_weights(group, engine, wait, model_id, tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [({"torch": "2.0.0"}, "different kinds of torch"), ({"device": "NVIDIA A100"}, "different kinds of device")],
    ids=["software", "device"],
)
def test_ranks_on_unlike_machines_do_not_load(other: dict[str, str], message: str) -> None:
    """Fails if ranks do not compare what their sums depend on."""

    class Collectives:
        rank, world = 0, 2
        others: ClassVar[dict[str, str]] = {}

        def gather_everywhere(self, value: dict[str, str]) -> list[dict[str, str]]:
            return [value, {**value, **self.others}]

    config = RankConfig(
        engine=EngineConfig(source="m"), cluster=ClusterConfig(trainers=2), rank=0, rendezvous="tcp://127.0.0.1:1"
    )
    ranks = ranks_module.Ranks(config, Collectives())  # type: ignore[arg-type]
    ranks.compare_machines(torch.device("cpu"))
    Collectives.others = other
    with pytest.raises(ConfigError, match=message):
        ranks.compare_machines(torch.device("cpu"))
