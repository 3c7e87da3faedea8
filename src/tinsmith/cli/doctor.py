"""`tinsmith doctor`: what this machine has for a service of these settings, and what to do about what it lacks.

It looks and changes nothing: a file beside the data and a port are tried and given back.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinsmith.errors import TinsmithError
from tinsmith.service.config import ServeConfig

GIB = 2**30
SDK = (0, 38)
"""The SDK that the service is written against."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "warn", "fail"]
    place: str
    what: str
    cure: str = ""


def examine(config: ServeConfig) -> Iterable[Finding]:
    """Every check, one after another; a check that itself breaks is a failure of its own."""
    for check in (
        _python, _torch, _sdk, _memory, _disk, _folder, _lock, _database, _port, _models, _sampler, _open_files,
    ):  # fmt: skip
        yield _guarded(check, config)


def _guarded(check: Callable[[ServeConfig], Finding], config: ServeConfig) -> Finding:
    place = check.__name__.strip("_").replace("_", " ")
    try:
        return check(config)
    except TinsmithError as error:
        return Finding("fail", place, error.message, error.hint)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are still to be made
        return Finding("fail", place, f"{type(error).__name__}: {error}".splitlines()[0], "See what it says.")


def _python(_config: ServeConfig) -> Finding:
    return Finding("ok", "python", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def _torch(config: ServeConfig) -> Finding:
    import torch

    if config.device == "cuda" and not torch.cuda.is_available():
        return Finding("fail", "torch", f"{torch.__version__} finds no GPU", "Install a CUDA build, or --device cpu.")
    if torch.cuda.is_available() and config.device != "cpu":
        return Finding("ok", "torch", f"{torch.__version__} on {torch.cuda.get_device_name()}")
    cores = os.cpu_count() or 1
    threads = config.threads or torch.get_num_threads()
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    what = f"{torch.__version__} on the CPU, {threads} threads of {cores}, bf16 is {'fast' if fast else 'slow'} here"
    if threads > cores:
        return Finding("warn", "torch", what, f"Give at most --threads {cores}.")
    if config.dtype == "bfloat16" and not fast:
        return Finding("warn", "torch", what, "Use --dtype auto, which is float32 here.")
    return Finding("ok", "torch", what)


def _sdk(_config: ServeConfig) -> Finding:
    version = importlib.metadata.version("tinker")
    if tuple(int(part) for part in version.split(".")[:2]) != SDK:
        return Finding("warn", "sdk", f"tinker {version}", "Written against 0.38: pip install 'tinker>=0.38,<0.39'.")
    return Finding("ok", "sdk", f"tinker {version}")


def _memory(_config: ServeConfig) -> Finding:
    from tinsmith.engine.model.memory import free_bytes

    free = free_bytes()
    what = f"{free / GIB:.1f} GiB free"
    if free < 2 * GIB:
        return Finding("warn", "memory", what, "A model of 135M parameters takes 2 GiB: end other programs.")
    return Finding("ok", "memory", what)


def _disk(config: ServeConfig) -> Finding:
    free = shutil.disk_usage(_standing(config.data)).free
    what = f"{free / GIB:.1f} GiB free for {config.data}"
    if free < GIB:
        return Finding("fail", "disk", what, "Checkpoints need room: delete some, or give another --data.")
    return Finding("warn" if free < 10 * GIB else "ok", "disk", what, "Checkpoints grow." if free < 10 * GIB else "")


def _folder(config: ServeConfig) -> Finding:
    standing = _standing(config.data)
    try:
        with tempfile.NamedTemporaryFile(dir=standing):
            pass
    except OSError as error:
        return Finding("fail", "folder", f"{standing} cannot be written: {error.strerror}", "Give another --data.")
    return Finding("ok", "folder", str(config.data) if standing == config.data else f"{config.data} will be made")


def _lock(config: ServeConfig) -> Finding:
    file = config.data / "lock"
    if not file.exists():
        return Finding("ok", "lock", "no server uses the folder")
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return Finding("warn", "lock", f"A server uses {config.data}", "A second one needs its own --data.")
    return Finding("ok", "lock", "no server uses the folder")


def _database(config: ServeConfig) -> Finding:
    from sqlalchemy import inspect, text

    from tinsmith.service.storage.database import display_url, open_engine, sync_engine_of, translate_connection_errors

    if config.database is None and not (config.data / "tinsmith.db").exists():
        return Finding("ok", "database", "SQLite in the data folder, to be made")
    engine = open_engine(config.data, config.database)
    direct = sync_engine_of(engine)
    try:
        with translate_connection_errors(engine), direct.connect() as db:
            known = inspect(db).has_table("alembic_version")
            version = db.execute(text("select version_num from alembic_version")).scalar() if known else "none"
    finally:
        direct.dispose()
    return Finding("ok", "database", f"{display_url(engine)}, schema {version}")


def _port(config: ServeConfig) -> Finding:
    try:
        socket.create_server((config.host, config.port)).close()
    except OSError as error:
        if _serves(config):
            return Finding("ok", "port", f"a Tinsmith server answers on {config.host}:{config.port}")
        return Finding("fail", "port", f"{config.host}:{config.port}: {error.strerror}", "Give another --port.")
    return Finding("ok", "port", f"{config.host}:{config.port} is free")


def _models(config: ServeConfig) -> Finding:
    from tinsmith.cli.catalog import cached

    here = {one.name for one in cached()}
    missing = [source for source in config.sources() if source not in here and not Path(source).expanduser().exists()]
    if missing and config.engine == "torch":
        cure = f"tinsmith models pull {missing[0]}"
        return Finding("warn", "models", f"not on this machine yet: {', '.join(missing)}", cure)
    return Finding("ok", "models", f"{', '.join(config.sources())}")


def _sampler(config: ServeConfig) -> Finding:
    if config.sampler == "torch":
        return Finding("ok", "sampler", "the engine itself")
    from tinsmith.engine.vllm.server import find_python

    return Finding("ok", "sampler", f"the vLLM of {find_python(config.vllm)}")


def _open_files(_config: ServeConfig) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        return Finding("warn", "open files", f"at most {hard}", "Hundreds of polls are open at once: ulimit -Hn 65536.")
    return Finding("ok", "open files", f"{soft}" if soft == hard else f"{soft}, raised at the start")


def _standing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


def _serves(config: ServeConfig) -> bool:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    try:
        with urllib.request.urlopen(f"http://{host}:{config.port}/api/v1/healthz", timeout=3) as answer:
            return "status" in json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code == 503
    except (OSError, ValueError):
        return False
