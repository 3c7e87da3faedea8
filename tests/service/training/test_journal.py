"""The journal: acknowledged requests survive kill -9, and an unmodified client continues."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import tinker
from sqlalchemy import update
from tinker import types

from tests.service.conftest import datum
from tests.service.support.databases import beside
from tests.service.support.inprocess import Factory, api, pass_body
from tests.service.support.process import child, eventually, free_port
from tinsmith.service.config import ServeConfig
from tinsmith.service.storage.tables import CHECKPOINTS

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]

TOKENS = [5, 6, 7, 8, 9]
ADAM = types.AdamParams(learning_rate=0.02)
PROMPT = types.ModelInput.from_ints(TOKENS)


def data(step: int) -> list[types.Datum]:
    return [datum([step + i, *TOKENS], weights=[1.0, 0.5, 1.0, 1.0, 1.0]) for i in range(3)]


def losses(model: tinker.TrainingClient, steps: range) -> list[float]:
    """Losses of these steps; all are submitted before the first result is read."""
    futures = [(model.forward_backward(data(step), "cross_entropy"), model.optim_step(ADAM)) for step in steps]
    return [(passed.result().metrics["loss:sum"], stepped.result())[0] for passed, stepped in futures]


def test_kill_during_training_keeps_the_losses(tmp_path: Path) -> None:
    config = ServeConfig(
        models=("toy",), engine="fake", data=tmp_path, port=free_port(), api_key="tml-x", capture_every=3
    )
    steps = range(11)
    with child(config, delay=0.05) as first:
        client = tinker.ServiceClient(base_url=first.url, api_key="tml-x")
        straight = client.create_lora_training_client("toy", rank=4, seed=1).result()
        expected = losses(straight, steps)
        broken = client.create_lora_training_client("toy", rank=4, seed=1).result()
        early = losses(broken, steps[:4])
        unnamed = broken.save_weights_and_get_sampling_client().result()
        sampled = unnamed.compute_logprobs(PROMPT).result()
        broken.save_state("kept").result()
        late: list[float] = []
        run = threading.Thread(target=lambda: late.extend(losses(broken, steps[4:])))
        run.start()
        time.sleep(0.33)
        in_flight = unnamed.compute_logprobs(PROMPT)
        first.kill()
    with child(config, delay=0.05):
        run.join(240)
        assert early + late == expected
        final = [
            model.save_weights_and_get_sampling_client().result().compute_logprobs(PROMPT).result()
            for model in (straight, broken)
        ]
        assert final[0] == final[1]
        assert unnamed.compute_logprobs(PROMPT).result() == sampled
        assert in_flight.result() == sampled
        client.close("success").result()


def test_kill_between_gradient_and_step_keeps_the_gradient(tmp_path: Path) -> None:
    config = ServeConfig(
        models=("toy",), engine="fake", data=tmp_path, port=free_port(), api_key="tml-x", capture_every=1
    )
    with child(config) as first:
        client = tinker.ServiceClient(base_url=first.url, api_key="tml-x")
        models = [client.create_lora_training_client("toy", rank=4, seed=1).result() for _ in range(2)]
        for model in models:
            losses(model, range(2))
            model.forward_backward(data(7), "cross_entropy").result()
            # A save covers requests up to the last step; the gradient after it is only in the journal.
            model.save_state("mid").result()
            model.forward_backward(data(8), "cross_entropy").result()
        whole = models[0].optim_step(ADAM).result().metrics
        first.kill()
    with child(config):
        assert models[1].optim_step(ADAM).result().metrics == whole
        assert losses(models[0], range(3)) == losses(models[1], range(3))
        client.close("success").result()


def test_unwritten_versions_are_replayed(tmp_path: Path) -> None:
    """The kill precedes the write of an unnamed version; a replay makes the same version again."""
    config = ServeConfig(models=("toy",), engine="fake", data=tmp_path, port=free_port(), api_key="tml-x")
    with child(config) as first:
        client = tinker.ServiceClient(base_url=first.url, api_key="tml-x")
        model = client.create_lora_training_client("toy", rank=4, seed=1).result()
        losses(model, range(2))
        sampler = model.save_weights_and_get_sampling_client().result()
        before = sampler.compute_logprobs(PROMPT).result()
        losses(model, range(2))
        first.kill()
    for folder in (tmp_path / "checkpoints").iterdir():
        folder.rename(tmp_path / f"gone-{folder.name}")
    mark_unwritten(tmp_path)
    with child(config):
        assert sampler.compute_logprobs(PROMPT).result() == before
        client.close("success").result()


def mark_unwritten(folder: Path) -> None:
    with beside(folder) as engine, engine.begin() as db:
        db.execute(update(CHECKPOINTS).values(ready=False))


def test_ended_sessions_delete_their_captures(tmp_path: Path) -> None:
    config = ServeConfig(
        models=("toy",), engine="fake", data=tmp_path, port=free_port(), api_key="tml-x", capture_every=1
    )
    with child(config) as running:
        client = tinker.ServiceClient(base_url=running.url, api_key="tml-x")
        model = client.create_lora_training_client("toy", rank=4).result()
        losses(model, range(2))
        model.save_weights_and_get_sampling_client().result()
        checkpoint = model.save_state("kept").result().path
        [ended] = (tmp_path / "journal").iterdir()
        client.close("success").result()
        other = tinker.ServiceClient(base_url=running.url, api_key="tml-x")
        other.create_training_client_from_state(checkpoint).result()
        eventually(lambda: not ended.exists())
        assert len(list((tmp_path / "journal").iterdir())) == 1
        eventually(lambda: len(list((tmp_path / "checkpoints").iterdir())) == 1)
        other.close("success").result()


def test_replay_does_not_split_passes_at_a_forward(tmp_path: Path) -> None:
    async def main() -> None:
        start, ran, hold = Factory(), [], asyncio.Event()

        def hook(call: str, argument: object):
            if call == "run":
                ran.append([batched.forward_only for batched in argument])  # type: ignore[attr-defined]
            return hold.wait() if call == "step" else None

        start.hook = hook
        async with api(tmp_path, start) as app:
            model = await app.model()
            await app.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
            for seq, forward_only in ((2, False), (3, True), (4, False)):
                await app.post("forward_backward", pass_body(model, seq, forward_only=forward_only))
            hold.set()
            await app.result({"request_id": f"{model}:4"})
            start.kill()
            await app.step(model, 5)
            assert ran == [[False, True, False], [False, False]]

    asyncio.run(main())
