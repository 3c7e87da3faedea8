"""Virtual optimizer steps through the unmodified SDK: results against real steps on a fork, refusals, precedence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.service.conftest import Served, served_by
from tests.service.support.inprocess import Factory, api, pass_body
from tinsmith.engine.base import Pass
from tinsmith.errors import NotFound
from tinsmith.service.wire.protobuf import append_config, pb

pytestmark = pytest.mark.usefixtures("forked_programs")

N = 6
LR = 2e-3
ADAM = {"shadow/opt": "adam", "shadow/beta1": 0.8, "shadow/beta2": 0.9, "shadow/eps": 1e-3}
ADAM_PARAMS = types.AdamParams(learning_rate=LR, beta1=0.8, beta2=0.9, eps=1e-3)


@pytest.fixture(scope="module", params=["fake", "torch"])
def served(request: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_by(request.param, tiny_llama, tmp_path_factory.mktemp("shadow")) as served:
        yield served


def datum(seed: int, **inputs: Any) -> types.Datum:
    """One datum of N tokens, with weights on its second half."""
    tokens = np.random.default_rng(seed).integers(3, 120, N + 1)
    weights = (np.arange(N) >= N // 2).astype(np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights, **inputs},
    )


def member(seed: int, group: int, role: int) -> types.Datum:
    return datum(seed, shadow_group=np.full(N, group), shadow_role=np.array([role], np.int64))


def data_of(groups: int) -> list[types.Datum]:
    """Groups with two train data, a probe of their own and one that all share."""
    return [
        member(seed, group, role)
        for group in range(groups)
        for seed, role in ((10 * group, 0), (10 * group + 1, 0), (10 * group + 2, 1), (999, 1))
    ]


def array(output: Any, name: str) -> np.ndarray:
    return output[name].to_numpy()


def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model with moments and a pending gradient."""
    train = client.create_lora_training_client("toy", rank=4, seed=1).result()
    for seed in (50, 51):
        train.forward_backward([datum(seed)], "cross_entropy")
        train.optim_step(types.AdamParams(learning_rate=0.02)).result()
    return train


@pytest.mark.parametrize("inherit", [False, True])
def test_virtual_step_equals_a_real_step_on_a_fork(client: tinker.ServiceClient, inherit: bool) -> None:
    train = trained(client)
    saved = train.save_state(f"state-{inherit}").result().path
    config = {**ADAM, "shadow/lr": LR, "shadow/opt": "adam_inherit" if inherit else "adam"}
    results = [train.forward(data_of(2), "shadow", config).result()]
    train.optim_step(types.AdamParams(learning_rate=0.02)).result()  # the saved path is not changed by it
    results.append(train.forward(data_of(2), "shadow", {**config, "shadow/at": saved}).result())
    for group in range(2):
        create = client.create_training_client_from_state_with_optimizer if inherit else None
        fork = (create or client.create_training_client_from_state)(saved).result()
        probes = [datum(10 * group + 2), datum(999)]
        before = fork.forward(probes, "cross_entropy").result()
        fork.forward_backward([datum(10 * group), datum(10 * group + 1)], "cross_entropy")
        fork.optim_step(ADAM_PARAMS)
        after = fork.forward(probes, "cross_entropy").result()
        for result in results:
            outputs = result.loss_fn_outputs[4 * group : 4 * group + 4]
            for output in outputs[:2]:
                sizes = [array(output, name).size for name in ("logprobs", "logprobs_pre", "logprobs_post", "delta")]
                assert sizes == [N, 0, 0, 0]
            for output, old, new in zip(outputs[2:], before.loss_fn_outputs, after.loss_fn_outputs, strict=True):
                pre, post = array(old, "logprobs"), array(new, "logprobs")
                np.testing.assert_allclose(array(output, "logprobs_pre"), pre, atol=2e-5)
                np.testing.assert_allclose(array(output, "logprobs_post"), post, atol=2e-5)
                assert array(output, "delta").shape == (1,)
                assert array(output, "delta")[0] == pytest.approx((post - pre)[N // 2 :].sum(), abs=1e-4)
    assert results[0].metrics["shadow/groups:sum"] == 2
    assert results[0].metrics["shadow/probes:sum"] == 4


def test_first_order_agrees_with_exact(client: tinker.ServiceClient) -> None:
    train = trained(client)
    deltas = []
    for mode in ("exact", "first_order"):
        config = {"shadow/lr": 2e-6, "shadow/mode": mode}
        outputs = train.forward(data_of(3), "shadow", config).result().loss_fn_outputs
        deltas.append([array(output, "delta")[0] for output in outputs if array(output, "delta").size])
        assert any("logprobs_post" in output for output in outputs) is (mode == "exact")
    np.testing.assert_allclose(deltas[1], deltas[0], rtol=0.05, atol=2e-5)


def test_gradient_and_weights_stay_as_they_were(client: tinker.ServiceClient) -> None:
    answers = []
    for shadows in (0, 1):
        train = trained(client)
        for seed in (60, 61):
            train.forward_backward([datum(seed)], "cross_entropy").result()
            for mode in ("exact", "first_order")[: 2 * shadows]:
                train.forward(data_of(2), "shadow", {**ADAM, "shadow/lr": LR, "shadow/mode": mode}).result()
        norm = train.optim_step(types.AdamParams(learning_rate=0.02)).result().metrics["grad_norm"]
        output = train.forward([datum(1)], "cross_entropy").result().loss_fn_outputs[0]
        answers.append((norm, array(output, "logprobs").tolist()))
    assert answers[0] == answers[1]


def test_more_data_than_one_request_split_between_groups(client: tinker.ServiceClient) -> None:
    train = client.create_lora_training_client("toy", rank=4, seed=1).result()
    short = [member(1, 0, 0), member(2, 0, 1)]
    many = [datum(seed, shadow_group=np.array([group]), shadow_role=np.array([role]))
            for group in range(520) for seed, role in ((1, 0), (2, 1))]  # fmt: skip
    alone = train.forward(short, "shadow", {"shadow/lr": LR}).result().loss_fn_outputs[1]
    result = train.forward(many, "shadow", {"shadow/lr": LR}).result()
    assert result.metrics["shadow/groups:sum"] == 520
    assert array(result.loss_fn_outputs[-1], "delta")[0] == pytest.approx(array(alone, "delta")[0], abs=1e-5)


WRONG: dict[str, tuple[dict[str, Any], list[types.Datum], str]] = {
    "no rate": ({}, data_of(1), "shadow/lr"),
    "a rate below 0": ({"shadow/lr": -1.0}, data_of(1), "shadow/lr is -1"),
    "a near miss": ({"shadow/lr": LR, "shadow/mod": "exact"}, data_of(1), "Did you mean 'shadow/mode'"),
    "an unknown optimizer": ({"shadow/lr": LR, "shadow/opt": "lion"}, data_of(1), "adam, adam_inherit, sgd"),
    "an unknown mode": ({"shadow/lr": LR, "shadow/mode": "second"}, data_of(1), "exact, first_order"),
    "settings that sgd does not read": ({"shadow/lr": LR, "shadow/eps": 1e-8}, data_of(1), "sgd does not read"),
    "eps of 0": ({**ADAM, "shadow/lr": LR, "shadow/eps": 0.0}, data_of(1), "shadow/eps is 0"),
    "a term": ({"shadow/lr": LR, "kl_coef": 1.0}, data_of(1), "no 'kl_coef' for shadow"),
    "the service's own key": ({"shadow/lr": LR, "shadow/checkpoint": "x"}, data_of(1), "no 'shadow/checkpoint'"),
    "a checkpoint of nobody": ({"shadow/lr": LR, "shadow/at": "tinker://a:train:0/weights/x"}, data_of(1), "no|not"),
    "a path that is none": ({"shadow/lr": LR, "shadow/at": "x"}, data_of(1), "not the path"),
    "a group without probes": ({"shadow/lr": LR}, data_of(1)[:2], "no probes.*1,024 data or 5 MB"),
    "a group without train data": ({"shadow/lr": LR}, data_of(1)[2:], "no train data.*between groups"),
    "train data after a probe": ({"shadow/lr": LR}, [*data_of(1), member(3, 0, 0)], "after a probe"),
    "a role that is none": ({"shadow/lr": LR}, [*data_of(1), member(3, 0, 2)], "shadow_role is not one whole"),
    "no group": ({"shadow/lr": LR}, [datum(1)], "shadow_group"),
    "an input of another loss": ({"shadow/lr": LR}, [datum(1, advantages=np.ones(N))], "shadow_group|advantages"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rejects_invalid_requests_by_name(train: tinker.TrainingClient, case: str) -> None:
    config, data, says = WRONG[case]
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=says):
        train.forward(data, "shadow", config).result()


def test_has_no_backward(train: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="Use forward, not forward_backward"):
        train.forward_backward(data_of(1), "shadow", {"shadow/lr": LR}).result()


def shadow_body(model: str, seq: int, at: str = "") -> bytes:
    """One group: a train datum and a probe."""
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(pass_body(model, seq, loss_fn="shadow", forward_only=True))
    message.data.add().CopyFrom(message.data[0])
    for role, row in enumerate(message.data):
        for name, value in (("shadow_group", 0), ("shadow_role", role)):
            tensor = row.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = np.asarray([value], "<i8").tobytes(), pb.DTYPE_INT64
            tensor.shape.append(1)
    return append_config(message.SerializeToString(), {"shadow/lr": LR, **({"shadow/at": at} if at else {})})


def has_shadow(argument: object) -> bool:
    return isinstance(argument, list) and any(isinstance(each, Pass) and each.loss_fn == "shadow" for each in argument)


def test_other_models_train_while_a_shadow_pass_runs(tmp_path: Path) -> None:
    async def main() -> None:
        start, release = Factory(), asyncio.Event()

        async def hook(name: str, argument: object) -> None:
            if name == "run" and has_shadow(argument):
                await release.wait()

        start.hook = hook
        async with api(tmp_path, start) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            shadowed, other = await app.model(session, 0), await app.model(session, 1)
            beside = (await app.post("forward_backward", shadow_body(shadowed, 1))).json()
            later = (await app.post("forward_backward", pass_body(shadowed, 2))).json()
            await app.result((await app.post("forward_backward", pass_body(other, 1))).json())
            assert "metrics" in await app.step(other, 2)
            assert not release.is_set()
            waiting = asyncio.create_task(app.result(later))
            await asyncio.sleep(0.05)
            assert not waiting.done()  # the model's own requests keep their order
            release.set()
            assert (await app.result(beside)).headers["content-type"] == "application/x-protobuf"
            assert (await waiting).headers["content-type"] == "application/x-protobuf"

    asyncio.run(main())


def test_shadow_pass_that_kills_engines_fails_alone(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()

        def hook(name: str, argument: object) -> None:
            if name == "run" and has_shadow(argument):
                start.kill()

        start.hook = hook
        async with api(tmp_path, start) as app:
            session = (await app.post("create_session", {"tags": []})).json()["session_id"]
            good, bad = await app.model(session, 0), await app.model(session, 1)
            promises = [
                (await app.post("forward_backward", body)).json()
                for body in (pass_body(good, 1), shadow_body(bad, 1), pass_body(bad, 2), pass_body(good, 2))
            ]
            answers = [await app.result(promise) for promise in promises]
            assert "died 3 times" in answers[1].json()["error"]
            assert all(answers[index].headers["content-type"] == "application/x-protobuf" for index in (0, 2, 3))
            assert len(start.made) <= 5  # a death counts only if the request ran by itself

    asyncio.run(main())


def test_pending_shadow_pass_survives_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        start, never = Factory(), asyncio.Event()

        async def hook(name: str, argument: object) -> None:
            if name == "run" and has_shadow(argument):
                await never.wait()

        async with api(tmp_path) as app:
            model = await app.model(seed=1)
            path = (await app.call("save_weights", {"model_id": model, "seq_id": 1, "path": "kept"}))["path"]
            shadow = shadow_body(model, 2, path)
            wanted = (await app.result((await app.post("forward_backward", shadow)).json())).content
        start.hook = hook
        async with api(tmp_path, start) as app:
            promise = (await app.post("forward_backward", shadow_body(model, 3, path))).json()
            await asyncio.sleep(0.05)
        async with api(tmp_path) as app:
            assert (await app.result(promise)).content == wanted
            stranger = await app.tenant("stranger")
            refused = await stranger.post("forward_backward", shadow_body(await stranger.model(), 1, path))
            assert refused.status_code == NotFound.status

    asyncio.run(main())
