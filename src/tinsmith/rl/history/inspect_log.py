"""Rollouts as a log of Inspect, a .eval file that `inspect view` opens: a sample for each rollout, an epoch for each of
its group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.chat.strict_json import encodable
from tinsmith.errors import ConfigError
from tinsmith.rl.history.rows import RolloutRow
from tinsmith.rl.history.run import RunHistory
from tinsmith.rl.history.transcript import TrajectoryRecord, Transcript, transcript

_ROLES = ("system", "user", "assistant", "tool")


def write_log(history: RunHistory, rows: Sequence[RolloutRow], target: Path) -> None:
    """Write the rollouts to `target`. Raises ConfigError if it is no .eval file, or if inspect-ai is not installed."""
    if target.suffix != ".eval":
        raise ConfigError(f"{target} is no name of a log of Inspect.", "Name a file that ends with .eval.")
    try:
        from inspect_ai.log import EvalLog, write_eval_log  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError("Logs of Inspect need the package inspect-ai.", "pip install 'tinsmith[inspect]'") from error
    samples = [_sample(row, transcript(history.rollouts.read(row))) for row in rows]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_eval_log(EvalLog.model_validate(_log(history, rows, samples)), str(target), format="eval")


def _log(history: RunHistory, rows: Sequence[RolloutRow], samples: list[dict[str, Any]]) -> dict[str, Any]:
    model = history.settings.get("model")
    name = str(model.get("name")) if isinstance(model, dict) else "unknown"
    rewards = [row.reward for row in rows if row.reward is not None and not row.failed]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return {
        "status": "success",
        "eval": {
            "created": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "task": encodable(history.name),
            "dataset": {"name": encodable(history.name), "samples": len(samples)},
            "model": encodable(name),
            "config": {},
            "metadata": {"folder": str(history.path)},
        },
        "results": {
            "total_samples": len(samples),
            "completed_samples": len(samples),
            "scores": [
                {"name": "reward", "scorer": "reward", "metrics": {"mean": {"name": "mean", "value": mean}}},
            ],
        },
        "samples": samples,
    }


def _sample(row: RolloutRow, rollout: Transcript) -> dict[str, Any]:
    prompt = [_message(role, content) for role, content in rollout.messages]
    replies = [message for each in rollout.trajectories for message in _turns(each, len(rollout.trajectories) > 1)]
    last = next((message for message in reversed(replies) if message["role"] == "assistant"), None)
    choices = [{"message": last, "stop_reason": "max_tokens" if row.cut else "stop"}] if last else []
    return {
        "id": encodable(f"{row.kind} {row.step} {row.task} {row.group}"),
        "epoch": row.index + 1,
        "input": prompt or "",
        "target": encodable(rollout.answer),
        "messages": [*prompt, *replies],
        "output": {"model": "policy", "choices": choices},
        "scores": _scores(rollout),
        "metadata": {"rollout": row.id, "version": row.version, "termination": encodable(rollout.termination)}
        | {encodable(name): value for name, value in rollout.metrics.items()},
        "error": _error(rollout.error) if rollout.error else None,
    }


def _scores(rollout: Transcript) -> dict[str, Any]:
    values: Mapping[str, float | None] = {"reward": rollout.reward, **rollout.reward_parts}
    scores: dict[str, Any] = {encodable(name): {"value": value} for name, value in values.items() if value is not None}
    if rollout.correct is not None:
        scores["correct"] = {"value": "C" if rollout.correct else "I"}
    return scores


def _turns(trajectory: TrajectoryRecord, named: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for at, turn in enumerate(trajectory.turns):
        if turn.input and (at or named):
            messages.append(_message("user", turn.input))
        content = f"[{trajectory.role}] {turn.text}" if named else turn.text
        messages.append({**_message("assistant", content), "source": "generate"})
    return messages


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role if role in _ROLES else "user", "content": encodable(content)}


def _error(text: str) -> dict[str, str]:
    return {"message": encodable(text), "traceback": "", "traceback_ansi": ""}
