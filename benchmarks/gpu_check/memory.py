"""Step 11: rows of 32,768 tokens, and requests beyond what fits: refused or failed by name, and the engine lives on."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.engine_driver import EngineDriver
from benchmarks.gpu_check.device import peak_gb
from benchmarks.gpu_check.shapes import Size
from benchmarks.gpu_check.step import Values
from benchmarks.workloads import grpo, questions, rows_of

RANK = 32
MAX_MODELS = 64


def limits(size: Size) -> Values:
    """Peak of a long row; then models until one is refused, and a pass and samples after it."""
    ours = size.engine("Qwen3-8B")
    ours.create("check", RANK)
    length = size.of(32_768, 512)
    peak = peak_gb(size, lambda: ours.run(rows_of(length, 1).as_pass("check")))
    many = size.of(64, 4)
    prompts = questions(many, size.of(8000, 64))
    ours.capture("check", "version")
    refused: list[str] = []
    _attempt(refused, lambda: ours.sample(prompts, "version", 4, size.of(64, 4)))
    for number in range(size.of(MAX_MODELS, 2)):
        _attempt(refused, lambda number=number: _train_another(ours, f"model-{number}", length // 2))
    ours.run(grpo(groups=1).as_pass("check"))
    ours.step("check")
    ours.sample(questions(2), "version", 2, 8)
    values = {"row_tokens": length, "peak_gb": peak, "refused": refused[:8], "lives": True}
    ours.close()
    return values


def _train_another(ours: EngineDriver, model: str, length: int) -> None:
    ours.create(model, 128)
    ours.run(rows_of(length, 1).as_pass(model))
    ours.step(model)


def _attempt(refused: list[str], work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the question is whether the engine lives on
        refused.append(f"{type(error).__name__}: {str(error)[:200]}")
