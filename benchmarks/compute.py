"""Training and sampling speed of the engine against transformers with PEFT, in one process, with the same threads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from benchmarks.baseline import Baseline
from benchmarks.contest import Contest, in_turns
from benchmarks.workloads import groups, questions, separate
from tinsmith.engine.base import AdamParams, Engine, LoraSpec, SampleRequest
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig

RANK = 16
SAMPLES, LENGTH = 8, 48


class Ours:
    """The engine with one model and one version of it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._runner = asyncio.Runner()
        self._engine: Engine = build(EngineConfig(source=str(folder), dtype=dtype, device="cpu"))  # type: ignore[arg-type]
        self._wait(self._engine.create("bench", LoraSpec(rank=RANK, seed=0)))
        self._asked = 0

    def train(self, batch: Any) -> None:
        """The batch, and a step."""
        (result,) = self._wait(self._engine.run([batch.as_pass("bench")]))
        if isinstance(result, Exception):
            raise result
        self._wait(self._engine.step("bench", AdamParams()))

    def capture(self) -> None:
        """Make the present weights the version that is sampled."""
        self._wait(self._engine.capture("bench", "version"))

    def sample(self, prompts: Any, version: str | None) -> None:
        """All prompts at once, as a client with 64 open requests would."""
        self._wait(self._sample(prompts, version))

    def close(self) -> None:
        """Give the memory back."""
        self._wait(self._engine.close())
        self._runner.close()

    async def _sample(self, prompts: Any, version: str | None) -> None:
        self._asked += 1
        settings: dict[str, Any] = {"num_samples": SAMPLES, "max_tokens": LENGTH, "stop_tokens": (), "version": version}
        requests = [
            SampleRequest(
                request_id=f"{self._asked}-{index}", prompt=prompt, seed=self._asked * 100 + index, **settings
            )
            for index, prompt in enumerate(prompts)
        ]
        for found in await asyncio.gather(*(self._engine.sample(request) for request in requests)):
            assert all(len(sequence.tokens) == LENGTH for sequence in found.sequences)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)


def contests(folder: Path, dtype: str, turns: int) -> list[Contest]:
    """Training on two kinds of rows, sampling from the base model and from an adapter."""
    ours, theirs = Ours(folder, dtype), Baseline(folder, getattr(torch, dtype), RANK)
    found = []
    for batch, wanted in ((groups(), 1.5), (separate(), 1.5)):
        contest = Contest(
            name="training",
            work=f"{batch.name}: {len(batch.rows)} rows, rank {RANK}, {dtype}",
            tokens=batch.tokens,
            wanted=wanted,
        )
        found.append(
            in_turns(
                contest,
                lambda batch=batch: ours.train(batch),
                lambda batch=batch: theirs.train(batch.rows, batch.prompts),
                turns,
            )
        )
    ours.capture()
    prompts = questions()
    for name, version in (("base model", None), ("adapter", "version")):
        contest = Contest(
            name="sampling",
            work=f"{len(prompts)} prompts x {SAMPLES} samples x {LENGTH} tokens, {name}, {dtype}",
            tokens=len(prompts) * SAMPLES * LENGTH,
            wanted=2.0,
        )
        found.append(
            in_turns(contest, lambda v=version: ours.sample(prompts, v), _generator(theirs, version, prompts), turns)
        )
    ours.close()
    return found


def _generator(theirs: Baseline, version: str | None, prompts: Any) -> Any:
    def generate() -> None:
        if version is not None:
            theirs.sample(prompts, SAMPLES, LENGTH)
            return
        with theirs.model.disable_adapter():
            theirs.sample(prompts, SAMPLES, LENGTH)

    return generate
