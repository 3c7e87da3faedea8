"""Benchmarks of EleutherAI's lm-evaluation-harness, by its model `local-completions`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.errors import ConfigError
from tinsmith.rl.evaluation.endpoint import CONCURRENCY, Endpoint, Sampling, translated
from tinsmith.rl.evaluation.scores import Attempt, Scores
from tinsmith.settings import did_you_mean

OTHER_NAMES = {"math500": "minerva_math500", "math": "minerva_math", "arc": "arc_challenge"}
"""Common names of benchmarks that the harness calls differently."""
TIMEOUT_S = 24 * 3600
"""Time limit of a request: with many open at once, a slow machine takes long for each."""
_ALL_IN_ONE = "none"
"""The filter of a task without filters."""


def run(name: str, endpoint: Endpoint, sampling: Sampling) -> Scores:
    """The scores of a task or of each task of a group. Raises ConfigError for an unknown name."""
    return translated(lambda: _run(OTHER_NAMES.get(name, name), endpoint, sampling), f"The benchmark {name}")


def _run(name: str, endpoint: Endpoint, sampling: Sampling) -> Scores:
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    tasks = TaskManager(include_path=str(sampling.include) if sampling.include else None)
    if name not in tasks.all_tasks:
        raise ConfigError(
            f"lm-evaluation-harness has no benchmark {name}. {did_you_mean(name, tasks.all_tasks)}".rstrip(),
            "A task of Inspect is named PACKAGE/TASK or FILE.py@TASK, an environment TYPE:NAME; a task of your own is "
            "found with --include.",
        )
    options: dict[str, Any] = {"max_gen_toks": sampling.max_tokens} if sampling.max_tokens is not None else {}
    if sampling.temperature is not None:
        options |= {"temperature": sampling.temperature, "do_sample": sampling.temperature > 0}
    rounds = [
        lm_eval.simple_evaluate(
            model="local-completions",
            model_args=_model(endpoint, sampling, attempt),
            tasks=[name],
            task_manager=tasks,
            limit=sampling.limit,
            gen_kwargs=options or None,
            apply_chat_template=sampling.chat,
            bootstrap_iters=0,
            log_samples=True,
        )
        for attempt in range(sampling.count)
    ]
    return scores_of([each["samples"] for each in rounds])


def _model(endpoint: Endpoint, sampling: Sampling, attempt: int) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "base_url": f"{endpoint.url.rstrip('/')}/v1/completions",
        "header": {"Authorization": f"Bearer {endpoint.key}"},
        "tokenizer": str(endpoint.tokenizer),
        "tokenizer_backend": "huggingface",
        # Tokens, so that the server scores the continuation that the harness counts.
        "tokenized_requests": True,
        "add_bos_token": not sampling.chat,  # a chat template writes its own
        "timeout": TIMEOUT_S,
        "num_concurrent": CONCURRENCY,
        "seed": sampling.seed + attempt,
    }


def scores_of(rounds: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]) -> Scores:
    """The scores in the logged samples of several rounds, each of which answers every problem once.

    Example: scores_of([{"gsm8k": [{"doc_id": 0, "filter": "none", "metrics": ["acc"], "acc": 1.0, …}]}])
    """
    scores: dict[str, dict[str, list[Attempt]]] = {}
    for samples in rounds:
        for task, rows in samples.items():
            for row in rows:
                for metric in row["metrics"]:
                    value = _number(row.get(metric))
                    if value is None:
                        continue  # a score of the whole set, such as a corpus BLEU
                    of = "" if row["filter"] == _ALL_IN_ONE else f" ({row['filter']})"
                    attempts = scores.setdefault(f"{task} {metric}{of}", {}).setdefault(str(row["doc_id"]), [])
                    attempts.append(Attempt(_answer(row), value))
    return scores


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _answer(row: Mapping[str, Any]) -> str:
    """The answer that the filter read; empty for a choice by likelihood."""
    answers = row.get("filtered_resps") or [""]
    return answers[0] if isinstance(answers[0], str) else ""
