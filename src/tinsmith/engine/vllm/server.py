"""vLLM's own server as a child process: found, started, watched, started again when it ends.

It listens on a free port of 127.0.0.1 and ends with this process, however that ends. Its log is a file of its own; the
last lines of it are told when it does not start. What it is asked, and which adapters it holds, is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from tinsmith.engine.base import ModelCard
from tinsmith.engine.config import VllmConfig
from tinsmith.errors import ConfigError, EngineDied, EngineError, TinsmithError

log = logging.getLogger(__name__)

BASE = "base"
"""What requests call the base model without an adapter."""
LOCAL = Path(".venv-vllm/bin/python")
"""Where `make vllm` puts it."""
RESIDENT = 32
"""Adapter versions that vLLM keeps in the machine's memory, beside those of its present step."""
INSTALL = (
    "In a checkout: make vllm. Elsewhere: python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm "
    "(docs/guides/vllm.md; on a CPU it is another package), then --vllm-python .venv-vllm/bin/python."
)
LOG_LINES = 25
POLL_S = 0.25
NOTICE_S = 1.0
START_S = 1800.0
END_S = 4.0
RETRY_CAP_S = 30.0

_DYING_WITH_US = (
    "import ctypes, os, signal, sys, time\n"
    "vllm = os.getpid()\n"
    "if os.fork() == 0:\n"
    "    while os.getppid() == vllm: time.sleep(0.5)\n"
    "    os.killpg(0, signal.SIGKILL)\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Asks the kernel for a SIGTERM when the parent dies (PR_SET_PDEATHSIG), then becomes what the arguments say. What that
starts may outlive it: a guard ends its whole group when it is gone."""


def find_python(config: VllmConfig) -> Path:
    """The interpreter that has vLLM. Raises ConfigError, saying how to install it, if there is none."""
    command = shutil.which("vllm")
    beside = [Path(command).resolve().parent / "python"] if command else []
    candidates = [config.python.expanduser()] if config.python is not None else [LOCAL, *beside]
    python = next((one for one in candidates if one.is_file() and os.access(one, os.X_OK)), None)
    if python is None:
        looked = ", ".join(map(str, candidates)) if config.python else f"{LOCAL} or a `vllm` on PATH"
        raise ConfigError(f"--sampler vllm finds no vLLM: there is no {looked}.", INSTALL)
    asked = "import importlib.util as found; raise SystemExit(found.find_spec('vllm') is None)"
    if subprocess.run([python, "-c", asked], capture_output=True, check=False).returncode:
        raise ConfigError(f"--sampler vllm: {python} has no vLLM.", INSTALL)
    return python.absolute()  # not resolved: a venv's python is a link, and the venv is where the link is


def command_of(python: Path, config: VllmConfig, card: ModelCard, port: int) -> list[str]:
    """Loads the model from where its tokenizer is: folders hold both, and the hub's cache is shared."""
    head = ["--hf-overrides", '{"head_dtype": "float32"}'] if card.dtype == "bfloat16" else []
    slots = config.adapters + (card.device == "cpu")  # there one adapter stands for none
    return [
        *(str(python), "-c", _DYING_WITH_US, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", card.tokenizer, "--served-model-name", BASE, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", card.dtype, "--max-model-len", str(card.context_length), *head),
        *("--generation-config", "vllm"),  # no sampling parameters out of the model's folder
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--enable-lora", "--max-lora-rank", str(config.rank), "--max-loras", str(slots)),
        *("--max-cpu-loras", str(max(RESIDENT, slots))),
        *("--gpu-memory-utilization", str(config.memory)),
        *("--disable-uvicorn-access-log",),
        *config.args,
    ]


def environment_of(config: VllmConfig, card: ModelCard, threads: int) -> dict[str, str]:
    """What is set outside wins, but for the devices and threads that our own settings name."""
    ours = {"OMP_WAIT_POLICY": "passive", "VLLM_NO_USAGE_STATS": "1"}
    named = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if card.device == "cpu":
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default it takes whole cores and leaves one of them idle
        if threads:
            named["OMP_NUM_THREADS"] = str(threads)
    if config.devices:
        named["CUDA_VISIBLE_DEVICES"] = config.devices
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # its venv is its own
    return ours | kept | named


class VllmServer:
    """The child. `url` and `starts` belong to the present one; `up` is set while it answers."""

    def __init__(self, config: VllmConfig, card: ModelCard, threads: int, folder: Path) -> None:
        self._config, self._card, self._threads = config, card, threads
        self._log = folder / "vllm.log"
        self._python: Path | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.url = ""
        self.starts = 0
        """How often it came up; what an earlier one was told is not known to the present one."""
        self.up = asyncio.Event()

    async def start(self) -> None:
        """Until it answers. Raises ConfigError where there is no vLLM, EngineError when it ends instead."""
        self._python = await asyncio.to_thread(find_python, self._config)
        await self._start(self._python)
        self._watch = asyncio.create_task(self._keep(self._python))

    @property
    def pid(self) -> int:
        """The child's, 0 while there is none."""
        return self._child.pid if self._child is not None else 0

    async def hung_up(self) -> EngineDied:
        """What to tell a request whose connection broke; if vLLM ended, that is noticed before the next one comes."""
        if self._child is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._child.wait(), NOTICE_S)
                self.up.clear()
        return EngineDied("vLLM ended before it had answered.", "It is being started again; submit once more.")

    async def close(self) -> None:
        """End it and all that it started."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        self.up.clear()
        await self._end()

    async def _start(self, python: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = command_of(python, self._config, self._card, port)
        with self._log.open("ab") as out:
            self._child = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment_of(self._config, self._card, self._threads),
            )
        log.info("Starting vLLM for %s (process %d); its log is %s", self._card.source, self._child.pid, self._log)
        self.url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(START_S):
                await self._answers(self._child)
        except (TinsmithError, TimeoutError, asyncio.CancelledError) as error:
            await self._end()
            if isinstance(error, TimeoutError):
                raise EngineError(f"vLLM did not answer within {START_S:.0f} s.{self._tail()}") from error
            raise
        self.starts += 1
        self.up.set()
        log.info("vLLM for %s answers on %s", self._card.source, self.url)

    async def _answers(self, child: asyncio.subprocess.Process) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=5, trust_env=False) as client:
            while True:
                if child.returncode is not None:
                    raise EngineError(
                        f"vLLM for {self._card.source} ended while it started (exit {child.returncode}).{self._tail()}",
                        "If it lacks memory, change vllm.memory, vllm.adapters or vllm.rank (docs/guides/vllm.md).",
                    )
                with suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == 200:
                        return
                await asyncio.sleep(POLL_S)

    async def _keep(self, python: Path) -> None:
        """Started again as often as it ends, later and later while it does not come up."""
        while True:
            assert self._child is not None
            code = await self._child.wait()
            self.up.clear()
            log.warning("vLLM for %s ended (exit %d); starting it again.%s", self._card.source, code, self._tail(5))
            wait = 1.0
            while not self.up.is_set():
                await self._end()
                try:
                    await self._start(python)
                except (TinsmithError, OSError):
                    log.exception("vLLM for %s does not start; next try in %.0f s.", self._card.source, wait)
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, RETRY_CAP_S)

    async def _end(self) -> None:
        """Its whole process group: what it started may outlive it."""
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            if child.returncode is None:
                child.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), END_S)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()

    def _tail(self, lines: int = LOG_LINES) -> str:
        told: Sequence[str] = []
        with suppress(OSError):
            told = self._log.read_text(errors="replace").splitlines()[-lines:]
        return "\n" + "\n".join(told) if told else ""
