"""Tasks of Inspect, by its provider for OpenAI's API: PACKAGE/TASK of an installed package, or FILE.py@TASK."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from tinsmith.errors import ConfigError, UserError
from tinsmith.rl.evaluation.endpoint import CONCURRENCY, Endpoint, Sampling, translated
from tinsmith.rl.evaluation.scores import Attempt, Scores

_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Inspect's grades: correct, partial, incorrect, no answer."""


def run(name: str, endpoint: Endpoint, sampling: Sampling) -> Scores:
    """The scores of a task."""
    return translated(lambda: _run(name, endpoint, sampling), f"The task {name}")


def _run(name: str, endpoint: Endpoint, sampling: Sampling) -> Scores:
    import inspect_ai  # pyright: ignore[reportMissingImports]

    model = _model(name, endpoint)
    options = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    with TemporaryDirectory() as folder:
        evaluated = inspect_ai.eval(
            name,
            model=model,
            limit=sampling.limit,
            epochs=sampling.count,
            display="none",
            log_dir=folder,
            max_connections=CONCURRENCY,
            seed=sampling.seed,
            **{key: value for key, value in options.items() if value is not None},
        )
        return _scores(name, evaluated)  # samples are read from the logs


def _model(name: str, endpoint: Endpoint) -> Any:
    """Inspect's model of an endpoint. Raises ConfigError if the package openai is missing or too old for Inspect."""
    from inspect_ai.model import get_model  # pyright: ignore[reportMissingImports]

    url = f"{endpoint.url.rstrip('/')}/v1"
    try:
        return get_model(f"openai-api/tinsmith/{endpoint.model}", base_url=url, api_key=endpoint.key)
    except Exception as error:
        if type(error).__name__ != "PrerequisiteError":
            raise
        text = str(error).removeprefix("ERROR: ")
        raise ConfigError(
            f"The task {name}: {text}",
            "pip install --upgrade openai, where verifiers 0.4, which needs openai 2, is not.",
        ) from error


def _scores(name: str, logs: Sequence[Any]) -> Scores:
    if not logs:
        raise UserError(f"Inspect finds no task {name}.", "Name it PACKAGE/TASK or FILE.py@TASK.")
    scores: dict[str, dict[str, list[Attempt]]] = {}
    for log in logs:
        if log.status != "success":
            raise UserError(f"The task {name}: {log.error.message if log.error else log.status}")
        scores |= scores_of(log.eval.task, log.samples or ())
    return scores


def scores_of(task: str, samples: Iterable[Any]) -> dict[str, dict[str, list[Attempt]]]:
    """The scores of the samples of a log; a sample has an id and the scores of its scorers by name."""
    scores: dict[str, dict[str, list[Attempt]]] = {}
    for sample in samples:
        for scorer, score in (sample.scores or {}).items():
            value = _GRADES.get(score.value, score.value) if isinstance(score.value, str) else score.value
            if isinstance(value, bool | int | float):
                attempts = scores.setdefault(f"{task} {scorer}", {}).setdefault(str(sample.id), [])
                attempts.append(Attempt(score.answer or "", float(value)))
    return scores
