"""The fake engine: gradients of its losses, sampling, immutable versions, adapter folders."""

import asyncio

import numpy as np
import pytest
import torch

from tests.engine.data import CONFIGS, LOSSES, datum_for, replace_inputs
from tinsmith.engine.base import AdamParams, Datum, LoraSpec, Pass, PassResult, SampleRequest
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.engine.fake.losses import builtin_loss
from tinsmith.engine.training import loss_specs
from tinsmith.engine.training.losses import LossInputs, objective
from tinsmith.errors import Gone


def engine() -> FakeEngine:
    return FakeEngine(EngineConfig(source="fake", kind="fake"))


def make_datum(loss_fn: str = "cross_entropy", n: int = 6, seed: int = 0) -> Datum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 512, n).astype(np.int32)
    values = {
        "weights": rng.standard_normal(n),
        "logprobs": -1 - rng.random(n),
        "advantages": rng.standard_normal(n),
        "sequence_ratio_mask": np.ones(n),
    }
    if loss_fn == "trinity_ppo":
        values |= {"weights": np.ones(n), "ref_logprobs": -1 - rng.random(n)}
    spec = loss_specs.LOSSES[loss_fn]
    needed = (
        ("weights",) if loss_fn == "cross_entropy" else (*spec.required, *{"ref_logprobs"}.intersection(spec.optional))
    )
    inputs = {key: values[key].astype(np.float32) for key in needed}
    return Datum(tokens=tokens, targets=rng.integers(0, 512, n).astype(np.int64), inputs=inputs)


async def train(fake: FakeEngine, model: str, steps: int = 2) -> list[float]:
    losses = []
    for index in range(steps):
        [result] = await fake.run([Pass(model_id=model, data=(make_datum(seed=index),), loss_fn="cross_entropy")])
        assert isinstance(result, PassResult)
        losses.append(result.metrics["loss:sum"])
        await fake.step(model, AdamParams(learning_rate=0.01, weight_decay=0.1))
    return losses


def request_of(name: str, datum: Datum, **config: float | str) -> Pass:
    return Pass(model_id="m", data=(datum,), loss_fn=name, loss_config={**CONFIGS.get(name, {}), **config})


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "trinity_ppo"])
def test_gradient_of_a_loss_equals_finite_differences(name: str) -> None:
    datum = make_datum(name)
    p, entropies = -1.0 - np.random.default_rng(1).random(6), np.zeros(6)
    request = request_of(name, datum)
    grad = builtin_loss(request, datum, p, entropies).grad
    for index in range(len(p)):
        step = np.zeros_like(p)
        step[index] = 1e-6
        difference = (
            builtin_loss(request, datum, p + step, entropies).loss
            - builtin_loss(request, datum, p - step, entropies).loss
        ) / 2e-6
        assert grad[index] == pytest.approx(difference, abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_the_metrics_of_the_torch_engine(name: str, estimator: str) -> None:
    """Each loss with each regularizer: names of the metrics, the entropy term, and a finite value and gradient."""
    rng = np.random.default_rng(4)
    datum = datum_for(name, rng, 12)
    config: dict[str, float | str] = {"entropy_coef": 0.4}
    if name != "trinity_ppo":
        datum = replace_inputs(datum, ref_logprobs=rng.normal(-6, 1, 12).astype(np.float32))
        config |= {"kl_coef": 0.2, "kl_estimator": estimator}
    request = request_of(name, datum, **config)
    p, entropies = rng.normal(-6, 1.5, 12), rng.uniform(0, 6, 12)
    actual = builtin_loss(request, datum, p, entropies)
    leaves = [torch.tensor(values, requires_grad=True) for values in (p, entropies)]
    inputs = {
        key: torch.tensor(values, dtype=torch.float64) for key, values in loss_specs.loss_inputs(request, datum).items()
    }
    targets = LossInputs(
        logprobs=leaves[0], entropies=leaves[1], sequence=torch.zeros(12, dtype=torch.long), inputs=inputs
    )
    loss, metrics = objective(
        name, targets, loss_specs.numeric_settings(request), loss_specs.kl_estimator(request), request.loss_config
    )
    entropy_grad = torch.autograd.grad(loss, leaves)[1]
    assert np.isfinite(actual.loss)
    assert np.isfinite(actual.grad).all()
    assert actual.grad.any()
    np.testing.assert_allclose(actual.entropy_grad, entropy_grad.numpy(), rtol=1e-9, atol=1e-12)
    assert actual.metrics.keys() == metrics.keys()


def test_entropy_bonus_raises_the_entropy() -> None:
    async def main() -> None:
        fake = engine()
        await fake.create("m", LoraSpec(rank=4, seed=1))
        datum = Datum(
            tokens=make_datum().tokens, targets=make_datum().targets, inputs={"weights": np.zeros(6, np.float32)}
        )
        config = {"entropy_coef": 1.0, "return_entropy": 1.0}
        datum = replace_inputs(datum, entropy_mask=np.ones(6, np.float32))
        request = Pass(model_id="m", data=(datum,), loss_fn="cross_entropy", loss_config=config)
        sums = []
        for _ in range(4):
            [result] = await fake.run([request])
            assert isinstance(result, PassResult)
            assert result.entropies is not None
            assert result.metrics["entropy:sum"] == pytest.approx(result.entropies[0].sum(), rel=1e-5)
            assert result.metrics["loss:sum"] == pytest.approx(-result.entropies[0].sum(), rel=1e-5)
            sums.append(result.metrics["entropy:sum"])
            await fake.step("m", AdamParams(learning_rate=0.01))
        assert sums == sorted(sums)
        assert sums[-1] > sums[0] + 0.01

    asyncio.run(main())


def test_step_lowers_the_loss_of_equal_new_adapters() -> None:
    async def main() -> None:
        fake = engine()
        for seed, name in ((1, "a"), (2, "b")):
            await fake.create(name, LoraSpec(rank=4, seed=seed))
        request = Pass(model_id="a", data=(make_datum(),), loss_fn="importance_sampling", forward_only=True)
        datum = Datum(
            tokens=make_datum().tokens, targets=make_datum().targets, inputs={"weights": np.ones(6, np.float32)}
        )
        passes = [Pass(model_id=name, data=(datum,), loss_fn="cross_entropy") for name in "ab"]
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


def test_loaded_state_continues_bit_for_bit(tmp_path) -> None:
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


def test_versions_never_change_and_unknown_raise_gone(tmp_path) -> None:
    async def main() -> None:
        fake = engine()
        await fake.create("m", LoraSpec(rank=4, seed=3))
        await train(fake, "m")
        await fake.capture("m", "v1")
        sample_request = SampleRequest(
            request_id="r", prompt=np.asarray([5, 6, 7], np.int32), version="v1", max_tokens=1, prompt_logprobs=True
        )
        before = await fake.sample(sample_request)
        await fake.persist("v1", tmp_path / "v1")
        await train(fake, "m")
        after = await fake.sample(sample_request)
        np.testing.assert_array_equal(before.prompt_logprobs, after.prompt_logprobs)
        await fake.detach("v1")
        with pytest.raises(Gone):
            await fake.sample(sample_request)
        await fake.attach("v1", tmp_path / "v1")
        np.testing.assert_array_equal((await fake.sample(sample_request)).prompt_logprobs, before.prompt_logprobs)

    asyncio.run(main())


def test_sampling_follows_seed_stop_and_temperature() -> None:
    async def main() -> None:
        fake = engine()

        async def sample_request(**changes):
            values = {"request_id": "r", "prompt": np.asarray([5, 6], np.int32), "max_tokens": 30, "num_samples": 2}
            return await fake.sample(SampleRequest(**{**values, "stop_tokens": (), **changes}))

        datum, again, other = await sample_request(seed=1), await sample_request(seed=1), await sample_request(seed=2)
        assert datum.sequences[0].tokens.tolist() == again.sequences[0].tokens.tolist()
        assert datum.sequences[0].tokens.tolist() != datum.sequences[1].tokens.tolist()
        assert datum.sequences[0].tokens.tolist() != other.sequences[0].tokens.tolist()
        assert [len(s.tokens) for s in datum.sequences] == [30, 30]
        stop = int(datum.sequences[0].tokens[4])
        stopped = (await sample_request(seed=1, stop_tokens=(stop,))).sequences[0]
        assert stopped.tokens[-1] == stop
        assert stopped.stop_reason == "stop"
        greedy = await sample_request(temperature=0.0, topk_sample_logprobs=3)
        assert greedy.sequences[0].tokens.tolist() == greedy.sequences[0].topk.token_ids[:, 0].tolist()
        # After temperature: differences of logprobs are divided by it.
        hot, cold = await sample_request(seed=1, topk_sample_logprobs=2, temperature=1.0), None
        cold = await sample_request(seed=1, topk_sample_logprobs=2, temperature=0.5)
        gaps = [np.diff(answer.sequences[0].topk.logprobs[0])[0] for answer in (hot, cold)]
        assert gaps[1] == pytest.approx(2 * gaps[0], rel=1e-4)

    asyncio.run(main())
