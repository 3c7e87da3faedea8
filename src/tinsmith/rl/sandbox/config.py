"""Settings of the sandbox in which code of a model runs."""

from __future__ import annotations

import shutil
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tinsmith.settings import Needs, Settings


class SandboxConfig(Settings):
    """Limits of code that a model wrote, and how it is confined.

    `process` starts it as a process of this machine: without the environment, files, processes and network of the run
    where the kernel grants namespaces, else with the limits alone (docs/train/rewards.md). `docker` and `podman` start
    a container without network for each program.
    """

    kind: Literal["process", "docker", "podman"] = "process"
    """What confines the code."""
    image: Annotated[str, Needs("kind", ("docker", "podman"))] = "python:3.12-slim"
    """Image of the containers, with `python` in its PATH. It is pulled once, before the first program."""
    strict: Annotated[bool, Needs("kind", ("process",))] = False
    """Refuse to run code where the kernel grants no namespaces, in place of running it with the limits alone."""
    timeout: float = Field(default=5.0, gt=0, le=3600)
    """Time limit of one program, in seconds from its first line."""
    memory_mb: int = Field(default=1024, ge=64)
    """Memory of each process, in MiB, at most 4096; of a container, of all its processes."""
    processes: int = Field(default=16, ge=1)
    """Number of processes and threads."""
    output_kb: int = Field(default=256, ge=1)
    """Size of what a program may print, in KiB; a program that prints more is ended."""
    disk_mb: int = Field(default=64, ge=1)
    """Size of the files that a program may write, in MiB; without namespaces, of each file."""

    @model_validator(mode="after")
    def _check_program(self) -> SandboxConfig:
        if self.kind == "process" and self.memory_mb > 4096:
            raise ValueError("memory_mb is at most 4096 with kind: process; use a container")
        if self.kind != "process" and shutil.which(self.kind) is None:
            raise ValueError(f"there is no program {self.kind} on this machine; install it, or set kind: process")
        return self
