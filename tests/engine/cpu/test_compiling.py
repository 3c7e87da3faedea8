"""Functions are compiled by other processes while a model is read."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.cpu.compiling import compile_ahead, compile_part, is_compiled

pytest.importorskip("numba")

from tinsmith.engine.cpu import primitives


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Numba's cache folder, as this process sees it."""
    monkeypatch.setattr(primitives.config, "CACHE_DIR", str(tmp_path / "numba"))
    return tmp_path / "numba"


@pytest.mark.parametrize(("kind", "parts"), [("bfloat16", ["attention"]), ("float32", ["attention", "projections"])])
def test_each_part_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, parts: list[str]) -> None:
    commands = list[list[str]]()

    def run(command: list[str], **_: Any) -> None:
        commands.append(command[1:])
        folder.mkdir(exist_ok=True)
        (folder / "-".join(command[-2:])).touch()

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        compile_ahead(kind, panels=len(parts) > 1).join()
    module = "tinsmith.engine.cpu.compiling"
    assert sorted(commands) == [["-m", module, part, kind] for part in parts]


@pytest.mark.parametrize(
    "error",
    [OSError("no memory"), subprocess.TimeoutExpired("compile", 1), subprocess.CalledProcessError(1, "compile")],
)
def test_failure_is_left_to_the_first_call(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    compile_ahead("float32", panels=False).join()
    assert not folder.exists()


@pytest.mark.usefixtures("folder")
def test_another_process_fills_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    compile_ahead("float32", panels=False).join()
    files = {file.name.split("-")[0] for file in (tmp_path / "numba").rglob("*.nbc")}
    assert {name for name in files if name.startswith("packed.")} == {
        "packed.forward_function.locals.attend", "packed.backward_function.locals.attend_backward"
    }  # fmt: skip
    assert (tmp_path / "numba" / "attention-float32").exists()


@pytest.mark.parametrize("part", ["attention", "layers", "decoding-2-16"])
def test_parts_that_are_compiled_are_read(folder: Path, part: str) -> None:
    assert not is_compiled(part, "float32")
    compile_part(part, "float32")
    assert is_compiled(part, "float32")
    assert [file.name for file in folder.glob("*-float32")] == [f"{part}-float32"]
