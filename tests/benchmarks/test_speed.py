"""Parts of the benchmarks on a tiny model, and the result tables."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import speed, table
from benchmarks.apart import Ending
from benchmarks.comparison import Comparison, Line, Setting, rotate
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts import agreement, sharing, switching, tenants, training
from benchmarks.parts.trees import measurement as trees
from benchmarks.parts.trees import shapes
from benchmarks.parts.vllm import measurement as vllm
from benchmarks.parts.vllm import process as vllm_process
from benchmarks.workloads import grpo, tree
from tests.engine.cpu.processor import needs_panels
from tests.engine.reference import plain_model
from tinsmith.engine.model import packing

pytestmark = pytest.mark.e2e

STUB = """
import json, sys
if len(sys.argv) > 3 and not {takes_adapters}:
    sys.exit("no adapters")
print("ready", flush=True)
for line in sys.stdin:
    work = json.loads(line)
    print("done", len(work["prompts"]) * work["samples"] * work["tokens"], flush=True)
"""


def test_rotate_alternates_the_order_of_sides():
    order: list[str] = []
    seconds = rotate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(seconds) for name, seconds in seconds.items()} == {"a": 3, "b": 3}


def test_comparison_takes_a_ratio_in_each_turn():
    line = Comparison(ours_s=[1.0, 2.0, 4.0], theirs_s=[3.0, 4.0, 20.0]).line("work", "theirs", 2.0, 4.0, tokens=100)
    assert (line.values, line.median, line.value_range, line.verdict) == ([3.0, 2.0, 5.0], 3.0, (2.0, 5.0), "yes")
    assert (line.ours, line.theirs) == ("50 tokens/s", "25 tokens/s")


def test_promise_is_an_upper_bound_where_lower_is_better():
    line = Line(work="w", baseline="-", unit="ms", least=20.0, aim=3.0, values=[25.0], lower=True)
    assert line.verdict == "no"
    assert "≤ 20 ms" in table.row(line)
    assert Line(work="w", baseline="-", unit="ms", least=20.0, aim=3.0, values=[2.5], lower=True).verdict == "aim"


def test_results_of_other_parts_are_preserved(tmp_path: Path):
    def part(work: str) -> table.Part:
        line = Line(work=work, baseline="-", unit="x", least=1.0, aim=2.0, values=[1.5])
        return table.Part(measured="today", machine="here", lines=[line])

    results = tmp_path / "speed"
    table.write(results, {"b": part("second")}, ["a", "b"])
    table.write(results, {**table.read(results), "a": part("first")}, ["a", "b"])
    assert [line.work for part in table.read(results).values() for line in part.lines] == ["first", "second"]
    text = results.with_suffix(".md").read_text()
    assert text.index("first") < text.index("second")
    assert results.with_suffix(".png").is_file()


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "pass", "while True: pass"])
def test_part_that_gives_no_lines_fails(program: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """A part that ends, ends without a result, or takes too long."""
    arguments = argparse.Namespace(dtype="float32", model="m", threads=1, turns=1, instructions=None)
    monkeypatch.setattr(speed, "PART_S", 1.0 if program.startswith("while") else 100.0)
    run_apart = speed.run_apart
    monkeypatch.setattr(speed, "run_apart", lambda _, *args, **options: run_apart(
        lambda _: [sys.executable, "-c", program], *args, **options))  # fmt: skip
    assert speed._apart("memory", arguments) is None
    assert "memory: the process " in capfd.readouterr().err


@needs_panels
def test_part_computes_with_the_limited_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch and compiled functions say so themselves, in a process of the part's environment."""
    program = """
import torch, numba
from tinsmith.engine.cpu.vectors import HAS_AMX, HAS_PAIRS, LANES
print(torch.backends.cpu.get_cpu_capability(), numba.config.CPU_NAME, LANES, HAS_AMX, HAS_PAIRS)
"""
    environments: list[dict[str, str]] = []

    def ended(_: object, seconds: float, *, environment: dict[str, str]) -> Ending:
        environments.append(environment)
        return Ending(result=None, seconds=0, error="not run", log="")

    monkeypatch.setattr(speed, "run_apart", ended)
    options = {"dtype": "float32", "model": "m", "threads": 1, "turns": 1}
    speed._apart("memory", argparse.Namespace(**options, instructions="avx2"))
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, env=environments[0], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout.split() == ["AVX2", "znver3", "8", "False", "False"]


def test_limited_instructions_need_float32(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["speed", "--instructions", "avx2"])
    with pytest.raises(SystemExit):
        speed._arguments()
    assert "--dtype float32" in capsys.readouterr().err


def test_flops_are_two_per_weight_and_position(tiny_llama: Path):
    ours = EngineDriver(Setting(folder=tiny_llama, threads=1, turns=1, dtype="float32"))
    counted = sum(training.weight_flops(ours).values())
    rates = training.peak_rates(ours)
    ours.close()
    model = plain_model(tiny_llama)
    matrices = [part for name, part in model.named_parameters() if "_proj" in name]
    assert counted == 2 * sum(part.numel() for part in (*matrices, model.get_output_embeddings().weight))
    assert set(rates) == {tuple(part.shape) for part in (*matrices, model.get_output_embeddings().weight)}
    assert all(rate > 0 for rate in rates.values())


def test_batches_have_equal_lengths_and_one_shares_prompts():
    shared, different = grpo(), grpo(shared=False)
    assert [len(row) for row in shared.rows] == [len(row) for row in different.rows]
    packed = [
        len(
            packing.pack(
                [packing.PackedRow(key=key, adapter=0, tokens=row) for key, row in enumerate(part.rows)]
            ).tokens
        )
        for part in (shared, different)
    ]
    assert packed[0] < sum(map(len, shared.rows)) - 7 * 8 * 150 + 64
    assert packed[1] > 0.99 * sum(map(len, different.rows))


def test_tree_trains_answers_alone_and_its_rows_share_turns():
    leaves, answers = tree(), tree(by_turn=True)
    assert {int((leaves.advantages(index) != 0).sum()) for index in range(20)} == {260}
    assert {int((answers.advantages(index) != 0).sum()) for index in range(len(answers.rows))} == {26}
    computed = {len(packing.pack(shapes.packed_rows(work)).tokens) for work in (leaves, answers)}
    assert len(computed) == 1
    assert shapes.sharing(answers) > 3 * shapes.sharing(leaves) > 6


def test_gradients_of_a_tree_are_those_of_separate_rows(tiny_llama: Path):
    line = trees._gradients(Setting(folder=tiny_llama, threads=1, turns=1))
    assert line.verdict == "aim", line.values


@pytest.mark.parametrize("part", [agreement, sharing, switching, tenants])
def test_part_runs_on_a_tiny_model(part: object, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharing, "TOKENS", 8)
    monkeypatch.setattr(tenants, "MANY", 100)
    lines = part.measure(Setting(folder=tiny_llama, threads=1, turns=1, dtype="float32"))  # type: ignore[attr-defined]
    assert lines
    assert all(line.values for line in lines)


def test_vllm_line_is_not_measured_without_vllm(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINSMITH_VLLM_PYTHON", "/nowhere/python")
    (line,) = vllm.measure(Setting(folder=tiny_llama, threads=1, turns=1))
    assert line.verdict == "not measured"
    assert "TINSMITH_VLLM_PYTHON" in table.row(line)


@pytest.mark.parametrize("takes_adapters", [True, False])
def test_vllm_lines_have_every_size_with_and_without_an_adapter(
    takes_adapters: bool, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a program in vLLM's place that computes nothing."""
    program = tmp_path / "program.py"
    program.write_text(STUB.format(takes_adapters=takes_adapters))
    monkeypatch.setattr(vllm_process, "PROGRAM", program)
    monkeypatch.setenv("TINSMITH_VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(vllm, "SAME_64", vllm.Size("the same samples", 2, 2, 2))
    sizes = (vllm.Size("1 sequence", 1, 1, 3), vllm.Size("of one prompt", 1, 2, 3))
    monkeypatch.setattr(vllm, "SIZES", sizes)
    monkeypatch.setattr(vllm, "ADAPTER_SIZES", sizes)
    lines = vllm.measure(Setting(folder=tiny_llama, threads=1, turns=1, dtype="float32"))
    assert [(line.work, line.baseline) for line in lines[:3]] == [
        ("the same samples of 2 tokens", "vLLM on the same cores, no adapter"),
        ("1 sequence of 3 tokens, no adapter", "vLLM on the same cores, no adapter"),
        ("of one prompt of 3 tokens, no adapter", "vLLM on the same cores, no adapter"),
    ]
    theirs = "the same adapter" if takes_adapters else "no adapter"
    assert [line.work for line in lines[3:]] == [f"{size.work}, adapter of rank 32" for size in sizes]
    assert {line.baseline for line in lines[3:]} == {f"vLLM on the same cores, {theirs}"}
    assert {line.note for line in lines[3:]} == {"" if takes_adapters else "vLLM does not take it: no adapters"}
    assert all(len(line.values) == 1 for line in lines)
