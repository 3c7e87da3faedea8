"""Cases of ServiceClient and of futures."""

from __future__ import annotations

import asyncio
import pickle

import httpx
import pytest
import tinker
import torch
from tinker import types

from tests.conformance.catalog import case
from tests.conformance.world import World, datum, fresh, logprobs, params, prompt


@case("ServiceClient.create_lora_training_client")
def create(world: World) -> None:
    made = world.call(
        world.service.create_lora_training_client, world.model, rank=8, seed=3, train_unembed=False,
        user_metadata={"a": "b"},
    )  # fmt: skip
    info = made.get_info()
    assert info.lora_rank == 8
    assert info.model_id.startswith(f"{world.session()}:train:")
    with pytest.raises(tinker.NotFoundError):
        world.service.create_lora_training_client("no-such-model").result()
    with pytest.raises(tinker.BadRequestError):
        world.service.create_lora_training_client(world.model, rank=0).result()


@case("ServiceClient.create_training_client_from_state")
def from_state(world: World) -> None:
    model, path = world.saved()
    made = world.call(world.service.create_training_client_from_state, path)
    again = made.forward([datum([5, 6, 7, 8])], "cross_entropy").result()
    assert logprobs(again) == pytest.approx(logprobs(model.forward([datum([5, 6, 7, 8])], "cross_entropy").result()))


@case("ServiceClient.create_training_client_from_state_with_optimizer")
def from_state_with_optimizer(world: World) -> None:
    """A step after loading equals a step without interruption, so the moments were restored."""
    model, path = world.saved()
    other = world.call(world.service.create_training_client_from_state_with_optimizer, path)
    after = []
    for item in (model, other):
        item.forward_backward([datum([8, 7, 6, 5])], "cross_entropy").result()
        item.optim_step(types.AdamParams(learning_rate=0.02)).result()
        after.append(logprobs(item.forward([datum([5, 6, 7, 8])], "cross_entropy").result()))
    assert after[0] == pytest.approx(after[1], abs=1e-4)


@case("ServiceClient.create_sampling_client", "TrainingClient.create_sampling_client")
def sampling_client(world: World) -> None:
    model, state = world.saved()
    saved = model.save_weights_for_sampler(fresh("s")).result().path
    requests = [{"base_model": world.model}, {"model_path": saved}, {"model_path": state}]
    for request in requests:
        made = world.plain().call(world.service.create_sampling_client, **request)
        assert len(made.sample(prompt(), 1, params()).result().sequences[0].tokens) == 4
    maker = model if world.through_future or world.is_async else world.service
    made = world.call(maker.create_sampling_client, model_path=saved)
    assert made.sample(prompt(), 1, params()).result().sequences
    with pytest.raises(tinker.NotFoundError):
        world.service.create_sampling_client(model_path=f"{saved}-not").result()


@case("ServiceClient.create_rest_client")
def rest_client(world: World) -> None:
    assert world.service.create_rest_client().get_server_capabilities().result().supported_models


@case("ServiceClient.create_custom_loss")
def custom_loss(world: World) -> None:
    def neg_ll(logprobs: torch.Tensor, weights: torch.Tensor):  # type: ignore[no-untyped-def]
        loss = -(logprobs * weights).sum()
        return loss, {"custom/neg_ll:sum": loss}

    handle = world.call(world.service.create_custom_loss, neg_ll, input_ranks={"logprobs": 1, "weights": 1})
    model = world.plain().train()
    data = [datum([5, 6, 7, 8], weights=[1.0, 0.5, 0.0])]
    result = model.forward_backward_custom(data, handle).result()
    plain = model.forward_backward(data, "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-4)


@case("ServiceClient.copy_weights", "RestClient.copy_weights")
def copy_weights(world: World) -> None:
    _, path = world.saved()
    client = tinker.ServiceClient(base_url=world.url, api_key=world.key, project_id="conformance")
    for copied in (
        world.call(client.copy_weights, path, ttl_seconds=3600),
        world.call(world.rest.copy_weights, path, "conformance"),
    ):
        assert copied != path
        assert world.rest.get_weights_info_by_tinker_path(copied).result().base_model == world.model


@case("ServiceClient.get_server_capabilities", "RestClient.get_server_capabilities")
def capabilities(world: World) -> None:
    for request in (world.service.get_server_capabilities, world.rest.get_server_capabilities):
        result = world.call(request)
        assert world.model in [model.model_name for model in result.supported_models]
        assert all(model.max_context_length > 0 for model in result.supported_models)


@case("ServiceClient.close")
def close(world: World) -> None:
    client = tinker.ServiceClient(base_url=world.url, api_key=world.key)
    session = client.holder.get_session_id()
    world.call(client.close, "errored", "the test said so")
    body = {"session_id": session, "type": "session_heartbeat"}
    answer = httpx.post(f"{world.url}/api/v1/session_heartbeat", json=body, headers={"X-API-Key": world.key})
    assert answer.status_code == 410


@case("ServiceClient.get_console_url", "TrainingClient.get_console_url")
def console_url(world: World) -> None:
    assert world.service.get_console_url().startswith("https://")
    assert world.train().get_console_url().startswith("https://")


@case("ServiceClient.get_telemetry", "TrainingClient.get_telemetry", "SamplingClient.get_telemetry",
      "RestClient.get_telemetry", "AdminClient.get_telemetry")  # fmt: skip
def telemetry(world: World) -> None:
    recorder = world.service.get_telemetry()
    if recorder is not None:
        assert recorder.log("conformance", {"a": 1})
    for client in (world.rest, world.admin, world.train(), world.sampler()):
        client.get_telemetry()


@case("ServiceClient.holder")
def holder(world: World) -> None:
    assert world.service.holder.get_session_id() == world.session()


@case("APIFuture.result")
def result(world: World) -> None:
    future = world.train().optim_step(types.AdamParams())
    assert future.result(timeout=60) == future.result(timeout=60)


@case("APIFuture.result_async", "APIFuture.coroutine")
def result_async(world: World) -> None:
    future = world.train().optim_step(types.AdamParams())

    async def in_parallel() -> tuple[object, object, object]:
        return await future, await future.result_async(timeout=60), await future.coroutine()

    first, second, third = asyncio.run(in_parallel())
    assert first == second == third


@case("APIFuture.future")
def future(world: World) -> None:
    future = world.train().optim_step(types.AdamParams())
    assert future.future().result(timeout=60) == future.result()


@case("SamplingClient.get_sampler_handle", "SamplingClient.from_sampler_handle")
def handle(world: World) -> None:
    sampler = world.plain().sampler()
    for other in (
        tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=world.key),
        pickle.loads(pickle.dumps(sampler)),
    ):
        futures = [client.sample(prompt(), 1, params()) for client in (sampler, other)]
        assert futures[0].result().sequences[0].tokens == futures[1].result().sequences[0].tokens


@case("SamplingClient.create")
def create_sampler(world: World) -> None:
    made = tinker.SamplingClient.create(world.service.holder, base_model=world.model).result()
    assert made.sample(prompt(), 1, params()).result().sequences


@case("SamplingClient.on_queue_state_change")
def queue_state(world: World) -> None:
    """The SDK calls the observer during polls; a waiting sampler continues."""
    from tinker.lib.api_future_impl import QueueState

    sampler = world.sampler()
    sampler.on_queue_state_change(QueueState.PAUSED_CAPACITY, "a reason")
    assert world.plain().call(world.plain().sampler().sample, prompt(), 1, params()).sequences
