"""Virtual optimizer steps against plain forks, both through the unmodified SDK and HTTP.

A plain fork is a model created from the saved state of a parent: forward of the probes, forward_backward of the train
text, optim_step, forward of the probes. The requests of a fork are submitted without waiting. The forks of a turn are
made together, so that the engine packs their requests, or in turn. Virtual steps are one `forward` with loss_fn
`shadow`.

The texts are those of a policy that predicts what it learns from each of its replies: groups of replies to one prompt,
compared on one question, or on a set of questions that all groups share. With long prompts and sgd, first-order steps
are differences of forward passes.

`python -m benchmarks.parts.shadow --quick` prints the rates.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from benchmarks.comparison import Comparison, Line, Setting, rotate
from benchmarks.servers import KEY, MODEL, tinsmith

RANK = 8
GROUPS, GROUP = 3, 16
REPLY, QUESTION, ANSWER = 20, 12, 3
"""Tokens."""
FORKS = 4
"""Plain forks of a turn: each takes as long as several virtual steps."""
LEAST, AIM = 10.0, 15.0
"""Of first-order steps with many probes. Exact steps compute what a fork computes, without its requests."""
ADAM = types.AdamParams(learning_rate=1e-4)


@dataclass(frozen=True, slots=True)
class Workload:
    """Steps of a batch: tokens of a prompt, probes of a step, distinct probes of the batch, and shadow/opt."""

    prompt: int
    probes: int
    pool: int
    optimizer: str

    @property
    def title(self) -> str:
        return f"{self.optimizer}, prompts of {self.prompt} tokens, probes: {self.probes}"


WORKLOADS = {
    "one-probe": Workload(prompt=12, probes=1, pool=1, optimizer="adam"),
    "many-probes": Workload(prompt=12, probes=20, pool=20, optimizer="adam"),
    "long-prompts": Workload(prompt=150, probes=1, pool=20, optimizer="sgd"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """A text to train on, and probes."""

    train: np.ndarray
    probes: Sequence[np.ndarray]


def measure(setting: Setting, workloads: Sequence[str] = tuple(WORKLOADS)) -> list[Line]:
    """Exact and first-order steps, against forks together and in turn."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tinsmith(setting.folder, setting.dtype, Path(folder), setting.threads) as service,
    ):
        client = tinker.ServiceClient(base_url=service.url, api_key=KEY)
        lines = [line for name in workloads for line in _lines(client, setting, WORKLOADS[name])]
        client.close("success").result()
    return lines


def _lines(client: tinker.ServiceClient, setting: Setting, workload: Workload) -> list[Line]:
    parent = client.create_lora_training_client(MODEL, rank=RANK, seed=1).result()
    work = steps(workload)
    parent.forward_backward([datum(step.train, REPLY) for step in work[:2]], "cross_entropy")
    parent.optim_step(ADAM)
    path = parent.save_state("parent").result().path
    few = work[:: len(work) // FORKS]
    some = work[::4]
    exact, linear = ({"shadow/opt": workload.optimizer, "shadow/mode": mode} for mode in ("exact", "first_order"))
    sides: dict[str, tuple[Callable[[], object], int]] = {
        "exact": (lambda: virtual(parent, some, exact), len(some)),
        "first_order": (lambda: virtual(parent, work, linear), len(work)),
        "forks together": (lambda: forks(client, path, few, len(few)), len(few)),
        "forks in turn": (lambda: forks(client, path, few, 1), len(few)),
    }
    forks(client, path, few[:1], 1)
    virtual(parent, work[:4], exact)
    totals = rotate({name: side for name, (side, _) in sides.items()}, setting.turns)
    seconds = {name: [total / sides[name][1] for total in totals[name]] for name in sides}
    return [
        _line(mode, workload, baseline, Comparison(seconds[mode], seconds[baseline]))
        for mode in ("exact", "first_order")
        for baseline in ("forks together", "forks in turn")
    ]


def _line(mode: str, workload: Workload, baseline: str, comparison: Comparison) -> Line:
    is_promised = mode == "first_order" and workload.probes > 1 and baseline == "forks in turn"
    rates = [3600 / sorted(seconds)[len(seconds) // 2] for seconds in (comparison.ours_s, comparison.theirs_s)]
    return Line(
        work=f"a shadow step, {mode}, {workload.title}",
        baseline=baseline,
        unit="x",
        least=LEAST if is_promised else None,
        aim=AIM if is_promised else None,
        values=comparison.ratios,
        ours=f"{rates[0]:,.0f}/h",
        theirs=f"{rates[1]:,.0f}/h",
    )


def steps(workload: Workload) -> list[Step]:
    """GROUPS prompts with GROUP replies each; a group's replies have the same probes."""
    draw = np.random.default_rng(0)
    pool = [draw.integers(100, 40_000, QUESTION + ANSWER) for _ in range(workload.pool)]
    listed = []
    for group in range(GROUPS):
        prompt = draw.integers(100, 40_000, workload.prompt)
        probes = [pool[(group * workload.probes + number) % workload.pool] for number in range(workload.probes)]
        replies = [draw.integers(100, 40_000, REPLY) for _ in range(GROUP)]
        listed += [Step(np.concatenate([prompt, reply]), probes) for reply in replies]
    return listed


def datum(tokens: np.ndarray, counted: int, **inputs: Any) -> types.Datum:
    """A datum whose last `counted` targets have weight 1."""
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[-counted:] = 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64), "weights": weights, **inputs},
    )


def virtual(parent: tinker.TrainingClient, work: Sequence[Step], config: dict[str, Any]) -> None:
    """All steps in one call."""
    data = [
        datum(tokens, counted, shadow_group=np.array([number]), shadow_role=np.array([role]))
        for number, step in enumerate(work)
        for role, tokens, counted in ((0, step.train, REPLY), *((1, probe, ANSWER) for probe in step.probes))
    ]
    parent.forward(data, "shadow", {"shadow/lr": ADAM.learning_rate, **config}).result()  # type: ignore[arg-type]


def forks(client: tinker.ServiceClient, path: str, work: Sequence[Step], together: int) -> None:
    """A fork for each step, `together` at a time."""
    for first in range(0, len(work), together):
        some = work[first : first + together]
        creating = [client.create_training_client_from_state(path) for _ in some]
        made = [future.result() for future in creating]
        waiting = []
        for fork, step in zip(made, some, strict=True):
            probes = [datum(probe, ANSWER) for probe in step.probes]
            waiting.append(fork.forward(probes, "cross_entropy"))
            waiting.append(fork.forward_backward([datum(step.train, REPLY)], "cross_entropy"))
            waiting.append(fork.optim_step(ADAM))
            waiting.append(fork.forward(probes, "cross_entropy"))
        for future in waiting:
            future.result()


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description="Virtual optimizer steps against plain forks.")
    parser.add_argument("--quick", action="store_true", help="one turn in place of three")
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, default=tuple(WORKLOADS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    from tinsmith.engine.model.sources import locate

    folder, threads = Path(locate(arguments.model).folder), len(os.sched_getaffinity(0))
    turns = 1 if arguments.quick else 3
    setting = Setting(folder=folder, threads=threads, turns=turns, dtype=arguments.dtype)
    for line in measure(setting, arguments.workload):
        print(f"{line.work}: {line.ours}; {line.baseline}: {line.theirs}; {line.median:.1f} times as many")


if __name__ == "__main__":
    main()
