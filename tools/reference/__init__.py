"""The generated parts of the documentation: settings, commands, losses, routes, the Python API, and measurements.

A page holds blocks between two marks, `<!-- generated: NAME -->` and `<!-- end of NAME -->`. `BLOCKS` maps each NAME to
the function that writes the text of the block. `python -m tools.reference` (or `make docs`) rewrites all blocks of all
pages under docs/; `tests/docs/test_reference.py` fails when a block is stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tools.reference import api, architectures, commands, dialects, http, losses, metrics, results, settings

DOCS = Path(__file__).parents[2] / "docs"

BLOCKS: dict[str, Callable[[], str]] = {
    "run-file": settings.run_file,
    **settings.run_file_sections(),
    "algorithm-presets": settings.presets,
    "algorithm-settings": settings.algorithm,
    "serve-settings": settings.serve,
    "commands": commands.page,
    "server-losses": losses.table,
    "architectures": architectures.table,
    "run-metrics-trinity": metrics.trinity_names,
    "diagnosis-bounds": metrics.diagnosis_bounds,
    "trinity-keys": dialects.trinity,
    "minds-keys": dialects.minds,
    "other-names": dialects.other_names,
    "rllm-keys": dialects.rllm_tinker,
    "rllm-unified-keys": dialects.rllm_unified,
    "http-routes": http.routes,
    "http-bodies": http.bodies,
    "python-api": api.page,
    **{
        f"measured-{name}": partial(results.measured, name)
        for name in ("faults", "power-cuts", "load", "requests", "soak")
    },
}

_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def pages() -> Iterator[Path]:
    """Pages with at least one generated block."""
    return (page for page in sorted(DOCS.rglob("*.md")) if "<!-- generated: " in page.read_text())


def regenerated(page: str) -> str:
    """The text of a page with each block rewritten from the sources of today."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match['name']]().strip()}\n\n{match[3]}", page)
