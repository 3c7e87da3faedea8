"""Distillation of the teacher's likeliest tokens: values and gradients against plain PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rl.algorithms.helpers import run
from tinsmith.rl.algorithms import loss_dispatch
from tinsmith.rl.algorithms.config import AlgorithmConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.training_rows import TEACHER_TOP, TrainingRow
from tinsmith.rl.run.open import teacher_top
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

V, N = 11, 7
"""Vocabulary and positions of the tests without a server."""


def config(**loss: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"type": "topk_distill", "teacher": "large", "loss": loss})


def divergence(student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor, direction: str) -> torch.Tensor:
    """[N]: the divergence over `ids` and the rest, written out, from logits [N, V]."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    parts = []
    for each in (p, q):
        top = each.gather(1, ids)
        parts.append(torch.cat([top, 1 - top.sum(-1, keepdim=True)], 1) if ids.shape[1] < V else top)
    first, second = parts if direction == "reverse" else reversed(parts)
    return (first * (first / second).log()).sum(-1)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("k", [1, 4, V])
def test_loss_and_gradient_equal_plain_torch(direction, k):
    torch.manual_seed(k)
    student = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    teacher = 2 * torch.randn(N, V, dtype=torch.float64)
    ids = teacher.topk(k).indices
    mask = np.array([False, True, True, False, True, True, True])
    columns = np.stack([ids.numpy(), teacher.log_softmax(-1).gather(1, ids).numpy()], 1)
    zeros = np.zeros(N, np.float32)
    row = TrainingRow(
        tokens=np.arange(N), targets=np.arange(N), logprobs=zeros, advantages=zeros, mask=mask,
        columns={TEACHER_TOP: columns},
    )  # fmt: skip
    settings = config(k=k, direction=direction)
    batch = loss_dispatch.tokens_of_rows([row], settings, 1)
    context = loss_dispatch.LossContext(step=1, kl_coef=0.0)
    update = loss_dispatch.update_by_client([row], batch, settings, context)
    (more_NK,) = update.more_targets
    assert (more_NK == ids.numpy()).all()
    targets = torch.cat([torch.arange(N)[:, None], torch.from_numpy(more_NK)], 1)
    loss, numbers = update.client([student.log_softmax(-1).gather(1, targets)])
    expected = divergence(student, teacher, ids, direction)[torch.from_numpy(mask)].mean()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=2e-5 if k == V else 1e-12)
    (gradient,) = torch.autograd.grad(loss, student)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5 if k == V else 1e-12, rtol=0)
    covered = torch.from_numpy(np.exp(columns[mask, 1])).sum(-1).mean()
    assert numbers["teacher_covered"] == pytest.approx(float(covered), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"type": "topk_distill"}, "loss topk_distill needs a teacher"),
        ({"type": "topk_distill", "teacher": "a", "loss": {"type": "ppo"}}, "needs no teacher"),
        ({"type": "grpo", "advantage": {"type": "none"}}, "reads an advantage"),
    ],
)
def test_settings_without_effect_are_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        AlgorithmConfig.model_validate(settings)


@pytest.mark.e2e
@pytest.mark.usefixtures("forked_programs")
def test_policy_approaches_the_teacher_on_a_server(tiny, tmp_path):
    models = (f"tiny={tiny('llama')}", f"teacher={tiny('untied')}")

    async def train(address):
        trainer = await TinkerTrainer.connect(ModelConfig(name="tiny", rank=8), *address, seed=1)
        try:
            teacher = await trainer.models.open_model("teacher")
            zeros = np.zeros(N, np.float32)
            row = TrainingRow(
                tokens=np.arange(5, 5 + N), targets=np.arange(6, 6 + N), logprobs=zeros, advantages=zeros,
                mask=np.ones(N, bool),
            )  # fmt: skip
            (column,) = await teacher_top(teacher, [row], 6)
            row = replace(row, columns={TEACHER_TOP: column})
            settings = config(k=6)
            batch = loss_dispatch.tokens_of_rows([row], settings, 1)
            update = loss_dispatch.update_by_client(
                [row], batch, settings, loss_dispatch.LossContext(step=1, kl_coef=0.0)
            )
            scored = await trainer.logprobs([row])
            results = [result for _ in range(8) for result in await trainer.train([update], OptimizerConfig(), 0.02)]
            return scored[0], results
        finally:
            await trainer.models.close()

    with embedded(ServeConfig(models=models, threads=1, dtype="float32", data=tmp_path)) as address:
        scored, results = run(train(address))
    losses = [result.metrics["policy_loss"] for result in results]
    np.testing.assert_allclose(results[0].logprobs[0], scored, atol=1e-5)
    assert losses[-1] < losses[0] - 0.02
