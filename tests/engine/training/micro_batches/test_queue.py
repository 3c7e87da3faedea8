"""Micro-batches of runs in progress: shares take turns by tokens, runs join at the next micro-batch, failures stay."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.data import pass_for
from tests.engine.inspection import gradients_of
from tests.engine.reference import assert_same
from tinsmith.engine.base import AdamParams, PassResult
from tinsmith.engine.model.packing import PackedRow
from tinsmith.errors import BadRequest, TinsmithError

BUDGET = 100


class Rows:
    """Stands for a TrainingRun: rows of given lengths without common prefixes."""

    def __init__(self, share: str, lengths: Sequence[int], packing_group: object = None, with_grad: bool = True):
        self.share, self.packing_group, self.next_has_grad = share, packing_group, with_grad
        self.budget = None
        self.error: Exception | None = None
        self.next_rows = deque(
            PackedRow(key=key, adapter=0, tokens=np.full(length, key, np.int32)) for key, length in enumerate(lengths)
        )

    @property
    def is_over(self) -> bool:
        return self.error is not None or not self.next_rows

    def finish(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return [self.share]

    def discard(self) -> None:
        """Nothing to discard."""


class Device:
    """Stands for a runner; records micro-batches: the tokens of each run in each."""

    tokens, cuts = BUDGET, False

    def __init__(self, fails: Any = lambda runs: None, at_once: int = 1) -> None:
        from tinsmith.engine.training.micro_batches.queue import MicroBatchQueue

        self.batches: list[Counter[Any]] = []
        self.turns: list[list[SimpleNamespace]] = []
        """Micro-batches that were computed at the same time."""
        self._fails, self.at_once = fails, at_once
        self.queue = MicroBatchQueue(self, self._turn)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        for _ in range(3):
            await asyncio.sleep(0)
        yield

    def start(self, parts: Sequence[Any], with_grad: bool) -> SimpleNamespace:
        assert all(run.packing_group is parts[0][0].packing_group for run, _ in parts)
        self.batches.append(Counter({run: sum(len(row.tokens) for row in rows) for run, rows in parts}))
        return SimpleNamespace(runs=[run for run, _ in parts], is_done=False, error=None)

    def advance(self, running: Sequence[SimpleNamespace]) -> None:
        assert len(running) <= self.at_once
        self.turns.append(list(running))
        for each in running:
            try:
                self._fails(each.runs)
            except Exception as error:  # noqa: BLE001 - any error is kept
                each.error = error
            each.is_done = True

    def tokens_of(self, share: str) -> list[int]:
        """Tokens of a share in each micro-batch."""
        return [sum(tokens for run, tokens in batch.items() if run.share == share) for batch in self.batches]


async def spin(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("The condition did not become true.")


def test_small_run_is_in_the_next_micro_batch() -> None:
    """Break it: sort the runs by their arrival in `_next_micro_batch`."""

    async def main() -> None:
        device = Device()
        large = [asyncio.create_task(device.queue.run([Rows("busy", [50] * 400)])) for _ in range(5)]  # type: ignore[list-item]
        await spin(lambda: len(device.batches) == 10)
        small = Rows("single", [20, 20])
        await device.queue.run([small])  # type: ignore[list-item]
        assert [number for number, batch in enumerate(device.batches) if small in batch] in ([10], [11])
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)
        before = len(device.batches)
        await asyncio.sleep(0.01)
        assert len(device.batches) == before, "cancelled runs are not computed"

    asyncio.run(main())


def test_shares_get_equal_tokens_whatever_their_runs() -> None:
    """Break it: charge a micro-batch in place of its tokens."""

    async def main() -> None:
        device = Device()

        async def one_after_the_other(share: str, lengths: Sequence[int], count: int) -> None:
            for _ in range(count):
                await device.queue.run([Rows(share, lengths)])  # type: ignore[list-item]

        tenants = [one_after_the_other("a", [90] * 20, 9), one_after_the_other("b", [7] * 40, 9)]
        tenants += [one_after_the_other("c", [400], 9), *(one_after_the_other("d", [10] * 20, 9) for _ in range(3))]
        done, _ = await asyncio.wait([asyncio.create_task(work) for work in tenants], return_when="FIRST_COMPLETED")
        assert done
        served = [sum(device.tokens_of(share)) for share in "abcd"]
        assert max(served) - min(served) <= 2 * 400, served

    asyncio.run(main())


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(st.integers(1, 150), max_size=8),
            st.sampled_from([None, 1, 2]),
            st.booleans(),
            st.integers(0, 5),
        ),
        max_size=12,
    ),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=100)
def test_every_row_is_computed_once_within_the_budget(coming: Any, at_once: int) -> None:
    async def main() -> None:
        device, tasks, runs = Device(at_once=at_once), [], []
        for share, lengths, group, with_grad, pause in coming:
            runs.append(Rows(share, lengths, group, with_grad))
            tasks.append(asyncio.create_task(device.queue.run([runs[-1]])))  # type: ignore[list-item]
            for _ in range(pause):
                await asyncio.sleep(0)
        assert await asyncio.gather(*tasks) == [[[run.share]] for run in runs]
        for run, (_, lengths, *_) in zip(runs, coming, strict=True):
            assert sum(batch[run] for batch in device.batches) == sum(lengths)
        for batch in device.batches:
            assert batch.total() <= BUDGET or len(batch) == 1
            assert len({run.next_has_grad for run in batch}) == 1
        for turn in device.turns:
            together = [run for each in turn for run in each.runs]
            assert len(together) == len(set(together)), "a run is in one micro-batch at a time"

    asyncio.run(main())


def test_runs_that_do_not_fit_are_computed_at_the_same_time() -> None:
    """Break it: do not leave the runs of the first micro-batch out of the second."""

    async def main() -> None:
        device = Device(at_once=2)
        await asyncio.gather(*(device.queue.run([Rows("a", [60, 60])]) for _ in range(4)))  # type: ignore[list-item]
        assert [len(turn) for turn in device.turns] == [2, 2, 2, 2]

    asyncio.run(main())


def test_failing_micro_batch_fails_its_runs_only() -> None:
    async def main() -> None:
        bad = Rows("b", [30])

        def fails(runs: Sequence[Rows]) -> None:
            if bad in runs:
                raise MemoryError

        device = Device(fails)
        beside, later = Rows("a", [30]), Rows("c", [90, 90])
        answers = await asyncio.gather(
            *(device.queue.run([run]) for run in (beside, bad, later)),  # type: ignore[list-item]
            return_exceptions=True,
        )
        assert [isinstance(answer, MemoryError) for answer in answers] == [True, True, False]

    asyncio.run(main())


def busy_and_single(pair: Any, **settings: Any) -> tuple[Any, Any, Any, Any]:
    """(engine, a large pass of tenant a, a small pass of tenant b, their oracles)."""
    (engine, busy, left), (_, single, right) = pair(pass_tokens=32, **settings), pair(pass_tokens=32, **settings)
    large = replace(pass_for("cross_entropy", busy, lengths=(30,) * 20), share="a")
    small = replace(pass_for("ppo", single, lengths=(5, 3)), share="b")
    return engine, large, small, (left, right)


def test_passes_in_company_match_oracle(pair: Any, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, large, small, oracles = busy_and_single(pair)
    ended, turns = [], []
    start = engine.trainer._runner.start

    def counted(parts: Any, with_grad: bool) -> Any:
        turns.append(len(parts))
        return start(parts, with_grad)

    monkeypatch.setattr(engine.trainer._runner, "start", counted)

    async def run(request: Any) -> Any:
        [result] = await engine.run([request])
        ended.append((request.share, len(turns)))
        return result

    async def together() -> Any:
        first = asyncio.create_task(run(large))
        await spin(lambda: bool(turns))
        second = await run(small)
        stepped = await engine.step(small.model_id, AdamParams(learning_rate=0.0))
        assert stepped["grad_norm"] > 0
        ended.append(("step of b", len(turns)))
        return await first, second

    gradient = None
    for result, request, oracle in zip(wait(together()), (large, small), oracles, strict=True):
        (loss,) = oracle.backward(request)
        assert isinstance(result, PassResult)
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        gradient = gradient or oracle.gradients()
    assert_same(gradients_of(engine, large.model_id), gradient)
    assert [name for name, _ in ended] == ["b", "step of b", "a"]
    assert ended[0][1] <= 3, "the small pass is answered after its own micro-batch"
    assert ended[1][1] < ended[2][1] == 21


def test_failing_pass_in_company_fails_alone(pair: Any, wait: Any) -> None:
    engine, large, small, oracles = busy_and_single(pair)
    broken = replace(small, data=(replace(small.data[0], tokens=np.full_like(small.data[0].tokens, 4000)),))
    overflow = {"logprobs": np.full(5, -9e4, np.float32)}
    diverging = replace(small, data=(replace(small.data[0], inputs={**small.data[0].inputs, **overflow}),))

    async def together(bad: Any) -> Any:
        return await asyncio.gather(engine.run([large]), engine.run([bad]))

    oracles[0].backward(large)
    for bad in (broken, diverging):
        [[good], [failed]] = wait(together(bad))
        assert isinstance(good, PassResult)
        assert isinstance(failed, TinsmithError)
        assert isinstance(failed, BadRequest) == (bad is diverging)
        assert_same(gradients_of(engine, large.model_id), oracles[0].gradients())
        assert not any(gradient.any() for gradient in gradients_of(engine, small.model_id).values())
        wait(engine.step(large.model_id, AdamParams(learning_rate=0.0)))


def test_calls_on_a_model_take_effect_in_order(pair: Any, wait: Any) -> None:
    engine, large, _, (oracle, _) = busy_and_single(pair)

    async def main() -> Any:
        return await asyncio.gather(
            engine.run([large]),
            engine.step(large.model_id, AdamParams(learning_rate=0.0)),
            engine.run([large]),
            engine.step(large.model_id, AdamParams(learning_rate=0.0)),
        )

    _, first, _, second = wait(main())
    oracle.backward(large)
    norm = float(np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in oracle.gradients().values())))
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert second["grad_norm"] == pytest.approx(norm, rel=1e-4)
