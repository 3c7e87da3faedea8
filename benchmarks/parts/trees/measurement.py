"""Branching rollouts: 20 conversations of ten turns that fork from each other at any turn, against padded PEFT.

24 tokens are said and 26 answered in each turn; answers are trained. The rollouts come as a row for each leaf, or as a
row for each answer with all that was said before it, as an agent's requests are recorded. The baseline computes the
rows by length, eight at a time, and shares nothing. A ratio is what sharing gives (tokens of all rows by packed
positions) times what the engine gains on rows that share nothing; the note has both. A row for each answer is also
computed in smaller micro-batches, down to those whose memory is that of the longest row.
"""

from __future__ import annotations

import gc
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import numpy as np

from benchmarks.baseline import ROWS, Baseline, load
from benchmarks.comparison import Comparison, Line, Setting, rotate
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts import memory
from benchmarks.parts.trees import shapes
from benchmarks.workloads import Batch, grpo, tree

RANK = 32
SMALLER = (512, 192)
"""`pass_tokens` of the smaller micro-batches: one that the longest row fits into with little to spare, and one whose
activations, with the saved keys and values, take no more than the longest row alone."""
SUBJECT = "tree of 20 leaves, depth 10 (24 said, 26 answered a turn), forks at any turn"


def measure(setting: Setting) -> list[Line]:
    """Speed with both kinds of rows, gradients against separate rows in float32, and peak memory."""
    return [*_speed(setting), _gradients(setting), *_memory(setting)]


def _speed(setting: Setting) -> list[Line]:
    ours, theirs, small = EngineDriver(setting), Baseline(load(setting), RANK), grpo(groups=1)
    smaller = {tokens: EngineDriver(setting, pass_tokens=tokens) for tokens in SMALLER}
    for engine in (ours, *smaller.values()):
        engine.create("bench", RANK)
        _train(engine, small)
    theirs.train_batch(small)
    leaves, answers = tree(), tree(by_turn=True)
    sides = {
        "leaves": lambda: _train(ours, leaves),
        "theirs": lambda: theirs.train_batch(leaves),
        "answers": lambda: _train(ours, answers),
        **{f"answers in {tokens}": partial(_train, engine, answers) for tokens, engine in smaller.items()},
        "their answers": lambda: theirs.train_batch(answers),
    }
    seconds = rotate(sides, setting.turns)
    for engine in (ours, *smaller.values()):
        engine.close()
    in_smaller = [
        _speed_line(
            replace(answers, name=f"{answers.name}, in micro-batches of {tokens} tokens"),
            Comparison(seconds[f"answers in {tokens}"], seconds["their answers"]),
        )
        for tokens in SMALLER
    ]
    return [
        replace(_speed_line(leaves, Comparison(seconds["leaves"], seconds["theirs"])), least=None, aim=None),
        _speed_line(answers, Comparison(seconds["answers"], seconds["their answers"])),
        *in_smaller,
    ]


def _speed_line(work: Batch, comparison: Comparison) -> Line:
    shared = shapes.sharing(work)
    gain = statistics.median(comparison.ratios) / shared
    note = f"{len(work.rows)} rows; sharing gives {shared:.2f}x, the engine {gain:.2f}x"
    baseline = f"transformers + PEFT, padded rows of {ROWS}"
    return comparison.line(f"{SUBJECT}, {work.name}", baseline, 8.0, 12.0, work.tokens, note)


def _gradients(setting: Setting) -> Line:
    """Gradients of the tree against those of each row alone, in float32."""
    work = tree()
    ours = EngineDriver(replace(setting, dtype="float32"))
    for name in ("tree", "rows"):
        ours.create(name, RANK)
        ours.run(*(grpo(groups=1).as_pass(name),))  # B is no longer 0 after a step
        ours.step(name)
    ours.run(work.as_pass("tree"))
    for index in range(len(work.rows)):
        row = replace(work, rows=work.rows[index : index + 1], prompts=work.prompts[index : index + 1])
        ours.run(row.as_pass("rows"))
    together, apart = (ours.engine.trainer.gradients(name) for name in ("tree", "rows"))
    ours.close()
    greatest = max(float(np.abs(part).max()) for pair in apart.values() for part in pair)
    differences = [
        float(np.abs(shared - separate).max()) / greatest
        for name in apart
        for shared, separate in zip(together[name], apart[name], strict=True)
    ]
    return Line(
        work="the same tree, float32: difference of its gradients from those of separate rows, by the largest gradient",
        baseline="each row in a pass of its own",
        unit="",
        least=1e-5,
        aim=1e-5,
        values=[max(differences)],
        lower=True,
    )


def _memory(setting: Setting) -> list[Line]:
    """Peaks above the loaded base, each in a process of its own."""
    work = tree(by_turn=True)
    longest = replace(work, rows=work.rows[-1:], prompts=work.prompts[-1:])
    least = {"auto": None, **dict.fromkeys(SMALLER, 1.0)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as apart:
        row = apart.submit(_peak, setting, longest, "auto").result()
        theirs = apart.submit(_their_peak, setting, work).result()
        peaks = {tokens: apart.submit(_peak, setting, work, tokens).result() for tokens in least}
    return [
        Line(
            work=f"the same tree, pass_tokens {tokens}: peak memory above the loaded base",
            baseline=f"its longest row alone (PEFT on {ROWS} rows: {theirs / 1e9:.2f} GB)",
            unit="x",
            values=[peak / row],
            least=least[tokens],
            aim=least[tokens],
            ours=f"{peak / 1e9:.2f} GB",
            theirs=f"{row / 1e9:.2f} GB",
            note="with gradients and moments",
            lower=True,
        )
        for tokens, peak in peaks.items()
    ]


def _peak(setting: Setting, work: Batch, pass_tokens: str | int) -> int:
    ours = EngineDriver(setting, pass_tokens=pass_tokens)
    gc.collect()
    base = memory.resident()
    ours.create("bench", RANK)
    peaks = []
    for _ in range(2):
        memory.reset_peak()
        _train(ours, work)
        peaks.append(memory.peak() - base)
    ours.close()
    return max(peaks)


def _their_peak(setting: Setting, work: Batch) -> int:
    theirs = Baseline(load(setting), RANK)
    gc.collect()
    base = memory.resident()
    memory.reset_peak()
    theirs.train_batch(replace(work, rows=work.rows[-ROWS:], prompts=work.prompts[-ROWS:]))
    return memory.peak() - base


def _train(ours: EngineDriver, work: Batch) -> None:
    ours.run(work.as_pass("bench"))
    ours.step("bench")
