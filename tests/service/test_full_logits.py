"""Targets, alternative tokens and top-k, (N, K) or sparse, against full logits of plain transformers.

Uses a served torch engine with a tiny Llama of random weights, called through the SDK.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.engine.reference import plain_model
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

TOKENS = [1, 349, 201, 410, 297, 77, 130, 9]
N, K = len(TOKENS) - 1, 40
PROMPT = types.ModelInput.from_ints(TOKENS)
ONE = types.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> np.ndarray:
    """float64 [N, V]: row i predicts token i + 1."""
    with torch.no_grad():
        return plain_model(tiny_llama)(input_ids=torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def service(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    data = tmp_path_factory.mktemp("served")
    config = ServeConfig(models=(f"tiny={tiny_llama}",), dtype="float32", device="cpu", threads=1, data=data)
    with embedded(config) as (url, key):
        client = tinker.ServiceClient(base_url=url, api_key=key)
        yield client
        client.close("success").result()


@pytest.fixture
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model="tiny").result()


def scattered(fill: int) -> torch.Tensor:
    """[N, K] with few ids, which the SDK sends as CSR; some rows are empty."""
    draw = np.random.default_rng(3)
    ids = torch.full((N, K), fill, dtype=torch.int64)
    for row in range(N):
        for _ in range(row % 4):
            ids[row, int(draw.integers(K))] = int(draw.integers(3, 500))
    return ids


@pytest.mark.parametrize("sparse", [False, True])
def test_prompt_targets_equal_full_logits(sampler: tinker.SamplingClient, wanted: np.ndarray, sparse: bool) -> None:
    ids = scattered(-1)
    targets = types.TensorData.from_torch_sparse(ids, pad_value=-1) if sparse else types.TensorData.from_torch(ids)
    assert (targets.sparse_crow_indices is not None) == sparse
    logprobs = sampler.sample(PROMPT, 1, ONE, target_prompt_logprobs=targets).result().target_prompt_logprobs
    assert logprobs.sparse_col_indices == targets.sparse_col_indices
    expected = np.where(ids >= 0, np.take_along_axis(wanted, ids.clamp(min=0).numpy(), axis=1), 0.0)
    np.testing.assert_allclose(logprobs.to_numpy(), expected, atol=1e-5)


def test_prompt_alt_tokens_equal_full_logits(sampler: tinker.SamplingClient, wanted: np.ndarray) -> None:
    params = types.SamplingParams(max_tokens=1, temperature=0.7)
    drawn = sampler.sample(PROMPT, 1, params, prompt_alt_tokens_k=5).result().prompt_alt_tokens
    tempered = torch.log_softmax(torch.as_tensor(wanted) / 0.7, dim=1).numpy()
    tokens = drawn.tokens.to_numpy()
    assert tokens.shape == (N, 5)
    np.testing.assert_allclose(drawn.logprobs.to_numpy(), np.take_along_axis(tempered, tokens, axis=1), atol=3e-5)
    bare = sampler.sample(types.ModelInput.from_ints([5]), 1, params, prompt_alt_tokens_k=5).result()
    assert bare.prompt_alt_tokens.tokens.shape == [0, 5]


def test_topk_logprobs_equal_full_logits(sampler: tinker.SamplingClient, wanted: np.ndarray) -> None:
    answer = sampler.sample(PROMPT, 1, ONE, topk_prompt_logprobs=3, topk_sample_logprobs=4).result()
    best = np.sort(wanted, axis=1)[:, ::-1]
    np.testing.assert_allclose(answer.topk_prompt_logprobs_np.logprobs[1:], best[:, :3], atol=1e-5)
    assert answer.sequences[0].topk_logprobs_np.token_ids.shape == (1, 4)
    token, logprob = answer.sequences[0].tokens[0], answer.sequences[0].logprobs[0]
    assert answer.sequences[0].topk_logprobs[0][0][1] >= logprob
    again = sampler.compute_logprobs(types.ModelInput.from_ints([*TOKENS, token])).result()
    assert again[-1] == pytest.approx(logprob, abs=1e-5)
    np.testing.assert_allclose(again[1:-1], np.take_along_axis(wanted, np.array(TOKENS)[1:, None], 1)[:, 0], atol=1e-5)


def test_training_targets_equal_full_logits(service: tinker.ServiceClient, wanted: np.ndarray) -> None:
    """Dense and sparse tensors, each with its own pattern; a step along the gradient lowers the loss."""
    ids = scattered(0)
    weights = torch.zeros((N, K))
    weights[ids > 0] = torch.linspace(-1, 2, int((ids > 0).sum()))
    weights[2, :] = 0.0  # the pattern differs from the one of the ids
    weights[0, 5] = 0.25  # where the ids are zero, which is token 0
    as_torch = {"target_tokens": ids, "weights": weights}
    dense = {name: types.TensorData.from_torch(value) for name, value in as_torch.items()}
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
        for inputs in (dense, as_torch)
    ]
    assert [datum.loss_fn_inputs["weights"].sparse_crow_indices is not None for datum in data] == [False, True]
    model = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    expected = np.take_along_axis(wanted, ids.numpy(), axis=1)
    answer = model.forward_backward(data, "cross_entropy").result()
    for output in answer.loss_fn_outputs:
        assert output["logprobs"].shape == [N, K]
        np.testing.assert_allclose(output["logprobs"].to_numpy(), expected, atol=1e-5)
    loss = -float((weights.numpy() * expected).sum())
    assert answer.metrics["loss:sum"] == pytest.approx(2 * loss, abs=1e-4)
    model.optim_step(types.AdamParams(learning_rate=0.01)).result()
    assert model.forward(data[:1], "cross_entropy").result().metrics["loss:sum"] < loss - 0.01
