"""The check of a GPU: its steps with tiny shapes on a CPU, and steps that fail, hang or die beside others."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu_check import card, report, runner
from benchmarks.gpu_check.shapes import REAL, Size
from benchmarks.gpu_check.step import Mark, Outcome, Step
from benchmarks.gpu_check.steps import STEPS

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
FAKE = {
    "raises": "raise ValueError('no such kernel')",
    "hangs": "import time; time.sleep(600)",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "works": (
        "import json, sys; outcome = {'step': 3, 'name': 'works', 'ok': True, 'seconds': 1.0};"
        "json.dump(outcome, open(sys.argv[1], 'w'))"
    ),
}


@pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_step_measures_its_values_with_tiny_shapes(step: Step) -> None:
    outcome = runner.measure(step, Size(tiny=True))
    assert outcome.ok, (outcome.missed, outcome.error)
    assert {mark.value for mark in step.marks if not mark.value.startswith("mfu")} <= outcome.values.keys()
    json.dumps(outcome.to_json())


def test_steps_go_on_after_failure_hang_and_kill(tmp_path: Path) -> None:
    limits = {"hangs": 3.0}
    steps = [
        Step(number=number, name=name, limit_s=limits.get(name, 120.0), measure=lambda _: {})
        for number, name in enumerate(FAKE)
    ]

    def command(step: Step, outcome: Path) -> Sequence[str]:
        return [sys.executable, "-c", FAKE[step.name], str(outcome)]

    into = tmp_path / "results" / "lines.jsonl"
    outcomes = runner.run_all(steps, command, into, time.monotonic() + 3600)
    assert [outcome.ok for outcome in outcomes] == [False, False, False, True]
    assert "no such kernel" in outcomes[0].error
    assert "killed after its limit" in outcomes[1].error
    assert "exit status -9" in outcomes[2].error
    assert [json.loads(line)["name"] for line in into.read_text().splitlines()] == list(FAKE)
    assert runner.done(into) == {3}


def test_each_head_group_compiles_its_own_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's limit is for one model. To break it: leave out `reset` in `packed_attention`."""
    calls = list[object]()
    monkeypatch.setattr(card.torch._dynamo, "reset", lambda: calls.append("reset"))

    def attend(_: Size, group: int, *others: object) -> tuple[float, float]:
        calls.append(group)
        return 0.0, 0.0

    monkeypatch.setattr(card, "_attend", attend)
    card.packed_attention(Size(tiny=True))
    assert [call for call, _ in itertools.groupby(calls)] == ["reset", 1, "reset", 4]


def test_no_step_begins_after_the_deadline(tmp_path: Path) -> None:
    step = Step(number=0, name="late", limit_s=1.0, measure=lambda _: {})
    (outcome,) = runner.run_all([step], lambda *_: ["false"], tmp_path / "lines", time.monotonic())
    assert not outcome.ok
    assert "deadline" in outcome.error


def test_step_that_raises_gives_its_traceback() -> None:
    def fail(_: Size) -> dict[str, float]:
        raise RuntimeError("cudaErrorIllegalAddress")

    outcome = runner.measure(Step(number=0, name="x", limit_s=1.0, measure=fail), Size(tiny=True))
    assert not outcome.ok
    assert "cudaErrorIllegalAddress" in outcome.error


def test_marks_of_speed_count_on_a_gpu_alone() -> None:
    marks = (Mark(value="speed", least=10), Mark(value="error", most=0.1, tiny=True))
    step = Step(number=0, name="x", limit_s=1.0, measure=lambda _: {}, marks=marks)
    assert step.missed({"speed": 1.0, "error": 0.01}, tiny=True) == []
    assert step.missed({"speed": 1.0, "error": 0.01}, tiny=False) == ["speed is 1, at least 10 is needed"]
    assert step.missed({"speed": 10.0, "error": float("nan")}, tiny=False) == ["error is nan, at most 0.1 is allowed"]
    assert step.missed({"speed": 10.0}, tiny=True) == ["error was not measured"]


def test_results_are_compared_with_the_last_of_the_card(tmp_path: Path) -> None:
    def outcome(rate: float) -> list[Outcome]:
        card = Outcome(step=0, name="card", ok=True, seconds=1.0, values={"card": "NVIDIA H100 80GB HBM3"})
        return [card, Outcome(step=5, name="training", ok=True, seconds=1.0, values={"tokens_per_s": rate, "note": ""})]

    file = report.save(outcome(10_000.0), tmp_path)
    assert file.name.startswith("h100-80gb-hbm3-")
    earlier = tmp_path / "h100-80gb-hbm3-2020-01-01.json"
    file.rename(earlier)
    (tmp_path / "a100-2020-01-02.json").write_text("{}")
    newer = report.save(outcome(20_000.0), tmp_path)
    assert report.last_before(newer) == earlier
    assert report.last_before(earlier) is None
    assert list(report.changes(report.read(earlier), report.read(newer))) == ["step 5, tokens_per_s: 1e+04 -> 2e+04"]


def test_shapes_have_the_sizes_of_their_names() -> None:
    def parameters(name: str) -> float:
        config = REAL[name]
        width, layers, size = config.hidden_size, config.num_hidden_layers, config.head_dim
        block = 2 * width * size * (config.num_attention_heads + config.num_key_value_heads)
        block += 3 * width * config.intermediate_size
        return layers * block + (1 if config.tie_word_embeddings else 2) * config.vocab_size * width

    assert parameters("Qwen3-0.6B") == pytest.approx(0.596e9, rel=0.01)
    assert parameters("Qwen3-4B") == pytest.approx(4.02e9, rel=0.01)
    assert parameters("Qwen3-8B") == pytest.approx(8.19e9, rel=0.01)


def test_check_starts_with_the_packages_of_a_bare_image() -> None:
    """Imports of the check and of the GPU tests, without the packages that only the service and the harness need."""
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.benchmarks import bare_image; bare_image.block()\n"
        "import benchmarks.gpu_check.steps, benchmarks.gpu_check.__main__\n"
        "import tests.gpu.conftest, tests.gpu.test_attention, tests.gpu.test_losses, tests.gpu.test_sampling\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
