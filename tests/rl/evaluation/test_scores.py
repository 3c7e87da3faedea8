"""Scores of benchmarks: averages over attempts, and models compared on the same problems."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from tinsmith.errors import ConfigError, Unreachable, UserError
from tinsmith.imports import require
from tinsmith.rl.evaluation import inspect_tasks, lm_harness
from tinsmith.rl.evaluation.endpoint import translated
from tinsmith.rl.evaluation.scores import Attempt, estimates, measures, print_table


def attempts(*pairs: tuple[str, float]) -> list[Attempt]:
    return [Attempt(answer, score) for answer, score in pairs]


def test_measures_of_right_and_wrong_answers():
    problems = {
        "a": attempts(("1", 1.0), ("2", 0.0), ("1", 1.0), ("3", 0.0)),
        "b": attempts(("5", 0.0), ("6", 1.0), ("5", 0.0), ("7", 0.0)),
        "c": attempts(("8", 0.0), ("8", 0.0), ("8", 0.0), ("8", 0.0)),
    }
    assert measures(problems) == {
        "avg@4": {"a": 0.5, "b": 0.25, "c": 0.0},
        "pass@4": {"a": 1.0, "b": 1.0, "c": 0.0},
        "maj@4": {"a": 1.0, "b": 0.0, "c": 0.0},
    }


def test_scores_between_have_a_mean_alone():
    assert list(measures({"a": attempts(("x", 0.3), ("y", 1.0))})) == ["avg@2"]
    assert list(measures({"a": attempts(("x", 1.0))})) == ["avg@1"]
    assert measures({}) == {}


def test_majority_needs_answers_that_were_read():
    assert list(measures({"a": attempts(("", 1.0), ("", 0.0))})) == ["avg@2", "pass@2"]


def test_later_models_are_compared_on_common_problems():
    base = {"sums": {str(n): attempts(("", 0.0)) for n in range(12)}}
    better = {"sums": {str(n): attempts(("", 1.0)) for n in range(2, 14)}}
    first, second = estimates({"base": base, "tuned": better})
    assert first.against_first is None
    assert second.against_first is not None
    assert (second.against_first.tasks, second.against_first.difference) == (10, 1.0)
    assert second.against_first.p_value == pytest.approx(2 / 2**10)
    assert (second.problems, second.mean, second.low, second.high) == (12, 1.0, 1.0, 1.0)
    out = io.StringIO()
    print_table(Console(file=out, width=200), [first, second])
    assert "+1 (+1 to +1)" in out.getvalue()


def test_checkpoints_in_the_table_have_short_names():
    path = "tinker://0123456789abcdef:train:0/sampler_weights"
    problems = {str(number): attempts(("7", 1.0)) for number in range(2)}
    rows = estimates({name: {"t": problems} for name in ("tiny", f"{path}/final", f"{path}/a", f"{path}2/a")}, seed=0)
    out = io.StringIO()
    print_table(Console(file=out, width=200), rows)
    names = [line.split()[2] for line in out.getvalue().splitlines() if " avg@1 " in line]
    assert names == ["tiny", "…/final", f"{path}/a", f"{path}2/a"]


def test_table_of_80_columns_keeps_its_headings_whole():
    names = ("/models/of/mine/tiny", "tinker://0123456789abcdef:train:0/sampler_weights/final")
    rows = estimates({name: {"run reward": {str(n): attempts(("", 1.0)) for n in range(9)}} for name in names})
    out = io.StringIO()
    print_table(Console(file=out, width=80), rows)
    heading = next(line for line in out.getvalue().splitlines() if "benchmark" in line)
    assert [word for word in ("measure", "problems", "difference", " p ") if word not in heading] == []
    assert "…/tiny" in out.getvalue()


def test_samples_of_the_harness_become_attempts():
    row = {"doc_id": 3, "filter": "none", "metrics": ["exact_match", "bleu"], "bleu": ("x", "y")}
    rounds = [
        {"sums": [{**row, "exact_match": np.float64(1.0), "filtered_resps": ["7"]}]},
        {"sums": [{**row, "exact_match": False, "filtered_resps": ["8"]}]},
    ]
    assert lm_harness.scores_of(rounds) == {"sums exact_match": {"3": attempts(("7", 1.0), ("8", 0.0))}}
    choice = [{"c": [{"doc_id": 0, "filter": "f", "metrics": ["acc"], "acc": 1.0, "filtered_resps": [(-2.0, True)]}]}]
    assert lm_harness.scores_of(choice) == {"c acc (f)": {"0": attempts(("", 1.0))}}


def test_samples_of_inspect_become_attempts():
    grades = [("C", "7"), ("I", None), (0.25, "x"), ({"part": 1}, None)]
    samples = [
        SimpleNamespace(id=1, scores={"match": SimpleNamespace(value=value, answer=answer)}) for value, answer in grades
    ]
    expected = {"t match": {"1": attempts(("7", 1.0), ("", 0.0), ("x", 0.25))}}
    assert inspect_tasks.scores_of("t", samples) == expected


def test_missing_package_is_named_with_its_command():
    with pytest.raises(ConfigError, match=r"gsm8k needs absent_package.* pip install 'tinsmith\[lm-eval\]'"):
        require("absent_package", "lm-eval", "The benchmark gsm8k")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"), Unreachable, "gsm8k: its data is on the hub"),
        (ValueError("bad\nmore"), UserError, "gsm8k: ValueError: bad"),
        (SystemExit("no"), UserError, "gsm8k: SystemExit: no"),
    ],
)
def test_faults_of_a_library_are_errors_by_name(error, kind, text):
    def fail() -> None:
        raise error

    with pytest.raises(kind) as raised:
        translated(fail, "gsm8k")
    assert type(raised.value) is kind
    assert text in raised.value.message


def test_models_have_the_same_measures():
    graded = {"a": {"t": {"p": attempts(("", 0.5), ("", 1.0))}}, "b": {"t": {"p": attempts(("", 0.0), ("", 1.0))}}}
    assert {(row.model, row.measure) for row in estimates(graded)} == {("a", "avg@2"), ("b", "avg@2")}
    judged = {model: {"t": {"p": attempts(("", 0.0), ("", 1.0))}} for model in "ab"}
    assert {row.measure for row in estimates(judged)} == {"avg@2", "pass@2"}
