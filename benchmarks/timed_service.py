"""A service whose samples take a given time and report their end.

`python -m benchmarks.timed_service PORT FOLDER`.

`max_tokens` of a request is the number of milliseconds that its sample takes; 1 means none. The two tokens of a sample
are the time at which the engine ended it, in seconds and microseconds since 1970. Passes compute nothing. Everything
else is the real service.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.servers import KEY
from tinsmith.engine.base import OnDelta, Pass, PassResult, SampledSequence, SampleRequest, SampleResult
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.fake.engine import FakeEngine
from tinsmith.errors import TinsmithError
from tinsmith.service.config import ServeConfig
from tinsmith.service.engines.host import RunningEngine
from tinsmith.service.server import serve


class TimedEngine(FakeEngine):
    """Sleeps instead of sampling and computes no passes."""

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        """Zeros of the targets' shapes."""
        return [
            PassResult(
                logprobs=tuple(np.zeros(datum.targets.shape, np.float32) for datum in data_pass.data),
                metrics={"loss:sum": 0.0},
            )
            for data_pass in passes
        ]

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        """Two tokens that encode the time at which the sample ended."""
        milliseconds = request.max_tokens or 1
        if milliseconds > 1:
            await asyncio.sleep(milliseconds / 1000)
        tokens = np.array(divmod(time.time_ns() // 1000, 10**6), np.int32)
        return SampleResult(
            sequences=(SampledSequence(tokens=tokens, logprobs=np.zeros(2, np.float32), stop_reason="length"),)
        )


async def start(config: EngineConfig) -> RunningEngine:
    """A TimedEngine."""
    return RunningEngine(engine=TimedEngine(config), died=asyncio.Event())


if __name__ == "__main__":
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    config = ServeConfig(models=("timed",), engine="fake", port=port, data=folder, api_key=KEY)
    serve(config, start=start)
