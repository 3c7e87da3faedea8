"""Extensions of the protocol, through the unmodified SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.service.conftest import Served, served_by
from tinsmith.engine.training.loss_specs import EXTENSIONS, LOSSES

pytestmark = pytest.mark.usefixtures("forked_programs")

N = 6


@pytest.fixture(scope="module", params=["fake", "torch"])
def served(request: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_by(request.param, tiny_llama, tmp_path_factory.mktemp("extended")) as served:
        yield served


def datum(seed: int, **inputs: Any) -> types.Datum:
    """One datum of N tokens; inputs are arrays or tensors, which may have any name."""
    tokens = np.random.default_rng(seed).integers(3, 500, N + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def floats(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


RL = {"logprobs": np.full(N, -4, np.float32), "advantages": floats(0, 0, 1, -1, 0.5, 2)}


def test_capabilities_list_the_extensions(served: Served) -> None:
    answer = httpx.get(
        f"{served.url}/api/v1/get_server_capabilities", headers={"X-API-Key": served.key}, timeout=60
    ).json()
    names = {place: list(names) for place, names in EXTENSIONS.items()}
    assert answer["extensions"] == names | {"path": ["@live"], "asample": ["return_routed_experts"]}
    assert [(model["model_name"], model["images"]) for model in answer["supported_models"]] == [("toy", False)]
    rest = tinker.RestClient(base_url=served.url, api_key=served.key)
    assert [model.model_name for model in rest.get_server_capabilities().result().supported_models] == ["toy"]


def test_returns_entropies_and_their_loss_term(train: tinker.TrainingClient) -> None:
    data = [datum(1, **RL), datum(2, **RL, entropy_mask=torch.ones(N))]
    config = {"entropy_coef": 0.5, "return_entropy": 1}
    plain = train.forward(data[:1], "ppo", {"return_entropy": 1}).result()
    answer = train.forward_backward(data, "ppo", config).result()
    entropies = [output["entropy"].to_numpy() for output in answer.loss_fn_outputs]
    assert [entropy.shape for entropy in entropies] == [(N,), (N,)]
    assert all((entropy > 0).all() and (entropy < np.log(512)).all() for entropy in entropies)
    np.testing.assert_allclose(plain.loss_fn_outputs[0]["entropy"].to_numpy(), entropies[0], rtol=1e-4)
    assert answer.metrics["entropy:sum"] == pytest.approx(entropies[0][2:].sum() + entropies[1].sum(), rel=1e-5)
    without = train.forward([datum(1, **RL), datum(2, **RL)], "ppo").result()
    assert "entropy" not in without.loss_fn_outputs[0]
    assert answer.metrics["loss:sum"] == pytest.approx(
        without.metrics["loss:sum"] - 0.5 * answer.metrics["entropy:sum"], rel=1e-4
    )


def test_entropy_bonus_raises_the_entropy(train: tinker.TrainingClient) -> None:
    data = [datum(1, weights=np.zeros(N, np.float32), entropy_mask=np.ones(N, np.float32))]
    sums = []
    for _ in range(4):
        sums.append(
            train.forward_backward(data, "cross_entropy", {"entropy_coef": 1.0}).result().metrics["entropy:sum"]
        )
        train.optim_step(types.AdamParams(learning_rate=0.01)).result()
    assert sums == sorted(sums)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimator_is_sent_as_text(train: tinker.TrainingClient, estimator: str) -> None:
    reference = np.full(N, -5, np.float32)
    data = [datum(1, **RL, ref_logprobs=torch.tensor(reference), kl_mask=floats(0, 1, 1, 1, 1, 0.5))]
    plain = train.forward([datum(1, **RL)], "importance_sampling").result()
    answer = train.forward_backward(data, "importance_sampling", {"kl_coef": 0.1, "kl_estimator": estimator}).result()
    gap = plain.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64) - reference
    k = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap}[estimator]
    wanted = (floats(0, 1, 1, 1, 1, 0.5) * k).sum()
    assert answer.metrics["kl:sum"] == pytest.approx(wanted, rel=1e-4)
    assert answer.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"] + 0.1 * wanted, rel=1e-4)


def test_trinity_ppo_chunks_add_up(train: tinker.TrainingClient) -> None:
    """1,100 data travel as two requests; Trinity divides by all of them."""
    inputs = {**RL, "weights": floats(0, 0, 1, 1, 1, 1), "ref_logprobs": np.full(N, -5, np.float32)}
    config = {"clip_range": 0.2, "clip_ratio_c": 3.0, "kl_coef": 0.1, "num_total_datums": 1100}
    whole = train.forward([datum(1, **inputs)] * 1100, "trinity_ppo", config).result().metrics
    single = train.forward([datum(1, **inputs)], "trinity_ppo", {**config, "num_total_datums": 1}).result().metrics
    assert whole["loss:sum"] == pytest.approx(single["loss:sum"], rel=1e-4)
    assert whole["trinity/response_tokens:sum"] == 4400
    assert whole.keys() == single.keys()
    assert single.keys() == {"loss:sum"} | {
        f"trinity/{name}:sum"
        for name in ("response_tokens", "ratio_sum", "ratio_squared_sum", "clipped_tokens", "kl_sum")
    }


WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "estimator": ("ppo", {"kl_coef": 1.0, "kl_estimator": "k4"}, {"ref_logprobs": floats(*[0] * N)}, "k1, k2, k3"),
    "estimator as a number": ("ppo", {"kl_coef": 1.0, "kl_estimator": 2}, {"ref_logprobs": floats(*[0] * N)}, "k1, k2"),
    "estimator of nothing": ("ppo", {"kl_estimator": "k3"}, {}, "requires kl_coef"),
    "a divergence below 0": ("ppo", {"kl_coef": -1.0}, {"ref_logprobs": floats(*[0] * N)}, "Give 0 or more"),
    "a bound below 0": ("dro", {"beta": -0.1}, {}, "Give 0 or more"),
    "bounds the wrong way round": ("ppo", {"clip_high_threshold": 0.5}, {}, "above clip_high_threshold"),
    "no reference": ("ppo", {"kl_coef": 1.0}, {}, "ref_logprobs"),
    "a reference for nothing": ("ppo", {}, {"ref_logprobs": floats(*[0] * N)}, "kl_coef"),
    "a mask for nothing": ("ppo", {}, {"entropy_mask": floats(*[0] * N)}, "entropy_coef"),
    "a mask of another length": ("ppo", {"entropy_coef": 1.0}, {"entropy_mask": floats(1)}, "model_input"),
    "half an entropy": ("ppo", {"return_entropy": 0.5}, {}, "0 or 1"),
    "text": ("ppo", {"entropy_coef": "high"}, {}, "finite number"),
    "near miss": ("ppo", {"entropy_coeff": 1.0}, {}, "Did you mean 'entropy_coef'"),
    "no total": ("trinity_ppo", {}, {"weights": floats(*[1] * N)}, "num_total_datums"),
    "total of nothing": ("trinity_ppo", {"num_total_datums": 0}, {"weights": floats(*[1] * N)}, "at least 1"),
    "weights no mask": ("trinity_ppo", {"num_total_datums": 1}, {"weights": floats(*[0.5] * N)}, "mask"),
    "estimator of trinity": (
        "trinity_ppo", {"num_total_datums": 1, "kl_estimator": "k3"}, {"weights": floats(*[1] * N)}, "kl_estimator"),
    "trinity without reference": (
        "trinity_ppo", {"num_total_datums": 1, "kl_coef": 1.0}, {"weights": floats(*[1] * N)}, "ref_logprobs"),
    "stable_reinforce": ("stable_reinforce", {}, {}, "importance_sampling"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_rejects_invalid_extension_fields(train: tinker.TrainingClient, case: str) -> None:
    loss_fn, config, inputs, says = WRONG[case]
    with pytest.raises(tinker.BadRequestError, match=says):
        train.forward_backward([datum(1, **RL, **inputs)], loss_fn, config).result()


@pytest.mark.parametrize("loss_fn", [name for name in LOSSES if name != "cross_entropy"])
def test_other_losses_reject_several_targets(train: tinker.TrainingClient, loss_fn: str) -> None:
    spec = LOSSES[loss_fn]
    inputs: dict[str, Any] = {name: np.ones((N, 2), np.float32) for name in spec.required}
    config = {key: 1.0 for key, default in spec.config.items() if default is None}
    data = [datum(1, **{**inputs, "target_tokens": np.ones((N, 2), np.int64)})]
    with pytest.raises(tinker.BadRequestError, match="Only cross_entropy"):
        train.forward_backward(data, loss_fn, config).result()


def test_several_targets_support_entropy_but_not_kl(train: tinker.TrainingClient) -> None:
    wide = {"target_tokens": np.ones((N, 2), np.int64), "weights": np.ones((N, 2), np.float32)}
    answer = train.forward([datum(1, **wide)], "cross_entropy", {"entropy_coef": 1.0, "return_entropy": 1}).result()
    assert answer.loss_fn_outputs[0]["entropy"].to_numpy().shape == (N,)
    assert answer.loss_fn_outputs[0]["logprobs"].to_numpy().shape == (N, 2)
    reference = np.ones((N, 2), np.float32)
    with pytest.raises(tinker.BadRequestError, match="one target per position"):
        train.forward([datum(1, **wide, ref_logprobs=reference)], "cross_entropy", {"kl_coef": 1.0}).result()
