"""Custom losses through the unmodified SDK: server and client evaluation give equal numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph

from tests.engine.custom_loss.traced_losses import DISTILLED_RANKS, LOSSES, RANKS, distilled, traced
from tests.service.conftest import Served
from tests.service.support.inprocess import Factory, api, pass_body, until
from tests.service.support.process import child
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.service.storage.records import CustomLoss
from tinsmith.service.tenancy.keys import create_key
from tinsmith.service.wire.protobuf import pb

pytestmark = pytest.mark.usefixtures("forked_programs")

ADAM = types.AdamParams(learning_rate=0.02)
LENGTHS = (9, 5, 14)


@pytest.fixture(scope="module", params=["fake", "torch"])
def accepting(request: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with custom losses enabled."""
    data = tmp_path_factory.mktemp("accepting")
    source, device = "toy", {}
    if request.param == "torch":
        source, device = f"toy={tiny_llama}", {"dtype": "float32", "threads": 1}
    config = ServeConfig(models=(source,), engine=request.param, data=data, custom_losses=True, **device)
    with embedded(config) as (url, key):
        yield Served(url, key, data)


@pytest.fixture
def client(accepting: Served) -> Iterator[tinker.ServiceClient]:
    made = tinker.ServiceClient(base_url=accepting.url, api_key=accepting.key)
    yield made
    made.close("success").result()


def data_of(lengths: tuple[int, ...] = LENGTHS) -> list[types.Datum]:
    draw = np.random.default_rng(1)
    outputs = []
    for length in lengths:
        tokens = draw.integers(3, 500, length + 1)
        inputs = {
            "target_tokens": tokens[1:],
            "advantages": draw.normal(size=length).astype(np.float32),
            "mask": (np.arange(length) % 3 != 0).astype(np.float32),
            "logprobs": np.full(length, -1, np.float32),  # allowed, but not read by the loss
        }
        outputs.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return outputs


def both_ways(
    client: tinker.ServiceClient, fn: Callable[..., Any], ranks: dict[str, Any], data: list[types.Datum]
) -> list[tuple[types.ForwardBackwardOutput, float]]:
    """(result, gradient norm), evaluated by the server and evaluated by the SDK."""
    uploaded = client.create_custom_loss(fn, ranks).result()
    assert uploaded.loss_id is not None
    local = traced(fn, ranks)
    outputs = []
    for loss in (uploaded, lambda data, logprobs: _locally(local, data, logprobs)):
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        model.forward_backward([_plain(datum) for datum in data], "cross_entropy").result()
        model.optim_step(ADAM).result()
        answer = model.forward_backward_custom(data, loss).result()
        outputs.append((answer, model.optim_step(ADAM).result().metrics["grad_norm"]))
    return outputs


def _locally(handle: Any, data: list[types.Datum], logprobs: list[Any]) -> Any:
    from tinker.lib.public_interfaces.custom_loss import run_loss_handle

    return run_loss_handle(handle, data, logprobs)


def _plain(datum: types.Datum) -> types.Datum:
    inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"]}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def assert_alike(outputs: list[tuple[types.ForwardBackwardOutput, float]]) -> None:
    (ours, our_norm), (theirs, their_norm) = outputs
    metrics = {name: value for name, value in theirs.metrics.items() if name != "surrogate_loss:sum"}
    assert ours.metrics == pytest.approx(metrics, rel=2e-5, abs=1e-6)
    assert our_norm == pytest.approx(their_norm, rel=1e-4)
    assert our_norm > 0
    for output, other in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(output["logprobs"].to_numpy(), other["logprobs"].to_numpy(), atol=1e-5)
        assert output["logprobs"].shape == other["logprobs"].shape


@pytest.mark.parametrize("name", LOSSES)
def test_custom_loss_equals_the_client_evaluation(client: tinker.ServiceClient, name: str) -> None:
    assert_alike(both_ways(client, LOSSES[name], RANKS, data_of()))


def test_custom_loss_with_several_targets_and_scalars(client: tinker.ServiceClient) -> None:
    draw = np.random.default_rng(2)
    data = []
    for length in LENGTHS:
        inputs = {
            "target_tokens": draw.integers(3, 500, (length, 4)),
            "teacher": draw.random((length, 4)).astype(np.float32),
            "temperature": types.TensorData(data=[1.5], dtype="float32", shape=[]),
        }
        tokens = draw.integers(3, 500, length).tolist()
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    assert_alike(both_ways(client, distilled, DISTILLED_RANKS, data))


def test_chunks_of_a_custom_loss_add_up(client: tinker.ServiceClient) -> None:
    """1,100 data are sent as two requests; sums add up, and means cover both."""
    assert_alike(both_ways(client, LOSSES["clipped"], RANKS, data_of((4,) * 1100)))


def test_custom_loss_forward_only_and_missing_input(client: tinker.ServiceClient) -> None:
    model = client.create_lora_training_client("toy", rank=4, seed=1).result()
    handle = client.create_custom_loss(LOSSES["reinforce"], RANKS).result()
    data = data_of()
    looked = model.forward(data, "custom", {"loss_id": handle.loss_id}).result()
    assert model.optim_step(ADAM).result().metrics["grad_norm"] == 0
    assert looked.metrics == model.forward_backward_custom(data, handle).result().metrics
    with pytest.raises(tinker.BadRequestError, match="advantages"):
        model.forward_backward([_plain(datum) for datum in data], "custom", {"loss_id": handle.loss_id}).result()
    with pytest.raises(tinker.BadRequestError, match="entropy_coef"):
        model.forward_backward(data, "custom", {"loss_id": handle.loss_id, "entropy_coef": 1.0}).result()


def test_failing_custom_loss_fails_alone(client: tinker.ServiceClient) -> None:
    def outside(logprobs, mask):
        return logprobs[(mask * 1000).long() + 1000].sum(), {}

    model = client.create_lora_training_client("toy", rank=4, seed=1).result()
    handle = client.create_custom_loss(outside, {"logprobs": 1, "mask": 1}).result()
    with pytest.raises(tinker.RequestFailedError, match=r"outside, operator.getitem .*out of bounds"):
        model.forward_backward_custom(data_of(), handle).result()
    assert model.forward(data_of(), "custom", {"loss_id": _good(client)}).result().metrics["loss:sum"] != 0
    assert model.optim_step(ADAM).result().metrics["grad_norm"] == 0


def _good(client: tinker.ServiceClient) -> str:
    return client.create_custom_loss(LOSSES["reinforce"], RANKS).result().loss_id or ""


def test_rejects_einsum_by_name(client: tinker.ServiceClient) -> None:
    import torch

    def summed(logprobs):
        return torch.einsum("i,i->", logprobs, logprobs), {}

    with pytest.raises(tinker.BadRequestError, match="einsum"):
        client.create_custom_loss(summed, {"logprobs": 1}).result()


def definition(session: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    """A body of create_custom_loss."""
    handle = traced(LOSSES["reinforce"], RANKS)
    body = {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": handle.name,
        "inputs": [item.model_dump() for item in handle.inputs],
        "graph": encode_graph(handle).model_dump(),
        "type": "create_custom_loss",
    }
    return {**body, **changes}


def changed(session: str, change: Callable[[list[dict[str, Any]]], None]) -> dict[str, Any]:
    body = definition(session)
    change(body["graph"]["nodes"])
    return body


def with_first_kwarg(session: str, value: str) -> bytes:
    """A body with a keyword argument of this JSON value."""
    return json.dumps(definition(session)).replace('"kwargs": {}', f'"kwargs": {{"x": {value}}}', 1).encode()


def with_step(session: str, **changes: Any) -> dict[str, Any]:
    """A body with another first node."""
    return changed(session, lambda nodes: nodes[3].update(changes))


HOSTILE: dict[str, Callable[[str], Any]] = {
    "not JSON": lambda _: b"\xff{",
    "deep JSON": lambda session: with_first_kwarg(session, "[" * 5000 + "]" * 5000),
    "not a number": lambda session: with_first_kwarg(session, "NaN"),
    "large number": lambda session: with_first_kwarg(session, "1" + "0" * 5000),
    "too many nodes": lambda session: changed(session, lambda nodes: nodes.extend(nodes[3:4] * 2000)),
    "too large": lambda session: definition(session, name="x" * 2**19),
    "another format": lambda session: definition(session, graph={"format": 2, "nodes": []}),
    "no nodes": lambda session: definition(session, graph={"format": 1, "nodes": []}),
    "system": lambda session: with_step(session, target="os.system", args=["true"]),
    "eval": lambda session: with_step(session, target="eval", args=["1"]),
    "dunder": lambda session: with_step(session, target="getattr", args=[{"ref": "logprobs"}, "__class__"]),
    "target not text": lambda session: with_step(session, target=["torch.exp"]),
    "arguments not a list": lambda session: with_step(session, args={"ref": "logprobs"}),
    "rank": lambda session: definition(session, inputs=[{"name": "logprobs", "rank": 9}]),
    "another's session": lambda _: definition("nobody"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_rejects_hostile_uploads(accepting: Served, case: str) -> None:
    with accepting.raw() as call:
        session = call("create_session", {"tags": []}).json()["session_id"]
        refused = call("create_custom_loss", HOSTILE[case](session))
        assert 400 <= refused.status_code < 500
        assert refused.status_code not in (402, 408, 409)
        assert call("create_custom_loss", definition(session)).status_code == 200


def test_upload_is_idempotent_and_bound_to_its_session(accepting: Served) -> None:
    with accepting.raw() as call:
        single, other = (call("create_session", {"tags": []}).json()["session_id"] for _ in range(2))
        first, again = (call("create_custom_loss", definition(single)).json() for _ in range(2))
        assert first == again
        answer = call("retrieve_future", first).json()
        assert answer == {"loss_id": first["request_id"], "type": "create_custom_loss"}
    with tinker.ServiceClient(base_url=accepting.url, api_key=accepting.key) as client:
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        for stranger in (answer["loss_id"], "nothing", ""):
            with pytest.raises(tinker.NotFoundError, match="no loss"):
                model.forward_backward(data_of(), "custom", {"loss_id": stranger}).result()
        for config in ({}, {"loss_id": 3.0}, {"graph": "{}"}):
            with pytest.raises(tinker.APIStatusError):
                model.forward_backward(data_of(), "custom", config).result()
    assert single != other


def test_disabled_custom_losses_are_evaluated_by_the_client(served: Served) -> None:
    with tinker.ServiceClient(base_url=served.url, api_key=served.key) as client:
        handle = client.create_custom_loss(LOSSES["clipped"], RANKS).result()
        assert handle.loss_id is None
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        assert model.forward_backward_custom(data_of(), handle).result().metrics["custom/ratio:mean"] > 0
        with pytest.raises(tinker.BadRequestError, match="custom_losses=true"):
            model.forward_backward(data_of(), "custom", {"loss_id": "x"}).result()
    with served.raw() as call:
        refused = call("create_custom_loss", definition("s"))
        assert (refused.status_code, "forward_backward_custom" in refused.text) == (400, True)


def test_custom_losses_survive_kill_and_replay(tmp_path: Path) -> None:
    config = ServeConfig(models=("toy",), engine="fake", custom_losses=True, api_key="tml-k", data=tmp_path)
    norms = []
    for kill in (False, True):
        own = config.model_copy(update={"data": tmp_path / str(kill)})
        with child(own) as first:
            port = httpx.URL(first.url).port
            client = tinker.ServiceClient(base_url=first.url, api_key="tml-k")
            model = client.create_lora_training_client("toy", rank=4, seed=1).result()
            handle = client.create_custom_loss(LOSSES["clipped"], RANKS).result()
            model.forward_backward_custom(data_of(), handle).result()
            if kill:
                first.kill()
            norms.append(_finish(model, handle, own.model_copy(update={"port": port}), kill))
    assert norms[0] == norms[1]


def _finish(model: tinker.TrainingClient, handle: Any, config: ServeConfig, again: bool) -> list[float]:
    def more() -> list[float]:
        single = model.optim_step(ADAM).result().metrics["grad_norm"]
        loss = model.forward_backward_custom(data_of(), handle).result().metrics["loss:sum"]
        return [single, loss, model.optim_step(ADAM).result().metrics["grad_norm"]]

    if not again:
        return more()
    with child(config):
        return more()


def test_custom_losses_end_with_their_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, Factory(), custom_losses=True) as raw:
            session = (await raw.post("create_session", {"tags": []})).json()["session_id"]
            promise = (await raw.post("create_custom_loss", definition(session))).json()
            assert (await raw.result(promise)).status_code == 200
            await raw.post(f"sessions/{session}/finish", {})
            await until(lambda: not raw.service.store.all(CustomLoss))
            assert (await raw.result(promise)).status_code == 404

    asyncio.run(main())


def test_custom_loss_of_another_tenant_is_not_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, Factory(), custom_losses=True) as raw:
            session = (await raw.post("create_session", {"tags": []})).json()["session_id"]
            promise = (await raw.post("create_custom_loss", definition(session))).json()
            key, _ = await create_key(raw.service.store.database, "theirs", "stranger")
            await raw.service.tenants.reload()
            headers = {"X-API-Key": key}
            for path, body in (("create_custom_loss", definition(session)), ("retrieve_future", promise)):
                tried = await raw.http.post(f"/api/v1/{path}", json=body, headers=headers)
                assert (tried.status_code, "There is no" in tried.text) == (404, True)
            theirs = await raw.http.post("/api/v1/create_session", json={}, headers=headers)
            made = {"session_id": theirs.json()["session_id"], "model_seq_id": 0, "base_model": "toy"}
            model = (await raw.http.post("/api/v1/create_model", json=made, headers=headers)).json()["model_id"]
            body = with_loss(pass_body(model, 1, loss_fn="custom"), promise["request_id"])
            tried = await raw.http.post("/api/v1/forward_backward", content=body, headers=headers)
            assert (tried.status_code, "There is no loss" in tried.text) == (404, True)

    asyncio.run(main())


def with_loss(body: bytes, loss_id: str) -> bytes:
    """A forward_backward body that names a custom loss."""
    more = pb.ForwardBackwardRequest()
    more.loss_fn_config_v2["loss_id"].text = loss_id
    return body + more.SerializeToString()
