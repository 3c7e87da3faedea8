"""Sick and healthy runs whose settings and metrics are recorded, to be diagnosed: python -m tests.rl.diagnosis

Most use the scripted policy, whose replies are given; `FOLDERS` are runs of SmolLM2 and of the fake engine, which take
minutes: their run folders are named on the command line.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from typing_extensions import override

from tests.rl.scripted_run import settings
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.sampling import Sample, SampleRequest, SampleResult
from tinsmith.rl.run.loop import train
from tinsmith.rl.types import Rollout, Task, Turn
from tinsmith.rl.workflows.multi_turn import Answer, Environment
from tinsmith.testing import ScriptedPolicy

NUMBER = [{"type": "number"}]
UNREAD = ("time/", "speed/", "workflow/", "shadow/", "buffer/", "policy/lag_")
UNREAD_SETTINGS = ("service", "monitors", "rollout", "buffer", "checkpoint", "bench", "folder", "tasks", "model")


@dataclass(frozen=True)
class Case:
    """A run of the scripted policy: its replies, the right answers of its tasks in turn, and changes of settings."""

    replies: Sequence[str] = ("4", "5", "perhaps")
    answers: Sequence[str] = ("4",)
    steps: int = 40
    failing: int = 0
    """Every so many requests, one fails."""
    noise: float = 0.0
    """Standard deviation of what the sampler adds to its logprobs, as one of another precision does."""
    changes: Mapping[str, Any] = field(default_factory=dict)


def case(
    replies: str = "4 5 perhaps",
    answers: str = "4",
    steps: int = 40,
    failing: int = 0,
    noise: float = 0.0,
    **changes: Any,
) -> Case:
    """A case with replies and answers as words."""
    return Case(replies.split(), answers.split(), steps, failing, noise, changes)


class Guessing(Environment):
    """A game that ends at an even number, which is worth 1."""

    @override
    def step(self, reply: Turn) -> Answer:
        is_right = int(reply.text) % 2 == 0
        return Answer(message="another?", reward=float(is_right), done=is_right)


RATE = {"learning_rate": 0.02}


def chance(task: Task, rollout: Rollout) -> float:
    """A reward that has nothing to do with the reply."""
    return random.random()


GAME = {"type": "multi_turn", "path": "tests.rl.diagnosis.cases:Guessing", "max_turns": 2}
PAIRS = {"data": {"type": "jsonl", "path": "ROWS", "chosen": "{answer}", "rejected": "5"}}
PAYS_FORM = [{"type": "format", "pattern": "perhaps"}]
CASES: dict[str, Case] = {
    # healthy
    "learns": case(),
    "learns_a_format": case(rewards=[{"type": "format", "pattern": "5"}], eval={"every": 10}),
    "learns_with_staleness": case(staleness=1, algorithm={"type": "grpo"}),
    "learns_from_demonstrations": case(
        algorithm={"type": "sft"}, demonstrations={"data": {"type": "jsonl", "path": "ROWS"}}, steps=30
    ),
    "is_solved": case("4 5", steps=60, optimizer={"learning_rate": 0.5}),
    "learns_pairs": case(algorithm={"type": "dpo"}, demonstrations=PAIRS, steps=30),
    "learns_a_game": case("5 7 4 6 8", workflow=GAME, rewards=[]),
    "keeps_what_it_knows": case(
        answers="4 4 5", algorithm={"type": "sft"}, steps=60, optimizer={"learning_rate": 1e-4},
        demonstrations={"data": {"type": "jsonl", "path": "ROWS"}},
    ),
    "learns_with_filters": case(filters=[{"type": "reward_std"}], filter_refills=8, steps=8),
    "short": case(steps=3),
    # no signal
    "all_wrong": case("5 6 7", steps=8),
    "all_right": case("4 4.0", steps=8),
    "one_reward": case(rewards=PAYS_FORM, replies="4 5 6", steps=8),
    "same_format": case(rewards=[{"type": "format", "pattern": ".*"}], replies="4 5 6", steps=8),
    "greedy": case(sampling={"temperature": 0}, steps=6, algorithm={"old_logprobs": "recomputed"}),
    "single_replies": case(group_size=2, replies=" ".join(["4", *map(str, range(100, 130))]), steps=20),
    "cut": case("it_is_4_I_think it_is_5_I_think", sampling={"max_tokens": 4}, steps=8),
    "right_and_cut": case("4.I_think 4.Of_course", sampling={"max_tokens": 3}, steps=8),
    "format_right_and_cut": case(
        "it_is_4 it_is_5", sampling={"max_tokens": 3}, steps=8, rewards=[{"type": "format", "pattern": "it.*"}]
    ),
    "cut_and_masked": case(
        "it_is_4_I_think it_is_5_I_think 4", sampling={"max_tokens": 6}, steps=10, algorithm={"mask_truncated": True}
    ),
    "filtered": case(filters=[{"type": "reward", "low": 2}], steps=8),
    "failing": case("5 4 perhaps", failing=4, steps=12),
    # damage
    "collapsed": case("4 5 6", answers="4 5 6", optimizer={"learning_rate": 50}, steps=20),
    "entropy_collapse": case(
        "4 5 6 7", answers="4 5 6 7", algorithm={"type": "grpo", "entropy": {"coef": -1.0}},
        optimizer={"learning_rate": 0.1},
    ),
    "flat": case("4 5", answers="4 5", optimizer=RATE),
    "tiny_rate": case("5 4 perhaps", optimizer={"learning_rate": 1e-7}),
    "spikes": case(
        " ".join([*["4", "5"] * 75, "jackpot"]), answers="4", steps=60, optimizer={"learning_rate": 1e-5},
        rewards=[{"type": "number"}, {"type": "format", "pattern": "jackpot", "right": 3000, "name": "jackpot"}],
    ),
    "form_only": case(
        "4 5 perhaps", rewards=PAYS_FORM, eval={"every": 10, "rewards": NUMBER}, tasks={"held_out": 20},
    ),
    "below_constant": case(
        "5 6 perhaps", answers="4 4 5", eval={"every": 10, "baseline": 3}, rewards=NUMBER, tasks={"held_out": 20}
    ),
    "useless_critic": case(
        "5 4 perhaps",
        algorithm={"type": "ppo", "kl": {"type": "none"}, "critic": {"optimizer": {"learning_rate": 1e-9}}},
        optimizer={"learning_rate": 1e-3}, steps=20,
    ),
    "other_sampler": case(noise=0.4, optimizer={"learning_rate": 1e-3}, answers="4 5"),
    "too_hot": case(sampling={"temperature": 3}, algorithm={"type": "grpo", "old_logprobs": "sampler"}),
    "far_away": case(
        " ".join("abcdefghijklmnopqrstuvwxyz"), steps=36,
        algorithm={"type": "grpo", "kl": {"type": "k2", "coef": 1e-6}}, optimizer={"learning_rate": 4e-3},
        rewards=[{"type": "custom", "path": "tests.rl.diagnosis.cases:chance", "weight": 400}],
    ),
    "endless_game": case("5 7 9 1 3 4", workflow=GAME, rewards=[], optimizer={"learning_rate": 2e-4}),
    "unwinnable_game": case("5 7 9", workflow=GAME, rewards=[], steps=8),
    "diverging": case(
        "4 5 6", answers="4 5 6", algorithm={"type": "sft"}, steps=60, optimizer={"learning_rate": 100},
        demonstrations={"data": {"type": "jsonl", "path": "ROWS"}},
    ),
    "unlearned_pairs": case(
        algorithm={"type": "dpo"}, demonstrations=PAIRS, steps=20, optimizer={"learning_rate": 1e-9}
    ),
    "too_old": case("5 4 6 7",
        staleness=6, backoff=None, optimizer={"learning_rate": 0.4}, answers="4 5 6", steps=30,
        algorithm={"type": "grpo"}, allow_high_staleness=False,
    ),
}  # fmt: skip


def record(name: str, folder: Path) -> dict[str, Any]:
    """Run a case and return what is recorded of it."""
    chosen, calls, noise = CASES[name], [0], random.Random(0)
    rows = [
        {"question": f"{number}: what is it?", "answer": chosen.answers[number % len(chosen.answers)]}
        for number in range(240)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = {"train": {"type": "jsonl", "path": str(data)}, "held_out": 12}
    changes = {
        "rewards": NUMBER, "optimizer": {"learning_rate": 0.1}, "eval": {"every": 10}, "groups_per_step": 4,
        **json.loads(json.dumps(dict(chosen.changes)).replace("ROWS", str(data))),
    }  # fmt: skip
    changes["tasks"] = {**source, **changes.get("tasks", {})}
    config = _config(folder / "run", chosen.steps, changes)

    async def failing(request: SampleRequest, sample: Sample) -> SampleResult:
        calls[0] += 1
        if chosen.failing and calls[0] % chosen.failing == 0:
            raise RuntimeError("the tool does not answer")
        result = await sample(request)
        turns = [
            replace(turn, logprobs=tuple(p + noise.gauss(0, chosen.noise) for p in turn.logprobs))
            for turn in result.turns
        ]
        return replace(result, turns=tuple(turns)) if chosen.noise else result

    async def connect(state: str, version: int) -> ScriptedPolicy:
        weights = folder / "weights"
        return ScriptedPolicy(chosen.replies, weights, state=state, version=version, middleware=(failing,))

    asyncio.run(train(config, connect, Console(file=io.StringIO())))
    return recorded(folder / "run")


def _config(folder: Path, steps: int, changes: Mapping[str, Any]) -> RunConfig:
    if "demonstrations" not in changes:
        return settings(folder, steps=steps, **changes)
    keys = ("demonstrations", "algorithm", "optimizer", "rewards", "tasks")
    values = {key: changes[key] for key in keys}
    own = {"name": "small", "folder": str(folder), "model": {"name": "scripted"}, "monitors": [], "groups_per_step": 4}
    return RunConfig.model_validate({**own, **values, "steps": steps})


def recorded(run: Path) -> dict[str, Any]:
    """The settings and metrics of a run folder that are recorded, metrics as columns."""
    values = yaml.safe_load((run / "run.yaml").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = dict.fromkeys(name for row in rows for name in row if not name.startswith(UNREAD))
    return {
        "settings": {key: value for key, value in values.items() if key not in UNREAD_SETTINGS and value},
        "metrics": {name: [_short(row[name]) if name in row else "" for row in rows] for name in names},
    }


def rows_of(record_of_run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record; "" stands for a metric that a row lacks."""
    columns = record_of_run["metrics"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: value for name, value in row.items() if value != ""} for row in rows]


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value
