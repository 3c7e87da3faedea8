"""The installed package verifiers, and environments of it by the path of their folder.

Nothing here imports verifiers at the top: it takes seconds, and is an extra (`pip install 'tinsmith[verifiers]'`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tinsmith.errors import ConfigError

EXTRA = "verifiers"
SUPPORTED = "0.4."
"""Beginning of the versions of verifiers with the API that is used here, verifiers.v1."""


def require_verifiers() -> None:
    """Raises ConfigError unless verifiers is installed, in a version with the API verifiers.v1."""
    installed = installed_version()
    install = "pip install 'tinsmith[verifiers]'"
    if installed is None:
        raise ConfigError("type: verifiers needs the package verifiers, which is not installed.", f"{install}.")
    if not installed.startswith(SUPPORTED):
        raise ConfigError(
            f"type: verifiers needs verifiers {SUPPORTED}x; version {installed} is installed.",
            f"Install it with {install}, or use type: verifiers_legacy for environments of verifiers 0.1 to 0.3.",
        )


def installed_version() -> str | None:
    """Version of the installed package verifiers; None if there is none."""
    try:
        return version(EXTRA)
    except PackageNotFoundError:
        return None


def importable_name(identifier: str) -> str:
    """The name under which verifiers imports an environment: of a package, a folder or a .py file.

    The folder of a path becomes importable in this process and in tool servers that it starts. Raises ConfigError.
    """
    path = Path(identifier).expanduser()
    looks_like_path = identifier.startswith((".", "/", "~")) or identifier.endswith(".py")
    if not path.exists():
        if looks_like_path:
            raise ConfigError(
                f"id: there is no folder {path}.", "Check the path; it is relative to the working directory."
            )
        return identifier
    if not looks_like_path and not path.is_dir():
        return identifier
    module = _module_of(path.resolve())
    name = module.stem
    if name != name.replace("-", "_").lower():
        raise ConfigError(f"id: {module} cannot be imported by verifiers.", "Use lower case and no dashes in its name.")
    other = importlib.util.find_spec(name)
    if other is not None and not (other.origin and Path(other.origin).resolve().is_relative_to(module)):
        raise ConfigError(f"id: {module} has the name of another module, {name}.", "Rename it.")
    _make_importable(str(module.parent))
    return name


def last_part(identifier: str) -> str:
    """The name of an environment without its folders."""
    return identifier.rstrip("/").rsplit("/", 1)[-1].removesuffix(".py")


def _module_of(path: Path) -> Path:
    """The module at a path: itself, or the only package or module of a project folder."""
    if path.is_file() or (path / "__init__.py").is_file():
        return path
    name = path.name.replace("-", "_").lower()
    candidates = [path / name, path / "src" / name, path / f"{name}.py"]
    candidates = [each for each in candidates if (each / "__init__.py").is_file() or each.is_file()]
    candidates = candidates or [file.parent for file in sorted(path.glob("*/__init__.py"))]
    if len(candidates) != 1:
        raise ConfigError(f"id: {path} holds {len(candidates)} packages.", "Set the path of the package itself.")
    return candidates[0]


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), folder])
