"""The sampler pool over fake processes: routing, versions, deaths, cancellation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.cluster.pools import CONFIG, Slots, in_loop, pool_of, request_of, trainer_with
from tinsmith.engine.base import SavedObject, SequenceDelta
from tinsmith.engine.cluster.pool import SamplerPool
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.errors import EngineDied, EngineError, Gone


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@in_loop
async def test_answers_equal_those_of_a_single_engine() -> None:
    pool, slots, _ = await pool_of(3)
    requests = [request_of(number, num_samples=2) for number in range(12)]
    results = await asyncio.gather(*map(pool.sample, requests))
    for request, result in zip(requests, results, strict=True):
        expected = await FakeEngine(CONFIG).sample(request)
        for left, right in zip(result.sequences, expected.sequences, strict=True):
            assert np.array_equal(left.tokens, right.tokens)
            assert np.array_equal(left.logprobs, right.logprobs)
    assert [len(slots[index].requests) for index in range(3)] == [4, 4, 4]
    await pool.close()


@in_loop
async def test_request_follows_its_prefix_until_the_replica_is_full() -> None:
    pool, slots, _ = await pool_of(2)
    await pool.sample(request_of(1))
    await pool.sample(request_of(2))
    await pool.sample(request_of(1, seed=5))
    assert [len(slots[index].requests) for index in range(2)] == [3, 0]  # nothing runs: both are free
    for index in range(2):
        slots[index].gate.clear()
    held = [asyncio.create_task(pool.sample(request_of(3, request_id=str(index)))) for index in range(40)]
    await _settle()
    counts = [sum(request.seed == 3 for request in slots[index].requests) for index in range(2)]
    assert min(counts) > 0  # spilled over
    assert max(counts) > min(counts)
    for index in range(2):
        slots[index].gate.set()
    await asyncio.gather(*held)
    assert pool.counts.routed_by_prefix > 20
    assert [each.cache_tokens for each in pool.status()] == [0, 0]
    await pool.close()


@in_loop
async def test_version_is_attached_where_it_is_sampled(tmp_path: Path) -> None:
    pool, slots, trainer = await pool_of(3)
    await trainer.save("m", tmp_path / "v", optimizer=False)
    await pool.attach("v", tmp_path / "v")
    await pool.sample(request_of(1, version="v"))
    await pool.attach("v", tmp_path / "v")  # the same folder again changes nothing
    await pool.sample(request_of(1, version="v"))
    assert [len(slots[index].calls) for index in range(3)] == [1, 0, 0]
    await pool.detach("v")
    with pytest.raises(Gone):
        await pool.sample(request_of(1, version="v"))
    assert [name for name, _ in slots[0].calls] == ["attach", "detach"]
    await pool.close()


@in_loop
async def test_versions_move_to_the_store(tmp_path: Path) -> None:
    """Fails if replicas that use the store are given a folder, or if one that has the version is given it again."""
    pool, slots, trainer = await pool_of(2)
    await trainer.save("m", tmp_path / "v", optimizer=False)
    await pool.attach("v", tmp_path / "v")
    expected = await pool.sample(request_of(1, version="v"))
    pool._transfer.through_store = True
    with pytest.raises(Gone):  # the service attaches it again
        await pool.sample(request_of(1, version="v"))
    await pool.attach("v", SavedObject("00" * 16))
    assert (await pool.sample(request_of(1, version="v"))).sequences[0].tokens.tolist() == (
        expected.sequences[0].tokens.tolist()
    )
    assert [len(slots[index].calls) for index in range(2)] == [1, 0]
    await pool.close()


@in_loop
async def test_samples_wait_until_the_version_is_published(tmp_path: Path) -> None:
    pool, slots, _ = await pool_of(3)
    await pool.capture("m", "v")
    waiting = asyncio.create_task(pool.sample(request_of(1, version="v")))
    await _settle()
    assert not any(slots[index].requests for index in range(3))
    await pool.persist("v", tmp_path / "v")
    await waiting
    attached = [any(name == "attach" for name, _ in slots[index].calls) for index in range(3)]
    assert attached.count(True) == 2  # two are given it at once
    await pool.close()


@in_loop
async def test_replaced_and_lost_versions_fail_their_waiting_samples(tmp_path: Path) -> None:
    pool, _, _ = await pool_of(1)
    await pool.capture("m", "v")
    first = asyncio.create_task(pool.sample(request_of(1, version="v")))
    await _settle()
    await pool.capture("m", "v")
    with pytest.raises(Gone):
        await first
    second = asyncio.create_task(pool.sample(request_of(2, version="v")))
    await _settle()
    pool.use_trainer(await trainer_with("m"))
    with pytest.raises(Gone):
        await second
    await pool.capture("m", "v")
    await pool.persist("v", tmp_path / "v")
    await pool.sample(request_of(3, version="v"))
    await pool.close()


@in_loop
async def test_unheard_samples_of_a_dead_replica_go_to_another() -> None:
    pool, slots, _ = await pool_of(2)
    slots[0].gate.clear()
    request = request_of(7, max_tokens=6)
    running = asyncio.create_task(pool.sample(request, lambda _: None))
    await _settle()
    slots.may_start.clear()
    slots[0].die()
    result = await running
    expected = await FakeEngine(CONFIG).sample(request)
    assert np.array_equal(result.sequences[0].tokens, expected.sequences[0].tokens)
    assert len(slots[1].requests) == 1
    assert pool.counts.moved == 1
    await pool.close()


@in_loop
async def test_streamed_samples_of_a_dead_replica_fail() -> None:
    pool, slots, _ = await pool_of(2)
    slots[0].hold.clear()
    deltas: list[SequenceDelta] = []
    running = asyncio.create_task(pool.sample(request_of(7), deltas.append))
    await _settle()
    assert len(deltas) == 1
    slots[0].die()
    with pytest.raises(EngineDied) as death:
        await running
    assert death.value.process == 1
    assert not slots[1].requests
    await pool.close()


@in_loop
async def test_request_that_ends_replicas_is_stopped_after_two() -> None:
    pool, slots, _ = await pool_of(4)
    for index in range(4):
        slots[index].gate.clear()
    running = asyncio.create_task(pool.sample(request_of(1)))
    slots.may_start.clear()
    for _ in range(2):
        await _settle()
        index = next(index for index in range(4) if slots[index].requests and not slots[index].died.is_set())
        slots[index].die(from_outside=False)
    with pytest.raises(EngineDied):
        await running
    assert pool.living == 2
    await pool.close()


@in_loop
async def test_requests_wait_while_no_replica_runs() -> None:
    pool, slots, _ = await pool_of(2)
    rooms: list[int] = []
    pool.on_change = lambda: rooms.append(pool.living)
    slots.may_start.clear()
    for index in range(2):
        slots[index].die()
    await _settle()
    assert (pool.up.is_set(), rooms) == (False, [1, 0])
    waiting = asyncio.create_task(pool.sample(request_of(1)))
    await _settle()
    assert not waiting.done()
    slots.may_start.set()
    await waiting
    assert (pool.up.is_set(), rooms) == (True, [1, 0, 1, 2])
    assert [each.starts for each in pool.status()] == [2, 2]
    await pool.close()


@in_loop
async def test_new_process_of_a_place_is_given_versions_again(tmp_path: Path) -> None:
    pool, slots, trainer = await pool_of(1)
    await trainer.save("m", tmp_path / "v", optimizer=False)
    await pool.attach("v", tmp_path / "v")
    await pool.sample(request_of(1, version="v"))
    slots[0].die()
    await _settle()
    await pool.sample(request_of(1, version="v"))
    assert [[name for name, _ in process.calls] for process in slots.processes[0]] == [["attach"], ["attach"]]
    await pool.close()


@in_loop
async def test_request_gives_no_folder_to_a_replica_that_starts_blind(tmp_path: Path) -> None:
    pool, slots, trainer = await pool_of(1)
    await trainer.save("m", tmp_path / "v", optimizer=False)
    await pool.attach("v", tmp_path / "v")
    slots.may_start.clear()
    slots[0].die()
    await _settle()
    waiting = asyncio.create_task(pool.sample(request_of(1, version="v")))
    await _settle()
    pool._transfer.through_store = True  # as the start on another machine does
    slots.may_start.set()
    with pytest.raises(Gone):  # the service attaches it again
        await waiting
    assert slots[0].calls == []
    await pool.close()


@in_loop
async def test_cancelled_request_is_cancelled_on_its_replica() -> None:
    pool, slots, _ = await pool_of(1)
    slots[0].gate.clear()
    running = asyncio.create_task(pool.sample(request_of(1)))
    await _settle()
    await pool.cancel("r1")
    with pytest.raises(Gone):
        await running
    caller = asyncio.create_task(pool.sample(request_of(2)))
    await _settle()
    caller.cancel()
    await asyncio.wait([caller])
    await _settle()
    assert slots[0].cancelled == ["r1", "r2"]
    assert pool.status()[0].cache_tokens == 0
    await pool.close()


@in_loop
async def test_closing_fails_running_requests_and_ends_processes() -> None:
    pool, slots, _ = await pool_of(2)
    await pool.release_memory()
    assert all(slots[index].calls == [("release_memory", None)] for index in range(2))
    slots[0].gate.clear()
    running = asyncio.create_task(pool.sample(request_of(1)))
    await _settle()
    await pool.close()
    with pytest.raises(EngineDied):
        await running
    assert all(slots[index].died.is_set() for index in range(2))
    assert not pool.up.is_set()


@in_loop
async def test_replica_that_does_not_start_ends_the_others() -> None:
    slots = Slots(1)

    async def fail() -> None:
        raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        await SamplerPool.start([*slots.launches(), fail], trainer=await trainer_with("m"))  # type: ignore[list-item]
    assert slots[0].died.is_set()


@in_loop
async def test_trainer_samples_what_vllm_does_not_support(tmp_path: Path) -> None:
    slots, trainer = Slots(2), await trainer_with("m")
    pool = await SamplerPool.start(slots.launches(), trainer.card, trainer=trainer)
    await trainer.save("m", tmp_path / "v", optimizer=False)
    await pool.attach("v", tmp_path / "v")
    await pool.sample(request_of(1, version="v", top_k=3))
    assert not any(slots[index].requests for index in range(2))
    request = request_of(2, version="v", prompt_logprobs=True)
    result = await pool.sample(request)
    (routed,) = slots[0].requests
    expected = await trainer.sample(replace(request, version=routed.version))
    assert np.array_equal(result.sequences[0].tokens, expected.sequences[0].tokens)
    assert result.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert np.array_equal(result.prompt_logprobs, expected.prompt_logprobs, equal_nan=True)
    await pool.detach("v")
    with pytest.raises(Gone):
        await trainer.sample(replace(request, version=routed.version))
    await pool.close()
