"""What the service adds to a request: an empty optim_step through the SDK, against a stub that answers at once.

The same unmodified client takes turns between the two servers, so what the SDK itself costs cancels out. Then some real
work goes through the service while its memory is watched.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker

from benchmarks.contest import percentile
from benchmarks.servers import KEY, MODEL, Watch, stub, tinsmith
from benchmarks.workloads import groups

RANK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """Milliseconds of one empty optim_step at each server, in turns, and the service's memory in bytes."""

    ours_ms: list[float]
    stub_ms: list[float]
    idle_bytes: int
    peak_bytes: int

    @property
    def added_ms(self) -> float:
        """Median of the differences, turn by turn."""
        return statistics.median(ours - theirs for ours, theirs in zip(self.ours_ms, self.stub_ms, strict=True))

    def lines(self) -> list[str]:
        """As markdown."""
        differences = [ours - theirs for ours, theirs in zip(self.ours_ms, self.stub_ms, strict=True)]
        low, high = percentile(differences, 0.05), percentile(differences, 0.95)
        return [
            f"| empty optim_step, above the SDK's own {statistics.median(self.stub_ms):.1f} ms | "
            f"{self.added_ms:.1f} ms (5 to 95 %: {low:.1f} to {high:.1f}) | 15 ms |",
            f"| service memory, idle with a model | {self.idle_bytes / 1e9:.2f} GB | 3 GB |",
            f"| service memory, peak while it trains and samples | {self.peak_bytes / 1e9:.2f} GB | 3 GB |",
        ]


def measure(folder: Path, dtype: str, turns: int) -> RoundTrip:
    """`turns` steps at each server, then three batches of training and sampling at ours."""
    with tempfile.TemporaryDirectory() as data, tinsmith(folder, dtype, Path(data)) as service, stub() as nothing:
        clients = [tinker.ServiceClient(base_url=server.url, api_key=KEY) for server in (service, nothing)]
        ours, theirs = (
            client.create_lora_training_client(name, rank=RANK, seed=1).result()
            for client, name in zip(clients, (MODEL, "stub"), strict=True)
        )
        times: dict[str, list[float]] = {"ours": [], "stub": []}
        for turn in range(turns + 5):
            for name, client in (("ours", ours), ("stub", theirs)):
                milliseconds = _step(client)
                if turn >= 5:
                    times[name].append(milliseconds)
        idle = service.memory()
        with Watch(service) as watch:
            _work(ours)
        for client in clients:
            client.close("success").result()
        return RoundTrip(ours_ms=times["ours"], stub_ms=times["stub"], idle_bytes=idle, peak_bytes=watch.peak)


def _step(client: Any) -> float:
    start = time.perf_counter()
    client.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
    return (time.perf_counter() - start) * 1000


def _work(client: Any) -> None:
    batch = groups()
    data = []
    for row, prompt in zip(batch.rows, batch.prompts, strict=True):
        weights = [0.0] * (prompt - 1) + [1.0] * (len(row) - prompt)
        tokens = row.tolist()
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    for _ in range(3):
        trained = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(tinker.AdamParams())
        trained.result()
        stepped.result()
        sampler = client.save_weights_and_get_sampling_client().result()
        parameters = tinker.SamplingParams(max_tokens=64, stop=[])
        futures = [
            sampler.sample(tinker.ModelInput.from_ints(batch.rows[8 * index][:prompt].tolist()), 8, parameters)
            for index, prompt in enumerate(batch.prompts[::8])
        ]
        for future in futures:
            future.result()
