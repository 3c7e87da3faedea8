"""Benchmarks inside a run: their program, their metrics, and what a run does with them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.rl.evaluation.test_scores import attempts
from tests.rl.scripted_run import rows, run, settings
from tests.rl.workflows.test_workflows import policy
from tinsmith.errors import ConfigError
from tinsmith.rl.evaluate import EvalConfig
from tinsmith.rl.evaluation import benchmarks
from tinsmith.rl.evaluation.benchmarks import Benchmark, metrics_of, run_on_policy
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint

HARNESS = '''
import json
from urllib.request import Request, urlopen


def simple_evaluate(model_args, tasks, limit, gen_kwargs, **_):
    """Ask for a continuation of each of two problems; it is right if it is yes."""
    samples = []
    for problem in range(limit):
        body = {"prompt": [[65 + problem]], "model": model_args["model"], "max_tokens": gen_kwargs["max_gen_toks"]}
        request = Request(model_args["base_url"], json.dumps(body).encode(), model_args["header"])
        with urlopen(request) as response:
            text = json.load(response)["choices"][0]["text"]
        row = {"doc_id": problem, "filter": "none", "metrics": ["acc"], "acc": float(text == "yes")}
        samples.append({**row, "filtered_resps": [text]})
    return {"samples": {tasks[0]: samples}}
'''
TASKS = """
class TaskManager:
    def __init__(self, include_path):
        self.all_tasks = ["agree"]
"""


@pytest.fixture
def harness(tmp_path, monkeypatch) -> Path:
    """A package in place of lm-evaluation-harness, with the benchmark `agree`."""
    package = tmp_path / "packages" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(HARNESS)
    (package / "tasks.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def on_policy(*names: str, replies: tuple[str, ...] = ("yes",)):
    """The scores of a scripted policy on benchmarks."""

    async def main():
        endpoint = AgentEndpoint()
        try:
            entries = [Benchmark(name=name, limit=2, max_tokens=8) for name in names]
            return await run_on_policy(entries, policy(*replies), endpoint, 0)
        finally:
            await endpoint.close()

    return asyncio.run(main())


@pytest.mark.e2e
@pytest.mark.usefixtures("harness")
def test_program_scores_the_policy_at_its_endpoint():
    assert on_policy("agree") == {"agree acc": {"0": attempts(("yes", 1.0)), "1": attempts(("yes", 1.0))}}
    with pytest.raises(ConfigError, match=r"no benchmark agre\. Did you mean 'agree'"):
        on_policy("agre")


def test_program_that_dies_is_named_with_its_last_line(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho out of memory\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(Exception, match="gsm8k ended without scores: out of memory"):
        on_policy("gsm8k")


def test_metrics_are_named_by_task_metric_and_filter():
    single = {"gsm8k exact_match (flexible-extract)": {"0": attempts(("1", 1.0)), "1": attempts(("2", 0.0))}}
    assert metrics_of(single) == {"eval/benchmark/gsm8k/exact_match/flexible-extract": 0.5}
    several = {"t match": {"0": attempts(("1", 1.0), ("2", 0.0))}}
    assert metrics_of(several) == {
        "eval/benchmark/t/match": 0.5, "eval/benchmark/t/match/pass@2": 1.0, "eval/benchmark/t/match/maj@2": 1.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"name": "gsm8k", "num_samples": 2}, "greedy answers are identical"),
        ({"name": "gsm8k", "include": "absent"}, "no folder absent"),
        ({"name": "mine.py@task", "chat": True}, "chat is not used with mine.py@task"),
        ({"name": ""}, "at least 1 character"),
    ],
)
def test_entries_without_effect_are_refused(entry, error):
    with pytest.raises(ValidationError, match=error):
        EvalConfig.model_validate({"benchmarks": [entry]})


def test_missing_package_ends_the_run_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr("tinsmith.imports.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"The benchmark gsm8k needs lm_eval.* pip install 'tinsmith\[lm-eval\]'"):
        run(settings(tmp_path, eval={"benchmarks": ["gsm8k"]}))
    assert rows(tmp_path) == []


def test_run_keeps_its_best_by_a_benchmark_and_compares_it(tmp_path, monkeypatch):
    values = iter([0.0, 0.25, 1.0, 0.5, 0.5])
    monkeypatch.setattr("tinsmith.rl.evaluate.check_package", lambda _: None)

    async def scores(*_):
        mean = next(values)
        return {"agree acc": {str(n): attempts(("", float(n < 8 * mean))) for n in range(8)}}

    monkeypatch.setattr(benchmarks, "_in_program", scores)
    tasks = {"train": {"type": "addition"}, "held_out": 0}
    metric = "eval/benchmark/agree/acc"
    change = {"tasks": tasks, "steps": 8, "eval": {"every": 2, "benchmarks": ["agree"]}}
    state = run(settings(tmp_path, **change, checkpoint={"keep": "best", "metric": metric}))
    assert {row["step"]: row[metric] for row in rows(tmp_path) if metric in row} == {
        0: 0,
        2: 0.25,
        4: 1,
        6: 0.5,
        8: 0.5,
    }
    assert state.best is not None
    assert state.best.step == 4
    (row,) = json.loads((tmp_path / "comparison.json").read_text())
    assert (row["source"], row["measure"], row["second"], row["difference"]) == ("agree acc", "avg@1", "step 4", 1.0)


def test_best_by_a_benchmark_needs_one(tmp_path):
    tasks = {"train": {"type": "addition"}, "held_out": 0}
    with pytest.raises(ValidationError, match="is never measured"):
        settings(tmp_path, tasks=tasks, eval={}, checkpoint={"keep": "best", "metric": "eval/benchmark/agree/acc"})
    with pytest.raises(ValidationError, match=r"eval/reward/mean is never measured"):
        settings(tmp_path, tasks=tasks, eval={"benchmarks": ["agree"]}, checkpoint={"keep": "best"})
