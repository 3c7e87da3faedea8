"""Sampling against vLLM on the same cores: few sequences and many, of one prompt and of different ones.

Each size is measured without an adapter on both sides and with the same adapter on both, and the 64 samples of the part
`sampling` with an adapter on our side alone. vLLM is what `make vllm` makes, or what TINSMITH_VLLM_PYTHON names; both
sides get all requests at once, and each waits while the other works.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.comparison import Line, Setting, in_turns
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts.sampling import RANK, SAMPLES, TOKENS
from benchmarks.parts.vllm.process import VllmError, VllmProcess
from benchmarks.workloads import PROMPT, grpo, questions

PLACES = (Path(".venv-vllm/bin/python"),)
VERSION = "version"
OURS_WITH = f"adapter of rank {RANK}"
THEIRS = "vLLM on the same cores"
THEIRS_WITHOUT = f"{THEIRS}, no adapter"


@dataclass(frozen=True, slots=True)
class Size:
    """Sequences that are sampled at once."""

    name: str
    prompts: int
    samples: int
    """Of each prompt."""
    tokens: int
    """Of each sample."""
    length: int = PROMPT
    """Tokens of a prompt."""

    @property
    def work(self) -> str:
        """The work of its lines."""
        prompts = "" if self.length == PROMPT else f" after prompts of {self.length}"
        return f"{self.name} of {self.tokens} tokens{prompts}"


SAME_64 = Size("the same 64 samples", 8, SAMPLES, TOKENS)
"""As the part `sampling` has them."""
SIZES = (
    Size("1 sequence", 1, 1, 96),
    Size("8 sequences of one prompt", 1, 8, 64),
    Size("8 sequences of different prompts", 8, 1, 64),
    Size("64 sequences of 8 prompts", 8, 8, 32),
    Size("64 sequences of different prompts", 64, 1, 32),
)
ADAPTER_SIZES = (
    Size("1 sequence", 1, 1, 64),
    Size("8 sequences of one prompt", 1, 8, 32),
    Size("8 sequences of different prompts", 8, 1, 32),
    Size("64 sequences of 8 prompts", 8, 8, 8),
    Size("64 sequences of different prompts", 64, 1, 8, length=32),
)
"""Smaller: on a CPU, vLLM (0.32) copies a row's adapter matrices for each position, 40 ms for one of a prompt."""


def measure(setting: Setting) -> list[Line]:
    """The lines; one, which says so, without an environment that has vLLM."""
    named = os.environ.get("TINSMITH_VLLM_PYTHON")
    interpreters = [place for place in ((Path(named),) if named else PLACES) if place.is_file()]
    if not interpreters:
        why = "not measured: no environment with vLLM (make vllm, or TINSMITH_VLLM_PYTHON)"
        return [Line(work=SAME_64.work, baseline=THEIRS_WITHOUT, unit="x", least=1.0, aim=2.0, values=[], note=why)]
    lines = _Lines(interpreters[0].absolute(), setting)
    try:
        return [*lines.without_adapter(), *lines.with_adapter()]
    finally:
        lines.close()


class _Lines:
    """Our engine, with an adapter that has been trained a step (B is not zero), and vLLM beside it."""

    def __init__(self, python: Path, setting: Setting) -> None:
        self._python, self._setting, self._seeds = python, setting, count(1)
        self._ours = EngineDriver(setting)
        self._ours.create("bench", RANK)
        self._ours.run(grpo(groups=1, group=2).as_pass("bench"))
        self._ours.step("bench")
        self._ours.capture("bench", VERSION)

    def without_adapter(self) -> Iterator[Line]:
        """The lines in which vLLM has no adapter."""
        with closing(VllmProcess(self._python, self._setting)) as vllm:
            yield self._line(vllm, SAME_64, VERSION, SAME_64.work, THEIRS_WITHOUT, aim=2.0)
            for size in SIZES:
                yield self._line(vllm, size, None, f"{size.work}, no adapter", THEIRS_WITHOUT)

    def with_adapter(self) -> Iterator[Line]:
        """The lines in which both sides have the adapter, or ours alone where vLLM does not take it."""
        with tempfile.TemporaryDirectory() as folder:
            adapter, theirs, note = Path(folder) / "adapter", f"{THEIRS}, the same adapter", ""
            self._ours.wait(self._ours.engine.persist(VERSION, adapter))
            try:
                vllm = VllmProcess(self._python, self._setting, adapter)
            except VllmError as refusal:
                theirs, note = THEIRS_WITHOUT, f"vLLM does not take it: {str(refusal).splitlines()[-1]}"
                vllm = VllmProcess(self._python, self._setting)
            with closing(vllm):
                for size in ADAPTER_SIZES:
                    yield self._line(vllm, size, VERSION, f"{size.work}, {OURS_WITH}", theirs, note=note)

    def _line(
        self,
        vllm: VllmProcess,
        size: Size,
        version: str | None,
        work: str,
        baseline: str,
        aim: float = 1.5,
        note: str = "",
    ) -> Line:
        self._ours.sample(self._prompts(size), version, size.samples, 4)
        vllm.sample(self._prompts(size)[:1], size.samples, 4)
        comparison = in_turns(
            lambda: self._ours.sample(self._prompts(size), version, size.samples, size.tokens),
            lambda: vllm.sample(self._prompts(size), size.samples, size.tokens),
            self._setting.turns,
            warm_up=0,
        )
        tokens = size.prompts * size.samples * size.tokens
        return comparison.line(work, baseline, 1.0, aim, tokens, note)

    def _prompts(self, size: Size) -> Sequence[np.ndarray]:
        """New ones at each call, so that none is in a cache."""
        return questions(size.prompts, size.length, seed=next(self._seeds))

    def close(self) -> None:
        self._ours.close()
