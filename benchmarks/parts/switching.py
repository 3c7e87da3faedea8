"""What it costs to sample from the newest weights: an optimizer step, a capture, the first token of the new version.

The same without the capture, from a version known before, is subtracted turn by turn; so a capture that puts its work
off, to the first token or to the next step, is charged for it. No prompt is used twice: nothing comes from a cache.
"""

from __future__ import annotations

from itertools import count

from benchmarks.comparison import Line, Setting, percentile, rotate
from benchmarks.engine_driver import EngineDriver
from benchmarks.workloads import grpo, questions

RANK = 32


def measure(setting: Setting) -> list[Line]:
    """One line, in milliseconds."""
    ours, numbers = EngineDriver(setting), count(1)
    small = grpo(groups=1, group=2).as_pass("bench")
    ours.create("bench", RANK)
    ours.run(small)
    ours.step("bench")
    ours.capture("bench", "earlier")

    def cycle(*, captures: bool) -> None:
        number, version = next(numbers), "earlier"
        ours.step("bench")
        if captures:
            version = f"version-{number}"
            ours.capture("bench", version)
            ours.wait(ours.engine.detach(f"version-{number - 2}"))
        ours.sample(questions(1, 16, seed=number), version, 1, 1)

    sides = {"new": lambda: cycle(captures=True), "earlier": lambda: cycle(captures=False)}
    rotate(sides, 3)
    seconds = rotate(sides, 10 * setting.turns)
    ours.close()
    added = [1000 * (new - earlier) for new, earlier in zip(seconds["new"], seconds["earlier"], strict=True)]
    return [
        Line(
            work=f"adapter version captured and switched, rank {RANK}",
            baseline="a step and a token of a known version",
            unit="ms",
            least=20.0,
            aim=3.0,
            values=added,
            ours=f"{1000 * percentile(seconds['new'], 0.5):.1f} ms",
            theirs=f"{1000 * percentile(seconds['earlier'], 0.5):.1f} ms",
            note="step, capture and first token, less the same without the capture",
            lower=True,
        )
    ]
