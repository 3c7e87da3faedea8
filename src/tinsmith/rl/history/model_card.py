"""The model card of an exported checkpoint: README.md with what it was trained from, on and how, and its figures.

Texts of the run file are shown as code, where Markdown and HTML mean nothing. Of paths on this machine, the last part
is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import yaml

from tinsmith.rl.diagnosis import diagnose
from tinsmith.rl.history.checkpoints import RunCheckpoint
from tinsmith.rl.history.console_text import line, number
from tinsmith.rl.history.rows import finite, records
from tinsmith.rl.record.metrics import measures_right

_LENGTH = 200
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_SETTINGS = (
    "algorithm.advantage.type", "algorithm.loss.type", "algorithm.kl.type", "algorithm.kl.coef",
    "optimizer.learning_rate", "optimizer.schedule", "groups_per_step", "group_size", "staleness",
    "sampling.temperature", "sampling.max_tokens", "workflow.type", "workflow.system", "seed",
)  # fmt: skip
_SOURCE = ("path", "dataset", "name", "subset", "split", "file", "files", "url", "environment")
"""Keys of a source that say which data it reads."""


def model_card(checkpoint: RunCheckpoint, *, library: str) -> str:
    """The text of README.md. `library` is what loads the exported folder: peft or transformers."""
    settings = checkpoint.run.settings
    base = str(_at(settings, "model.name") or "")
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["tinsmith", "lora"]}
    if _HUB_ID.fullmatch(base):
        head = {"base_model": base, **head}
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {_code(checkpoint.run.name)}",
        _introduction(checkpoint, base, library),
        "\n".join(_facts(checkpoint, settings)),
        "## Results",
        *_results(checkpoint),
        "## Settings",
        "\n".join(
            f"- `{name}`: {_code(value)}" for name in _SETTINGS if (value := _at(settings, name)) not in ("", None)
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(checkpoint: RunCheckpoint, base: str, library: str) -> str:
    form = "A LoRA adapter of" if library == "peft" else "A LoRA adapter merged into"
    return (
        f"{form} {_code(base)}, after step {checkpoint.step} of a run of Tinsmith {version('tinsmith')}. "
        "This card was written from the files of the run."
    )


def _facts(checkpoint: RunCheckpoint, settings: Mapping[str, Any]) -> Iterator[str]:
    steps = f" of {checkpoint.run.step_count}" if checkpoint.run.step_count else ""
    yield f"- base model: {_code(_at(settings, 'model.name'))}"
    yield f"- rank of the adapter: {_code(_at(settings, 'model.rank'))}"
    if start := _at(settings, "model.load_from"):
        yield f"- started from: {_code(start)}"
    yield f"- algorithm: {_code(_at(settings, 'algorithm.type'))}"
    yield f"- step: {checkpoint.step}{steps}"
    for name, source in _sources(settings):
        yield f"- {name}: {source}"
    if summary := diagnose(
        settings, [row for row in checkpoint.run.metrics.rows if row["step"] <= checkpoint.step]
    ).summary:
        yield f"- training: {_code(summary)}"


def _sources(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what it is, description) of the data of a run."""
    environments = records(settings.get("environments"))
    tasks = settings.get("tasks")
    tasks = tasks if isinstance(tasks, dict) else {}
    demonstrations = settings.get("demonstrations")
    demonstrations = demonstrations.get("data") if isinstance(demonstrations, dict) else None
    for name, value in (("trained on", tasks.get("train")), ("demonstrations", demonstrations)):
        for source in [value] if isinstance(value, dict) else records(value):
            yield name, _source(source)
    yield from (("environment", _source(environment)) for environment in environments)
    for reward in records(settings.get("rewards")):
        yield "reward", _source(reward)


def _source(source: Mapping[str, Any]) -> str:
    values = [source.get("type"), *(source[key] for key in _SOURCE if source.get(key))]
    if isinstance(source.get("source"), dict):
        return _source(source["source"])
    return ", ".join(_code(value) for value in values if value) or "–"


def _results(checkpoint: RunCheckpoint) -> Iterator[str]:
    """Held-out tasks before training and at the checkpoint, with intervals where both were recorded."""
    rows = _comparison(checkpoint)
    if not rows:
        last = [row for row in checkpoint.run.metrics.evaluations() if row["step"] == checkpoint.step]
        names = [name for name in ("eval/pass@1", "eval/reward/mean") if last and name in last[-1]]
        yield "\n".join(f"- `{name}`: {number(last[-1][name])}" for name in names) or (
            "This checkpoint was not evaluated on held-out tasks."
        )
        return
    table = [
        "| held-out tasks | before | after | difference (95 % interval) | p | tasks |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["measure"] if row["source"] == "all" else f"{row['source']}: {row['measure']}"
        interval = f"{row['difference']:+.3g} ({row['low']:+.3g} to {row['high']:+.3g})"
        cells = (_cell(name), number(row["first_mean"]), number(row["second_mean"]), interval, number(row["p_value"]))
        table.append(f"| {' | '.join((*cells, str(row['tasks'])))} |")
    yield "\n".join(table)
    yield (
        "Before is the model at the start of the run, after is this checkpoint, both on the same tasks of the run's "
        "evaluation; the interval is of the mean of the differences task by task."
    )


def _comparison(checkpoint: RunCheckpoint) -> list[dict[str, Any]]:
    """The evaluation of the checkpoint against the one before training; none where one of them was not recorded."""
    from tinsmith.rl.record import comparison

    run, second = checkpoint.run, f"step {checkpoint.step}"
    rows = [row for row in run.comparison if row.get("first") == "step 0" and row.get("second") == second]
    files = [run.layout.rollouts("eval", step) for step in (0, checkpoint.step)]
    if not rows and checkpoint.step and all(file.exists() for file in files):
        with suppress(OSError, ValueError, LookupError, TypeError):  # a damaged file has no figures
            threshold = float(_at(run.settings, "eval.threshold") or 1.0)
            first, last = (comparison.read_results(file, threshold) for file in files)
            pairs = ("step 0", first), (second, last)
            rows = [each.row for each in comparison.compare_results(*pairs, [""] * len(first), seed=0)]
    measured = measures_right(run.metrics.rows)
    return [row for row in rows if _is_whole(row) and (measured or row["measure"] != "pass@1")]


def _is_whole(row: Mapping[str, Any]) -> bool:
    """Whether a row has what the table shows."""
    numbers = ("first_mean", "second_mean", "difference", "low", "high", "p_value", "tasks")
    return {"measure", "source"} <= row.keys() and all(finite(row.get(name)) is not None for name in numbers)


def _at(settings: Any, path: str) -> Any:
    """The value of a setting by its path; None if it is missing."""
    for key in path.split("."):
        settings = settings.get(key) if isinstance(settings, dict) else None
    return settings


def _code(value: Any) -> str:
    """A value as code of Markdown, in one line."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str("" if value is None else value)
    if text.startswith(("/", "~")):
        text = text.rstrip("/").rpartition("/")[2]
    shown = line(text.replace("`", "'"), _LENGTH)
    return f"`{shown}`" if shown else "–"


def _cell(value: Any) -> str:
    """A value as code in a cell of a table."""
    return _code(value).replace("|", "\\|")
