"""A request that fails has changed nothing, and what is loaded, saved or captured is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.service.inprocess import Api, Factory, api, loss_in, pass_body
from tinsmith.errors import EngineError
from tinsmith.service.storage.records import Model


async def loss(on: Api, model: str, seq: int) -> float:
    return loss_in(await on.result((await on.post("forward_backward", pass_body(model, seq))).json()))


def load(model: str, seq: int, name: str) -> dict:
    return {"model_id": model, "seq_id": seq, "path": f"tinker://{model}/weights/{name}", "optimizer": True}


def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as on:
            model = await on.model(seed=1)
            await on.call("save_weights", {"model_id": model, "path": "fresh", "seq_id": 1})
            fresh = await loss(on, model, 2)
            await on.step(model, 3)
            gone: list[int] = []

            async def delete() -> None:
                path = f"/api/v1/training_runs/{model}/checkpoints/weights/fresh"
                gone.append((await on.http.delete(path)).status_code)

            start.hook = lambda call, _: delete() if call == "load" and not gone else None
            assert "path" in await on.call("load_weights", load(model, 4, "fresh"))
            assert gone == [204]
            assert await loss(on, model, 5) == fresh
        async with api(tmp_path) as on:
            assert await loss(on, model, 6) == fresh

    asyncio.run(main())


def test_a_load_that_fails_leaves_model_and_folder_as_they_were(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()
        async with api(tmp_path, start) as on:
            model = await on.model(seed=1)
            await on.call("save_weights", {"model_id": model, "path": "bad", "seq_id": 1})
            await loss(on, model, 2)
            await on.step(model, 3)
            before = await loss(on, model, 4)
            states = set(tmp_path.glob("journal/*/*"))
            [weights] = tmp_path.glob("checkpoints/*/adapter_model.safetensors")
            weights.unlink()
            assert "cannot be read" in (await on.call("load_weights", load(model, 5, "bad")))["error"]
            weights.parent.rename(tmp_path / "elsewhere")
            failed = await on.call("load_weights", load(model, 6, "bad"))
            assert failed["category"] == "server"
            assert "data folder" in failed["error"]
            assert await loss(on, model, 7) == before
            assert set(tmp_path.glob("journal/*/*")) == states
            assert len(start.made) == 1

    asyncio.run(main())


def test_a_named_save_that_fails_leaves_no_version_in_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()

        def full(call: str, _argument: object) -> None:
            if call == "persist":
                raise OSError(28, "No space left on device")

        start.hook = full
        async with api(tmp_path, start) as on:
            model = await on.model()
            failed = await on.call("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"})
            assert "No space left" in failed["error"]
            assert start.made[-1].engine._versions == {}  # type: ignore[attr-defined]

    asyncio.run(main())


@pytest.mark.parametrize("kills", [False, True])
def test_a_load_waits_for_versions_that_only_a_replay_could_bring_back(tmp_path: Path, kills: bool) -> None:
    async def main() -> None:
        start, held = Factory(), asyncio.Event()
        start.hook = lambda call, _: held.wait() if call == "persist" and len(start.made) == 1 else None
        async with api(tmp_path, start, capture_every=1) as on:
            model = await on.model(seed=1)
            await loss(on, model, 1)
            await on.call("save_weights", {"model_id": model, "path": "s", "seq_id": 2})
            await on.step(model, 3)
            save = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}
            sampler = (await on.call("save_weights_for_sampler", save))["sampling_session_id"]
            loading = (await on.post("load_weights", load(model, 5, "s"))).json()
            await asyncio.sleep(0.1)
            if kills:
                start.kill()
            held.set()
            assert "path" in (await on.result(loading)).json()
            await on.step(model, 6)
            asked = {
                "sampling_session_id": sampler,
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            }
            answer = await on.result((await on.post("asample", {**asked, "sampling_params": {"max_tokens": 1}})).json())
            assert answer.headers["content-type"] == "application/x-protobuf", answer.text
            await on.step(model, 7)
            found = on.service.store.find(Model, model)
            assert found is not None
            assert found.covered >= 6, "states are captured again"

    asyncio.run(main())


def test_a_load_fails_while_a_version_before_it_cannot_be_written(tmp_path: Path) -> None:
    async def main() -> None:
        start = Factory()

        def full(call: str, _argument: object) -> None:
            if call == "persist":
                raise EngineError("No space left on device.")

        start.hook = full
        async with api(tmp_path, start) as on:
            model = await on.model(seed=1)
            await on.call("save_weights", {"model_id": model, "path": "s", "seq_id": 1})
            await on.call("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0})
            assert "No space left" in (await on.call("load_weights", load(model, 3, "s")))["error"]
            assert "metrics" in await on.step(model, 4)

    asyncio.run(main())
