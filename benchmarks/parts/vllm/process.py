"""vLLM as `program.py` runs it, in a process that is stopped between two requests.

vLLM lives in an environment of its own. Its worker looks for work without pause, which takes a ninth of a core, so
between two requests the process and its engine are stopped by a signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.comparison import Setting
from tinsmith.engine.processes.slots import WAITING_THREADS

PROGRAM = Path(__file__).with_name("program.py")
LOG_END = 3000


class VllmError(RuntimeError):
    """vLLM has ended, or has answered something else than it should; with the end of its log."""


class VllmProcess:
    """A running vLLM with the setting's model, dtype and threads, and an adapter in PEFT's format or none. Its threads
    wait as they do by default.

    The interpreter has vLLM. All methods raise VllmError.
    """

    def __init__(self, python: Path, setting: Setting, adapter: Path | None = None) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in WAITING_THREADS}
        environment = {
            **inherited,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
            "OMP_NUM_THREADS": str(setting.threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default it leaves one of the cores idle
        }
        command = [str(python), str(PROGRAM), str(setting.folder), setting.dtype, *([str(adapter)] if adapter else [])]
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
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
            self._expect("ready")
        except VllmError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def sample(self, prompts: Sequence[np.ndarray], samples: int, tokens: int) -> None:
        """`samples` continuations of exactly `tokens` tokens for each prompt, from all prompts at once."""
        request = {"prompts": [prompt.tolist() for prompt in prompts], "samples": samples, "tokens": tokens}
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._expect(f"done {len(prompts) * samples * tokens}")
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it and its engine."""
        self._signal(signal.SIGKILL)
        self._process.wait(timeout=30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _expect(self, answer: str) -> None:
        assert self._process.stdout is not None
        if (line := self._process.stdout.readline().strip()) != answer:
            log = self._log.read_text(errors="replace")[-LOG_END:]
            raise VllmError(f"vLLM answered {line!r} where {answer!r} was expected; it wrote:\n{log}")
