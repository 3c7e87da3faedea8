"""Images through the service: training and sampling, replays after a death of the engine, chat completions.

The engines compute in this process; `test_sdk_trains_and_samples_with_images` starts a real server for a real SDK.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from tests.service.routes.test_futures import base_sampler, sample_body
from tests.service.support.inprocess import Api, Factory, api
from tests.service.wire.test_protobuf import body
from tests.vision import END, START, image_tokens, picture, save_vision_model
from tinsmith.engine.config import EngineConfig
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded
from tinsmith.service.engines.host import RunningEngine
from tinsmith.service.wire.protobuf import pb

A, B = picture(0), picture(1, 64, 48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(Path(tmp_path_factory.mktemp("vision")))


class Engines:
    """Starts torch engines in this process; `kill` lets the service replace the newest."""

    def __init__(self) -> None:
        self.made: list[RunningEngine] = []

    async def __call__(self, config: EngineConfig) -> RunningEngine:
        from tinsmith.engine.torch_engine import TorchEngine

        engine = await asyncio.to_thread(TorchEngine, config)
        self.made.append(RunningEngine(engine=engine, died=asyncio.Event()))
        return self.made[-1]

    def kill(self) -> None:
        self.made[-1].died.set()


def torch_api(data: Path, folder: Path, start: Engines) -> Any:
    settings = {"dtype": "float32", "device": "cpu", "threads": 1}
    return api(data, start, models=(f"toy={folder}",), engine="torch", hold_s=40, **settings)


def model_input(*parts: list[int] | bytes, expected: bool = True) -> types.ModelInput:
    chunks: list[Any] = [
        types.ImageChunk(data=part, format="png", expected_tokens=image_tokens(part) if expected else None)
        if isinstance(part, bytes)
        else types.EncodedTextChunk(tokens=part)
        for part in parts
    ]
    return types.ModelInput(chunks=chunks)


def datum_of(*parts: list[int] | bytes) -> types.Datum:
    """Targets are the next tokens, with weight 0 where these are an image's."""
    row = np.concatenate([part if isinstance(part, list) else [-1] * image_tokens(part) for part in parts])
    targets = np.append(row[1:], 7).astype(np.int64)
    inputs = {"target_tokens": np.maximum(targets, 0).tolist(), "weights": (targets >= 0).astype(float).tolist()}
    return types.Datum(model_input=model_input(*parts), loss_fn_inputs=inputs)


DATA = [
    datum_of([5, 6, START], A, [END, 8, 9]),
    datum_of([5, 6, START], B, [END, 8], A, [9]),
    datum_of([5, 6, 7]),
]


async def trained(app: Api, model: str, seq: int, data: Sequence[types.Datum] = DATA) -> float:
    """The loss of a pass and a step."""
    message = pb.ForwardBackwardRequest.FromString(body(list(data), seq=seq))
    message.model_id = model
    promise = await app.post("forward_backward", message.SerializeToString())
    assert promise.status_code == 200, promise.text
    result = await app.result(promise.json())
    assert result.headers["content-type"] == "application/x-protobuf", result.text
    await app.step(model, seq + 1)
    return float(deserialize_forward_backward_output(result.content).metrics["loss:sum"])


def test_replays_requests_with_images_after_a_death(tmp_path: Path, folder: Path) -> None:
    """Fails if the journal does not keep the images, or if a replay sees them otherwise."""

    async def losses(name: str, killed: bool) -> list[float]:
        start = Engines()
        async with torch_api(tmp_path / name, folder, start) as app:
            model = await app.model(seed=1)
            first = [await trained(app, model, 1), await trained(app, model, 3)]
            if killed:
                start.kill()
                await asyncio.sleep(0)
            rest = [await trained(app, model, 5)]
            assert len(start.made) == 1 + killed
            return first + rest

    straight, replayed = asyncio.run(losses("straight", False)), asyncio.run(losses("killed", True))
    assert replayed == straight
    assert straight[2] < straight[0]


def test_samples_and_chats_with_images(tmp_path: Path, folder: Path) -> None:
    async def main() -> None:
        async with torch_api(tmp_path, folder, Engines()) as app:
            prompt = model_input([5, START], A, [END, 8]).model_dump(mode="json")
            settings = {"sampling_params": {"max_tokens": 4, "temperature": 0}, "prompt_logprobs": True}
            sampler = await base_sampler(app)
            promise = await app.post("asample", sample_body(sampler, 0, prompt=prompt, **settings))
            sampled = deserialize_sample_response((await app.result(promise.json())).content)
            assert [logprob is None for logprob in sampled.prompt_logprobs or []] == [
                True,
                False,
                *[True] * 6,
                *[False] * 2,
            ]
            wrong = model_input([5], B).model_dump(mode="json")
            wrong["chunks"][1]["expected_tokens"] = 3
            refused = await app.post("asample", sample_body(sampler, 1, prompt=wrong))
            assert "expected_tokens 3" in (await app.result(refused.json())).text
            await chats(app)

    async def chats(app: Api) -> None:
        def chat(url: str, **fields: Any) -> Any:
            parts = [{"type": "text", "text": "What is 39 + 13?"}, {"type": "image_url", "image_url": {"url": url}}]
            options = {"model": "toy", "max_tokens": 4, "temperature": 0, **fields}
            return app.send(
                "POST", "/v1/chat/completions", {**options, "messages": [{"role": "user", "content": parts}]}
            )

        urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (A, B, A)]
        first, second, again = [(await chat(url)).json() for url in urls]
        assert first["choices"][0]["message"] == again["choices"][0]["message"] != second["choices"][0]["message"]
        assert second["usage"]["prompt_tokens"] - first["usage"]["prompt_tokens"] == image_tokens(B) - image_tokens(A)
        for response, says in (
            (await chat("http://example.org/a.png"), "the server fetches no files"),
            (await chat("data:image/png;base64,?"), "not base64"),
            (await chat(urls[0], return_token_ids=True), "return_token_ids"),
        ):
            assert response.status_code == 400
            assert says in response.text

    asyncio.run(main())


def test_text_models_refuse_images_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path, Factory()) as app:
            prompt = model_input([5], A).model_dump(mode="json")
            answer = await app.post("asample", sample_body(await base_sampler(app), 0, prompt=prompt))
            assert answer.status_code == 400
            assert "takes no images" in answer.json()["detail"]
            message = pb.ForwardBackwardRequest.FromString(body(DATA[:1], seq=1))
            message.model_id = await app.model()
            answer = await app.post("forward_backward", message.SerializeToString())
            assert answer.status_code == 400
            assert "data[0].model_input holds a chunk of type image" in answer.json()["detail"]

    asyncio.run(main())


@pytest.mark.slow
def test_sdk_trains_and_samples_with_images(tmp_path: Path, folder: Path) -> None:
    options = {"dtype": "float32", "threads": 1, "engine": "torch"}
    with embedded(ServeConfig(models=(f"toy={folder}",), data=tmp_path, **options)) as (url, key):
        client = tinker.ServiceClient(base_url=url, api_key=key)
        train = client.create_lora_training_client("toy", rank=4, seed=1).result()
        losses = []
        for _ in range(4):
            passed = train.forward_backward(DATA, "cross_entropy")
            train.optim_step(types.AdamParams(learning_rate=0.02)).result()
            losses.append(passed.result().metrics["loss:sum"])
        assert losses[-1] < losses[0]
        scored = train.forward(DATA, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        sampler = train.save_weights_and_get_sampling_client().result()
        logprobs = sampler.compute_logprobs(model_input([5, 6, START], A, [END, 8, 9])).result()
        assert [logprob is None for logprob in logprobs] == [True, False, False, *[True] * 6, *[False] * 3]
        np.testing.assert_allclose(
            [logprobs[index] for index in (1, 2, 9, 10, 11)], scored[[0, 1, 8, 9, 10]], atol=1e-5
        )
        for expected in (True, False):
            prompt = model_input([5, 6, START], A, [END, 8], expected=expected)
            result = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4)).result()
            assert len(result.sequences) == 2
        inputs = {"target_tokens": [0] * 12, "weights": [1.0] * 12}
        row = types.Datum(model_input=DATA[0].model_input, loss_fn_inputs=inputs)
        with pytest.raises(tinker.BadRequestError, match="counts a target that is a token of an image"):
            train.forward_backward([row], "cross_entropy").result()
        client.close("success").result()
