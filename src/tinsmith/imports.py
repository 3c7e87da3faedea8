"""Python objects by a text that names them, `package.module:name` or `path/to/file.py:name`; and packages that may be
missing: an installation for clients has no PyTorch, which the extra `serve` brings, and other extras bring others.

Names of installed packages' parts are in `entry_points`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from tinsmith.errors import ConfigError


def import_object(path: str) -> Any:
    """The object at `package.module:name` or `file.py:name`; the name may have dots, as Class.method.

    A file's path is relative to the working directory. Raises ImportError if there is no such object, and what the
    module itself raises.
    """
    module_name, colon, name = path.rpartition(":")
    if not (colon and module_name and name):
        raise ImportError("it is neither module:name nor file.py:name")
    is_file = module_name.endswith(".py")
    value: Any = import_file(Path(module_name).expanduser()) if is_file else import_module(module_name)
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise ImportError(f"{module_name} has no '{name}'") from None
    return value


def import_file(file: Path) -> ModuleType:
    """The module of a Python file, under the file's own name, made once in a process.

    Raises ImportError if there is no such file or another module has its name, and what the file itself raises.
    """
    name = file.stem
    if (loaded := sys.modules.get(name)) is not None:
        if loaded.__file__ is not None and Path(loaded.__file__).resolve() == file.resolve():
            return loaded
        raise ImportError(f"the file has the name of another module, {name}; rename it")
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"there is no Python file {file}")
    module = module_from_spec(spec)
    sys.modules[name] = module  # as dataclasses and pickle need it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def has_torch() -> bool:
    """Whether PyTorch is installed. Does not import it."""
    return find_spec("torch") is not None


def require_torch(feature: str, instead: str = "") -> None:
    """Raise ConfigError if PyTorch, which `feature` needs, is not installed. `instead`: what works without it."""
    if not has_torch():
        raise _missing(feature, "PyTorch", f"pip install 'tinsmith[serve]'. {instead}".rstrip())


def require(package: str, extra: str, feature: str) -> None:
    """Raise ConfigError if a package, which `feature` needs and `extra` brings, is not installed."""
    if find_spec(package) is None:
        raise _missing(feature, package, f"pip install 'tinsmith[{extra}]'")


def _missing(feature: str, package: str, fix: str) -> ConfigError:
    return ConfigError(f"{feature} needs {package}, which is not installed.", fix)
