"""TinkerTrainer with the real SDK, against a served fake engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tinker import TrainingClient

from tinsmith.errors import ConfigError, TinsmithError, UserError
from tinsmith.rl.algorithms.algorithm import Algorithm
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy import tinker_models
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.sdk import Capabilities
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.tinker_models import TinkerModels
from tinsmith.rl.policy.trainer import Update
from tinsmith.rl.record.update_metrics import update_metrics
from tinsmith.rl.types import Group, Message, Rollout, Task
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

PROMPT = (Message(role="user", content="What is 39 + 13?"),)
SAMPLING = SamplingConfig(max_tokens=5)
MODEL = ModelConfig(name="tiny", rank=4)
NAMES = ("tiny", "second")
"""Of the same base model."""
T = TypeVar("T")


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and key of a service with the fake engine."""
    data = tmp_path_factory.mktemp("served")
    with embedded(
        ServeConfig(models=tuple(f"{name}={tiny_llama}" for name in NAMES), engine="fake", data=data)
    ) as address:
        yield address


def with_policy(served, use: Callable[[TinkerTrainer], Awaitable[T]], config: ModelConfig = MODEL, **options) -> T:
    """The result of `use` with a connected policy, which is closed after."""

    async def main() -> T:
        policy = await TinkerTrainer.connect(config, *served, **{"seed": 1, **options})
        try:
            return await use(policy)
        finally:
            await policy.models.close()

    return asyncio.run(main())


def group_of(turns) -> Group:
    """A group with a rollout of increasing reward for each turn."""
    rollouts = tuple(Rollout.single((turn,), at**2 / 8) for at, turn in enumerate(turns))
    return Group(task=Task(id="t", messages=PROMPT), rollouts=rollouts)


async def train_once(policy: TinkerTrainer, *, seed: int, **algorithm: Any) -> dict[str, float]:
    """Sample a group of eight, make one update, and return its metrics."""
    turns = await (await policy.snapshot()).sample(PROMPT, count=8, seed=seed, sampling=SAMPLING)
    group = group_of(turns)
    update = await scored(policy, group, **algorithm)
    return update_metrics([(update, (await policy.train([update], OptimizerConfig(), 1e-2))[0])])


async def scored(policy: TinkerTrainer, group: Group, **algorithm: Any) -> Update:
    """The update of the default algorithm, with changes, for a group; rows without advantage are included."""
    config = AlgorithmConfig.model_validate({"advantage": {"std_threshold": None}, **algorithm})

    async def reference(rows):
        return [await (await policy.models.open_model("tiny")).logprobs(row.sequence) for row in rows]

    columns = {"reference": reference, "entropy": policy.entropies}
    return await Algorithm(config, policy.models.extensions, columns, 0).score_part(1, [group])


def test_replies_have_prompt_tokens_logprobs_and_text(served, tiny_llama):
    from transformers import AutoTokenizer

    async def use(policy: TinkerTrainer):
        return await (await policy.snapshot()).sample(PROMPT, count=3, seed=7, sampling=SAMPLING)

    turns = with_policy(served, use)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    prompt = "<|im_start|>user\nWhat is 39 + 13?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(turns[0].prompt) == prompt
    assert len({turn.tokens for turn in turns}) == 3
    for turn in turns:
        assert 1 <= len(turn.tokens) == len(turn.logprobs) <= 5
        assert turn.text == tokenizer.decode(turn.tokens, skip_special_tokens=True)
        assert (turn.stop, turn.version) == ("stop" if turn.tokens[-1] == 2 else "length", 0)


def test_replies_depend_on_the_seed_only(served):
    async def use(policy: TinkerTrainer):
        snapshot = await policy.snapshot()
        return [await snapshot.sample(PROMPT, count=4, seed=seed, sampling=SAMPLING) for seed in (1, 1, 2)]

    first, again, other = with_policy(served, use)
    assert first == again != other


def test_prompt_may_be_token_ids(served):
    async def use(policy: TinkerTrainer):
        return await (await policy.snapshot()).sample([5, 6, 7], count=1, seed=1, sampling=SAMPLING)

    assert with_policy(served, use)[0].prompt == (5, 6, 7)


def test_trainer_and_sampler_agree_on_policy_samples(served):
    async def use(policy: TinkerTrainer):
        return [await train_once(policy, seed=seed) for seed in range(3)], policy.version

    numbers, version = with_policy(served, use)
    assert version == 3
    for metrics in numbers:
        assert metrics["optim/kl_sample_train_v2"] < 1e-9
        assert {"optim/loss", "optim/grad_norm"} <= metrics.keys()
    assert numbers[-1]["optim/grad_norm"] > 0


def test_snapshot_is_unchanged_by_updates(served):
    async def use(policy: TinkerTrainer):
        old = await policy.snapshot()
        before = await old.sample(PROMPT, count=2, seed=3, sampling=SAMPLING)
        await train_once(policy, seed=0)
        new = await policy.snapshot()
        return before, await old.sample(PROMPT, count=2, seed=3, sampling=SAMPLING), old.version, new.version

    before, after, old_version, new_version = with_policy(served, use)
    assert before == after
    assert (old_version, new_version) == (0, 1)


def test_saved_weights_and_optimizer_resume_exactly(served):
    async def whole(policy: TinkerTrainer):
        await train_once(policy, seed=0)
        path = await policy.save("half", 3600)
        return path, await train_once(policy, seed=1), await train_once(policy, seed=2)

    async def second(policy: TinkerTrainer):
        return policy.version, await train_once(policy, seed=1), await train_once(policy, seed=2)

    path, *numbers = with_policy(served, whole)
    version, *again = with_policy(served, second, state=path, version=1)
    assert path.startswith("tinker://")
    assert version == 1
    assert again == numbers


def test_load_from_starts_at_saved_weights(served):
    async def first(policy: TinkerTrainer):
        await train_once(policy, seed=0)
        return await policy.save("seed-weights", None), await reply(policy)

    async def reply(policy: TinkerTrainer):
        turns = await (await policy.snapshot()).sample(PROMPT, count=4, seed=9, sampling=SAMPLING)
        return [turn.tokens for turn in turns]

    path, tokens = with_policy(served, first)
    assert with_policy(served, reply, ModelConfig(name="tiny", load_from=path)) == tokens


def test_weights_saved_for_sampling_open_by_path(served):
    import tinker

    async def use(policy: TinkerTrainer):
        await train_once(policy, seed=0)
        return await policy.save_for_sampling("sampling-weights")

    path = with_policy(served, use)
    with tinker.ServiceClient(base_url=served[0], api_key=served[1]) as service:
        client = service.create_sampling_client(model_path=path).result()
        answer = client.sample(tinker.ModelInput.from_ints([1, 2]), 1, tinker.SamplingParams(max_tokens=2)).result()
    assert len(answer.sequences) == 1


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            ModelConfig(name="tny", rank=4),
            "not served here. Did you mean 'tiny'? Set model.name to",
        ),
        (ModelConfig(name="tiny", load_from="tinker://no/weights/such"), "tinker://no/weights/such"),
        (ModelConfig(name="tiny", rank=4, tokenizer="/no/such/folder"), "model.tokenizer"),
    ],
)
def test_connect_reports_refusals_as_user_errors(served, config, sentence):
    async def use(policy: TinkerTrainer): ...

    with pytest.raises(UserError) as caught:
        with_policy(served, use, config)
    assert sentence in str(caught.value)


def test_connect_rejects_wrong_key_and_wrong_address(served):
    async def use(policy: TinkerTrainer): ...

    with pytest.raises(UserError, match=r"rejected the API key .* keeps its own in api-key"):
        with_policy((served[0], "tml-wrong"), use)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="No server responds at"):
            with_policy((url, "tml-x"), use)
    with pytest.raises(ConfigError, match="not the URL of a server"):
        with_policy(("localhost:8000", "tml-x"), use)


def test_refused_update_names_the_loss(served):
    async def use(policy: TinkerTrainer):
        turns = await (await policy.snapshot()).sample(PROMPT, count=8, seed=0, sampling=SAMPLING)
        update = await scored(policy, group_of(turns))
        wrong = replace(update, loss="ppo", config={"clip_low": 0.5})
        return (await policy.train([wrong], OptimizerConfig(), 1e-2))[0]

    with pytest.raises(TinsmithError, match=r"training with the loss ppo.*clip_low"):
        with_policy(served, use)


def test_update_returns_logprobs_in_row_order(served):
    async def use(policy: TinkerTrainer):
        turns = await (await policy.snapshot()).sample(PROMPT, count=6, seed=4, sampling=SAMPLING)
        group = group_of(turns)
        update = await scored(policy, group, merge_replies=False)
        return update.rows, (await policy.train([update], OptimizerConfig(), 1e-3))[0]

    rows, updated = with_policy(served, use)
    for row, logprobs in zip(rows, updated.logprobs, strict=True):
        np.testing.assert_allclose(logprobs[row.mask], row.logprobs[row.mask], atol=1e-5)


def test_client_loss_trains_with_equal_logprobs(served):
    async def use(policy: TinkerTrainer):
        turns = await (await policy.snapshot()).sample(PROMPT, count=8, seed=0, sampling=SAMPLING)
        update = await scored(policy, group_of(turns), loss={"type": "topr"}, kl={"type": "abs", "coef": 0.1})
        assert update.client is not None
        return update.rows, (await policy.train([update], OptimizerConfig(), 1e-2))[0]

    rows, updated = with_policy(served, use)
    assert updated.metrics["kl"] == pytest.approx(0.0, abs=1e-5)  # a fresh adapter is the reference
    for row, logprobs in zip(rows, updated.logprobs, strict=True):
        np.testing.assert_allclose(logprobs[row.mask], row.logprobs[row.mask], atol=1e-5)


@pytest.mark.parametrize("trains", [True, False])
def test_model_on_the_general_path_is_a_warning_at_start(
    trains: bool, served: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Of a model that is trained or only sampled, and of a second one. To break it: leave out `warn` in `connect` of
    TinkerModels."""

    async def slow(*_: str) -> Capabilities:
        return Capabilities(general_path_faults={"tiny": "no kernel", "second": "no kernel here either"})

    async def main() -> None:
        if trains:
            models = (await TinkerTrainer.connect(MODEL, *served, seed=1)).models
        else:
            models = await TinkerModels.connect(MODEL, *served)
        for name in ("tiny", "second", "second"):
            await models.open_model(name)
        await models.close()

    monkeypatch.setattr(tinker_models, "capabilities", slow)
    asyncio.run(main())
    assert [message for message in caplog.messages if "slower here" in message] == [
        "tiny is several times slower here than on the engine's fast path: no kernel",
        "second is several times slower here than on the engine's fast path: no kernel here either",
    ]


def test_server_extensions_are_detected_and_used(served):
    async def use(policy: TinkerTrainer):
        turns = await (await policy.snapshot()).sample(PROMPT, count=8, seed=0, sampling=SAMPLING)
        algorithm = {"kl": {"type": "k2", "coef": 0.1}, "entropy": {"coef": 0.01}, "aggregate": "token_mean"}
        update = await scored(policy, group_of(turns), **algorithm)
        updated = (await policy.train([update], OptimizerConfig(), 1e-2))[0]
        return policy.models.extensions, update, updated, await policy.entropies(update.rows)

    extensions, update, updated, entropies = with_policy(served, use)
    assert {"kl_coef", "entropy_coef", "return_entropy"} <= extensions
    assert (update.client, update.loss) == (None, "importance_sampling")
    assert {"kl:sum", "entropy:sum"} <= updated.metrics.keys()
    assert [len(values) for values in entropies] == [len(row.tokens) for row in update.rows]


def test_auxiliary_adapter_learns_its_own_tokens(served):
    async def use(policy: TinkerTrainer):
        turns = await (await policy.snapshot()).sample(PROMPT, count=4, seed=0, sampling=SAMPLING)
        rows = (await scored(policy, group_of(turns))).rows
        adapter = await policy.auxiliary_adapter(rank=4, seed=3)
        ids = tuple(range(adapter.vocabulary - 8, adapter.vocabulary))
        before = await adapter.logprobs(rows, ids)
        weights = [np.zeros((len(row.tokens), 8), np.float32) for row in rows]
        for first in weights:
            first[:, 2] = 0.1
        numbers = await adapter.fit(rows, ids, weights, OptimizerConfig(), 1e-2)
        again = await policy.auxiliary_adapter(rank=4, seed=3, state=await adapter.save("critic", None))
        return before, numbers, await adapter.logprobs(rows, ids), await again.logprobs(rows, ids)

    before, numbers, after, again = with_policy(served, use)
    assert numbers["loss:sum"] > 0
    assert np.mean([second[:, 2].mean() - first[:, 2].mean() for first, second in zip(before, after, strict=True)]) > 0
    for first, second in zip(after, again, strict=True):
        np.testing.assert_array_equal(first, second)


def test_update_requests_the_next_sampling_weights_early(served, monkeypatch):
    requests: list[str] = []

    def record(name: str) -> None:
        send = getattr(TrainingClient, name)

        def recorded(client, *args, **options):
            requests.append(name)
            return send(client, *args, **options)

        monkeypatch.setattr(TrainingClient, name, recorded)

    for name in ("forward_backward", "optim_step", "save_weights_and_get_sampling_client"):
        record(name)

    async def use(policy: TinkerTrainer) -> None:
        await policy.snapshot()
        requests.clear()
        await train_once(policy, seed=1)
        assert requests == ["forward_backward", "optim_step", "save_weights_and_get_sampling_client"]
        snapshot = await policy.snapshot()
        assert snapshot.version == policy.version == 1
        assert await policy.snapshot() is snapshot
        assert len(requests) == 3
        update = await scored(policy, group_of(await snapshot.sample(PROMPT, count=8, seed=2, sampling=SAMPLING)))
        await policy.train([update], OptimizerConfig(), 1e-2)
        requests.clear()
        await policy.train([update], OptimizerConfig(), 1e-2)  # nothing sampled from the previous weights
        assert requests == ["forward_backward", "optim_step"]
        assert (await policy.snapshot()).version == policy.version == 3

    with_policy(served, use)
