"""Router replay through the real SDK: records of a served mixture, training rows, metrics, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.architectures import save_tiny
from tinsmith.errors import ConfigError, Unsupported
from tinsmith.rl.config.run_config import RunConfig
from tinsmith.rl.optimizer import OptimizerConfig
from tinsmith.rl.policy.models import ModelConfig
from tinsmith.rl.policy.router_replay import check_routers
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.tinker import TinkerTrainer
from tinsmith.rl.policy.trainer import Update
from tinsmith.rl.policy.training_rows import TrainingRow, rows_from_trajectory
from tinsmith.rl.types import Trajectory, Turn
from tinsmith.routed_experts import share_that_differs, to_text
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.usefixtures("forked_programs")

PROMPT = (5, 9, 17, 3, 8, 21, 40)
SAMPLING = SamplingConfig(max_tokens=6, stop=())
T = TypeVar("T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("mixture"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    data = tmp_path_factory.mktemp("served")
    with embedded(ServeConfig(models=(f"tiny={folder}",), threads=1, dtype="float32", data=data)) as address:
        yield address


def _with_policy(served: Any, mode: str, use: Callable[[TinkerTrainer], Awaitable[T]]) -> T:
    config = ModelConfig.model_validate({"name": "tiny", "rank": 2, "router_replay": mode})

    async def main() -> T:
        policy = await TinkerTrainer.connect(config, *served, seed=1)
        try:
            return await use(policy)
        finally:
            await policy.models.close()

    return asyncio.run(main())


async def _conversation(policy: TinkerTrainer) -> list[Turn]:
    """Two turns, of which the second continues the first."""
    snapshot = await policy.snapshot()
    (first,) = await snapshot.sample(PROMPT, count=1, seed=1, sampling=SAMPLING)
    (second,) = await snapshot.sample((*first.prompt, *first.tokens, 11, 12), count=1, seed=2, sampling=SAMPLING)
    return [first, second]


def _update(row: TrainingRow) -> Update:
    inputs = {"logprobs": row.logprobs, "advantages": row.mask.astype(np.float32)}
    return Update(rows=(row,), inputs=(inputs,), loss="importance_sampling")


def _own_experts(folder: Path, tokens: np.ndarray) -> np.ndarray:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: list[Tensor] = []
    for module in plain.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[2]))
    with torch.no_grad():
        plain(torch.as_tensor(tokens).long()[None])
    return torch.stack(seen, 1).numpy().astype(np.uint8)


@pytest.mark.slow
def test_rows_carry_the_experts_of_all_turns(served: Any, folder: Path) -> None:
    async def use(policy: TinkerTrainer) -> Any:
        turns = await _conversation(policy)
        (row,) = rows_from_trajectory(Trajectory(turns=tuple(turns)))
        changed = (row.routed_experts + 1) % 8
        results = [await policy.accumulate(_update(replace(row, routed_experts=each)))
                   for each in (row.routed_experts, changed)]  # fmt: skip
        return row, results, await policy.logprobs([row])

    row, (replayed, shifted), logprobs = _with_policy(served, "replay", use)
    assert share_that_differs(row.routed_experts, _own_experts(folder, row.tokens)) == 0
    assert replayed.metrics["expert_mismatch:mean"] == 0
    assert replayed.metrics["logprob_mismatch:mean"] < 1e-4
    assert shifted.metrics["logprob_mismatch:mean"] > 0.05
    assert shifted.metrics["expert_mismatch:mean"] > 0.5
    np.testing.assert_allclose(logprobs[0], replayed.logprobs[0], atol=1e-5)


@pytest.mark.slow
def test_measuring_leaves_the_routers_free(served: Any) -> None:
    async def use(policy: TinkerTrainer) -> Any:
        turns = await _conversation(policy)
        (row,) = rows_from_trajectory(Trajectory(turns=tuple(turns)))
        changed = replace(row, routed_experts=(row.routed_experts + 1) % 8)
        return await policy.accumulate(_update(row)), await policy.accumulate(_update(changed))

    free, compared = _with_policy(served, "measure", use)
    np.testing.assert_array_equal(free.logprobs[0], compared.logprobs[0])
    assert compared.metrics["expert_mismatch:mean"] > 0.5
    assert free.metrics["expert_mismatch:mean"] == 0


def test_first_records_win_and_gaps_are_filled() -> None:
    records = [np.full((length, 1, 2), number, np.uint8) for length, number in ((4, 1), (8, 2))]
    texts = [to_text(record) for record in records]
    turns = [
        Turn(prompt=(1, 2, 3), tokens=(4, 5), logprobs=(0, 0), text="", stop="stop", routed_experts=texts[0]),
        Turn(prompt=(1, 2, 3, 4, 5, 6), tokens=(7, 8, 9), logprobs=(0, 0, 0), text="", stop="stop",
             routed_experts=texts[1]),
    ]  # fmt: skip
    (row,) = rows_from_trajectory(Trajectory(turns=tuple(turns)))
    assert row.routed_experts is not None
    assert row.routed_experts[:, 0, 0].tolist() == [1] * 4 + [2] * 4
    (row,) = rows_from_trajectory(Trajectory(turns=(turns[0], replace(turns[1], routed_experts=""))))
    assert row.routed_experts is not None
    assert row.routed_experts[:, 0, 0].tolist() == [1] * 4 + [255] * 4
    (row,) = rows_from_trajectory(Trajectory(turns=(replace(turns[0], routed_experts=""),)))
    assert row.routed_experts is None


def test_replay_is_refused_where_there_is_none(tiny_llama: Path, tmp_path: Path) -> None:
    config = ServeConfig(models=(f"tiny={tiny_llama}",), engine="fake", data=tmp_path)
    with embedded(config) as dense, pytest.raises(ConfigError, match="no routers to replay"):
        _with_policy(dense, "replay", _conversation)

    async def other_server() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await check_routers(f"http://127.0.0.1:{port}", "key", "tiny")

    with pytest.raises(ConfigError, match="does not record"):
        asyncio.run(other_server())

    task = {"tasks": {"eval": {"type": "addition"}}, "rewards": [{"type": "closeness"}], "mode": "bench"}
    with pytest.raises(ValueError, match="router_replay is not used"):
        RunConfig.model_validate({**task, "model": {"name": "tiny", "router_replay": "replay"}})


@pytest.mark.slow
def test_losses_of_the_client_are_not_replayed(served: Any) -> None:
    async def client_loss(policy: TinkerTrainer) -> None:
        (row,) = rows_from_trajectory(Trajectory(turns=tuple((await _conversation(policy))[:1])))
        await policy.train([Update(rows=(row,), client=lambda _: (None, {}))], OptimizerConfig(), 1e-3)

    with pytest.raises(Unsupported, match="the client computes"):
        _with_policy(served, "replay", client_loss)
