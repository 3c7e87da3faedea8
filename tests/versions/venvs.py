"""Venvs with an old version of a package, which also see the packages of the venv that runs the tests."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

from tests import certificates
from tinsmith.engine.config import cache_folder


def python_with(package: str, version: str, *options: str) -> Path:
    """The interpreter of a venv with this version, created in the cache folder if missing; `options` of pip."""
    folder = cache_folder() / package / version
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    # Written each time, as another venv may run the tests. Its packages come last; its own .pth files are read, such as
    # that of an editable installation.
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
    if not (folder / "ready").exists():
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *options]
        subprocess.run([*install, f"{package}=={version}"], env=certificates.SYSTEM, check=True)
        (folder / "ready").touch()
    return python
