"""How far the sampler's logprobs are from the trainer's on the same tokens: what an importance ratio begins with.

Text of this project is continued at temperature 1 under an adapter that has been trained some steps, then the trainer
computes the logprobs of the samples.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison import Line, Setting
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import PROMPT
from tinsmith.engine.base import Datum, Pass

TEXT = Path(__file__).parents[2] / "README.md"
PROMPTS, SAMPLES, TOKENS, RANK, STEPS = 6, 8, 64, 32, 4


def measure(setting: Setting) -> list[Line]:
    """Mean difference in both dtypes, and in float32 the largest."""
    lines = []
    for dtype, least, aim in (("float32", 1e-5, 1e-5), ("bfloat16", 0.06, 0.03)):
        differences = np.abs(_differences(replace(setting, dtype=dtype)))
        means = differences.reshape(PROMPTS, -1).mean(1)
        line = {"baseline": "-", "unit": "", "lower": True}
        subject = f"sampler against trainer, {dtype}: abs. logprob difference,"
        overall = f"mean of all {differences.mean():.2g}"
        note = f"{differences.size} sampled tokens; median and range of the means by prompt; {overall}"
        lines.append(Line(work=f"{subject} mean", least=least, aim=aim, values=means.tolist(), note=note, **line))
        if dtype == "float32":
            lines.append(
                Line(work=f"{subject} greatest", least=1e-4, aim=1e-4, values=[float(differences.max())], **line)
            )
    return lines


def _differences(setting: Setting) -> np.ndarray:
    """[prompts * samples * tokens] sampled less trained."""
    ours = EngineDriver(setting)
    prompts = _texts(ours.engine.card.tokenizer)
    ours.create("bench", RANK)
    for _ in range(STEPS):
        ours.run(_learn(prompts))
        ours.step("bench", 2e-4)
    ours.capture("bench", "version")
    sequences = [
        (prompt, sequence)
        for prompt, differences in zip(prompts, ours.sample(prompts, "version", SAMPLES, TOKENS), strict=True)
        for sequence in differences.sequences
    ]
    rows = [np.concatenate([prompt, sequence.tokens]) for prompt, sequence in sequences]
    (result,) = ours.run(scored_pass(rows, "bench"))
    ours.close()
    trained = [logprobs[PROMPT - 1 :] for logprobs in result.logprobs]
    return np.concatenate([s.logprobs - t for (_, s), t in zip(sequences, trained, strict=True)])


def _texts(tokenizer: str) -> list[np.ndarray]:
    from transformers import AutoTokenizer

    read: Any = AutoTokenizer.from_pretrained(tokenizer)
    ids = np.array(read.encode(TEXT.read_text()), np.int32)
    return [ids[at * PROMPT : (at + 1) * PROMPT] for at in range(PROMPTS)]


def _learn(prompts: list[np.ndarray]) -> Pass:
    data = [
        Datum(
            tokens=row[:-1],
            targets=row[1:].astype(np.int64),
            inputs={"weights": np.ones(len(row) - 1, np.float32) / 100},
        )
        for row in prompts
    ]
    return Pass(model_id="bench", data=tuple(data), loss_fn="cross_entropy")


def scored_pass(rows: list[np.ndarray], model_id: str) -> Pass:
    """A request for the logprobs of all tokens of the rows after the first."""
    data = [
        Datum(
            tokens=row[:-1].astype(np.int32),
            targets=row[1:].astype(np.int64),
            inputs={"weights": np.zeros(len(row) - 1, np.float32)},
        )
        for row in rows
    ]
    return Pass(model_id=model_id, data=tuple(data), loss_fn="cross_entropy", forward_only=True)
