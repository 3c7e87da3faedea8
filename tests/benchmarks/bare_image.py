"""Python as on an image with PyTorch, transformers and PEFT: packages that only Tinsmith needs cannot be imported.

Allowed are the requirements of the image's packages, read from the metadata of those installed here, what the image has
for its own tests, and the wheels that the check brings.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

IMAGE = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "numpy",
    "pillow",
    "hypothesis",
    "pytest",
    "pytest-timeout",
    "psutil",
)
REQUIREMENTS = Path(__file__).parents[2] / "benchmarks" / "gpu_check" / "requirements.txt"


def block() -> None:
    """Make the other packages of this Python unavailable."""
    allowed = _with_requirements([*IMAGE, *REQUIREMENTS.read_text().split("\n")])
    blocked = {
        module
        for module, distributions in packages_distributions().items()
        if not allowed & {_normal(name) for name in distributions} and _normal("tinsmith") not in distributions
    }

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if fullname.partition(".")[0] in blocked:
                return None
            return super().find_spec(fullname, path, target)

    sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]


def _with_requirements(names: list[str]) -> set[str]:
    """The distributions and all that they require, without extras."""
    allowed: set[str] = set()
    waiting = [_normal(name) for name in names if name and not name.startswith("#")]
    while waiting:
        if (name := waiting.pop()) in allowed:
            continue
        allowed.add(name)
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        waiting += [_normal(re.match(r"[\w.-]+", need)[0]) for need in needs if "extra ==" not in need]  # type: ignore[index]
    return allowed


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
