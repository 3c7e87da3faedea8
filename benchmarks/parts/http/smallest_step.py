"""The smallest step: forward_backward and optim_step of 8 tokens, through the unmodified SDK and HTTP.

The model is tiny, so what is measured is what a step costs whatever its model; its widths are multiples of 32, as those
of published models are. The baseline is a stub that answers at once: what the SDK itself needs. One client alone, then
50 at once, each with a session and a model of its own.
`python -m benchmarks.parts.http.smallest_step` prints the lines.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tinker

from benchmarks.comparison import Line, Setting, percentile
from benchmarks.servers import KEY, MODEL, Server, stub, tinsmith
from tests.models import save_model

RANK = 8
TOKENS = 8
CLIENTS = 50
STEPS = 100
"""Steps of the one client in a turn; each of the others takes a tenth of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A server, and clients that train there."""

    server: Server
    models: Sequence[Any]

    def turn(self, clients: int, steps: int) -> list[float]:
        """Have so many clients take steps at the same time; returns the seconds of each step."""
        times: list[float] = []

        def work(model: Any) -> None:
            for _ in range(steps):
                began = time.perf_counter()
                step(model)
                times.append(time.perf_counter() - began)

        threads = [threading.Thread(target=work, args=(model,)) for model in self.models[:clients]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return times


@contextmanager
def tiny_service(setting: Setting, folder: str, clients: int) -> Iterator[Side]:
    """A service of a tiny model, and clients with a session and a model each."""
    source = save_model("aligned", Path(folder) / "model")
    with tinsmith(source, setting.dtype, Path(folder) / "data", setting.threads) as server:
        yield from _side(server, MODEL, clients)


def measure(setting: Setting) -> list[Line]:
    """Median and 99th percentile of a step's time against the stub's, with one client and with 50."""
    logging.getLogger("tinker").setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as folder,
        stub() as nothing,
        contextmanager(_side)(nothing, "stub", CLIENTS) as theirs,
        tiny_service(setting, folder, CLIENTS) as ours,
    ):
        return [
            *_lines(ours, theirs, 1, STEPS, setting.turns),
            *_lines(ours, theirs, CLIENTS, STEPS // 10, setting.turns),
        ]


def _side(server: Server, name: str, clients: int) -> Iterator[Side]:
    services = [tinker.ServiceClient(base_url=server.url, api_key=KEY) for _ in range(clients)]
    waiting = [service.create_lora_training_client(name, rank=RANK, seed=1) for service in services]
    yield Side(server=server, models=[model.result() for model in waiting])
    for service in services:
        service.close("success").result()


def step(model: Any) -> None:
    """One smallest step: both requests are submitted, then both results awaited, as the SDK's documentation has it."""
    trained = model.forward_backward([DATUM], "cross_entropy")
    stepped = model.optim_step(tinker.AdamParams(learning_rate=1e-4))
    trained.result()
    stepped.result()


INPUTS: dict[str, Any] = {"target_tokens": np.arange(4, 4 + TOKENS), "weights": np.ones(TOKENS, np.float32)}
DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(list(range(3, 3 + TOKENS))),
    loss_fn_inputs=INPUTS,
)


def _lines(ours: Side, theirs: Side, clients: int, steps: int, turns: int) -> list[Line]:
    """The lines of a number of clients; the sides take turns, and the one that goes first alternates."""
    times: dict[str, list[list[float]]] = {"ours": [], "theirs": []}
    for side in (ours, theirs):
        side.turn(clients, max(3, steps // 10))
    used, own = [_processor_s(side.server) for side in (ours, theirs)], time.process_time()
    for turn in range(turns):
        sides = [("ours", ours), ("theirs", theirs)]
        for name, side in sides if turn % 2 == 0 else reversed(sides):
            times[name].append(side.turn(clients, steps))
    count = clients * steps * turns
    spent = [
        1000 * (_processor_s(side.server) - before) / count for side, before in zip((ours, theirs), used, strict=True)
    ]
    note = (
        f"processor time of a step: service {spent[0]:.1f} ms, stub {spent[1]:.1f}, SDK "
        f"{500 * (time.process_time() - own) / count:.1f}"
    )
    who = "one client" if clients == 1 else f"{clients} clients at once"
    return [
        _line(
            f"forward_backward and optim_step of {TOKENS} tokens, tiny model, {who}: {name}",
            times,
            of_turn,
            note if not at else "",
        )
        for at, (name, of_turn) in enumerate(
            (("median", median), ("99th percentile", lambda each: percentile(each, 0.99)))
        )
    ]


def _line(
    work: str, times: dict[str, list[list[float]]], of_turn: Callable[[Sequence[float]], float], note: str
) -> Line:
    values = {name: [of_turn(each) for each in turns] for name, turns in times.items()}
    return Line(
        work=work,
        baseline="the SDK's own time: a stub that answers at once",
        unit="x",
        least=2.0,
        aim=1.5,
        values=[step_s / stub_s for step_s, stub_s in zip(values["ours"], values["theirs"], strict=True)],
        ours=f"{1000 * median(values['ours']):.1f} ms",
        theirs=f"{1000 * median(values['theirs']):.1f} ms",
        note=note,
        lower=True,
    )


def _processor_s(server: Server) -> float:
    """Processor time of a server and its processes so far."""
    times = [process.cpu_times() for process in (server.process, *server.process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    for line in measure(Setting(folder=Path(), threads=1, turns=2, dtype="float32")):
        ratios = " ".join(f"{value:.2f}" for value in line.values)
        print(f"{line.work}: {line.median:.2f} ({ratios}), {line.ours} and {line.theirs} {line.note}")
