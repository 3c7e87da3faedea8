"""Run one script with each SDK from 0.23 on; docs/reference/compatibility.md holds the results.

Each version has a venv with the SDK only; its dependencies come from the venv that runs the tests. Venvs are created
once, in the cache folder. `python -m tests.versions.test_versions` rewrites the page.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.versions.venvs import python_with
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

pytestmark = pytest.mark.slow

VERSIONS = (
    *("0.23.0", "0.24.1", "0.25.0", "0.26.0", "0.26.2", "0.27.2", "0.28.1"),
    *("0.29.1", "0.30.4", "0.32.0", "0.34.0", "0.36.0", "0.38.0"),
)
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
BEGIN, END = "<!-- versions: begin -->", "<!-- versions: end -->"


def outcomes(version: str, url: str, key: str) -> dict[str, str]:
    """Outcome by step: "ok" or an error."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TINKER_"))}
    command = [
        str(python_with("tinker", version, "--no-deps", "--ignore-installed")),
        str(Path(__file__).with_name("script.py")),
        url,
        key,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=clean)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def table(outcomes_by_version: dict[str, dict[str, str]]) -> str:
    """Rows are steps, columns are SDKs."""
    steps = list(dict.fromkeys(step for item in outcomes_by_version.values() for step in item))
    lines = [f"| step | {' | '.join(outcomes_by_version)} |", f"|---|{'---|' * len(outcomes_by_version)}"]
    for step in steps:
        cells = [
            "–" if step not in item else "yes" if item[step] == "ok" else "**no**"
            for item in outcomes_by_version.values()
        ]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


@contextmanager
def serving(tiny: Path) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as data:
        config = ServeConfig(models=(f"tiny={tiny}",), engine="fake", data=Path(data))
        with embedded(config) as address:
            yield address


@pytest.fixture(scope="module")
def address(tiny_llama: Path) -> Iterator[tuple[str, str]]:
    with serving(tiny_llama) as made:
        yield made


@pytest.fixture(scope="module")
def outcomes_of(address: tuple[str, str]) -> Callable[[str], dict[str, str]]:
    """The outcomes of a version; the script runs once for both tests."""
    return cache(lambda version: outcomes(version, *address))


@pytest.mark.parametrize("version", VERSIONS)
def test_script_runs_with_each_sdk(version: str, outcomes_of: Callable[[str], dict[str, str]]) -> None:
    assert {step: why for step, why in outcomes_of(version).items() if why != "ok"} == {}


def test_compatibility_page_is_current(outcomes_of: Callable[[str], dict[str, str]]) -> None:
    expected = table({version: outcomes_of(version) for version in VERSIONS})
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() == expected


def main() -> None:
    from tests.models import save_model

    with tempfile.TemporaryDirectory() as folder, serving(save_model("llama", Path(folder))) as (url, key):
        outcomes_by_version = {version: outcomes(version, url, key) for version in VERSIONS}
    before, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(outcomes_by_version)}\n{END}{after.partition(END)[2]}")
    print(json.dumps(outcomes_by_version, indent=1))


if __name__ == "__main__":
    main()
