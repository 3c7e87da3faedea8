"""What a machine of a cluster is: cores, memory, GPUs, and the versions of the software on it. Imports no torch."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

PACKAGES = ("tinsmith", "torch", "transformers", "ray")
"""Packages whose versions must be equal on all machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine."""

    name: str
    """Unique in its cluster."""
    host: str
    """Address for the other machines."""
    cpus: int
    memory_bytes: int
    gpus: tuple[str, ...]
    """Kind of each GPU."""
    versions: Mapping[str, str]
    """Version of Python and of each of PACKAGES that is installed."""
    gpu_bytes: int = 0
    """Memory of its smallest GPU; 0 if unknown."""


def this_machine(name: str = "", host: str = "127.0.0.1") -> Machine:
    """The machine of this process. `name` is by default the host's name."""
    return Machine(
        name=name or socket.gethostname(),
        host=host,
        cpus=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=tuple(_nvidia("name")),
        versions=versions(),
        gpu_bytes=min((_mebibytes(size) for size in _nvidia("memory.total")), default=0) << 20,
    )


def versions() -> dict[str, str]:
    """Versions of Python (without the patch level) and of PACKAGES."""
    installed = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def visible_gpus() -> list[str]:
    """GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [device for device in listed.split(",") if device.strip() not in ("", "-1")]
    return _nvidia("index")


def _mebibytes(size: str) -> int:
    """Of "143771 MiB"; 0 where the driver does not know."""
    number = size.split()[0] if size else ""
    return int(number) if number.isdigit() else 0


def _nvidia(field: str) -> list[str]:
    """One property of each GPU; empty without nvidia-smi."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    done = subprocess.run(
        [command, f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
