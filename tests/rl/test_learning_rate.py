"""Where a run file sets no learning rate, it is that of the model's size."""

from __future__ import annotations

import io

import pytest
import yaml
from rich.console import Console

from tests.rl.scripted_run import run, settings
from tinsmith.rl.optimizer import OptimizerConfig, rate_by_name


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 5e-4),
        ("Qwen/Qwen3-0.6B", 3e-4),
        ("meta-llama/Llama-3.2-1B", 2e-4),
        ("Qwen/Qwen3-8B-Base", 1e-4),
        ("Qwen/Qwen3-30B-A3B", 5e-5),
        ("openai/gpt-oss-120b", 5e-5),
        ("tiny", None),
        ("models-7B/mine", None),
        ("gpt2b4x", None),
    ],
)
def test_rate_by_the_size_in_the_name(name, rate):
    assert rate_by_name(name) == rate


def test_a_rate_that_is_set_stays():
    assert OptimizerConfig(learning_rate=1e-4).for_model("SmolLM2-135M").learning_rate == 1e-4
    assert OptimizerConfig().for_model("tiny").learning_rate == 1e-4


def test_run_says_and_records_its_rate(tmp_path):
    output = io.StringIO()
    config = settings(tmp_path / "run", steps=2, model={"name": "scripted-135M"}, optimizer={})
    run(config, console=Console(file=output, width=200))
    assert "optimizer.learning_rate is not set: 0.0005, for the model's size\n" in output.getvalue()
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["optimizer"]["learning_rate"] == 5e-4
    assert run(config, console=Console(file=output)).step == 2  # it resumes with the same settings
