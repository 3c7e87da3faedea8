"""Files of modes explore, train and bench: two of them share a run, and the third evaluates its checkpoints."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.integrations.trinity.conftest import NAME, Server
from tests.integrations.trinity.files import write
from tests.integrations.trinity.test_every_algorithm import connecting
from tinsmith.dialects import read_run
from tinsmith.rl.bench import bench
from tinsmith.rl.config import RunConfig
from tinsmith.rl.explore import explore
from tinsmith.rl.policy.tinker_models import TinkerModels
from tinsmith.rl.run.loop import train

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # raised when the SDK deletes a session

SHARED: dict[str, Any] = {
    "project": "two",
    "name": "processes",
    "checkpoint_root_dir": "out",
    "algorithm": {"algorithm_type": "rloo", "repeat_times": 4},
    "model": {"model_path": NAME, "max_prompt_tokens": 400, "max_response_tokens": 4, "tinker": {"enable": True}},
    "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1, "sync_offset": 1, "sync_timeout": 300},
}
ROWS = {"path": "rows.jsonl", "format": {"prompt_key": "question", "response_key": "answer"}}
TASKS = {"taskset": ROWS, "default_workflow_type": "simple_workflow", "default_reward_fn_type": "format_reward"}
PATTERN = {"reward_fn_args": {"pattern": "[^aeiou]*"}}
EXPLORE: dict[str, Any] = {
    **SHARED,
    "mode": "explore",
    "buffer": {"batch_size": 3, "total_steps": 3, "explorer_input": {**TASKS, "taskset": {**ROWS, **PATTERN}}},
}
TRAIN: dict[str, Any] = {
    **SHARED,
    "mode": "train",
    "algorithm": {**SHARED["algorithm"], "optimizer": {"lr": 1e-4}},
    "buffer": {"train_batch_size": 12},
    "trainer": {"total_steps": 3, "save_interval": 1},
}
BENCH: dict[str, Any] = {
    **SHARED,
    "mode": "bench",
    "buffer": {
        "explorer_input": {
            **TASKS,
            "taskset": None,
            "eval_tasksets": [
                {"name": "greedy", **ROWS, "rollout_args": {"temperature": 0.0}},
                {"name": "drawn", **ROWS, "repeat_times": 2, "rollout_args": {"temperature": 1.0}},
            ],
        }
    },
}


def with_buffer(values: dict[str, Any], buffer: dict[str, Any]) -> dict[str, Any]:
    return {**values, "buffer": {**values["buffer"], "trainer_input": {"experience_buffer": buffer}}}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def sampling_clients(config: RunConfig, server: Server):
    async def connect() -> TinkerModels:
        return await TinkerModels.connect(config.model, *server)

    return connect


def run_of(place: Path, values: dict[str, Any]) -> RunConfig:
    return read_run(write(place, values, f"{values['mode']}.yaml"), ["monitors=[]"]).settings


@pytest.mark.parametrize("kind", ["queue", "sql"])
def test_two_files_share_a_run_and_a_third_benchmarks_it(
    kind: str, place: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(place)
    (place / "rows.jsonl").write_text((place / "openai" / "gsm8k" / "train.jsonl").read_text())
    buffer = {"name": "meet", "storage_type": kind, **({"path": f"sqlite:///{place}/meet.db"} if kind == "sql" else {})}
    sampler, trainer = run_of(place, with_buffer(EXPLORE, buffer)), run_of(place, with_buffer(TRAIN, buffer))

    async def run_processes() -> tuple[int, Any]:
        async with asyncio.timeout(300):
            training = train(trainer, connecting(server)(trainer), quiet())
            return tuple(await asyncio.gather(explore(sampler, sampling_clients(sampler, server), quiet()), training))

    sampled, state = asyncio.run(run_processes())
    assert (sampled, state.step) == (3, 3)
    folder = place / "out" / "two" / "processes"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["sync/weights"] for row in rows] == [0, 0, 1]
    if kind == "sql":
        return
    benchmark = run_of(place, BENCH)
    results = asyncio.run(bench(benchmark, sampling_clients(benchmark, server), quiet()))
    assert results[0]["checkpoint"] == NAME
    assert len(results) == 1 + 3
    assert all({"eval/greedy/pass@1", "eval/drawn/pass@2"} <= row.keys() for row in results)
