"""Sampling sessions over raw HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.service.inprocess import api
from tests.service.routes.test_futures import base_sampler, sample_body


def test_a_sampling_session_is_made_once_and_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            sampler = await base_sampler(on)
            body = {"session_id": sampler.split(":")[0], "sampling_session_seq_id": 0, "base_model": "toy"}
            assert (await on.post("create_sampling_session", body)).json()["sampling_session_id"] == sampler
            told = (await on.http.get(f"/api/v1/samplers/{sampler}")).json()
            assert told == {"sampler_id": sampler, "base_model": "toy", "model_path": None}
            assert (await on.http.get("/api/v1/samplers/no")).status_code == 404
            refused = await on.post(
                "create_sampling_session", {**body, "sampling_session_seq_id": 1, "base_model": None}
            )
            assert refused.status_code == 400

    asyncio.run(main())


def test_a_tokenizer_that_is_a_folder_is_told_as_one_the_sdk_can_load(tmp_path: Path) -> None:
    async def main() -> None:
        source = tmp_path / "m"
        source.mkdir()
        (source / "config.json").write_text('{"vocab_size": 300}')
        async with api(tmp_path / "d", models=(f"Org/Name={source}",)) as on:
            session = (await on.post("create_session", {})).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "Org/Name"}
            sampler = (await on.post("create_sampling_session", body)).json()["sampling_session_id"]
            name = (await on.http.get(f"/api/v1/samplers/{sampler}")).json()["base_model"]
            assert Path(name).samefile(source)
            assert name.count("/") != 2

    asyncio.run(main())


def test_asample_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as on:
            sampler = await base_sampler(on)
            for changes, says in (
                ({"sampling_session_id": "no"}, "no sampling session"),
                ({"sampling_session_id": None, "base_model": "toy"}, "sampling_session_id"),
                ({"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "http://x"}]}}, "image_asset"),
                ({"prompt": {"chunks": [{"tokens": [2**40]}]}}, "token id"),
                ({"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}}, "shape"),
                ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
                ({"prompt": 3}, "prompt"),
            ):
                answer = await on.post("asample", sample_body(sampler, 0, **changes))
                assert 400 <= answer.status_code < 405, answer.text
                assert says in answer.json()["detail"]
            ok = (await on.post("asample", sample_body(sampler, 0, record_stability_info=False, new_field=[{}]))).json()
            assert (await on.result(ok)).status_code == 200

    asyncio.run(main())
