"""The libraries that run benchmarks: lm-evaluation-harness and Inspect, by the name of a benchmark."""

from __future__ import annotations

from tinsmith.imports import require
from tinsmith.rl.evaluation import inspect_tasks, lm_harness
from tinsmith.rl.evaluation.endpoint import Endpoint, Sampling
from tinsmith.rl.evaluation.scores import Scores


def is_inspect(name: str) -> bool:
    """Whether a name is that of a task of Inspect."""
    return "/" in name or "@" in name or name.endswith(".py")


def check_package(name: str) -> None:
    """Raise ConfigError if the library that runs a benchmark is not installed."""
    if is_inspect(name):
        require("inspect_ai", "inspect", f"The task {name}")
    else:
        require("lm_eval", "lm-eval", f"The benchmark {name}")


def run(name: str, endpoint: Endpoint, sampling: Sampling) -> Scores:
    """The scores of a benchmark. Raises UserError."""
    check_package(name)
    return (inspect_tasks if is_inspect(name) else lm_harness).run(name, endpoint, sampling)
