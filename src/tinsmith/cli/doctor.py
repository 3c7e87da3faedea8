"""The checks of `tinsmith doctor`: whether this machine has everything that a service with these settings needs.

The checks change nothing: a temporary file next to the data folder and the port are released at once.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinsmith.errors import TinsmithError
from tinsmith.imports import has_torch, require_torch
from tinsmith.plurals import counted
from tinsmith.service.config import ServeConfig

GIB = 2**30
SDK = (0, 38)
"""The version of the Tinker SDK that the service supports."""
CUDA_TORCH = (2, 11)
"""The first torch whose compiler reads the precision that the engine sets for products on a GPU."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    level: Literal["ok", "warn", "fail"]
    check: str
    message: str
    fix: str = ""


def run_checks(config: ServeConfig) -> Iterable[Finding]:
    """Run the checks in order. A check that raises an error counts as failed."""
    for check in (
        _python, _torch, _compiler, _sdk, _memory, _disk, _folder, _lock, _database, _port, _models, _plan, _sampler,
        _open_files,
    ):  # fmt: skip
        yield _run_check(check, config)


def _run_check(check: Callable[[ServeConfig], Finding], config: ServeConfig) -> Finding:
    name = check.__name__.strip("_").replace("_", " ")
    try:
        return check(config)
    except TinsmithError as error:
        return Finding("fail", name, error.message, error.hint)
    except Exception as error:  # noqa: BLE001 - the other checks still run
        return Finding("fail", name, f"{type(error).__name__}: {error}".splitlines()[0], "See the message.")


def _python(_config: ServeConfig) -> Finding:
    return Finding("ok", "python", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def _torch(config: ServeConfig) -> Finding:
    if config.engine == "fake" and not has_torch():
        return Finding("ok", "torch", "not installed, and engine=fake needs none")
    require_torch("The engine", "A client of another server needs none.")
    import torch

    from tinsmith.engine.cpu.instructions import cpu_bfloat16

    if config.device == "cuda" and not torch.cuda.is_available():
        return Finding(
            "fail", "torch", f"{torch.__version__} finds no GPU", "Install a CUDA build, or use --device cpu."
        )
    if torch.cuda.is_available() and config.device != "cpu":
        message = f"{torch.__version__} on {torch.cuda.get_device_name()}"
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < CUDA_TORCH:
            return Finding("fail", "torch", message, "GPUs need torch 2.11 or later: pip install --upgrade torch.")
        return Finding("ok", "torch", message)
    cores = os.cpu_count() or 1
    threads = config.threads or torch.get_num_threads()
    speed = cpu_bfloat16()
    size = f"{counted(threads, 'thread')} on {counted(cores, 'core')}"
    note = {"fast": "fast", "slow": "slower than float32", "emulated": "slow"}[speed]
    message = f"{torch.__version__} on the CPU, {size}, bfloat16 is {note}"
    if threads > cores:
        return Finding("warn", "torch", message, f"Use --threads {cores} or fewer.")
    if config.dtype == "bfloat16" and speed != "fast":
        which = "" if speed == "emulated" else " for models that leave room for it"
        return Finding("warn", "torch", message, f"Use --dtype auto, which picks float32 on this CPU{which}.")
    return Finding("ok", "torch", message)


def _compiler(config: ServeConfig) -> Finding:
    """On a GPU, compile a kernel as the engine does and run it."""
    if not has_torch():
        return Finding("ok", "compiler", "not needed without PyTorch")
    import torch

    if not torch.cuda.is_available():
        return Finding("ok", "compiler", "not needed on a CPU")
    try:
        result = torch.compile(lambda values: values.sin() * 2 + 1)(torch.zeros(1000, device="cuda")).sum().item()
    except Exception as error:  # noqa: BLE001 - of a compiler that is missing or broken in any way
        reason = f"a kernel does not compile: {type(error).__name__}: {error}".splitlines()[0]
        return Finding("warn", "compiler", reason, "Attention is slower without: install gcc and torch's own triton.")
    if result != 1000:
        return Finding("fail", "compiler", f"a compiled kernel computes {result} instead of 1000", "Reinstall torch.")
    return Finding("ok", "compiler", f"triton {importlib.metadata.version('triton')} compiles kernels and runs them")


def _sdk(_config: ServeConfig) -> Finding:
    version = importlib.metadata.version("tinker")
    if tuple(int(part) for part in version.split(".")[:2]) != SDK:
        return Finding(
            "warn", "sdk", f"tinker {version}", "The service supports 0.38: pip install 'tinker>=0.38,<0.39'."
        )
    return Finding("ok", "sdk", f"tinker {version}")


def _memory(_config: ServeConfig) -> Finding:
    from tinsmith.engine.model.memory import free_bytes

    free = free_bytes()
    message = f"{free / GIB:.1f} GiB free"
    if free < 2 * GIB:
        return Finding("warn", "memory", message, "A model with 135M parameters needs 2 GiB: close other programs.")
    return Finding("ok", "memory", message)


def _disk(config: ServeConfig) -> Finding:
    free = shutil.disk_usage(_existing(config.data)).free
    message = f"{free / GIB:.1f} GiB free for {config.data}"
    if free < GIB:
        return Finding("fail", "disk", message, "Checkpoints need disk space: delete some, or use another --data.")
    return Finding(
        "warn" if free < 10 * GIB else "ok",
        "disk",
        message,
        "Checkpoints need more over time." if free < 10 * GIB else "",
    )


def _folder(config: ServeConfig) -> Finding:
    existing = _existing(config.data)
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding("fail", "folder", f"{existing} cannot be written: {error.strerror}", "Use another --data.")
    return Finding("ok", "folder", str(config.data) if existing == config.data else f"{config.data} will be created")


def _lock(config: ServeConfig) -> Finding:
    from tinsmith.service.storage.folder_lock import is_locked

    if is_locked(config.data):
        return Finding("warn", "lock", f"a server uses {config.data}", "A second server needs a --data of its own.")
    return Finding("ok", "lock", "no server uses the folder")


def _database(config: ServeConfig) -> Finding:
    from tinsmith.service.storage.database import (
        display_url,
        known_revision,
        open_engine,
        sync_engine_of,
        translate_connection_errors,
    )

    if config.database is None and not (config.data / "tinsmith.db").exists():
        return Finding("ok", "database", "SQLite in the data folder, to be created")
    engine = open_engine(config.data, config.database)
    direct = sync_engine_of(engine)
    try:
        with translate_connection_errors(engine), direct.connect() as db:
            version = known_revision(db) or "none"
    finally:
        direct.dispose()
    return Finding("ok", "database", f"{display_url(engine)}, schema {version}")


def _port(config: ServeConfig) -> Finding:
    try:
        socket.create_server((config.host, config.port)).close()
    except OSError as error:
        if _serves(config):
            return Finding("ok", "port", f"a Tinsmith server listens on {config.host}:{config.port}")
        return Finding("fail", "port", f"{config.host}:{config.port}: {error.strerror}", "Use another --port.")
    return Finding("ok", "port", f"{config.host}:{config.port} is free")


def _models(config: ServeConfig) -> Finding:
    if config.engine == "fake":
        return Finding("ok", "models", f"{', '.join(config.sources())}, without weights")
    require_torch("Loading a base model")
    from tinsmith.cli.catalog import cached
    from tinsmith.engine.config import check_source

    for source in config.sources():
        check_source(source)
    names = {model.name for model in cached()}
    missing = [source for source in config.sources() if source not in names and not Path(source).expanduser().exists()]
    if missing:
        fix = f"tinsmith models pull {missing[0]}"
        return Finding("warn", "models", f"not on this machine yet: {', '.join(missing)}", fix)
    return Finding("ok", "models", ", ".join(config.sources()))


def _plan(config: ServeConfig) -> Finding:
    if config.engine == "fake" or config.device == "cpu":
        return Finding("ok", "plan", "no GPU, no plan of its memory")
    require_torch("A plan of a GPU's memory")
    import torch

    from tinsmith.cli.catalog import cached
    from tinsmith.cli.serve import memory_plans, plan_table
    from tinsmith.engine.model_facts import gpu_here

    if config.engine == "fake" or config.device == "cpu" or not torch.cuda.is_available():
        return Finding("ok", "plan", "no GPU, no plan of its memory")
    names = {model.name for model in cached()}
    if not all(source in names or Path(source).expanduser().exists() for source in config.sources()):
        return Finding("warn", "plan", "none, because models are not on this machine yet", "tinsmith models pull")
    plans = list(memory_plans(config, gpu_here()))
    lines = [line for plan in plans for line in plan_table(plan)]
    return Finding("ok", "plan", "\n                ".join(lines))


def _sampler(config: ServeConfig) -> Finding:
    if config.sampler == "torch":
        return Finding("ok", "sampler", "the built-in engine")
    from tinsmith.engine.vllm.server import find_python

    python = find_python(config.vllm)
    program = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    answer = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        return Finding("fail", "sampler", f"no vLLM in {python}", "Install vLLM there, or set vllm.python.")
    return Finding("ok", "sampler", f"vLLM {answer.stdout.strip()} in {python}")


def _open_files(_config: ServeConfig) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        return Finding(
            "warn", "open files", f"at most {hard}", "Clients keep hundreds of connections open: ulimit -Hn 65536."
        )
    return Finding("ok", "open files", f"{soft}" if soft == hard else f"{soft}, raised at startup")


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _serves(config: ServeConfig) -> bool:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    try:
        with urllib.request.urlopen(f"http://{host}:{config.port}/api/v1/healthz", timeout=3) as response:
            return "status" in json.load(response)
    except urllib.error.HTTPError as error:
        return error.code == 503
    except (OSError, ValueError):
        return False
