"""The second turn of many conversations: all that was said before is in the prompt again.

In each turn of the measurement 64 new conversations of 1,024 tokens get a reply (nothing of them can be
cached: the baseline), and then, with that reply and 24 more tokens, for the next one.
"""

from __future__ import annotations

import logging
from itertools import count

import numpy as np

from benchmarks.comparison import Comparison, Line, Setting, timed
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import questions

log = logging.getLogger(__name__)

CONVERSATIONS, LENGTH, REPLY, SAID = 64, 1024, 16, 24
RANK = 32


def measure(setting: Setting) -> list[Line]:
    """One line; under an adapter, as a policy's rollouts are."""
    ours = EngineDriver(setting, cache_tokens=131_072)
    ours.create("bench", RANK)
    ours.capture("bench", "version")
    comparison, seeds = Comparison(), count(1)
    ours.sample(questions(2, 64), "version", 1, 2)
    for _ in range(setting.turns):
        history = questions(CONVERSATIONS, LENGTH, seed=next(seeds))
        replies: list[np.ndarray] = []

        def first(history: list[np.ndarray] = history, replies: list[np.ndarray] = replies) -> None:
            results = ours.sample(history, "version", 1, REPLY)
            replies.extend(result.sequences[0].tokens for result in results)

        comparison.theirs_s.append(timed(first))
        said = questions(CONVERSATIONS, SAID, seed=next(seeds))
        longer = [np.concatenate(parts) for parts in zip(history, replies, said, strict=True)]
        comparison.ours_s.append(timed(lambda prompts=longer: ours.sample(prompts, "version", 1, REPLY)))
        log.info("conversations: %.1f s, then %.1f s", comparison.theirs_s[-1], comparison.ours_s[-1])
    ours.close()
    work = f"second turn of {CONVERSATIONS} conversations of {LENGTH + REPLY} tokens: {SAID} said, {REPLY} answered"
    baseline = f"prompts of {LENGTH} tokens of which nothing is cached"
    return [comparison.line(work, baseline, 5.0, 15.0)]
