"""Training requests over raw HTTP: repeats, gaps and order of seq_ids, invalid bodies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zstandard
from transformers import AutoTokenizer

from tests.service.support.inprocess import Api, Factory, api, loss_in, pass_body
from tinsmith.service.wire.protobuf import pb


def run(coroutine) -> None:
    asyncio.run(coroutine)


def test_repeated_request_runs_once(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model()
            bodies = {
                "forward_backward": pass_body(model, 1),
                "optim_step": {"model_id": model, "seq_id": 2, "adam_params": {}},
                "save_weights": {"model_id": model, "seq_id": 3, "path": "a"},
                "save_weights_for_sampler": {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0},
            }
            for path, body in bodies.items():
                first = (await app.post(path, body)).json()
                answer = await app.result(first)
                if path == "save_weights_for_sampler":
                    body["sampling_session_seq_id"] = 1  # as the SDK repeats it
                again = [(await app.post(path, body)).json() for _ in range(2)]
                assert again == [first, first]
                assert (await app.result(first)).content == answer.content
            engine = start.made[0].engine
            assert [engine.calls.count(call) for call in ("run", "step", "capture")] == [1, 1, 1]  # type: ignore[attr-defined]

    run(main())


def test_concurrent_repeats_run_once(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model()
            body = {"model_id": model, "seq_id": 1, "adam_params": {}}
            answers = await asyncio.gather(*(app.post("optim_step", body) for _ in range(5)))
            assert len({answer.json()["request_id"] for answer in answers}) == 1
            assert "metrics" in (await app.result(answers[0].json())).json()
            assert start.made[0].engine.calls.count("step") == 1  # type: ignore[attr-defined]

    run(main())


def test_repeat_after_a_restart_runs_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            promise = (await app.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})).json()
            answer = (await app.result(promise)).json()
        start = Factory()
        async with api(tmp_path, start) as app:
            again = await app.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
            assert again.json() == promise
            assert (await app.result(promise)).json() == answer
            assert start.made[0].engine.calls == []  # type: ignore[attr-defined]
            late = await app.post("create_model", {
                "session_id": model.split(":")[0], "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4},
            })  # fmt: skip
            assert (await app.result(late.json())).json()["model_id"] == model

    run(main())


def test_seq_id_gaps_are_allowed_and_late_requests_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            assert "metrics" in await app.step(model, 5)
            assert "metrics" in await app.step(model, 90)
            late = await app.post("optim_step", {"model_id": model, "seq_id": 7, "adam_params": {}})
            assert late.status_code == 400
            assert "order of seq_id" in late.json()["detail"]
            assert (
                await app.post("optim_step", {"model_id": model, "seq_id": 0, "adam_params": {}})
            ).status_code == 400
            assert "metrics" in await app.step(model, 91)

    run(main())


def test_accepts_compressed_bodies_and_rejects_bombs(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            body = zstandard.compress(pass_body(model, 1))
            headers = {"Content-Encoding": "zstd"}
            promise = await app.http.post("/api/v1/forward_backward", content=body, headers=headers)
            plain = (await app.post("forward_backward", pass_body(model, 2, forward_only=True))).json()
            assert loss_in(await app.result(promise.json())) == loss_in(await app.result(plain))
            bomb = zstandard.compress(bytes(300 * 2**20))
            refused = await app.http.post("/api/v1/forward_backward", content=bomb, headers=headers)
            assert refused.status_code == 413
            for content, coding in ((b"not zstd", "zstd"), (b"\xff\xff", None), (pass_body(model, 3), "br")):
                extra = {"Content-Encoding": coding} if coding else {}
                refused = await app.http.post("/api/v1/forward_backward", content=content, headers=extra)
                assert refused.status_code == 400, refused.text

    run(main())


def test_rejects_more_targets_than_vocabulary(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            message = pb.ForwardBackwardRequest.FromString(pass_body(await app.model(), 1, (5, 6)))
            for width, status in ((512, 200), (513, 400)):
                target = message.data[0].loss_fn_inputs["target_tokens"]
                target.dense, target.shape[:] = bytes(8 * width), [1, width]
                answer = await app.post("forward_backward", message.SerializeToString())
                assert answer.status_code == status
                message.seq_id += 1
            assert "513 targets for each position; toy has 512 tokens" in answer.json()["detail"]

    run(main())


def test_ignores_unknown_fields_and_validates_known_fields(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model(new_lora_option=3)
            body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1, "nu": 1}, "future": [1]}
            assert "metrics" in await app.call("optim_step", body)
            refused = await app.post("optim_step", {"model_id": model, "seq_id": "two", "adam_params": {}})
            assert refused.status_code == 400
            assert "'seq_id'" in refused.json()["detail"]
            refused = await app.post("optim_step", b"{not json")
            assert refused.status_code == 400
            live, named = {"kind": "live", "sampling_session_seq_id": 0}, {"kind": "inflight", "path": "named"}
            for extra, says in ((live, "snapshot"), (named, "without a path, inflight"), ({}, "neither")):
                refused = await app.post("save_weights_for_sampler", {"model_id": model, "seq_id": 2, **extra})
                assert says in refused.json()["detail"]

    run(main())


@pytest.mark.parametrize("path", ["optim_step", "save_weights", "save_weights_for_sampler", "load_weights", "get_info"])
def test_unknown_models_are_not_found(tmp_path: Path, path: str) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            body = {"model_id": "s:train:0", "seq_id": 1, "adam_params": {}, "path": "tinker://a/weights/b"}
            answer = await app.post(path, body)
            assert answer.status_code == 404
            assert "no model s:train:0" in answer.json()["detail"]

    run(main())


def test_get_info_returns_the_name_and_tokenizer(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            info = (await app.post("get_info", {"model_id": model})).json()
            tokenizer = info["model_data"].pop("tokenizer_id")
            assert info["model_data"] == {"arch": "fake", "model_name": "toy"}
            assert AutoTokenizer.from_pretrained(tokenizer, local_files_only=True).encode("Hi") == [72, 105]
            assert (info["is_lora"], info["lora_rank"]) == (True, 4)

    run(main())


async def _ended(app: Api, model: str) -> None:
    await app.post(f"sessions/{model.split(':')[0]}/finish", {"reason": {"type": "success"}, "detail": None})


def test_finished_session_runs_accepted_requests_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            model = await app.model()
            promise = (await app.post("save_weights", {"model_id": model, "seq_id": 1, "path": "last"})).json()
            await _ended(app, model)
            assert (await app.result(promise)).json()["path"] == f"tinker://{model}/weights/last"
            refused = await app.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
            assert refused.status_code == 400
            assert "has ended (success)" in refused.json()["detail"]

    run(main())
