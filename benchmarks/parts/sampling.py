"""64 samples under an adapter, with their logprobs, against `generate` of transformers under PEFT's adapter.

`generate` takes one prompt after the other with its eight samples together, and computes no logprobs; ours is
given all eight requests at once and always gives them.
"""

from __future__ import annotations

from itertools import count

from benchmarks.baseline import Baseline, load
from benchmarks.comparison import Comparison, Line, Setting, in_turns
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import grpo, questions

RANK = 32
SAMPLES, TOKENS = 8, 96


def measure(setting: Setting) -> list[Line]:
    """One line. Both adapters have been trained a step: B is not zero."""
    ours, theirs = EngineDriver(setting), Baseline(load(setting), RANK)
    small, prompts = grpo(groups=1, group=2), len(questions())
    ours.create("bench", RANK)
    ours.run(small.as_pass("bench"))
    ours.step("bench")
    ours.capture("bench", "version")
    theirs.train(small.rows, small.prompts)
    comparison = against_generate(ours, theirs, setting, prompts, SAMPLES, TOKENS)
    ours.close()
    work = f"{prompts} prompts x {SAMPLES} samples x {TOKENS} tokens, temperature 1, logprobs, adapter of rank {RANK}"
    tokens = prompts * SAMPLES * TOKENS
    return [comparison.line(work, f"transformers.generate(num_return_sequences={SAMPLES})", 4.0, 5.5, tokens)]


def against_generate(
    ours: EngineDriver, theirs: Baseline, setting: Setting, prompts: int, samples: int, tokens: int
) -> Comparison:
    """Times of `samples` continuations of `prompts` prompts on both sides; ours samples from "version".

    Ours is given new prompts in every turn, so that none is in a cache.
    """
    seeds, fixed = count(1), questions(prompts)
    ours.sample(fixed, "version", samples, 4)
    theirs.sample(fixed[:1], samples, 4)
    return in_turns(
        lambda: ours.sample(questions(prompts, seed=next(seeds)), "version", samples, tokens),
        lambda: theirs.sample(fixed, samples, tokens),
        setting.turns,
        warm_up=0,
    )
