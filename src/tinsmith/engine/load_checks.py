"""Results of the checks at load, kept in the cache folder: a model that has passed them is not computed again.

The checks compare this engine's computations with transformers' own (`model.self_check`, `lora.layers`,
`sampling.decode_check`). Their results follow from the model's config, the settings, the programs and the processor, so
they are kept under a digest of all of these, and any difference has the checks run again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.atomic import atomic_write
from tinsmith.engine.config import EngineConfig, cache_folder
from tinsmith.engine.cpu.compiling import Compilation

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "numpy", "numba")
ENVIRONMENT = ("ATEN_", "DNNL_", "MKL_", "NUMBA_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH")
"""Prefixes of variables that choose kernels."""
MAX_FILES = 256
"""Files that are kept; the oldest are deleted first."""

R = TypeVar("R")


class LoadChecks:
    """Results of the checks of one model, by the name of the check."""

    def __init__(self, file: Path | None = None, compilation: Compilation | None = None) -> None:
        """`file` has the results of earlier loads; without one, every check runs at load, and no result is kept.
        `compilation` is that of the functions for gradients."""
        self._file, self._compilation = file, compilation
        self._waiting: dict[str, Callable[[], bool]] = {}
        self._results: dict[str, Any] = {}
        self._is_changed = False
        if file is not None:
            with suppress(OSError, TypeError, ValueError):  # none yet, or not whole
                self._results = dict(json.loads(file.read_bytes()))

    def result(self, name: str, check: Callable[[], R]) -> R:
        """What a check returns, or has returned at an earlier load. One that raises is not kept."""
        if name not in self._results:
            self._results[name] = check()
            self._is_changed = True
        return self._results[name]

    def gradients_result(self, name: str, check: Callable[[], bool]) -> bool:
        """As `result`, but True for a check that waits until its functions are compiled (`finish`)."""
        compilation = self._compilation
        if name not in self._results and compilation is not None and compilation.compiles_gradients:
            if self._file is not None:
                self._waiting[name] = check
                return True
            compilation.wait(gradients=True)  # or this process would compile them too
        return self.result(name, check)

    @property
    def compilation(self) -> Compilation | None:
        """What `finish` has to wait for; None if no check waits."""
        return self._compilation if self._waiting else None

    def finish(self) -> None:
        """Run the checks that wait. Raises SystemExit if one fails: the weights are laid out for functions that do not
        work, and the process that the service starts in place of this one uses none of them."""
        waiting, self._waiting = self._waiting, {}
        works = [self.result(name, check) for name, check in waiting.items()]
        self.keep()
        if not all(works):
            raise SystemExit("The compiled gradients do not work here: the engine starts again without them.")

    def keep(self) -> None:
        """Keep the results for later loads, those that can be written as JSON. Called when the model is loaded."""
        if self._file is None or not self._is_changed:
            return
        texts = {}
        for name, result in self._results.items():
            with suppress(TypeError):
                texts[name] = json.dumps(result)
        content = "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items()) + "}"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._file, content.encode())
            files = sorted(self._file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for old in files[:-MAX_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.info("The results of the checks at load are not kept, so the next start repeats them: %s", error)


def checks_of(config: EngineConfig, folder: Path, compilation: Compilation | None = None) -> LoadChecks:
    """The checks of a model with these settings, whose files are in a folder; `compilation` is that of LoadChecks."""
    if not config.keeps_checks:
        return LoadChecks(None, compilation)
    digest = hashlib.blake2b(digest_size=16)
    for part in (*_model(config, folder), *_programs(), *_machine()):
        digest.update(f"{len(part)}:".encode() + part)
    return LoadChecks(cache_folder() / "checks" / f"{digest.hexdigest()}.json", compilation)


def _model(config: EngineConfig, folder: Path) -> Iterator[bytes]:
    """The settings, and the model's config and files. Both sides of a check read the same weights: a size will do."""
    yield config.model_dump_json(exclude={"source"}).encode()
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        yield f"{file.name} {file.stat().st_size}".encode()
        if file.suffix in (".json", ".py") and file.stat().st_size < 1 << 20:
            yield file.read_bytes()


def _programs() -> Iterator[bytes]:
    """Versions of the packages, and this engine's own code."""
    yield sys.version.encode()
    for package in PACKAGES:
        with suppress(PackageNotFoundError):  # Numba may be missing
            yield f"{package} {version(package)}".encode()
    here = Path(__file__).parent
    for file in sorted(here.rglob("*")):
        if file.is_file() and file.suffix != ".pyc":
            yield str(file.relative_to(here)).encode()
            yield file.read_bytes()


def _machine() -> Iterator[bytes]:
    """The processor, and the variables that choose its kernels."""
    yield platform.platform().encode()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        yield b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))
    for name, value in sorted(os.environ.items()):
        if name.startswith(ENVIRONMENT):
            yield f"{name}={value}".encode()
