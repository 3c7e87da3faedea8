"""What the service adds to the engine: the GRPO batch through the unmodified SDK and HTTP, and on an engine in hand.

Both engines hold the same model on the same threads, one in this process, one in the service; they take turns. A
stub that answers at once shows what an empty step costs beyond the SDK's own share. The service's memory is watched.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tinker

from benchmarks.comparison import Line, Setting, in_turns
from benchmarks.engine_driver import EngineDriver
from benchmarks.servers import KEY, MODEL, Watch, stub, tinsmith
from benchmarks.workloads import Batch, grpo

RANK = 32


def measure(setting: Setting) -> list[Line]:
    """The batch, an empty step, memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        stub() as nothing,
        tinsmith(setting.folder, setting.dtype, Path(folder), setting.threads) as service,
    ):
        clients = [tinker.ServiceClient(base_url=server.url, api_key=KEY) for server in (service, nothing)]
        served, empty = (
            client.create_lora_training_client(name, rank=RANK, seed=1).result()
            for client, name in zip(clients, (MODEL, "stub"), strict=True)
        )
        added = in_turns(lambda: _step(served), lambda: _step(empty), 20 * setting.turns, warm_up=5)
        with Watch(service) as watch:
            lines = [_batch(setting, served)]
        for client in clients:
            client.close("success").result()
    return [*lines, _empty(added.ours_s, added.theirs_s), _memory(watch.peak)]


def _batch(setting: Setting, served: Any) -> Line:
    work, direct = grpo(), EngineDriver(setting)
    direct.create("bench", RANK)

    def by_hand() -> None:
        direct.run(work.as_pass("bench"))
        direct.step("bench")

    def through() -> None:
        trained = served.forward_backward(data_of(work), "importance_sampling")
        stepped = served.optim_step(tinker.AdamParams())
        trained.result()
        stepped.result()

    comparison = in_turns(through, by_hand, setting.turns)
    direct.close()
    subject = f"GRPO batch of {work.name} through SDK and HTTP"
    return comparison.line(subject, "the engine called directly", 0.95, 0.98, work.tokens)


def _empty(ours_s: list[float], stub_s: list[float]) -> Line:
    return Line(
        work="empty optim_step through SDK and HTTP, above the SDK's own share",
        baseline="a stub that answers at once",
        unit="ms",
        least=15.0,
        aim=5.0,
        values=[1000 * (ours - theirs) for ours, theirs in zip(ours_s, stub_s, strict=True)],
        lower=True,
    )


def _memory(peak: int) -> Line:
    return Line(
        work="memory of the service, peak while it trains on that batch",
        baseline="-",
        unit="GB",
        least=3.0,
        aim=2.5,
        values=[peak / 1e9],
        note="API and engine together; pages that they share are counted in each",
        lower=True,
    )


def data_of(work: Batch) -> list[tinker.Datum]:
    """The batch as a client sends it."""
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(datum.tokens.tolist()),
            loss_fn_inputs={
                "target_tokens": datum.targets,
                **{name: np.asarray(v) for name, v in datum.inputs.items()},
            },
        )
        for datum in work.as_pass("").data
    ]


def _step(client: Any) -> None:
    client.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
