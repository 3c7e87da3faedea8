"""Synchronous access to an engine for benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from benchmarks.comparison import Setting
from tinsmith.engine.base import AdamParams, LoraSpec, Pass, PassResult, SampleRequest, SampleResult, SequenceDelta
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.torch_engine import TorchEngine

OnDelta = Callable[[SequenceDelta], None]


class EngineDriver:
    """An engine with the setting's model and threads, or with a loaded base; `options` go to its config."""

    def __init__(self, setting: Setting, base: BaseModel | None = None, **options: Any) -> None:
        options = {"dtype": setting.dtype, "device": "cpu", **options}
        self._runner = asyncio.Runner()
        self._runner.run(asyncio.sleep(0))
        self.engine = TorchEngine(EngineConfig(source=str(setting.folder), threads=setting.threads, **options), base)
        self._calls = 0

    def create(self, model_id: str, rank: int, seed: int = 0) -> None:
        """Create a new adapter."""
        self.wait(self.engine.create(model_id, LoraSpec(rank=rank, seed=seed)))

    def run(self, *passes: Pass) -> list[PassResult]:
        """Run passes; raises the first error among the results."""
        results = self.wait(self.engine.run(passes))
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def step(self, model_id: str, learning_rate: float = 1e-4) -> None:
        """Take one AdamW step."""
        self.wait(self.engine.step(model_id, AdamParams(learning_rate=learning_rate)))

    def capture(self, model_id: str, version: str) -> None:
        """Capture the current weights as a version."""
        self.wait(self.engine.capture(model_id, version))

    def sample(
        self, prompts: Sequence[np.ndarray], version: str | None, samples: int, tokens: int, **settings: Any
    ) -> list[SampleResult]:
        """Sample from all prompts at once, as a client with that many requests; each sample has `tokens` tokens."""
        return self.wait(self.sampling(prompts, version, samples, tokens, **settings))

    async def sampling(
        self,
        prompts: Sequence[np.ndarray],
        version: str | None,
        samples: int,
        tokens: int,
        listener: Callable[[], OnDelta] | None = None,
        **settings: Any,
    ) -> list[SampleResult]:
        """The same as a coroutine; `listener` creates the `on_delta` of each request."""
        self._calls += 1
        fixed: dict[str, Any] = {"num_samples": samples, "max_tokens": tokens, "stop_tokens": (), "version": version}
        requests = [
            SampleRequest(
                request_id=f"{self._calls}-{index}",
                prompt=prompt,
                **{"seed": self._calls * 1000 + index, **fixed, **settings},
            )
            for index, prompt in enumerate(prompts)
        ]
        results = await asyncio.gather(
            *(self.engine.sample(request, listener() if listener else None) for request in requests)
        )
        assert all(len(sequence.tokens) == tokens for result in results for sequence in result.sequences)
        return results

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to completion."""
        return self._runner.run(work)

    def close(self) -> None:
        """Free the engine's memory."""
        self.wait(self.engine.close())
        self._runner.close()
