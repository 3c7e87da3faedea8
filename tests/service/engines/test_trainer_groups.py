"""A service whose base model is trained by a group of ranks, each of which is killed during every operation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.service.support.inprocess import Api, api, loss_in, pass_body
from tinsmith.engine.cluster.config import ClusterConfig
from tinsmith.engine.cluster.trainers.group import GroupEngine
from tinsmith.engine.processes.client import RemoteEngine
from tinsmith.service.engines.clusters import ClusterFactory

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("forked_programs"), pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of a rank, some time after a call was sent."""

    method: str
    rank: int
    delay_s: float


KILLS = [
    Kill("create", 1, 0.0),
    Kill("run", 1, 0.01),
    Kill("run", 0, 0.03),
    Kill("step", 0, 0.0),
    Kill("step", 1, 0.001),
    Kill("save", 1, 0.0),
    Kill("save", 0, 0.001),
    Kill("capture", 0, 0.0),
    Kill("persist", 1, 0.0),
    Kill("load", 0, 0.0),
    Kill("load", 1, 0.002),
]


def end(pid: int) -> None:
    """kill -9; the process may have ended with another rank of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Killer:
    """Kills ranks as planned: at the first call of the method, then at the next one, and so on."""

    def __init__(self, kills: Sequence[Kill], patch: pytest.MonkeyPatch) -> None:
        self.left = list(kills)
        self.dead: list[int] = []
        groups: dict[RemoteEngine, GroupEngine] = {}
        create, call = GroupEngine.__init__, RemoteEngine.call

        def noting_create(group: GroupEngine, ranks: Sequence[RemoteEngine]) -> None:
            groups[ranks[0]] = group
            create(group, ranks)

        async def killing_call(engine: RemoteEngine, method: Any, *args: Any, **options: Any) -> Any:
            kill = next((kill for kill in self.left if kill.method == method.__name__), None)
            if kill is not None:
                self.left.remove(kill)
                pids = groups[engine].pids
                self.dead += pids
                asyncio.get_running_loop().call_later(kill.delay_s, end, pids[kill.rank])
            return await call(engine, method, *args, **options)

        patch.setattr(GroupEngine, "__init__", noting_create)
        patch.setattr(RemoteEngine, "call", killing_call)


async def train(app: Api) -> list[float]:
    """Four steps of two models, with saves; returns the losses."""
    losses = []
    models = [await app.model(seed=1), await app.model(seed=2)]
    draw = np.random.default_rng(0)
    seq = 0
    for step in range(4):
        promises = []
        for model in models:
            rows = draw.integers(3, 500, (4, 40)).tolist()
            for number, row in enumerate(rows):
                body = pass_body(model, seq + 1 + number, row)
                promises.append((await app.send("POST", "/api/v1/forward_backward", body)).json())
            adam = {"learning_rate": 1e-3}
            body = {"model_id": model, "seq_id": seq + 5, "adam_params": adam}
            promises.append((await app.post("optim_step", body)).json())
            body = {"model_id": model, "seq_id": seq + 6, "path": f"step-{step}"}
            promises.append((await app.post("save_weights", body)).json())
            body = {"model_id": model, "seq_id": seq + 7, "path": f"sampler-{step}"}
            promises.append((await app.post("save_weights_for_sampler", body)).json())
        seq += 7
        for promise in promises:
            answer = await app.result(promise)
            while answer.status_code == 408 or b"try_again" in answer.content:
                answer = await app.result(promise)
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == "application/x-protobuf":
                losses.append(loss_in(answer))
            else:
                assert "error" not in answer.json(), answer.text
    return losses


def run(folder: Path, base: Path, trainers: int) -> tuple[list[float], set[bytes]]:
    async def serve() -> list[float]:
        factory = ClusterFactory(ClusterConfig(trainers=trainers, shards=4), folder)
        settings = {"engine": "torch", "models": (f"toy={base}",), "dtype": "float32", "device": "cpu", "threads": 1}
        settings |= {"deterministic": True, "hold_s": 40.0, "capture_every": 3}
        async with api(folder, factory, **settings) as app:
            app.http.timeout = 600
            return await train(app)

    losses = asyncio.run(serve())
    files = (folder / "checkpoints").rglob("*.safetensors")
    # Names are drawn. A rank that was killed may leave a folder unfinished, or one whose writing is repeated.
    return losses, {file.read_bytes() for file in files if not file.parent.name.startswith(".")}


def test_killed_ranks_leave_the_bits_of_a_quiet_run_of_one_rank(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet_losses, quiet = run(tmp_path / "quiet", tiny_llama, 1)
    killer = Killer(KILLS, monkeypatch)
    losses, files = run(tmp_path / "killed", tiny_llama, 2)
    assert [kill for kill in killer.left if kill.method != "load"] == []
    assert losses == quiet_losses
    assert files == quiet
    assert len(files) == 2 * 4 * 2  # weights and moments of each step; those of samplers are the same
    assert not [pid for pid in killer.dead if psutil.pid_exists(pid)]
