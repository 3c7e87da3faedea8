"""A run whose gradients are computed while the rest of the batch is sampled equals one that waits for whole batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.rl.scripted_run import REPLIES, rows, run, settings
from tinsmith.testing import ScriptedPolicy


@pytest.mark.parametrize("staleness", [0, 1])
def test_streamed_run_equals_a_run_of_whole_batches(tmp_path, staleness):
    parts: list[int] = []

    async def connect(state: str, version: int) -> ScriptedPolicy:
        class Counting(ScriptedPolicy):
            async def accumulate(self, update):
                parts.append(self.version)
                return await super().accumulate(update)

        folder = tmp_path / "streamed" / "weights"
        return Counting(REPLIES, folder, state=state, version=version, middleware=(slow,))

    async def slow(request, sample):
        for _ in range(request.seed % 7):
            await asyncio.sleep(0)
        return await sample(request)

    how = {"staleness": staleness, "groups_per_step": 6, "optimizer": {"learning_rate": 0.02}}
    whole = run(settings(tmp_path / "whole", **how))
    streamed = run(settings(tmp_path / "streamed", **how, updates={"stream": 3}), connect)
    assert max(map(parts.count, set(parts))) > 1
    names = ("reward/mean", "optim/entropy", "tokens/sampled")
    for name in names:
        expected = [row[name] for row in rows(tmp_path / "whole") if name in row]
        assert [row[name] for row in rows(tmp_path / "streamed") if name in row] == pytest.approx(expected)
    assert eval(Path(streamed.path).read_text()) == pytest.approx(eval(Path(whole.path).read_text()))
