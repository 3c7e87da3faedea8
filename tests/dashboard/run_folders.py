"""Run folders as a run writes them, without a run: settings, metrics, evaluations and rollouts that learn."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORDS = [
    "so",
    "the",
    "sum",
    "is",
    "first",
    "carry",
    "one",
    "then",
    "add",
    "tens",
    "and",
    "check",
    "each",
    "digit",
    "again",
    "answer",
]


def write_run(
    folder: Path, *, seed: int = 0, steps: int = 20, groups: int = 2, size: int = 4, gain: float = 1.0, **settings: Any
) -> Path:
    """A run of a curve with noise, evaluated before the first step and after each tenth; returns its folder."""
    rng = random.Random(seed)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "run.yaml").write_text(json.dumps(_settings(folder, seed, steps, groups, size) | settings))
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(steps + 1):
            level = gain * (1 - math.exp(-3 * step / steps))
            if step:
                metrics.write(json.dumps(_row(rng, step, level)) + "\n")
                _write_rollouts(folder, "train", rng, step, level, groups, size)
            if step % 10 == 0:
                metrics.write(json.dumps({"step": step, **_evaluation(rng, level)}) + "\n")
                _write_rollouts(folder, "eval", rng, step, level, 20, 1)
    (folder / "log.txt").write_text("2026-11-21 16:00:00,123 INFO tinsmith.rl.run.loop: Finished: all steps\n")
    return folder


def _settings(folder: Path, seed: int, steps: int, groups: int, size: int) -> dict[str, Any]:
    return {
        "name": folder.name,
        "folder": str(folder),
        "seed": seed,
        "steps": steps,
        "groups_per_step": groups,
        "group_size": size,
        "model": {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "rank": 16},
        "algorithm": {"type": "grpo", "loss": {"type": "ppo"}},
        "optimizer": {"learning_rate": 5e-4},
        "eval": {"threshold": 1.0, "every": 10},
    }


def _row(rng: random.Random, step: int, level: float) -> dict[str, float]:
    reward = 0.1 + 0.7 * level + rng.gauss(0, 0.04)
    return {
        "step": step,
        "reward/mean": reward,
        "reward/std": 0.4,
        "reward/correct": reward * 0.8,
        "reward/format": 0.2 + 0.7 * min(1.0, 2 * level),
        "groups/constant": 0.6 - 0.4 * level + rng.gauss(0, 0.03),
        "optim/loss": rng.gauss(0, 1),
        "optim/entropy": 1.6 - 0.9 * level + rng.gauss(0, 0.03),
        "optim/kl_sample_train_v2": 1e-4 * (1 + rng.random()),
        "optim/kl_sample_train_k3": 1e-4 * (1 + rng.random()),
        "optim/grad_norm": 2 + rng.random(),
        "optim/lr": 5e-4,
        "optim/steps": 1.0,
        "optim/ratio_mean": 1.0,
        "optim/ratio_min": 0.8,
        "optim/ratio_max": 1.3,
        "rollouts/cut": 0.2 * (1 - level),
        "rollouts/failed": 0.0,
        "tokens/reply": 40 + 60 * level + rng.gauss(0, 3),
        "tokens/sampled": 5000.0,
        "policy/staleness": 0.0,
        "policy/staleness_max": 0.0,
        "speed/sampled_tokens_per_second": 900 + rng.gauss(0, 40),
        "speed/trained_tokens_per_second": 700 + rng.gauss(0, 30),
        "time/step": 6 + rng.random(),
        "time/rollouts": 4 + rng.random(),
        "time/update": 2.0,
    }


def _evaluation(rng: random.Random, level: float) -> dict[str, float]:
    passed = 0.05 + 0.7 * level + rng.gauss(0, 0.02)
    values = {"eval/pass@1": passed, "eval/reward/mean": passed + 0.1, "eval/tasks": 20.0, "time/eval": 3.0}
    return values if level else {**values, "eval/constant_pass@1": 0.12, "eval/constant_reward": 0.15}


def _write_rollouts(
    folder: Path, kind: str, rng: random.Random, step: int, level: float, groups: int, size: int
) -> None:
    with (folder / "rollouts" / f"{kind}-{step:06}.jsonl").open("w") as file:
        for group in range(groups):
            task = group if kind == "eval" else rng.randrange(1000)
            for index in range(size):
                file.write(json.dumps(_rollout(rng, step, f"sums/{task}", index, level)) + "\n")


def _rollout(rng: random.Random, step: int, task: str, index: int, level: float) -> Mapping[str, Any]:
    is_right = rng.random() < 0.1 + 0.7 * level
    words = [rng.choice(WORDS) for _ in range(12)] + ["42" if is_right else "41"]
    turn = {
        "input": "user: 19 + 23?\nassistant: ",
        "text": " ".join(words),
        "stop": "stop",
        "model": "",
        "version": step,
        "reward": None,
        "prompt": [1, 2, 3],
        "tokens": list(range(len(words))),
        "token_texts": [f"{word} " for word in words],
        "logprobs": [-rng.random() for _ in words],
    }
    reward = float(is_right)
    return {
        "step": step,
        "version": step,
        "task": task,
        "index": index,
        "messages": [{"role": "user", "content": "19 + 23?"}],
        "answer": "42",
        "text": turn["text"],
        "reward": reward,
        "reward_parts": {"correct": reward, "format": 1.0},
        "correct": is_right,
        "metrics": {},
        "termination": "done",
        "error": "",
        "trajectories": [{"role": "policy", "reward": reward, "trained": True, "turns": [turn]}],
    }
