"""64 samples under an adapter, with their logprobs, against `generate` of transformers under PEFT's adapter.

`generate` takes one prompt after the other with its eight samples together, and computes no logprobs; ours is
given all eight requests at once and always gives them.
"""

from __future__ import annotations

from itertools import count

from benchmarks.baseline import Baseline, load
from benchmarks.comparison import Line, Setting, in_turns
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import grpo, questions

RANK = 32
SAMPLES, TOKENS = 8, 96


def measure(setting: Setting) -> list[Line]:
    """One line. Both adapters have been trained a step: B is not zero."""
    ours, theirs = EngineDriver(setting), Baseline(load(setting), RANK)
    prompts, small, seeds = questions(), grpo(groups=1, group=2), count(1)
    ours.create("bench", RANK)
    ours.run(small.as_pass("bench"))
    ours.step("bench")
    ours.capture("bench", "version")
    theirs.train(small.rows, small.prompts)
    ours.sample(prompts, "version", SAMPLES, 4)
    theirs.sample(prompts[:1], SAMPLES, 4)
    comparison = in_turns(
        # New prompts in every turn, so that none is in a cache.
        lambda: ours.sample(questions(seed=next(seeds)), "version", SAMPLES, TOKENS),
        lambda: theirs.sample(prompts, SAMPLES, TOKENS),
        setting.turns,
        warm_up=0,
    )
    ours.close()
    work = (
        f"{len(prompts)} prompts x {SAMPLES} samples x {TOKENS} tokens, temperature 1, logprobs, adapter of rank {RANK}"
    )
    tokens = len(prompts) * SAMPLES * TOKENS
    return [comparison.line(work, f"transformers.generate(num_return_sequences={SAMPLES})", 4.0, 5.5, tokens)]
