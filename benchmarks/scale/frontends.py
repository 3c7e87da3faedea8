"""What HTTP front ends take from the API process and cost themselves, fitted to benchmarks/results/frontends.json.

The measurement compares the ways in turns on a machine that other work used too, so its ratios count: the CPU times of
`Hardware` are multiplied by them. Front ends of one and of two processes are one way here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.scale.hardware import Hardware

RESULTS = Path(__file__).parents[1] / "results/frontends.json"
SHORT_PROMPT, LONG_PROMPT = 64, 8000
SHORT_PASS, LONG_PASS = 8 * 300, 175 * 300
SAMPLES = ("sample, prompt of 64 tokens", "sample, prompt of 8,000 tokens")
PASSES = ("forward_backward of 8 x 300 tokens (48 kB)", "forward_backward of 175 x 300 tokens (1 MiB)")
STEP = "forward_backward of 16 tokens and optim_step"

Results = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
"""By request and number of front ends: the figures of each turn."""


@dataclass(frozen=True, slots=True)
class Line:
    """Milliseconds of a request by its tokens."""

    fixed: float
    per_token: float

    @classmethod
    def through(cls, short: tuple[int, float], long: tuple[int, float]) -> Line:
        """The line through two points of tokens and milliseconds."""
        rate = (long[1] - short[1]) / (long[0] - short[0])
        return cls(short[1] - rate * short[0], rate)

    def of(self, tokens: int) -> float:
        """Milliseconds of a request."""
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU time of a process for each kind of request."""

    sample: Line
    forward_backward: Line
    step: float

    @classmethod
    def fitted(cls, results: Results, process: str, *, frontends: bool) -> Costs:
        """Of the process `core_ms` or `frontend_ms`, with front ends or without."""

        def median(request: str) -> float:
            ways = results[request][1:] if frontends else results[request][:1]
            return statistics.median(turn[process] for way in ways for turn in way)

        forward_backward = Line.through(*zip((SHORT_PASS, LONG_PASS), map(median, PASSES), strict=True))
        return cls(
            sample=Line.through(*zip((SHORT_PROMPT, LONG_PROMPT), map(median, SAMPLES), strict=True)),
            forward_backward=forward_backward,
            step=max(0.0, median(STEP) - forward_backward.of(16)),
        )


def measured() -> tuple[Costs, Costs, Costs]:
    """Costs of the API process by itself, of the API process with front ends, and of a front end."""
    results: Results = json.loads(RESULTS.read_text())
    return (
        Costs.fitted(results, "core_ms", frontends=False),
        Costs.fitted(results, "core_ms", frontends=True),
        Costs.fitted(results, "frontend_ms", frontends=True),
    )


def divided(hardware: Hardware) -> tuple[Hardware, Hardware]:
    """The figures with the CPU times of an API process with front ends, and with those of a front end.

    A step, which is mostly a commit, costs the API process as much as before, and a front end as its share of the
    smallest request.
    """
    alone, with_frontends, front = measured()

    def scaled(costs: Costs) -> dict[str, Any]:
        return {
            "api_sample_ms": hardware.api_sample_ms * costs.sample.of(SHORT_PROMPT) / alone.sample.of(SHORT_PROMPT),
            "api_sample_per_prompt_token_ms": hardware.api_sample_per_prompt_token_ms
            * costs.sample.per_token
            / alone.sample.per_token,
            "api_pass_ms": hardware.api_pass_ms * costs.forward_backward.fixed / alone.forward_backward.fixed,
            "api_pass_per_token_ms": hardware.api_pass_per_token_ms
            * costs.forward_backward.per_token
            / alone.forward_backward.per_token,
        }

    in_front = scaled(front)
    return (
        replace(hardware, **scaled(with_frontends)),
        replace(hardware, **in_front, api_step_ms=in_front["api_sample_ms"], api_answer_token_ms=0.0),
    )
