"""`tinsmith eval`: what it refuses, and real benchmarks on local data where their packages are installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tinsmith.cli.eval.command import evaluate
from tinsmith.cli.service.folder import temporary_folder
from tinsmith.cli.service.weights import find_weights
from tinsmith.errors import ConfigError
from tinsmith.rl.evaluation.endpoint import Sampling

RUN_FILE = str(Path(__file__).parents[3] / "examples" / "addition.yaml")


@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        ((), {}, "needs what to evaluate"),
        (("tiny",), {}, "needs what to evaluate, and a benchmark"),
        (("tiny", "gsm8k", "steps=2"), {}, "settings of model, service, tasks and environments only"),
        (("tiny", "gsm8k"), {"samples": 2}, "greedy answers are identical"),
        (("tiny", "gsm8k"), {"limit": 0}, "--limit is 0"),
        (("tiny", "gsm8k"), {"include": Path("absent")}, "no folder absent"),
        (("tinker://run/sampler_weights/final", RUN_FILE), {}, "no server is named that has it"),
    ],
)
def test_evaluation_refuses_what_it_cannot_do(monkeypatch, words, options, error):
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match=error):
        evaluate(*words, sampling=Sampling(**options))


def test_missing_package_is_refused_before_a_service_starts(monkeypatch):
    monkeypatch.setattr("tinsmith.imports.find_spec", lambda _: None)
    monkeypatch.setattr("tinsmith.runner.server", None)
    with pytest.raises(ConfigError, match="needs lm_eval, which is not installed"):
        evaluate("tiny", "gsm8k", "service.engine=fake")


def test_folder_without_a_run_or_a_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="neither the folder of a run nor of a model"):
        evaluate(str(tmp_path), "gsm8k")


@pytest.mark.parametrize(("name", "fix"), [("runs/on", "Did you mean 'one'?"), ("./no", "Name the folder of a run")])
def test_folder_that_does_not_exist_is_no_hub_id(tmp_path, monkeypatch, name, fix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "run.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=f"There is no folder {name}") as error:
        find_weights(name, [], tmp_path)
    assert fix in error.value.hint
    with pytest.raises(ConfigError, match=f"There is no folder {name}"):
        evaluate(name)
    assert find_weights("runs-of/model", [], tmp_path).config.model.name == "runs-of/model"


def test_folder_that_an_error_names_stays():
    with temporary_folder() as removed:
        (removed / "serve.log").touch()
    with pytest.raises(ConfigError), temporary_folder() as folder:
        raise ConfigError("The service did not start.", f"Its log is {folder}/serve.log.")
    assert not removed.exists()
    assert folder.is_dir()
    folder.rmdir()


TASK = """
task: local_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Q"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def local_sums():
    rows = json_dataset({rows!r}, lambda row: Sample(input=row["question"], target=row["answer"]))
    return Task(dataset=rows, solver=generate(), scorer=match())
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lm_eval", "inspect_ai"])
def test_benchmark_on_local_data(tmp_path, monkeypatch, capsys, tiny_llama, package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(3)))
    (tmp_path / "local_sums.yaml").write_text(TASK.format(rows=rows))
    (tmp_path / "sums.py").write_text(INSPECT.format(rows=str(rows)))
    name = {"lm_eval": "local_sums", "inspect_ai": "sums.py@local_sums"}[package]
    include = tmp_path if package == "lm_eval" else None  # tasks of Inspect name their file
    sampling = Sampling(include=include, samples=2, temperature=1.0, max_tokens=4)
    evaluate("tiny", name, "service.engine=fake", f"service.source={tiny_llama}", sampling=sampling, as_json=True)
    scores = json.loads(capsys.readouterr().out)
    assert {row["measure"] for row in scores} >= {"avg@2", "pass@2"}
    assert {row["problems"] for row in scores} == {3}
