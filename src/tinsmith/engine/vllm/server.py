"""vLLM's server as a child process: found, started and watched.

It listens on a free port of 127.0.0.1 and ends with this process, however this process ends. Its log is a file, whose
last lines are part of the error if it does not start. Requests are in `client`, loaded adapters in `adapters`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx

from tinsmith.engine.base import ModelCard
from tinsmith.engine.memory_plan import VLLM_ALONE_SHARE
from tinsmith.engine.process_end import ProcessEnd, process_end
from tinsmith.engine.processes.heartbeat import Wait, first_overdue, followers_seconds
from tinsmith.engine.processes.slots import CHILD_ENVIRONMENT, WAITING_THREADS
from tinsmith.engine.processes.supervisor import start_until_up
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import ConfigError, EngineDied, EngineError, PortTakenError, TinsmithError, Unsupported

log = logging.getLogger(__name__)

LOCAL = Path(".venv-vllm/bin/python")
"""Where `make vllm` installs it."""
CPU_SHARE = 0.3
"""Of the memory of a machine without a GPU, with `vllm.memory: auto`."""
MAX_RESIDENT = 32
"""Adapter versions that vLLM keeps in host memory, besides those of its current step."""
INSTALL = (
    "In a checkout: make vllm. Elsewhere: python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm "
    "(docs/serve/vllm.md; on a CPU it is another package), then --vllm-python .venv-vllm/bin/python."
)
LOG_LINES = 25
ERROR = re.compile(r"^(?:\([^)]+\) )?(?:ERROR .*\] )?([\w.]*(?:Error|Exception): .+)$", re.MULTILINE)
"""The last line of a traceback in the log of vLLM, whose processes put their name and a time before it."""
POLL_INTERVAL_S = 0.25
EXIT_NOTICE_S = 1.0
HEALTH_INTERVAL_S = 5.0
HEALTH_TIMEOUT_S = 5.0
"""Time for an answer of /health."""
STEP_TOKENS = 2048
"""Fewest tokens in a step of vLLM on a CPU, which is its default."""
BUSY_SHARE = 0.1
"""Share of one core that vLLM's processes use on a CPU while they compute, on a crowded machine too. A worker that
waits for vLLM's engine uses 0.03 of a slow core."""
START_TIMEOUT_S = 1800.0
STEP_LIMIT_S = 24 * 3600
"""vLLM's own limit for a step on a CPU, where its default (300 s) ends it at a long prompt: `_check_health` finds the
steps that compute nothing."""
END_TIMEOUT_S = 4.0
EXPANDABLE = "expandable_segments:True"
"""Setting of PyTorch's allocator that vLLM's sleep mode excludes."""

GUARD = Path(__file__).with_name("guard.py")
"""Program that executes its arguments with the same Python, until this process ends."""


def find_python(config: VllmConfig) -> Path:
    """The interpreter of an environment with vLLM. Raises ConfigError, with how to install it, if there is none."""
    command = shutil.which("vllm")
    next_to_command = [Path(command).resolve().parent / "python"] if command else []
    candidates = [config.python.expanduser()] if config.python is not None else [LOCAL, *next_to_command]
    python = next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)
    if python is None:
        places = ", ".join(map(str, candidates)) if config.python else f"{LOCAL} or a `vllm` on PATH"
        raise ConfigError(f"--sampler vllm finds no vLLM: there is no {places}.", INSTALL)
    program = "import importlib.util as util; raise SystemExit(util.find_spec('vllm') is None)"
    if subprocess.run([python, "-c", program], capture_output=True, check=False).returncode:
        raise ConfigError(f"--sampler vllm: {python} has no vLLM.", INSTALL)
    return python.absolute()  # not resolved: a venv's python is a link, and the venv is where the link is


def check_model(card: ModelCard) -> None:
    """Raises Unsupported for a mixture of experts on a CPU: vLLM (0.32) computes adapters beside experts with Triton
    only, and its engine ends at the first sample."""
    modules = card.adapted_modules.get("mlp", ())
    if card.device == "cpu" and (card.router is not None or any(name.startswith("experts.") for name in modules)):
        raise Unsupported(
            f"vLLM on a CPU samples no adapters of a mixture of experts ({card.arch}).",
            "Use the built-in sampler (sampler: torch), or a GPU.",
        )


def command_of(python: Path, config: VllmConfig, card: ModelCard, port: int, name: str) -> list[str]:
    """The command that starts vLLM, with `name` for the base model. It loads the model from where the tokenizer is:
    folders hold both, and the hub's cache is shared."""
    head = ["--hf-overrides", '{"head_dtype": "float32"}'] if card.dtype == "bfloat16" else []
    context = card.vllm_context or card.original_context or card.context_length
    # vLLM (0.32) on a CPU ends at a sample with a seed whose prompt it computes in parts.
    whole = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, STEP_TOKENS))]
    slots = config.adapters + (card.device == "cpu")  # on a CPU one adapter stands for the base model
    return [
        *(str(python), str(GUARD), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", card.tokenizer, "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", card.dtype, "--max-model-len", str(context), *head),
        *(whole if card.device == "cpu" else ()),
        *("--generation-config", "vllm"),  # no sampling parameters out of the model's folder
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--enable-lora", "--max-lora-rank", str(config.rank), "--max-loras", str(slots)),
        *("--max-cpu-loras", str(max(MAX_RESIDENT, slots))),
        *_memory_options(config, card),
        *(("--enable-sleep-mode",) if sleeps(config, card) else ()),
        *("--disable-uvicorn-access-log",),
        *config.args,
    ]


def sleeps(config: VllmConfig, card: ModelCard) -> bool:
    """Whether vLLM gives its memory back while the trainer computes: as the plan of their GPU says or, without a plan,
    if it is set."""
    if card.device == "cpu":
        return False
    plan = card.memory.vllm if card.memory is not None else None
    return config.sleep is True if plan is None else plan.asleep is not None


def _memory_options(config: VllmConfig, card: ModelCard) -> tuple[str, ...]:
    """Options for vLLM's share of a GPU, or of a machine without one. Where the plan divides the GPU, the size of the
    cache is given: vLLM would make it smaller or larger with what it measures beside a trainer that is at work."""
    plan = card.memory.vllm if card.memory is not None else None
    if plan is not None and config.memory == "auto":
        share = math.ceil(plan.share * 1000) / 1000
        return ("--gpu-memory-utilization", f"{share}", "--kv-cache-memory-bytes", str(plan.cache))
    automatic = CPU_SHARE if card.device == "cpu" else VLLM_ALONE_SHARE
    return ("--gpu-memory-utilization", str(automatic if config.memory == "auto" else config.memory))


def environment_of(config: VllmConfig, card: ModelCard, threads: int) -> dict[str, str]:
    """Environment of vLLM: variables that are already set win, except for devices and threads set in our settings."""
    defaults = {
        **WAITING_THREADS,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": f"{START_TIMEOUT_S:.0f}",  # vLLM's default gives up after 600 s
    }
    overrides = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if card.device == "cpu":
        defaults["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(STEP_LIMIT_S)
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # vLLM's default binds to whole cores and leaves one idle
        if threads:
            overrides["OMP_NUM_THREADS"] = str(threads)
    if config.devices:
        overrides["CUDA_VISIBLE_DEVICES"] = config.devices
    # vLLM has its own packages, and its own settings of PyTorch; its only client has no key.
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "VLLM_API_KEY") and (key, value) not in CHILD_ENVIRONMENT.items()
    }
    if sleeps(config, card):
        overrides["VLLM_SERVER_DEV_MODE"] = "1"  # /sleep and /wake_up are paths of this mode
        for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if key in inherited:
                others = [part for part in inherited[key].split(",") if part.replace(" ", "") != EXPANDABLE]
                overrides[key] = ",".join(others)
    return defaults | inherited | overrides


def _is_taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _metrics(text: str) -> list[str]:
    """Lines of /metrics that only a step of vLLM's engine changes; none, if it keeps no statistics."""
    return [line for line in text.splitlines() if line.startswith("vllm:")]


class VllmServer:
    """The child process, from its start to its end."""

    def __init__(
        self, config: VllmConfig, card: ModelCard, threads: int, folder: Path, *, timeout_s: float = 120.0
    ) -> None:
        """`timeout_s`: time without an answer of /health or of a call inside `answered_in_time`, or without progress of
        the requests that run, after which vLLM is killed."""
        self._config, self._card, self._threads = config, card, threads
        self._timeout_s = timeout_s
        self._log = folder / "vllm.log"
        self._log_start = 0
        """Where the log of the last start begins."""
        self._child: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._health = Wait("/health has not answered with status 200", timeout_s)
        self._progress = Wait("requests run, and vLLM's engine makes no step,", timeout_s)
        self._calls = set[Wait]()
        self._requests = 0
        """Samples that run now."""
        self._stall: ProcessEnd | None = None
        """Why it was killed."""
        self.name = ""
        """Name of the base model without an adapter in requests. No other vLLM has it, so that none answers them."""
        self.url = ""
        self.ended = asyncio.Event()
        self.end: ProcessEnd | None = None
        """Why it ended, once it has."""
        self.on_end: Callable[[ProcessEnd], None] = lambda _: None
        """Called before requests fail because vLLM has ended after its start."""
        self.answers = 0
        """Answers of /health so far."""
        self.is_asleep = False
        """Whether vLLM has given its memory back."""

    async def start(self) -> None:
        """Start vLLM and wait until it responds.

        Raises ConfigError if it is not installed, Unsupported for a model that it does not sample, EngineError if it
        ends.
        """
        check_model(self._card)
        python = await asyncio.to_thread(find_python, self._config)
        name = f"vLLM for {self._card.source}"
        child = await start_until_up(name, partial(self._start, python), errors=(PortTakenError,))
        self._watch = asyncio.create_task(self._note_end(child))

    @property
    def pid(self) -> int:
        """Process id of vLLM, 0 while there is none."""
        return self._child.pid if self._child is not None else 0

    async def sleep(self) -> None:
        """Let vLLM give the memory of the GPU back and pause its requests, until `wake_up`. It is killed if it does
        not."""
        self.is_asleep = True
        await self._switch("/sleep?level=1&mode=keep")

    async def wake_up(self) -> None:
        """Let a vLLM that sleeps go on with its requests. It is killed if it does not."""
        if self.is_asleep:
            await self._switch("/wake_up")
            self.is_asleep = False

    async def _switch(self, path: str) -> None:
        """Post to a path; a vLLM that does not answer with status 200 is killed."""
        child = self._child
        fault = f"{path} broke the connection"
        with suppress(httpx.TransportError), self.answered_in_time(path):
            async with httpx.AsyncClient(base_url=self.url, timeout=None, trust_env=False) as client:
                response = await client.post(path)
            if response.status_code == 200:
                return
            fault = f"{path} answered with status {response.status_code}: {response.text[:500]}"
        if child is not None:
            self._stall = self._stall or ProcessEnd(fault, from_outside=True)  # no request is the cause
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()

    async def connection_lost(self) -> EngineDied:
        """Error for a request whose connection broke."""
        code = None
        if self._child is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_NOTICE_S):
                    code = await self._child.wait()
        end = self.end or self._stall or process_end(code, memory_ran_out=True)
        return EngineDied(
            f"vLLM ended before the end of the response ({end.text}).",
            "It is being restarted: try again later.",
            from_outside=end.from_outside,
        )

    async def request_failed(self, message: str) -> TinsmithError:
        """Error for a request that vLLM answered with an error.

        A vLLM whose engine has ended answers every request so, and /health too, until it exits: it is killed.
        """
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
                is_dead = (await client.get("/health")).status_code != 200
        except httpx.TransportError as error:
            is_dead = not isinstance(error, httpx.TimeoutException)
        if not is_dead:
            return EngineError(message, "See vLLM's log.")
        if self._child is not None:
            self._stall = ProcessEnd("its engine has ended", from_outside=False)
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        return await self.connection_lost()

    @contextmanager
    def answered_in_time(self, call: str) -> Iterator[None]:
        """Wait for the answer of a call inside the block. Without one for `timeout_s`, vLLM is killed, which breaks
        the connection."""
        wait = Wait(f"{call} has not answered", self._timeout_s)
        self._calls.add(wait)
        try:
            yield
        finally:
            self._calls.discard(wait)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """A sample runs inside the block: vLLM is killed if it makes no progress for `timeout_s`.

        Counted here, since vLLM's own count stays at zero if its engine hangs before it has taken the first request.
        """
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def close(self) -> None:
        """End vLLM and all processes that it started."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self._end()

    async def _start(self, python: Path) -> asyncio.subprocess.Process:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.name = f"base-{secrets.token_hex(8)}"
        command = command_of(python, self._config, self._card, port, self.name)
        with self._log.open("ab") as out:
            self._log_start = out.tell()
            self._child = child = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,  # stays open until this process ends: the guard watches it
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment_of(self._config, self._card, self._threads),
            )
        log.info("Starting vLLM for %s (process %d); its log is %s", self._card.source, child.pid, self._log)
        self.url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._wait_until_up(child)
                await self._check_sleep_mode(python)
        except (TinsmithError, TimeoutError, asyncio.CancelledError) as error:
            await self._end()
            if isinstance(error, EngineError) and _is_taken(port):
                raise PortTakenError(error.message, "Wait: vLLM is started on another port.") from error
            if isinstance(error, TimeoutError):
                raise EngineError(f"vLLM did not respond within {START_TIMEOUT_S:.0f} s.{self._log_tail()}") from error
            raise
        log.info("vLLM for %s is up on %s", self._card.source, self.url)
        return child

    async def _wait_until_up(self, child: asyncio.subprocess.Process) -> None:
        """Raises EngineError if vLLM ends, PortTakenError if another program answers on its port."""
        async with httpx.AsyncClient(base_url=self.url, timeout=5, trust_env=False) as client:
            while True:
                if child.returncode is not None:
                    code, source = child.returncode, self._card.source
                    raise EngineError(
                        f"vLLM for {source} ended during startup (exit {code}){self._first_error()}.{self._log_tail()}",
                        "If it lacks memory, change vllm.memory, vllm.adapters or vllm.rank (docs/serve/vllm.md).",
                    )
                with suppress(httpx.HTTPError):
                    if (await client.get("/health")).status_code == 200:
                        await self._check_name(client)
                        return
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _check_name(self, client: httpx.AsyncClient) -> None:
        """Raises PortTakenError if what answers is not this vLLM, which alone serves a model of its name."""
        response = await client.get("/v1/models")
        served: list[str] = []
        with suppress(ValueError, KeyError, TypeError):
            served = [model["id"] for model in response.json()["data"]]
        if self.name not in served:
            raise PortTakenError(
                f"Another program answers on the port of vLLM for {self._card.source} ({self.url}).",
                "Wait: vLLM is started on another port.",
            )

    async def _check_sleep_mode(self, python: Path) -> None:
        """Raises ConfigError if vLLM is to sleep, and would abort its requests then, as older versions do."""
        if not sleeps(self._config, self._card):
            return
        async with httpx.AsyncClient(base_url=self.url, timeout=self._timeout_s, trust_env=False) as client:
            paths = (await client.get("/openapi.json")).json()["paths"]
        options = paths.get("/sleep", {}).get("post", {}).get("parameters", [])
        if not any(option["name"] == "mode" for option in options):
            raise ConfigError(
                f"The vLLM of {python} has no sleep mode that keeps its requests (POST /sleep?mode=keep).",
                "Install a newer vLLM, or set vllm.sleep=false.",
            )

    async def _note_end(self, child: asyncio.subprocess.Process) -> None:
        """Set `ended` once vLLM has ended, which is killed if it is stalled."""
        watch = asyncio.create_task(self._kill_when_stalled(child))
        try:
            code = await child.wait()
        finally:
            watch.cancel()
        await self._end()
        self.end = self._stall or process_end(code, memory_ran_out=True)
        log.warning("vLLM for %s ended (%s).%s", self._card.source, self.end.text, self._log_tail(5))
        self.on_end(self.end)
        self.ended.set()

    async def _kill_when_stalled(self, child: asyncio.subprocess.Process) -> None:
        """Kill vLLM once /health or a call has had no answer, or running requests no progress, for `timeout_s`."""
        tick_s = min(HEALTH_INTERVAL_S, self._timeout_s / 8)
        self._health.seconds = self._progress.seconds = 0.0
        checks = asyncio.create_task(self._check_health(child, tick_s))
        try:
            wait = await first_overdue(lambda: (self._health, self._progress, *self._calls), tick_s)
        finally:
            checks.cancel()
        self._stall = ProcessEnd(f"stalled: {wait.fault} for {self._timeout_s:g} s", from_outside=False)
        log.error("vLLM for %s is killed: %s.", self._card.source, self._stall.text)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    async def _check_health(self, child: asyncio.subprocess.Process, interval_s: float) -> None:
        """Forever: note each answer of /health that is not an error, and each sign of progress.

        /health of a vLLM whose GPU hangs answers 200, but then its metrics stand still. On a CPU a single step may take
        longer than the limit; its processes, which wait without spinning, are then busy.
        """
        metrics: list[str] = []
        busy_s = 0.0
        async with httpx.AsyncClient(base_url=self.url, timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
            while True:
                with suppress(httpx.HTTPError):
                    if (await client.get("/health")).status_code == 200:
                        self.answers += 1
                        self._health.seconds = 0.0
                    before, metrics = metrics, _metrics((await client.get("/metrics")).text)
                    spent_s, busy_s = busy_s, followers_seconds(child.pid) if self._card.device == "cpu" else 0.0
                    is_busy = busy_s - spent_s > BUSY_SHARE * interval_s
                    if not self._requests or self.is_asleep or not metrics or metrics != before or is_busy:
                        self._progress.seconds = 0.0
                await asyncio.sleep(interval_s)

    async def _end(self) -> None:
        """End the whole process group: children of vLLM may outlive it."""
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            if child.returncode is None:
                child.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await child.wait()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
        if child.stdin is not None:
            child.stdin.close()

    def _first_error(self) -> str:
        """The first error in the log of this start. The last one is that of vLLM's server, whose traceback only says
        that another of vLLM's processes ended."""
        with suppress(OSError), self._log.open("rb") as lines:
            lines.seek(self._log_start)
            error = ERROR.search(lines.read().decode(errors="replace"))
            return f": {error[1].rstrip(' .')}" if error else ""
        return ""

    def _log_tail(self, count: int = LOG_LINES) -> str:
        lines: Sequence[str] = []
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").splitlines()[-count:]
        return "\n" + "\n".join(lines) if lines else ""
