"""Sampling sessions over raw HTTP."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import tinker

from tests.models import save_tokenizer
from tests.service.routes.test_futures import base_sampler, sample_body
from tests.service.support.inprocess import KEY, api
from tests.service.support.process import child
from tinsmith.service.config import ServeConfig


def test_sampling_session_is_created_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            sampler = await base_sampler(app)
            body = {"session_id": sampler.split(":")[0], "sampling_session_seq_id": 0, "base_model": "toy"}
            assert (await app.post("create_sampling_session", body)).json()["sampling_session_id"] == sampler
            info = (await app.http.get(f"/api/v1/samplers/{sampler}")).json()
            assert info == {"sampler_id": sampler, "base_model": "toy", "model_path": None}
            assert (await app.http.get("/api/v1/samplers/no")).status_code == 404
            refused = await app.post(
                "create_sampling_session", {**body, "sampling_session_seq_id": 1, "base_model": None}
            )
            assert refused.status_code == 400

    asyncio.run(main())


def test_sampling_sessions_of_a_session_are_limited(tmp_path: Path) -> None:
    """Fails without a call of `check_sampling_session`. An ended session takes no place from others."""

    async def main() -> None:
        async with api(tmp_path, sampling_sessions=2) as app:
            model = await app.model()
            session = model.partition(":")[0]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
            assert (await app.post("create_sampling_session", body)).status_code == 200
            save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1}
            await app.call("save_weights_for_sampler", save)
            refused = [
                await app.post("create_sampling_session", {**body, "sampling_session_seq_id": 2}),
                await app.post("save_weights_for_sampler", {**save, "seq_id": 2, "sampling_session_seq_id": 2}),
            ]
            for answer in refused:
                assert answer.status_code == 403
                assert "2 sampling sessions, as many as one may have (sampling_sessions)" in answer.json()["detail"]
            for path, repeated in (("create_sampling_session", body), ("save_weights_for_sampler", save)):
                assert (await app.post(path, repeated)).status_code == 200
            await base_sampler(app)

    asyncio.run(main())


def test_local_client_gets_the_tokenizer_folder(tmp_path: Path) -> None:
    async def main() -> None:
        source = tmp_path / "m"
        source.mkdir()
        (source / "config.json").write_text('{"vocab_size": 300}')
        async with api(tmp_path / "d", models=(f"Org/Name={source}",)) as app:
            session = (await app.post("create_session", {})).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "Org/Name"}
            sampler = (await app.post("create_sampling_session", body)).json()["sampling_session_id"]
            name = (await app.http.get(f"/api/v1/samplers/{sampler}")).json()["base_model"]
            assert Path(name).samefile(source)
            assert name.count("/") != 2

    asyncio.run(main())


def test_remote_client_gets_the_served_name(tmp_path: Path, monkeypatch) -> None:
    for folder in (tmp_path / "server" / "m", tmp_path / "client" / "Org" / "Name"):
        folder.mkdir(parents=True)
        save_tokenizer(folder)
        (folder / "config.json").write_text('{"vocab_size": 512}')
    monkeypatch.chdir(tmp_path / "client")  # Org/Name exists there, as a stand-in for the hub
    source = tmp_path / "server" / "m"
    config = ServeConfig(
        host="0.0.0.0", port=0, api_key=KEY, engine="fake", data=tmp_path / "d", models=(f"Org/Name={source}",)
    )
    with child(config) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        client = tinker.ServiceClient(base_url=url, api_key=KEY)
        train = client.create_lora_training_client("Org/Name", rank=4).result()
        assert str(tmp_path) not in train.get_info().model_dump_json()
        shutil.rmtree(source)  # the client's machine does not have it
        tokenizer = train.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("What is 39 + 13?")) == "What is 39 + 13?"
        client.close("success").result()


def test_asample_rejects_invalid_requests(tmp_path: Path) -> None:
    async def main() -> None:
        async with api(tmp_path) as app:
            sampler = await base_sampler(app)
            for changes, says in (
                ({"sampling_session_id": "no"}, "no sampling session"),
                ({"sampling_session_id": None, "base_model": "toy"}, "sampling_session_id"),
                ({"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "http://x"}]}}, "image_asset"),
                ({"prompt": {"chunks": [{"tokens": [2**40]}]}}, "token id"),
                ({"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}}, "shape"),
                ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
                ({"prompt": 3}, "prompt"),
            ):
                answer = await app.post("asample", sample_body(sampler, 0, **changes))
                assert 400 <= answer.status_code < 405, answer.text
                assert says in answer.json()["detail"]
            ok = (
                await app.post("asample", sample_body(sampler, 0, record_stability_info=False, new_field=[{}]))
            ).json()
            assert (await app.result(ok)).status_code == 200

    asyncio.run(main())
