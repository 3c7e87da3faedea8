"""Cases of TrainingClient."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.conformance.catalog import case
from tests.conformance.world import World, datum, fresh, logprobs, params, prompt

DATA = [datum([5, 6, 7, 8], weights=[1.0, 0.5, 0.0]), datum([9, 10, 11], weights=[-1.0, 2.0])]
RL = {"logprobs": [-1.0, -2.0, -1.5], "advantages": [1.0, -1.0, 0.5]}


def losses() -> dict[str, list[types.Datum]]:
    mask = {"sequence_ratio_mask": [1.0, 1.0, 0.0]}
    rl = [datum([5, 6, 7, 8], **RL)]
    return {"importance_sampling": rl, "ppo": rl, "cispo": rl, "dro": rl, "gspo": [datum([5, 6, 7, 8], **RL, **mask)]}


@case("TrainingClient.forward_backward", "TrainingClient.forward")
def forward_backward(world: World) -> None:
    model = world.train()
    for method in (model.forward, model.forward_backward):
        result = settled(world, method, DATA, "cross_entropy")
        shapes = [output["logprobs"].shape for output in result.loss_fn_outputs]
        assert shapes == [[3], [2]]
        expected = -sum(
            float(w) * lp
            for output, original in zip(result.loss_fn_outputs, DATA, strict=True)
            for w, lp in zip(original.loss_fn_inputs["weights"].data, output["logprobs"].data, strict=True)
        )
        assert result.metrics["loss:sum"] == pytest.approx(
            expected, rel=1e-4
        )  # the sum over tokens, with weights of any sign
        assert all(key.count(":") == 1 for key in result.metrics)
        for loss_fn, data in losses().items():
            assert math.isfinite(settled(world, method, data, loss_fn).metrics["loss:sum"]), loss_fn
        clips = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
        assert math.isfinite(settled(world, method, losses()["ppo"], "ppo", clips).metrics["loss:sum"])
        several(world, method)
        for bad in ("no_such_loss", "importance_sampling"):
            with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError)):
                settled(world.plain(), method, DATA, bad)
        with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError)):
            settled(world.plain(), method, [datum([5, 2**31 - 1, 7])], "cross_entropy")


def several(world: World, method) -> None:  # type: ignore[no-untyped-def]
    """(N, K) targets, dense and sparse; mixed ranks in one call."""
    targets, weights = torch.zeros((3, 40), dtype=torch.int64), torch.zeros((3, 40))
    targets[0, 0], targets[2, 3], weights[0, 0], weights[2, 3] = 6, 9, 1.0, 0.25
    sparse = types.Datum(model_input=prompt(), loss_fn_inputs={"target_tokens": targets, "weights": weights})
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    dense = types.Datum(
        model_input=prompt(),
        loss_fn_inputs={"target_tokens": np.array([[6, 1], [7, 2], [8, 3]]), "weights": np.ones((3, 2), np.float32)},
    )
    result = settled(world, method, [sparse, datum([5, 6, 7, 8]), dense], "cross_entropy")
    assert [output["logprobs"].shape for output in result.loss_fn_outputs] == [[3, 40], [3], [3, 2]]
    first = [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]
    np.testing.assert_allclose(first[0][0, 0], first[1][0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(first[2][:, 0], first[1], rtol=1e-3, atol=1e-3)


def settled(world: World, method, *args):  # type: ignore[no-untyped-def]
    """The result of a call; a method called through a future returns a future."""
    made = world.call(method, *args)
    return made.result(timeout=120) if isinstance(made, tinker.APIFuture) else made


@case("TrainingClient.forward_backward_custom")
def custom(world: World) -> None:
    def loss(data: list[types.Datum], logprobs_by_datum: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = sum((item**2).sum() for item in logprobs_by_datum)
        assert isinstance(total, torch.Tensor)
        return total, {"mine:sum": float(total)}

    model = world.train()
    data = [datum([5, 6, 7, 8]), datum([9, 10, 11])]
    result = settled(world, model.forward_backward_custom, data, loss)
    assert result.metrics["mine:sum"] == pytest.approx(result.metrics["loss:sum"])
    step = settled(world, model.optim_step, types.AdamParams(learning_rate=1e-2))
    assert step is not None
    after = settled(world, model.forward_backward_custom, data, loss)
    assert after.metrics["mine:sum"] < result.metrics["mine:sum"]


@case("TrainingClient.optim_step")
def optim_step(world: World) -> None:
    model = world.train()
    before = settled(world.plain(), model.forward, DATA[:1], "cross_entropy").metrics["loss:sum"]
    settled(world.plain(), model.forward_backward, DATA[:1], "cross_entropy")
    adam = types.AdamParams(learning_rate=0.02, weight_decay=0.01, grad_clip_norm=1.0)
    assert settled(world, model.optim_step, adam) is not None
    after = settled(world.plain(), model.forward, DATA[:1], "cross_entropy").metrics["loss:sum"]
    assert after < before
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError)):
        settled(world.plain(), model.optim_step, types.AdamParams(learning_rate=-1.0))


@case("TrainingClient.get_info")
def get_info(world: World) -> None:
    info = world.call(world.train().get_info)
    assert (info.is_lora, info.lora_rank) == (True, 4)
    assert info.model_data.model_name == world.model


@case("TrainingClient.get_tokenizer")
def get_tokenizer(world: World) -> None:
    tokenizer = world.train().get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("What is 39 + 13?", add_special_tokens=False)) == "What is 39 + 13?"


@case("TrainingClient.save_state")
def save_state(world: World) -> None:
    model, name = world.train(), fresh("kept")
    first = settled(world, model.save_state, name, 3600, False, {"a": "b"}).path
    assert first.endswith(f"/weights/{name}")
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError)):
        settled(world.plain(), model.save_state, name)
    assert settled(world.plain(), model.save_state, name, None, True).path == first
    [listed] = [
        checkpoint
        for checkpoint in world.rest.list_user_checkpoints(1000).result().checkpoints
        if checkpoint.tinker_path == first
    ]
    assert (listed.checkpoint_type, listed.expires_at, listed.user_metadata) == ("training", None, None)


@case("TrainingClient.load_state", "TrainingClient.load_state_with_optimizer")
def load_state(world: World) -> None:
    source, path = world.saved()
    expected = logprobs(source.forward(DATA[:1], "cross_entropy").result())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("load_state", "load_state_with_optimizer"):
            model = world.train()
            settled(world, getattr(model, name), path)
            result = logprobs(settled(world.plain(), model.forward, DATA[:1], "cross_entropy"))
            assert result == pytest.approx(expected, abs=1e-4)
        with pytest.raises((tinker.NotFoundError, tinker.RequestFailedError)):
            settled(world.plain(), world.train().load_state, f"{path}-not")


@case("TrainingClient.save_weights_for_sampler")
def save_for_sampler(world: World) -> None:
    name = fresh("sampler")
    path = settled(world, world.train().save_weights_for_sampler, name, 7200, {"a": "b"}).path
    assert path.endswith(f"/sampler_weights/{name}")
    assert world.plain().sampler(base_model=None, model_path=path).sample(prompt(), 1, params()).result().sequences


@case("TrainingClient.save_weights_and_get_sampling_client")
def save_and_sample(world: World) -> None:
    """A snapshot does not change; inflight clients keep working when newer weights are saved."""
    model = world.train()
    adam = types.AdamParams(learning_rate=0.05)
    snapshot = world.call(model.save_weights_and_get_sampling_client)
    inflight = world.plain().call(model.save_weights_and_get_sampling_client, kind="inflight")
    before = snapshot.compute_logprobs(prompt(5, 6, 7, 8)).result()
    settled(world.plain(), model.forward_backward, DATA[:1], "cross_entropy")
    settled(world.plain(), model.optim_step, adam)
    moved = world.plain().call(model.save_weights_and_get_sampling_client)
    world.plain().call(model.save_weights_and_get_sampling_client, kind="inflight")
    assert snapshot.compute_logprobs(prompt(5, 6, 7, 8)).result() == before
    assert moved.compute_logprobs(prompt(5, 6, 7, 8)).result() != before
    assert inflight.sample(prompt(), 2, params()).result().sequences
    scored = settled(world.plain(), model.forward, [datum([5, 6, 7, 8])], "cross_entropy")
    assert moved.compute_logprobs(prompt(5, 6, 7, 8)).result()[1:] == pytest.approx(logprobs(scored), abs=1e-3)


@case("TrainingClient.save_weights_external", "RestClient.get_external_weights_urls")
def save_external(world: World) -> None:
    import urllib.request

    model, name = world.train(), fresh("external")
    made = settled(world, model.save_weights_external, name, 3600)
    assert made.path.endswith(f"/external_weights/{name}")
    links = (
        world.plain().call(world.rest.get_external_weights_urls, made.path)
        if not world.is_async
        else world.call(world.rest.get_external_weights_urls, made.path)
    )
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(links.urls)
    with urllib.request.urlopen(links.urls["adapter_config.json"]) as answer:
        assert int(answer.headers["Content-Length"]) == len(answer.read())
    recipient = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"
    sealed = settled(world.plain(), model.save_weights_external, fresh("sealed"), 3600, [recipient])
    urls = world.rest.get_external_weights_urls(sealed.path).result().urls
    assert all(file.endswith(".age") for file in urls)
