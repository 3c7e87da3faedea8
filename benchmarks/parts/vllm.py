"""The 64 samples again, against vLLM on the same cores; vLLM samples without an adapter, ours with one.

vLLM lives in an environment of its own: what `make vllm` makes, or what TINSMITH_VLLM_PYTHON names. It runs in a
process that is stopped while ours works (its worker looks for work without pause: a ninth of a core), and ours waits
for it. It gets all requests at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.comparison import Line, Setting, in_turns
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts.sampling import RANK, SAMPLES, TOKENS
from benchmarks.workloads import grpo, questions

PLACES = (Path(".venv-vllm/bin/python"),)
PROGRAM = Path(__file__).parents[1] / "vllm_baseline.py"
WORK = f"the same 64 samples of {TOKENS} tokens"
BASELINE = "vLLM on the same cores, no adapter"


def measure(setting: Setting) -> list[Line]:
    """One line; without an environment that has vLLM it says so."""
    named = os.environ.get("TINSMITH_VLLM_PYTHON")
    interpreters = [place for place in ((Path(named),) if named else PLACES) if place.is_file()]
    if not interpreters:
        why = "not measured: no environment with vLLM (make vllm, or TINSMITH_VLLM_PYTHON)"
        return [Line(work=WORK, baseline=BASELINE, unit="x", least=1.0, aim=2.0, values=[], note=why)]
    ours, seeds = EngineDriver(setting), count(1)
    small = grpo(groups=1, group=2)
    ours.create("bench", RANK)
    ours.run(small.as_pass("bench"))
    ours.step("bench")
    ours.capture("bench", "version")
    with _vllm(interpreters[0].absolute(), setting) as sample:
        ours.sample(questions(), "version", SAMPLES, 4)
        sample(0, 4)
        comparison = in_turns(
            lambda: ours.sample(questions(seed=next(seeds)), "version", SAMPLES, TOKENS),
            lambda: sample(next(seeds), TOKENS),
            setting.turns,
            warm_up=0,
        )
    ours.close()
    return [comparison.line(WORK, BASELINE, 1.0, 2.0, 8 * SAMPLES * TOKENS)]


@contextmanager
def _vllm(python: Path, setting: Setting) -> Iterator[Callable[[int, int], None]]:
    """A function that samples (seed, tokens of each sample). It raises RuntimeError with vLLM's log if vLLM ends."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
        "OMP_NUM_THREADS": str(setting.threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default it leaves one of the cores idle
    }
    command = [str(python), str(PROGRAM), str(setting.folder), setting.dtype]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
            bufsize=1,
            process_group=0,  # its engine is a process of its own, and outlives it where it is terminated
        )
        try:
            _answer(process, "ready")
            os.killpg(process.pid, signal.SIGSTOP)
            yield partial(_ask, process)
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{error}; it wrote:\n{log.read()[-3000:]}") from error
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def _ask(process: subprocess.Popen[str], seed: int, tokens: int) -> None:
    prompts = [prompt.tolist() for prompt in questions(seed=seed)]
    assert process.stdin is not None
    os.killpg(process.pid, signal.SIGCONT)
    process.stdin.write(json.dumps({"prompts": prompts, "samples": SAMPLES, "tokens": tokens, "seed": seed}) + "\n")
    _answer(process, f"done {len(prompts) * SAMPLES * tokens}")
    os.killpg(process.pid, signal.SIGSTOP)


def _answer(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    if (line := process.stdout.readline().strip()) != expected:
        raise RuntimeError(f"vLLM answered {line!r} where {expected!r} was expected")
