"""Steps 5, 6, 10 and 13: training of Qwen3-4B, against PEFT, of smaller and larger models, and a whole RL step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.baseline import Baseline
from benchmarks.comparison import in_turns, timed
from benchmarks.engine_driver import EngineDriver
from benchmarks.gpu_check.decoding import decode_rate
from benchmarks.gpu_check.device import datasheet_tflops, peak_gb, product_tflops, profile, seconds, settle
from benchmarks.gpu_check.shapes import Size
from benchmarks.gpu_check.step import Values
from benchmarks.parts.training import useful_flops
from benchmarks.workloads import Batch, grpo, questions, rows_of
from tinsmith.engine.lora.fused_layers import DecoderLayer

RANK = 32
TRACE = "CHECK_TRACE"
"""Environment variable: file for the trace of a step."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one kind of batch is trained."""

    tokens_per_s: float
    tflops: float


def long_rows(size: Size) -> Values:
    """Rows of 2,048 tokens and one of 16,384, without anything shared; where the time and the waits go."""
    ours = size.engine("Qwen3-4B")
    ours.create("check", RANK)
    short, long = rows_of(size.of(2048, 32), size.of(8, 2)), rows_of(size.of(16_384, 64), 1)
    peak = peak_gb(size, trainer(size, ours, short))
    rates = {"2k": train_rate(size, ours, short), "16k": train_rate(size, ours, long)}
    counted = profile(size, trainer(size, ours, short))
    measured, listed = product_tflops(size), datasheet_tflops()
    values: dict[str, object] = {
        "peak_gb": peak,
        "launches": counted.launches,
        "waits": counted.waits,
        "copies_to_host": counted.copies_to_host,
        "kernels": counted.kernels,
        "fused_layers": sum(isinstance(module, DecoderLayer) for module in ours.engine.trainer._base.body.modules()),
        "pass_tokens": ours.engine.card.pass_tokens,
    }
    for name, rate in rates.items():
        values[f"tokens_per_s_{name}"] = rate.tokens_per_s
        values[f"share_of_product_rate_{name}"] = rate.tflops / measured
        if listed is not None:
            values[f"mfu_{name}"] = rate.tflops / listed
    ours.close()
    return values


def against_peft(size: Size) -> Values:
    """Different prompts and a GRPO batch against PEFT: padded rows of eight with SDPA, its own kernels chosen by torch
    but for cuDNN's, which would plan each new shape."""
    ours = size.engine("Qwen3-4B")
    ours.create("check", RANK)
    model = size.model("Qwen3-4B", torch.bfloat16)
    model.set_attn_implementation("sdpa")
    theirs = Baseline(model, RANK)
    torch.backends.cuda.enable_cudnn_sdp(False)
    values: dict[str, object] = {}
    for name, batch in (
        ("different_prompts", grpo(shared=False, groups=size.of(8, 1))),
        ("grpo", grpo(groups=size.of(8, 1))),
    ):

        def theirs_train(batch: Batch = batch) -> None:
            theirs.train(batch.rows, batch.prompts)
            settle(size)

        comparison = in_turns(trainer(size, ours, batch), theirs_train, size.of(3, 1))
        values[f"{name}_ratio"] = float(np.median(comparison.ratios))
        values[f"{name}_tokens_per_s"] = batch.tokens / float(np.median(comparison.ours_s))
    ours.close()
    return values


def other_sizes(size: Size) -> Values:
    """Training and decoding of a small and of a large model."""
    values: dict[str, object] = {}
    for name in ("Qwen3-0.6B", "Qwen3-8B"):
        ours = size.engine(name)
        ours.create("check", RANK)
        batch = rows_of(size.of(2048, 32), size.of(8, 2))
        values[f"{name}: training tokens/s"] = train_rate(size, ours, batch).tokens_per_s
        ours.capture("check", "version")
        values[f"{name}: decoding tokens/s"] = decode_rate(size, ours, ["version"], size.of(64, 4)).tokens_per_s
        ours.close()
    return values


def rl_step(size: Size) -> Values:
    """Sample 8 x 8, train, take an optimizer step, capture, and the first token of the new version."""
    ours = size.engine("Qwen3-4B")
    ours.create("check", RANK)
    ours.capture("check", "version-0")
    prompts, tokens, taken = questions(size.of(8, 2), size.of(512, 32)), size.of(256, 8), {}

    def step(number: int) -> None:
        results: list[object] = []
        taken["sample_s"] = timed(lambda: results.append(ours.sample(prompts, f"version-{number}", 8, tokens)))
        rows = [
            np.concatenate([prompt, sequence.tokens])
            for prompt, result in zip(prompts, results[0], strict=True)  # type: ignore[call-overload]
            for sequence in result.sequences
        ]
        batch = Batch(name="", rows=rows, prompts=[len(prompts[0])] * len(rows))
        taken["train_s"] = timed(trainer(size, ours, batch))
        taken["capture_s"] = timed(lambda: ours.capture("check", f"version-{number + 1}"))
        taken["first_token_s"] = timed(lambda: ours.sample(prompts[:1], f"version-{number + 1}", 1, 1))

    step(0)
    step(1)
    counted = profile(size, lambda: step(2), trace=os.environ.get(TRACE, ""))
    ours.close()
    return {**taken, "launches": counted.launches, "waits": counted.waits, "trace_bytes": _trace_bytes()}


def trainer(size: Size, ours: EngineDriver, batch: Batch) -> Callable[[], None]:
    """forward_backward and optim_step over the batch, until the device has finished."""

    def train() -> None:
        ours.run(batch.as_pass("check"))
        ours.step("check")
        settle(size)

    return train


def train_rate(size: Size, ours: EngineDriver, batch: Batch) -> Rate:
    """Tokens a second as a user counts them, and useful FLOPs as `benchmarks.parts.training` counts them."""
    took = seconds(size, trainer(size, ours, batch))
    return Rate(batch.tokens / took, useful_flops(ours, batch, RANK) / took / 1e12)


def _trace_bytes() -> int:
    file = os.environ.get(TRACE, "")
    return Path(file).stat().st_size if file and Path(file).exists() else 0
