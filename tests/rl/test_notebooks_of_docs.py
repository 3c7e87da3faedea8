"""The notebooks of docs/notebooks run cell by cell, as they stand. In a kernel: tests/rl/test_notebook.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
RESULTS = {"first-run": "4 steps in", "own-loss": "soft_clip [", "compare-runs": "eval/variety/different"}

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forked_programs")]


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and key of a service that all notebooks share."""
    models, data = (f"{MODEL}={tiny_llama}",), tmp_path_factory.mktemp("served")
    with embedded(ServeConfig(models=models, engine="fake", custom_losses=True, data=data)) as address:
        yield address


def test_three_notebooks_are_tested_and_have_no_output() -> None:
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == RESULTS.keys()
    cells = [cell for file in FOLDER.glob("*.ipynb") for cell in json.loads(file.read_text())["cells"]]
    assert [cell for cell in cells if cell.get("outputs")] == []


@pytest.mark.parametrize("name", RESULTS)
def test_notebook_runs(
    name: str,
    tmp_path: Path,
    served: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", served[0])
    monkeypatch.setenv("TINKER_API_KEY", served[1])
    space: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}.ipynb", "exec"), space)
    assert RESULTS[name] in capsys.readouterr().out
