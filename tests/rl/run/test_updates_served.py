"""Gradients in parts and several optimizer steps, with the real SDK and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rl.algorithms.test_loss_dispatch import config, groups
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.updates import UpdatesConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.run.gradient_stream import GradientStream
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

ADAM = OptimizerConfig(eps=1e-3)  # with a small eps, AdamW magnifies the rounding of small gradients
RATE = 1e-2
Trains = Callable[[TinkerTrainer], Awaitable[dict[str, float]]]


@pytest.fixture(scope="module")
def served(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and key of a service with a tiny model."""
    data = tmp_path_factory.mktemp("updates")
    with embedded(ServeConfig(models=(f"tiny={tiny('llama')}",), threads=1, dtype="float32", data=data)) as address:
        yield address


def trained(served: tuple[str, str], trains: Trains) -> tuple[dict[str, float], Sequence[np.ndarray], int]:
    """(the result of `trains`, logprobs after it, the version) of a new policy."""

    async def main() -> Any:
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=4), *served, seed=1)
        algorithm = Algorithm(config("grpo", merge_replies=False), policy.models.extensions, {}, 0)
        rows = (await algorithm.score_part(1, groups())).rows
        numbers = await trains(policy)
        after = await policy.logprobs(rows)
        version = policy.version
        await policy.models.close()
        return numbers, after, version

    return asyncio.run(main())


@pytest.mark.parametrize("loss", ["importance_sampling", "topr"])
def test_streamed_gradient_equals_that_of_the_batch(served, loss):
    settings, batch = config("grpo", loss={"type": loss}), groups()

    async def whole(policy: TinkerTrainer) -> dict[str, float]:
        update = await Algorithm(settings, policy.models.extensions, {}, 0, 4).score_part(1, batch)
        return dict((await policy.train([update], ADAM, RATE))[0].metrics)

    async def in_parts(policy: TinkerTrainer) -> dict[str, float]:
        stream = GradientStream(1, Algorithm(settings, policy.models.extensions, {}, 0, 4), policy)
        for group in batch:
            await stream.add([group])
        return await stream.finish(ADAM, RATE)

    expected, expected_logprobs, version = trained(served, whole)
    numbers, logprobs, streamed_version = trained(served, in_parts)
    assert (version, streamed_version) == (1, 1)
    assert numbers["optim/grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    # The losses of a group nearly cancel out where its advantages do; the rounding of their logprobs does not.
    assert numbers["optim/loss"] == pytest.approx(expected["loss:sum"], rel=1e-5, abs=1e-6)
    for theirs, ours in zip(expected_logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("correction", [{}, {"type": "tis"}, {"mask": "geometric", "mask_high": 3.0, "mask_low": 0.1}])
def test_pipelined_updates_equal_single_ones(served, correction):
    settings, division = (
        config("rloo", correction=correction, kl={"type": "none", "coef": 0}),
        UpdatesConfig(minibatches=2, epochs=2),
    )

    async def pipelined(policy: TinkerTrainer) -> dict[str, float]:
        columns = {"proximal": policy.logprobs}
        algorithm = Algorithm(settings, policy.models.extensions, columns, 0, 4, division)
        results = await policy.train((await algorithm.score(1, groups())).updates, ADAM, RATE)
        return {str(at): result.metrics["loss:sum"] for at, result in enumerate(results)}

    async def one_by_one(policy: TinkerTrainer) -> dict[str, float]:
        columns = {"proximal": policy.logprobs}
        algorithm = Algorithm(settings, policy.models.extensions, columns, 0, 4, division)
        losses = {}
        for at, update in enumerate((await algorithm.score(1, groups())).updates):
            losses[str(at)] = (await policy.accumulate(update)).metrics["loss:sum"]
            await policy.step(ADAM, RATE)
        return losses

    together, logprobs, version = trained(served, pipelined)
    expected, expected_logprobs, updates = trained(served, one_by_one)
    assert (version, updates, len(together)) == (1, 4, 4)
    assert together == pytest.approx(expected, rel=1e-5)
    for theirs, ours in zip(expected_logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
