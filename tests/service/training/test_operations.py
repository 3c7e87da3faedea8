"""Operations: failed requests change nothing; loads, saves and captures are complete."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.support.inprocess import Api, Factory, api, loss_in, pass_body
from tinsmith.errors import EngineError
from tinsmith.service.storage.records import Model


async def loss(app: Api, model: str, seq: int) -> float:
    return loss_in(await app.result((await app.post("forward_backward", pass_body(model, seq))).json()))


def load(model: str, seq: int, name: str) -> dict:
    return {"model_id": model, "seq_id": seq, "path": f"tinker://{model}/weights/{name}", "optimizer": True}


def test_checkpoint_deleted_during_its_load_is_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model(seed=1)
            await app.call("save_weights", {"model_id": model, "path": "fresh", "seq_id": 1})
            fresh = await loss(app, model, 2)
            await app.step(model, 3)
            gone: list[int] = []

            async def delete() -> None:
                path = f"/api/v1/training_runs/{model}/checkpoints/weights/fresh"
                gone.append((await app.http.delete(path)).status_code)

            start.hook = lambda call, _: delete() if call == "load" and not gone else None
            assert "path" in await app.call("load_weights", load(model, 4, "fresh"))
            assert gone == [204]
            assert await loss(app, model, 5) == fresh
        async with api(tmp_path) as app:
            assert await loss(app, model, 6) == fresh

    asyncio.run(main())


def test_failed_load_leaves_model_and_folder_unchanged(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as app:
            model = await app.model(seed=1)
            await app.call("save_weights", {"model_id": model, "path": "bad", "seq_id": 1})
            await loss(app, model, 2)
            await app.step(model, 3)
            before = await loss(app, model, 4)
            states = set(tmp_path.glob("journal/*/*"))
            [weights] = tmp_path.glob("checkpoints/*/adapter_model.safetensors")
            weights.unlink()
            assert "cannot be read" in (await app.call("load_weights", load(model, 5, "bad")))["error"]
            weights.parent.rename(tmp_path / "elsewhere")
            failed = await app.call("load_weights", load(model, 6, "bad"))
            assert failed["category"] == "server"
            assert "data folder" in failed["error"]
            assert await loss(app, model, 7) == before
            assert set(tmp_path.glob("journal/*/*")) == states
            assert len(start.made) == 1

    asyncio.run(main())


def test_failed_named_save_leaves_no_version_in_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()

        def full(call: str, _argument: object) -> None:
            if call == "persist":
                raise OSError(28, "No space left on device")

        start.hook = full
        async with api(tmp_path, start) as app:
            model = await app.model()
            failed = await app.call("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"})
            assert "No space left" in failed["error"]
            assert not start.made[-1].engine._versions  # type: ignore[attr-defined]

    asyncio.run(main())


@pytest.mark.parametrize("kills", [False, True])
def test_load_waits_for_unwritten_versions(tmp_path: Path, kills: bool) -> None:
    async def main() -> None:
        start, held = Factory(), asyncio.Event()
        start.hook = lambda call, _: held.wait() if call == "persist" and len(start.made) == 1 else None
        async with api(tmp_path, start, capture_every=1) as app:
            model = await app.model(seed=1)
            await loss(app, model, 1)
            await app.call("save_weights", {"model_id": model, "path": "s", "seq_id": 2})
            await app.step(model, 3)
            save = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}
            sampler = (await app.call("save_weights_for_sampler", save))["sampling_session_id"]
            loading = (await app.post("load_weights", load(model, 5, "s"))).json()
            await asyncio.sleep(0.1)
            if kills:
                start.kill()
            held.set()
            assert "path" in (await app.result(loading)).json()
            await app.step(model, 6)
            body = {
                "sampling_session_id": sampler,
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            }
            answer = await app.result(
                (await app.post("asample", {**body, "sampling_params": {"max_tokens": 1}})).json()
            )
            assert answer.headers["content-type"] == "application/x-protobuf", answer.text
            await app.step(model, 7)
            record = app.service.store.find(Model, model)
            assert record is not None
            assert record.covered >= 6, "captures continue"

    asyncio.run(main())


def test_load_fails_while_an_earlier_version_is_unwritable(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()

        def full(call: str, _argument: object) -> None:
            if call == "persist":
                raise EngineError("No space left on device.")

        start.hook = full
        async with api(tmp_path, start) as app:
            model = await app.model(seed=1)
            await app.call("save_weights", {"model_id": model, "path": "s", "seq_id": 1})
            await app.call("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0})
            assert "No space left" in (await app.call("load_weights", load(model, 3, "s")))["error"]
            assert "metrics" in await app.step(model, 4)

    asyncio.run(main())
