"""Losses of users: they train as the built-in loss of the same formula does, and faults are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from tests.rl.scripted_run import run, settings
from tinsmith.errors import ConfigError
from tinsmith.rl.algorithms.algorithm import Algorithm, uploadable
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.algorithms.gradient_check import check_gradient
from tinsmith.rl.algorithms.losses import LossConfig
from tinsmith.rl.algorithms.losses.base import PolicyLoss
from tinsmith.rl.algorithms.losses.policy_gradient import PpoLoss
from tinsmith.rl.algorithms.losses.preference import PreferenceLoss
from tinsmith.rl.algorithms.losses.user_code import CustomLoss
from tinsmith.rl.algorithms.updates import UpdatesConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.types import Group, Message, Rollout, Task
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

HERE = Path(__file__).name
PROMPT = (Message(role="user", content="What is 39 + 13?"),)
BUILT_IN = [kind for kind in get_args(get_args(LossConfig)[0]) if kind is not CustomLoss]


def clipped(logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, epsilon: float = 0.2) -> Any:
    ratio = torch.exp(logprobs - sampling_logprobs)
    plain, bounded = -ratio * advantages, -ratio.clamp(1 - epsilon, 1 + epsilon) * advantages
    return torch.maximum(plain, bounded), {"clipped": (bounded > plain).float()}


def branching(logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor) -> Any:
    """The same, but for a branch that torch.fx cannot trace."""
    return clipped(logprobs, sampling_logprobs, advantages) if logprobs.sum() < 1 else None


def with_constants(logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor) -> Tensor:
    with torch.no_grad():
        weight = torch.exp(logprobs - sampling_logprobs).clamp(max=2.0)
    return -advantages * weight * torch.exp(logprobs - logprobs.detach())


class Squared(PolicyLoss):
    power: float = 2.0

    def tokens(self, logprobs: Any, batch: Any) -> Any:
        return (batch.advantages - logprobs).abs() ** self.power, {}


def test_loss_of_a_user_equals_the_built_in_one() -> None:
    ours, builtin = CustomLoss(path=clipped), PpoLoss(dual_clip=None)
    checked, reference = check_gradient(ours), check_gradient(builtin)
    assert (checked.equal, checked.gradient) == (True, pytest.approx(reference.gradient))


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_programs")
def test_runs_with_each_way_to_compute_it_have_equal_weights(tiny_llama: Path, tmp_path: Path) -> None:
    """Three steps of the server's loss, of the uploaded one, and of the one that the client computes."""
    ppo = {"type": "ppo", "dual_clip": None}
    losses = (ppo, {"type": "custom", "path": clipped}, {"type": "custom", "path": branching})

    async def trained(address: tuple[str, str], loss: dict[str, Any]) -> tuple[np.ndarray, str]:
        config = AlgorithmConfig.model_validate({"loss": loss, "aggregate": "token_mean"})
        policy = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=4), *address, seed=1)
        try:
            uploaded = ""
            if loss is losses[1]:
                uploaded = await policy.upload_loss(uploadable(config, UpdatesConfig()))
                assert uploaded
            algorithm = Algorithm(config, policy.models.extensions, {}, 0, uploaded=uploaded)
            turns = await (await policy.snapshot()).sample(
                PROMPT, count=6, seed=1, sampling=SamplingConfig(max_tokens=5)
            )
            rollouts = tuple(Rollout.single((turn,), at**2 / 8) for at, turn in enumerate(turns))
            group = Group(task=Task(id="t", messages=PROMPT), rollouts=rollouts)
            for step in (1, 2, 3):  # off-policy from the second on
                update = await algorithm.score_part(step, [group])
                (result,) = await policy.train([update], OptimizerConfig(), 3e-3)
                assert np.isfinite(result.metrics["loss:sum"])
            return np.concatenate(await policy.logprobs(update.rows)), algorithm.loss_location
        finally:
            await policy.models.close()

    serve = ServeConfig(models=(f"tiny={tiny_llama}",), data=tmp_path / "data", custom_losses=True)
    with embedded(serve) as address:
        results = [asyncio.run(trained(address, loss)) for loss in losses]
    assert [text.partition(",")[0] for _, text in results[:1]] == ["the server's ppo"]
    assert "uploaded to the server" in results[1][1]
    assert "computed here" in results[2][1]
    assert f"{HERE}:" in results[2][1]
    expected = np.sort(results[0][0])
    for logprobs, _ in results[1:]:
        np.testing.assert_allclose(np.sort(logprobs), expected, atol=2e-5)


@pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: kind.__name__)
def test_built_in_losses_pass_the_gradient_check(kind: type[PolicyLoss]) -> None:
    assert check_gradient(kind(), pairs=issubclass(kind, PreferenceLoss)).error < 1e-6


@pytest.mark.parametrize("loss", [with_constants, Squared, lambda logprobs: -logprobs])
def test_right_losses_of_users_pass_the_gradient_check(loss: Any) -> None:
    assert check_gradient(CustomLoss(path=loss)).error < 1e-6


def test_wrong_gradients_are_found() -> None:
    def rounded(logprobs: Tensor, advantages: Tensor) -> Tensor:
        values = -advantages * logprobs
        values.register_hook(lambda gradient: 2 * gradient)
        return values

    assert not check_gradient(CustomLoss(path=rounded)).equal


def _scalar(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return (logprobs * advantages).sum()


def _nan(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return torch.log(logprobs) * advantages


def _constant(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return advantages * 1.0


def _infinite(logprobs: Tensor) -> Tensor:
    return torch.where(logprobs < 0, logprobs, torch.sqrt(logprobs * 0))


def _raises(logprobs: Tensor) -> Tensor:
    return logprobs[100]


def _some_metrics(logprobs: Tensor) -> Any:
    return -logprobs, {"one": 1.0} if len(logprobs) > 1 else {}


def _text(logprobs: Tensor) -> Any:
    return "loss"


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (_scalar, r"returned a tensor of shape \(\) and type float64 for 1 token"),
        (_nan, "returned nan for a token whose logprob is -"),
        (_constant, "does not depend on logprobs"),
        (_infinite, "has a gradient that is not finite at 16 of 16 tokens"),
        (_raises, rf"failed: IndexError: .*{HERE}:\d+"),
        (_some_metrics, "returned the metric one for some replies only"),
        (_text, "returned a str in place of a tensor"),
    ],
)
def test_faults_of_losses_are_named_before_a_run_begins(
    loss: Callable[..., Any], sentence: str, tmp_path: Path
) -> None:
    async def connect(state: str, version: int) -> Any:
        raise AssertionError("the server is not reached")

    config = settings(tmp_path, algorithm={"loss": loss})
    with pytest.raises(ConfigError, match=sentence) as caught:
        run(config, connect)
    assert f"{HERE}:{loss.__code__.co_firstlineno}" in caught.value.message


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda lp, advantages: lp, "has the parameter 'lp', which is neither one that a run passes"),
        (lambda advantages: advantages, "does not take logprobs"),
        (3.5, "is not a function"),
    ],
)
def test_wrong_signatures_of_losses_are_refused(loss: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AlgorithmConfig.model_validate({"loss": {"type": "custom", "path": loss}})


def test_check_compares_gradients_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tinsmith.cli.check import check

    (tmp_path / "doubled_loss.py").write_text(
        "from tinsmith import loss\n\n\n@loss('doubled')\ndef doubled(logprobs, by=2.0):\n"
        "    losses = -logprobs * by\n    losses.register_hook(lambda gradient: gradient * by)\n    return losses\n"
    )
    values = {
        "model": {"name": "x"},
        "plugins": "doubled_loss.py",
        "tasks": {"train": {"type": "addition"}},
        "rewards": [{"type": "closeness"}],
        "steps": 1,
        "monitors": [],
        "algorithm": {"loss": {"type": "doubled", "by": 1.0}},
    }
    (file := tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    check(str(file), gradients=True)
    printed = capsys.readouterr().out
    assert "loss at algorithm.loss: doubled_loss:doubled, " in printed
    assert "gradient of algorithm.loss doubled: equal to finite differences at 16 random tokens" in printed
    with pytest.raises(ConfigError, match=r"where finite differences give -0\.125"):
        check(str(file), "algorithm.loss.by=2.0", "algorithm.aggregate=token_mean", gradients=True)
