"""The fake engine is an engine: its losses have the slopes it says, its versions never change, its files come back."""

import asyncio

import numpy as np
import pytest

from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult, SampleRequest
from tinsmith.engine.checks import LOSSES
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake import FakeEngine
from tinsmith.engine.fakemath import loss_of
from tinsmith.errors import Gone


def engine() -> FakeEngine:
    return FakeEngine(EngineConfig(source="fake", kind="fake"))


def datum(loss_fn: str = "cross_entropy", n: int = 6, seed: int = 0) -> Datum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 512, n).astype(np.int32)
    values = {
        "weights": rng.standard_normal(n),
        "logprobs": -1 - rng.random(n),
        "advantages": rng.standard_normal(n),
        "sequence_ratio_mask": np.ones(n),
    }
    needed = ("weights",) if loss_fn == "cross_entropy" else LOSSES[loss_fn].required
    inputs = {key: values[key].astype(np.float32) for key in needed}
    return Datum(tokens=tokens, targets=rng.integers(0, 512, n).astype(np.int64), inputs=inputs)


async def train(fake: FakeEngine, model: str, steps: int = 2) -> list[float]:
    losses = []
    for index in range(steps):
        [result] = await fake.run([Pass(model_id=model, data=(datum(seed=index),), loss_fn="cross_entropy")])
        assert isinstance(result, PassResult)
        losses.append(result.metrics["loss:sum"])
        await fake.step(model, AdamParams(learning_rate=0.01, weight_decay=0.1))
    return losses


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_slope_of_each_loss_is_its_derivative(name: str) -> None:
    one = datum(name)
    p = -1.0 - np.random.default_rng(1).random(6)
    _, slope = loss_of(name, p, one, {})
    if name in ("gspo", "cispo"):  # their gradients stop at the ratio by design: no finite difference shows them
        assert slope.shape == p.shape
        assert np.abs(slope).sum() > 0
        return
    for index in range(len(p)):
        step = np.zeros_like(p)
        step[index] = 1e-6
        slow = (loss_of(name, p + step, one, {})[0] - loss_of(name, p - step, one, {})[0]) / 2e-6
        assert slope[index] == pytest.approx(slow, abs=1e-5)


def test_a_step_goes_down_the_gradient_and_new_adapters_equal_the_base() -> None:
    async def main() -> None:
        fake = engine()
        for seed, name in ((1, "a"), (2, "b")):
            await fake.create(name, LoraSpec(rank=4, seed=seed))
        request = Pass(model_id="a", data=(datum(),), loss_fn="importance_sampling", forward_only=True)
        one = Datum(tokens=datum().tokens, targets=datum().targets, inputs={"weights": np.ones(6, np.float32)})
        passes = [Pass(model_id=name, data=(one,), loss_fn="cross_entropy") for name in "ab"]
        first = await fake.run(passes)
        assert all(isinstance(result, PassResult) for result in first)
        assert first[0].metrics == first[1].metrics  # type: ignore[union-attr]
        await fake.step("a", AdamParams(learning_rate=0.01))
        await fake.step("b", AdamParams(learning_rate=0.01))
        second = await fake.run(passes)
        assert second[0].metrics["loss:sum"] < first[0].metrics["loss:sum"]  # type: ignore[union-attr]
        assert second[0].metrics != second[1].metrics  # type: ignore[union-attr]  # A differs by seed
        assert request.forward_only

    asyncio.run(main())


def test_saved_state_goes_on_bit_for_bit(tmp_path) -> None:
    async def main() -> None:
        straight, broken = engine(), engine()
        for fake in (straight, broken):
            await fake.create("m", LoraSpec(rank=4, seed=3))
            await train(fake, "m")
        await broken.save("m", tmp_path / "state", optimizer=True)
        other = engine()
        await other.load("m", tmp_path / "state", optimizer=True)
        assert await train(other, "m", 3) == await train(straight, "m", 3)
        await other.load("m", tmp_path / "state", optimizer=False)
        assert (await train(other, "m", 3))[0] == (await train(broken, "m", 3))[0]

    asyncio.run(main())


def test_versions_never_change_and_unknown_ones_are_gone(tmp_path) -> None:
    async def main() -> None:
        fake = engine()
        await fake.create("m", LoraSpec(rank=4, seed=3))
        await train(fake, "m")
        await fake.capture("m", "v1")
        ask = SampleRequest(
            request_id="r", prompt=np.asarray([5, 6, 7], np.int32), version="v1", max_tokens=1, prompt_logprobs=True
        )
        before = await fake.sample(ask)
        await fake.persist("v1", tmp_path / "v1")
        await train(fake, "m")
        after = await fake.sample(ask)
        np.testing.assert_array_equal(before.prompt_logprobs, after.prompt_logprobs)
        await fake.detach("v1")
        with pytest.raises(Gone):
            await fake.sample(ask)
        await fake.attach("v1", tmp_path / "v1")
        np.testing.assert_array_equal((await fake.sample(ask)).prompt_logprobs, before.prompt_logprobs)

    asyncio.run(main())


def test_sampling_follows_seed_stop_and_temperature() -> None:
    async def main() -> None:
        fake = engine()

        async def ask(**changes):
            values = {"request_id": "r", "prompt": np.asarray([5, 6], np.int32), "max_tokens": 30, "num_samples": 2}
            return await fake.sample(SampleRequest(**{**values, "stop_tokens": (), **changes}))

        one, again, other = await ask(seed=1), await ask(seed=1), await ask(seed=2)
        assert one.sequences[0].tokens.tolist() == again.sequences[0].tokens.tolist()
        assert one.sequences[0].tokens.tolist() != one.sequences[1].tokens.tolist()
        assert one.sequences[0].tokens.tolist() != other.sequences[0].tokens.tolist()
        assert [len(s.tokens) for s in one.sequences] == [30, 30]
        stop = int(one.sequences[0].tokens[4])
        stopped = (await ask(seed=1, stop_tokens=(stop,))).sequences[0]
        assert stopped.tokens[-1] == stop
        assert stopped.stop_reason == "stop"
        greedy = await ask(temperature=0.0, topk_sample_logprobs=3)
        assert greedy.sequences[0].tokens.tolist() == greedy.sequences[0].topk.token_ids[:, 0].tolist()
        # After temperature: differences of logprobs are divided by it.
        hot, cold = await ask(seed=1, topk_sample_logprobs=2, temperature=1.0), None
        cold = await ask(seed=1, topk_sample_logprobs=2, temperature=0.5)
        gaps = [np.diff(answer.sequences[0].topk.logprobs[0])[0] for answer in (hot, cold)]
        assert gaps[1] == pytest.approx(2 * gaps[0], rel=1e-4)

    asyncio.run(main())
