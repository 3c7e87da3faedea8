"""Training and sampling clients of the unmodified SDK against a served fake engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.service.conftest import Served, datum

TOKENS = [5, 6, 7, 8, 9]
N = len(TOKENS) - 1
RL = {"logprobs": [-1.0] * N, "advantages": [1.0, -1.0, 0.5, 0.0]}
INPUTS = {
    "cross_entropy": {"weights": [1.0, -0.5, 0.25, 2.0]},
    "importance_sampling": RL,
    "ppo": RL,
    "cispo": RL,
    "dro": RL,
    "gspo": {**RL, "sequence_ratio_mask": [1.0] * N},
}
ADAM = types.AdamParams(learning_rate=0.02)


def logprobs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [item["logprobs"].to_numpy() for item in output.loss_fn_outputs]


def step(train: tinker.TrainingClient, times: int = 1) -> float:
    for _ in range(times):
        passed = train.forward_backward([datum(TOKENS, weights=[1.0] * N)], "cross_entropy")
        stepped = train.optim_step(ADAM)
        loss = passed.result().metrics["loss:sum"]
        assert stepped.result().metrics["grad_norm"] > 0
    return loss


@pytest.mark.parametrize("loss_fn", sorted(INPUTS))
def test_each_loss_returns_logprobs_and_a_sum(train: tinker.TrainingClient, loss_fn: str) -> None:
    data = [datum(TOKENS, **INPUTS[loss_fn]), datum(TOKENS[::-1], **INPUTS[loss_fn])]
    whole = train.forward_backward(data, loss_fn).result()
    assert [p.shape for p in logprobs_of(whole)] == [(N,), (N,)]
    first, second = (train.forward([d], loss_fn).result().metrics["loss:sum"] for d in data)
    assert whole.metrics["loss:sum"] == pytest.approx(first + second)
    p = logprobs_of(whole)[0].astype(np.float64)
    inputs = {k: np.asarray(v) for k, v in INPUTS[loss_fn].items()}
    if loss_fn == "cross_entropy":
        assert first == pytest.approx(-(inputs["weights"] * p).sum(), rel=1e-5)
    if loss_fn == "importance_sampling":
        assert first == pytest.approx(-(np.exp(p + 1) * inputs["advantages"]).sum(), rel=1e-5)


def test_training_lowers_the_loss_and_forward_does_not_train(train: tinker.TrainingClient) -> None:
    first = step(train)
    assert step(train, 5) < first
    data = [datum(TOKENS, weights=[1.0] * N)]
    before = train.forward(data, "cross_entropy").result().metrics["loss:sum"]
    train.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert train.forward(data, "cross_entropy").result().metrics["loss:sum"] == before


def test_gradients_of_several_calls_and_chunks_add_up(client: tinker.ServiceClient) -> None:
    whole, parts = (client.create_lora_training_client("toy", rank=4, seed=1).result() for _ in range(2))
    data = [
        datum([i % 500, i % 500 + 1, i % 500 + 2], weights=[1.0, 1.0]) for i in range(1100)
    ]  # over one chunk of 1024
    result = whole.forward_backward(data, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 1100
    results = [parts.forward_backward(piece, "cross_entropy") for piece in (data[:500], data[500:])]
    assert result.metrics["loss:sum"] == pytest.approx(sum(f.result().metrics["loss:sum"] for f in results))
    norms = [c.optim_step(ADAM).result().metrics["grad_norm"] for c in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_soft_targets_dense_and_sparse_agree(train: tinker.TrainingClient) -> None:
    k = 8
    targets = torch.zeros((N, k), dtype=torch.int64)
    weights = torch.zeros((N, k))
    targets[:, 0], weights[:, 0] = torch.tensor(TOKENS[1:]), 1.0
    prompt = types.ModelInput.from_ints(TOKENS[:-1])
    dense = {
        name: types.TensorData.from_torch(value) for name, value in (("target_tokens", targets), ("weights", weights))
    }
    sparse = {"target_tokens": targets, "weights": weights}
    data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs) for inputs in (dense, sparse)]
    assert data[1].loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    answer = train.forward(data, "cross_entropy").result()
    from_dense, from_sparse = logprobs_of(answer)
    assert from_dense.shape == (N, k)
    np.testing.assert_array_equal(from_dense, from_sparse)
    plain = train.forward([datum(TOKENS)], "cross_entropy").result()  # missing weights are 1
    assert answer.metrics["loss:sum"] == pytest.approx(2 * plain.metrics["loss:sum"])


def test_custom_loss_has_the_surrogate_of_its_gradient(train: tinker.TrainingClient) -> None:
    def squares(_data, logprobs):
        loss = sum((p**2).sum() for p in logprobs)
        return loss, {"mine:sum": 1.0}

    answer = train.forward_backward_custom([datum(TOKENS), datum(TOKENS[::-1])], squares).result()
    assert answer.metrics["surrogate_loss:sum"] == pytest.approx(2 * answer.metrics["loss:sum"], rel=1e-5)
    assert answer.metrics["mine:sum"] == 1.0
    assert train.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_sampling_client_is_a_snapshot(client: tinker.ServiceClient, train: tinker.TrainingClient) -> None:
    prompt = types.ModelInput.from_ints(TOKENS)
    base = client.create_sampling_client(base_model="toy").result()
    fresh = train.save_weights_and_get_sampling_client().result()
    assert fresh.compute_logprobs(prompt).result() == base.compute_logprobs(prompt).result()
    step(train, 3)
    trained = train.save_weights_and_get_sampling_client().result()
    before = trained.compute_logprobs(prompt).result()
    assert before[0] is None
    assert sum(before[1:]) > sum(base.compute_logprobs(prompt).result()[1:])
    # The sampler's logprobs are the trainer's.
    scored = logprobs_of(train.forward([datum(TOKENS)], "cross_entropy").result())[0]
    np.testing.assert_allclose(before[1:], scored, atol=1e-5)
    step(train, 3)
    assert trained.compute_logprobs(prompt).result() == before
    assert fresh.compute_logprobs(prompt).result() == base.compute_logprobs(prompt).result()


def test_samples_have_ids_and_obey_seed_and_stop(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="toy").result()
    prompt = types.ModelInput.from_ints(TOKENS)

    def ask(n: int = 1, **params) -> list[types.SampledSequence]:
        return sampler.sample(prompt, n, types.SamplingParams(**params)).result().sequences

    first, again = ask(3, max_tokens=9, seed=7, stop=[]), ask(3, max_tokens=9, seed=7, stop=[])
    assert [s.tokens for s in first] == [s.tokens for s in again]
    assert len({tuple(s.tokens) for s in first}) == 3
    assert len({s.sequence_id for s in first + again}) == 6
    assert [(len(s.tokens), len(s.logprobs), s.stop_reason) for s in first] == [(9, 9, "length")] * 3
    token = first[0].tokens[4]
    [stopped] = ask(max_tokens=9, seed=7, stop=[token])
    assert (stopped.tokens[-1], stopped.stop_reason) == (token, "stop")
    [spelled] = ask(max_tokens=9, seed=7, stop=chr(token))  # the fake spells a token as its character
    assert spelled.tokens == stopped.tokens
    [listed] = ask(max_tokens=9, seed=7, stop=[chr(token), "never"])
    assert listed.tokens == stopped.tokens


def test_sample_returns_prompt_logprobs(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="toy").result()
    prompt, params = types.ModelInput.from_ints(TOKENS), types.SamplingParams(max_tokens=2)
    ids = torch.full((N, 6), -1, dtype=torch.int64)
    ids[1, 0], ids[3, 2] = TOKENS[2], TOKENS[4]
    target_forms = (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1))
    assert target_forms[1].sparse_crow_indices is not None
    for targets in target_forms:
        answer = sampler.sample(
            prompt,
            1,
            params,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
            topk_sample_logprobs=2,
            target_prompt_logprobs=targets,
        ).result()
        own = answer.prompt_logprobs
        result = answer.target_prompt_logprobs
        assert result.sparse_col_indices == targets.sparse_col_indices
        assert result.to_numpy()[1, 0] == pytest.approx(own[2])
        assert result.to_numpy()[3, 2] == pytest.approx(own[4])
        assert result.to_numpy()[0, 0] == 0.0
        assert answer.topk_prompt_logprobs_np.logprobs.shape == (N + 1, 3)
        assert answer.topk_prompt_logprobs_np.logprobs[0, 0] == -99999.0
        assert answer.sequences[0].topk_logprobs_np.token_ids.shape == (2, 2)
    tail = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
    assert [p is None for p in tail] == [True, True, True, False, False]
    assert tail[3:] == own[3:]


def test_resume_with_and_without_optimizer(client: tinker.ServiceClient, train: tinker.TrainingClient) -> None:
    step(train, 3)
    path = train.save_state("at-3", ttl_seconds=3600, user_metadata={"note": "x"}).result().path
    assert path == f"tinker://{train.model_id}/weights/at-3"
    straight = [step(train) for _ in range(3)]
    full = client.create_training_client_from_state_with_optimizer(path).result()
    assert full.model_id.split(":train:")[0] == train.model_id.split(":train:")[0]
    assert full.get_info().lora_rank == 4
    assert [step(full) for _ in range(3)] == straight
    bare = client.create_training_client_from_state(path).result()
    without = [step(bare) for _ in range(3)]
    assert without[0] == straight[0]
    assert without[2] != straight[2]


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_load_state_into_an_existing_model(client: tinker.ServiceClient, train: tinker.TrainingClient) -> None:
    path = train.save_state("start").result().path
    first = step(train)
    step(train, 2)
    train.load_state_with_optimizer(path).result()
    assert step(train) == first
    wide = client.create_lora_training_client("toy", rank=8).result()
    with pytest.raises(tinker.BadRequestError, match="rank"):
        wide.load_state(path).result()


def test_checkpoint_names_are_unique(train: tinker.TrainingClient) -> None:
    first = step(train)
    train.save_state("x").result()
    with pytest.raises(tinker.BadRequestError, match="exists"):
        train.save_state("x").result()
    step(train)
    train.save_state("x", overwrite=True).result()
    sampler_path = train.save_weights_for_sampler("s").result().path
    assert sampler_path == f"tinker://{train.model_id}/sampler_weights/s"
    with pytest.raises(tinker.BadRequestError, match="exists"):
        train.save_weights_for_sampler("s").result()
    assert step(train) < first  # refused requests leave gaps in seq_id


def test_sampling_from_named_checkpoints(client: tinker.ServiceClient, train: tinker.TrainingClient) -> None:
    step(train, 2)
    paths = [train.save_weights_for_sampler("s").result().path, train.save_state("t").result().path]
    prompt = types.ModelInput.from_ints(TOKENS)
    own = train.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result()
    for path in paths:
        sampler = client.create_sampling_client(model_path=path).result()
        assert sampler.compute_logprobs(prompt).result() == own
        assert sampler.get_base_model() == "toy"


def test_seed_determines_the_adapter(client: tinker.ServiceClient) -> None:
    def trained(**options) -> float:
        model = client.create_lora_training_client("toy", rank=4, **options).result()
        step(model, 2)
        return step(model)

    assert trained(seed=5) == trained(seed=5)
    assert trained(seed=5) != trained(seed=6)
    assert trained() != trained()


def test_concurrent_sessions_are_independent(served: Served, train: tinker.TrainingClient) -> None:
    other = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    own = other.create_lora_training_client("alias", rank=4, seed=1).result()
    futures = []
    for _ in range(5):
        for model in (train, own):
            futures.append((model, model.forward_backward([datum(TOKENS)], "cross_entropy"), model.optim_step(ADAM)))
    losses = {train: [], own: []}
    for model, passed, stepped in futures:
        losses[model].append(passed.result().metrics["loss:sum"])
        stepped.result()
    assert losses[train] == losses[own]
    assert losses[train][-1] < losses[train][0]
    other.close("success").result()
    assert step(train) < losses[train][-1]


def test_management_calls(served: Served, train: tinker.TrainingClient) -> None:
    step(train)
    path = train.save_state("kept", ttl_seconds=7200, user_metadata={"a": "b"}).result().path
    train.save_weights_for_sampler("gone").result()
    rest = tinker.RestClient(base_url=served.url, api_key=served.key)
    run = rest.get_training_run(train.model_id).result()
    assert (run.base_model, run.lora_rank, run.last_checkpoint.tinker_path) == ("toy", 4, path)
    listed = rest.list_checkpoints(train.model_id).result().checkpoints
    assert [checkpoint.checkpoint_id for checkpoint in listed] == ["sampler_weights/gone", "weights/kept"]
    assert listed[1].user_metadata == {"a": "b"}
    assert listed[1].size_bytes > 0
    assert 7000 < (listed[1].expires_at - listed[1].time).total_seconds() < 7300
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("toy", 4, True)
    rest.delete_checkpoint(train.model_id, "sampler_weights/gone").result()
    assert [checkpoint.checkpoint_id for checkpoint in rest.list_checkpoints(train.model_id).result().checkpoints] == [
        "weights/kept"
    ]
    names = [model.model_name for model in rest.get_server_capabilities().result().supported_models]
    assert names == ["toy", "alias", "other/model"]


def test_deleted_checkpoint_keeps_its_sampling_session(
    served: Served, client: tinker.ServiceClient, train: tinker.TrainingClient
) -> None:
    path = train.save_weights_for_sampler("short").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    before = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    tinker.RestClient(base_url=served.url, api_key=served.key).delete_checkpoint_from_tinker_path(path).result()
    assert sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result() == before
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_sampling_client(model_path=path).result()
    train.save_weights_for_sampler("short").result()  # the name is free again


BAD_DATA = {
    "lengths": ([datum([1, 2, 3], weights=[1.0])], "cross_entropy", None, "shape"),
    "unknown loss": ([datum([1, 2, 3])], "crossentropy", None, "Did you mean 'cross_entropy'"),
    "unknown config": ([datum([1, 2], logprobs=[0], advantages=[0])], "ppo", {"clip_range": 0.2}, "clip_range"),
    "text config": ([datum([1, 2], logprobs=[0], advantages=[0])], "ppo", {"clip_low_threshold": "x"}, "finite number"),
    "token id": ([datum([1, 2, 99999])], "cross_entropy", None, "99999"),
    "NaN": ([datum([1, 2, 3], weights=[1.0, math.nan])], "cross_entropy", None, "NaN"),
    "too long": ([datum([1] * 32770)], "cross_entropy", None, "context"),
    "missing input": ([datum([1, 2, 3])], "ppo", None, "logprobs"),
    "stable_reinforce": ([datum([1, 2, 3])], "stable_reinforce", None, "importance_sampling"),
    "custom": ([datum([1, 2, 3])], "custom", {"loss_id": "x"}, "forward_backward_custom"),
    "empty input": ([types.Datum(model_input=types.ModelInput.from_ints([]), loss_fn_inputs={"target_tokens": []})],
                    "cross_entropy", None, "empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD_DATA))
def test_rejects_bad_data_and_keeps_the_model(train: tinker.TrainingClient, case: str) -> None:
    data, loss_fn, config, says = BAD_DATA[case]
    reference = train.forward([datum(TOKENS)], "cross_entropy").result().metrics
    with pytest.raises(tinker.APIStatusError, match=says) as refused:
        train.forward_backward(data, loss_fn, config).result()
    assert 400 <= refused.value.status_code < 500
    assert refused.value.status_code not in (402, 408, 409, 429)
    assert train.forward([datum(TOKENS)], "cross_entropy").result().metrics == reference
    assert train.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"] == 0


def test_rejects_bad_calls(client: tinker.ServiceClient, train: tinker.TrainingClient) -> None:
    refusals = [
        ("rank", lambda: client.create_lora_training_client("toy", rank=0)),
        ("nearest|mean|served", lambda: client.create_lora_training_client("toi", rank=4)),
        ("dimuon", lambda: train.optim_step(types.DimuonParams(learning_rate=0.1))),
        ("beta1", lambda: train.optim_step(types.AdamParams(beta1=1.5))),
        ("ttl", lambda: train.save_state("t", ttl_seconds=10)),
        ("cannot name", lambda: train.save_state("a/b")),
        ("optimizer", lambda: client.create_training_client_from_state_with_optimizer(sampler_path)),
        ("no checkpoint", lambda: client.create_training_client_from_state(f"tinker://{train.model_id}/weights/no")),
        ("belongs", lambda: client.create_training_client_from_state(state, base_model="other/model")),
        ("not served", lambda: client.create_sampling_client(base_model="nobody")),
    ]
    sampler_path = train.save_weights_for_sampler("s").result().path
    state = train.save_state("state").result().path
    for says, call in refusals:
        with pytest.raises(tinker.APIStatusError, match=says):
            call().result()
    step(train)


def test_rejects_bad_sampling_requests(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="toy").result()
    good, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=2)
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    refusals = [
        ("empty", lambda: sampler.sample(types.ModelInput.from_ints([]), 1, params)),
        ("context", lambda: sampler.sample(types.ModelInput.from_ints([1] * 32769), 1, params)),
        ("token id", lambda: sampler.sample(types.ModelInput.from_ints([512]), 1, params)),
        ("num_samples", lambda: sampler.sample(good, 0, params)),
        ("temperature", lambda: sampler.sample(good, 1, types.SamplingParams(temperature=-1, max_tokens=2))),
        ("top_p", lambda: sampler.sample(good, 1, types.SamplingParams(top_p=1.5, max_tokens=2))),
        ("stop string", lambda: sampler.sample(good, 1, types.SamplingParams(stop="", max_tokens=2))),
        ("prompt_alt_tokens_k", lambda: sampler.sample(good, 1, params, prompt_alt_tokens_k=10**6)),
        ("image", lambda: sampler.sample(image, 1, params)),
    ]
    for says, call in refusals:
        with pytest.raises(tinker.BadRequestError, match=says):
            call().result()
    recording = client.create_sampling_client(base_model="toy", record_stability_info=True).result()
    with pytest.raises(tinker.BadRequestError, match="record_stability_info"):
        recording.sample(good, 1, params).result()
    assert len(sampler.sample(good, 1, params).result().sequences) == 1


def test_wrong_key_raises_authentication_error(served: Served) -> None:
    with pytest.raises(tinker.AuthenticationError, match="X-API-Key"):
        tinker.ServiceClient(base_url=served.url, api_key="tml-wrong").create_lora_training_client("toy")
