"""A service whose samples take a given time and say when they ended: `python -m benchmarks.clockwork PORT FOLDER`.

`max_tokens` of a request is how many milliseconds its sample takes; 1 means none at all. The two tokens of an answer
are the moment at which the engine was done, in seconds and microseconds since 1970. Passes compute nothing. Everything
else is the service as it is served.
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


class Clockwork(FakeEngine):
    """Sleeps instead of sampling, and has an opinion on nothing."""

    async def run(self, passes: Sequence[Pass]) -> list[PassResult | TinsmithError]:
        """Zeros of the right shapes."""
        return [
            PassResult(
                logprobs=tuple(np.zeros(datum.targets.shape, np.float32) for datum in one.data),
                metrics={"loss:sum": 0.0},
            )
            for one in passes
        ]

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        """The time of its own end."""
        milliseconds = request.max_tokens or 1
        if milliseconds > 1:
            await asyncio.sleep(milliseconds / 1000)
        tokens = np.array(divmod(time.time_ns() // 1000, 10**6), np.int32)
        return SampleResult(
            sequences=(SampledSequence(tokens=tokens, logprobs=np.zeros(2, np.float32), stop_reason="length"),)
        )


async def start(config: EngineConfig) -> RunningEngine:
    """An engine of the source's name."""
    return RunningEngine(engine=Clockwork(config), died=asyncio.Event())


if __name__ == "__main__":
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    serve(ServeConfig(models=("clockwork",), engine="fake", port=port, data=folder, api_key=KEY), start=start)
