"""Shadow steps of a tiny model through the real SDK, against plain transformers with PEFT in float64."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import tinker
import torch

from tests.engine.reference import Reference
from tinsmith.engine.base import AdamParams, Datum, Pass
from tinsmith.errors import TinsmithError, UserError
from tinsmith.integrations.minds.shadow.config import ShadowConfig
from tinsmith.integrations.minds.shadow.records import ShadowDelta, ShadowText
from tinsmith.integrations.minds.shadow.service import ShadowService
from tinsmith.integrations.minds.shadow.tinker import TinkerShadowServer, text_datum
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.tinker_models import TinkerModels
from tinsmith.rl.policy.trainer import Update
from tinsmith.rl.policy.training_rows import TrainingRow
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

T = TypeVar("T")
RATE = 2e-5
METHODS = ("fork", "reverse", "virtual")


def random_text(seed: int, length: int, prompt: int) -> ShadowText:
    """Random tokens; those after the prompt have weights, some of them fractional or negative."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(3, 500, length)
    weights = [0.0] * (prompt - 1) + draw.choice([1.0, 0.5, -0.25], length - prompt).tolist()
    return ShadowText(tokens=tuple(int(token) for token in tokens), weights=tuple(weights))


REPLIES = tuple(random_text(seed, 17, 6) for seed in range(3))
PROBES = tuple(random_text(seed, 9, 5) for seed in range(10, 13))


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folder of the service."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def served(tiny_llama: Path, data_folder: Path) -> Iterator[tuple[str, str]]:
    """Address and key of a service with the torch engine."""
    config = ServeConfig.model_validate(
        {"models": (f"tiny={tiny_llama}",), "data": data_folder, "device": "cpu", "dtype": "float32", "threads": 1}
    )
    with embedded(config) as address:
        yield address


def with_policy(served: tuple[str, str], use: Callable[[TinkerTrainer], Awaitable[T]]) -> T:
    """The result of `use` with a new policy that has taken two steps, so that no weight of the adapter is 0."""

    async def main() -> T:
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=4), *served, seed=1)
        try:
            for seed in (100, 101):
                await train(policy, seed)
            return await use(policy)
        finally:
            await policy.models.close()

    return asyncio.run(main())


async def train(policy: TinkerTrainer, seed: int) -> None:
    text = random_text(seed, 20, 4)
    row = TrainingRow(
        tokens=np.array(text.tokens[:-1], np.int64),
        targets=np.array(text.tokens[1:], np.int64),
        logprobs=np.zeros(19, np.float32),
        advantages=np.zeros(19, np.float32),
        mask=np.ones(19, bool),
    )
    update = Update(rows=(row,), inputs=({"weights": np.ones(19, np.float32)},), loss="cross_entropy")
    await policy.train([update], OptimizerConfig(beta2=0.95, eps=1e-8), 0.01)


@asynccontextmanager
async def shadowing(policy: TinkerTrainer, lag: int = 0, **settings: Any):
    """A ShadowService of the policy, and its server."""
    config = ShadowConfig.model_validate({"learning_rate": RATE, **settings})
    server = TinkerShadowServer(policy, config, lag)
    shadow = ShadowService(config, server)
    try:
        yield shadow, server
    finally:
        await shadow.close()


async def saved(policy: TinkerTrainer, data_folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Save the policy; returns the checkpoint's folder and the contents of its files."""
    before = set((data_folder / "checkpoints").iterdir()) if (data_folder / "checkpoints").exists() else set()
    await policy.save(f"test-{len(before)}", None)
    (folder,) = set((data_folder / "checkpoints").iterdir()) - before
    return folder, {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def datum(text: ShadowText) -> Datum:
    return Datum(
        tokens=np.array(text.tokens[:-1], np.int32),
        targets=np.array(text.tokens[1:], np.int64),
        inputs={"weights": np.array(text.weights, np.float64)},
    )


def cross_entropy(texts: Sequence[ShadowText]) -> Pass:
    return Pass(model_id="m", data=[datum(text) for text in texts], loss_fn="cross_entropy", loss_config={})


def value(reference: Reference, text: ShadowText) -> float:
    """sum(weights * logprobs) of a text."""
    with torch.no_grad():
        (logprobs,) = reference.logprobs([datum(text)])
    return float((logprobs * torch.tensor(text.weights, dtype=logprobs.dtype)).sum())


def gradient_step(reference: Reference, texts: Sequence[ShadowText], rate: float) -> None:
    """A step of plain gradient descent."""
    reference.backward(cross_entropy(texts))
    with torch.no_grad():
        for parameter in reference.parameters.values():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
                parameter.grad = None


def effects(
    base: Path, adapter: Path, train: Sequence[ShadowText], probes: Sequence[ShadowText], optimizer: str
) -> list[float]:
    """Effects of a step in float64."""
    reference = Reference(base, adapter)
    before = [value(reference, probe) for probe in probes]
    if optimizer == "sgd":
        gradient_step(reference, train, RATE)
    else:
        reference.backward(cross_entropy(train))
        reference.step(AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8))
    return [value(reference, probe) - old for probe, old in zip(probes, before, strict=True)]


def values(delta: ShadowDelta) -> list[float]:
    return [probe.delta for probe in delta.probes]


@pytest.mark.parametrize("method", ["fork", "virtual"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam_fresh"])
def test_exact_steps_equal_float64(served, tiny_llama, data_folder, method, optimizer):
    async def use(policy: TinkerTrainer):
        folder, _ = await saved(policy, data_folder)
        async with shadowing(policy, method=method, optimizer=optimizer) as (shadow, _):
            return folder, await shadow.delta(train=REPLIES[:2], probes=PROBES)

    folder, delta = with_policy(served, use)
    wanted = effects(tiny_llama, folder, REPLIES[:2], PROBES, optimizer)
    assert values(delta) == pytest.approx(wanted, abs=3e-5)
    assert max(map(abs, wanted)) > 1e-3
    reference = Reference(tiny_llama, folder)
    for probe, effect in zip(PROBES, delta.probes, strict=True):
        assert effect.logprob_pre == pytest.approx(value(reference, probe), abs=1e-4)
        assert effect.logprob_post == pytest.approx(effect.logprob_pre + effect.delta, abs=1e-6)
        assert effect.mean == pytest.approx(effect.delta / np.abs(probe.weights).sum())
    assert (delta.version, delta.rung, delta.optimizer, delta.mode) == (2, method, optimizer, "exact")


@pytest.mark.parametrize("method", ["fork", "virtual"])
def test_inherited_moments_equal_float64(served, tiny_llama, data_folder, method):
    async def main():
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=4), *served, seed=1)
        folder, _ = await saved(policy, data_folder)
        for seed in (100, 101):
            await train(policy, seed)
        async with shadowing(policy, method=method, optimizer="adam_inherit") as (shadow, _):
            delta = await shadow.delta(train=REPLIES[:1], probes=PROBES)
        await policy.models.close()
        return folder, delta

    folder, delta = asyncio.run(main())
    reference = Reference(tiny_llama, folder)
    for seed in (100, 101):  # the policy's own training
        text = random_text(seed, 20, 4)
        reference.backward(cross_entropy([ShadowText(tokens=text.tokens, weights=(1.0,) * 19)]))
        reference.step(AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8))
    before = [value(reference, probe) for probe in PROBES]
    reference.backward(cross_entropy(REPLIES[:1]))
    reference.step(AdamParams(learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8))
    wanted = [value(reference, probe) - old for probe, old in zip(PROBES, before, strict=True)]
    assert values(delta) == pytest.approx(wanted, abs=3e-5)
    assert max(map(abs, wanted)) > 1e-4


def test_first_order_steps_equal_inner_products(served, tiny_llama, data_folder):
    async def use(policy: TinkerTrainer):
        folder, _ = await saved(policy, data_folder)
        async with shadowing(policy, method="virtual", mode="first_order", audit=1) as (shadow, _):
            steps = (shadow.delta(train=[reply], probes=PROBES) for reply in REPLIES)
            return folder, await asyncio.gather(*steps), shadow.metrics()

    folder, deltas, metrics = with_policy(served, use)
    reference = Reference(tiny_llama, folder)
    gradients = []
    for text in (*REPLIES, *PROBES):
        reference.backward(cross_entropy([text]))
        gradients.append(np.concatenate([values.ravel() for values in reference.gradients().values()]))
        for parameter in reference.parameters.values():
            parameter.grad = None
    products = np.array(gradients[:3]) @ np.array(gradients[3:]).T
    assert np.array(list(map(values, deltas))) == pytest.approx(RATE * products, rel=1e-3, abs=1e-6)
    exact = [effects(tiny_llama, folder, [reply], PROBES, "sgd") for reply in REPLIES]
    assert metrics["shadow/audit_mae"] == pytest.approx(np.abs(exact - RATE * products).mean(), abs=3e-5)
    assert deltas[0].mode == "first_order"


def test_reverse_equals_float64_in_both_directions(served, tiny_llama, data_folder):
    async def use(policy: TinkerTrainer):
        folder, _ = await saved(policy, data_folder)
        async with shadowing(policy, method="reverse") as (shadow, _):
            deltas = [await shadow.delta(train=REPLIES[:2], probes=PROBES)]
            deltas += await asyncio.gather(*(shadow.delta(train=[reply], probes=PROBES) for reply in REPLIES))
            return folder, deltas, shadow.metrics()

    folder, (two, *single), metrics = with_policy(served, use)
    reversed_effects = []
    for probe in PROBES:
        reference = Reference(tiny_llama, folder)
        before = [value(reference, reply) for reply in REPLIES]
        gradient_step(reference, [probe], RATE)
        reversed_effects.append([value(reference, reply) - old for reply, old in zip(REPLIES, before, strict=True)])
    wanted = np.array(reversed_effects).T
    assert np.array(list(map(values, single))) == pytest.approx(wanted, abs=3e-5)
    assert values(two) == pytest.approx(wanted[0] + wanted[1], abs=3e-5)
    forward = [effects(tiny_llama, folder, [reply], PROBES, "sgd") for reply in REPLIES]
    assert np.corrcoef(wanted.ravel(), np.ravel(forward))[0, 1] > 0.95
    assert metrics["shadow/live_forks"] == len(PROBES) + 1


@pytest.mark.parametrize("method", METHODS)
def test_policy_is_bit_identical_after_shadow_steps(served, data_folder, method):
    async def use(policy: TinkerTrainer):
        _, before = await saved(policy, data_folder)
        async with shadowing(policy, method=method) as (shadow, _):
            steps = (shadow.delta(train=[reply], probes=PROBES) for reply in REPLIES * 2)
            await asyncio.gather(*steps)
        _, after = await saved(policy, data_folder)
        return before, after

    before, after = with_policy(served, use)
    assert sorted(before) == ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"]
    assert before == after


@pytest.mark.parametrize("method", METHODS)
def test_pending_gradient_is_not_changed(served, data_folder, method):
    def trained(*, shadows: bool) -> dict[str, bytes]:
        async def use(policy: TinkerTrainer):
            data = [[text_datum(reply)] for reply in REPLIES[:2]]
            await policy.client.forward_backward(data[0], "cross_entropy")
            if shadows:
                async with shadowing(policy, method=method) as (shadow, _):
                    await shadow.delta(train=[REPLIES[2]], probes=PROBES)
            await policy.client.forward_backward(data[1], "cross_entropy")
            await policy.client.optim_step(tinker.AdamParams(learning_rate=1e-3))
            return (await saved(policy, data_folder))[1]

        return with_policy(served, use)

    assert trained(shadows=True) == trained(shadows=False)


@pytest.mark.parametrize("method", METHODS)
def test_steps_of_an_older_version_are_its_own(served, method):
    # Method "reverse" trains a fork for each probe; several may be trained in one batch, which rounds differently.
    probes = PROBES[:1] if method == "reverse" else PROBES

    async def use(policy: TinkerTrainer):
        async with shadowing(policy, lag=1, method=method) as (shadow, _):
            first = await shadow.delta(train=REPLIES[:1], probes=probes)
            await train(policy, 102)
            again = await shadow.delta(train=REPLIES[:1], probes=probes, at=2)
            newest = await shadow.delta(train=REPLIES[:1], probes=probes)
            await train(policy, 103)
            with pytest.raises(UserError, match="weights of version 2 are not saved"):
                await shadow.delta(train=REPLIES[:1], probes=probes, at=2)
        return first, again, newest

    first, again, newest = with_policy(served, use)
    assert (again.version, newest.version) == (2, 3)
    assert values(again) == values(first)
    assert values(newest) != values(first)


def test_saved_versions_need_no_earlier_shadow_step(served):
    async def use(policy: TinkerTrainer):
        async with shadowing(policy, lag=1, method="fork") as (shadow, _):
            await train(policy, 102)
            old = await shadow.delta(train=REPLIES[:1], probes=PROBES, at=2)
        async with shadowing(policy, lag=0, method="fork") as (shadow, _):
            await train(policy, 103)
            with pytest.raises(UserError, match="not saved"):
                await shadow.delta(train=REPLIES[:1], probes=PROBES, at=3)
        return old

    assert with_policy(served, use).version == 2


@pytest.mark.parametrize("method", METHODS)
def test_failing_step_does_not_affect_others(served, method):
    wrong = ShadowText(tokens=(5, 6, 9_999_999), weights=(1.0, 1.0))

    async def use(policy: TinkerTrainer):
        async with shadowing(policy, method=method) as (shadow, server):
            alone = await shadow.delta(train=REPLIES[:1], probes=PROBES)
            steps = [shadow.delta(train=[text], probes=PROBES) for text in (wrong, REPLIES[0], wrong)]
            results = await asyncio.gather(*steps, return_exceptions=True)
            await train(policy, 102)
            return alone, results, shadow.metrics(), server.live_forks

    alone, (first, good, last), metrics, _ = with_policy(served, use)
    assert isinstance(first, TinsmithError)
    assert isinstance(last, TinsmithError)
    # The service may train forks in one batch, which rounds differently.
    assert values(good) == pytest.approx(values(alone), abs=1e-5)
    assert (metrics["shadow/count"], metrics["shadow/errors"]) == (2, 2)


def test_cancelled_step_frees_its_fork(served):
    async def use(policy: TinkerTrainer):
        async with shadowing(policy, method="fork") as (shadow, server):
            alone = await shadow.delta(train=REPLIES[:1], probes=PROBES)
            for turns in (1, 30):
                task = asyncio.create_task(shadow.delta(train=REPLIES[:1], probes=PROBES))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            return alone, server.live_forks, await shadow.delta(train=REPLIES[:1], probes=PROBES)

    alone, live, after = with_policy(served, use)
    assert live == 0
    # The server may still compute the cancelled steps, in one batch with this one, which rounds differently.
    assert values(after) == pytest.approx(values(alone), abs=1e-5)


def test_sessions_end_after_their_share_of_forks(served, monkeypatch):
    ended: list[Any] = []

    async def end(service: Any, status: Any) -> None:
        ended.append(service)
        await service.close(status)

    monkeypatch.setattr("tinsmith.integrations.minds.shadow.tinker.end_session", end)

    async def use(policy: TinkerTrainer):
        async with shadowing(policy, method="fork", forks_per_session=2) as (shadow, _):
            for _ in range(5):
                await shadow.delta(train=REPLIES[:1], probes=PROBES)
            await asyncio.sleep(0)
            return len(ended)

    assert with_policy(served, use) == 2
    assert len(ended) == 3


@pytest.mark.parametrize("optimizer", ["sgd", "adam_inherit"])
def test_live_forks_equal_forks_of_saved_weights(served, data_folder, monkeypatch, optimizer):
    async def main(policy: TinkerTrainer) -> None:
        folders = set((data_folder / "checkpoints").iterdir()) if (data_folder / "checkpoints").exists() else set()
        measured = []
        for names in (policy.models.extensions, policy.models.extensions - {"@live"}):
            monkeypatch.setattr(TinkerModels, "extensions", names)
            async with shadowing(policy, method="fork", optimizer=optimizer) as (shadow, _):
                measured.append(values(await shadow.delta(train=REPLIES[:1], probes=PROBES)))
                made = set((data_folder / "checkpoints").iterdir()) - folders
                assert len(made) == ("@live" not in names)
        assert measured[0] == measured[1]

    with_policy(served, main)
