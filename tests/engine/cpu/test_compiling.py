"""Functions are compiled by other processes while a model is read, and those for gradients while it answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.cpu import compiling
from tinsmith.engine.cpu.compiling import Compilation, compile_part, is_compiled

pytest.importorskip("numba")

from tinsmith.engine.cpu import primitives


class Compiler:
    """In place of a process: compiles its first part, and the others after `goes_on`."""

    def __init__(self, arguments: tuple[str, ...], folder: Path) -> None:
        self.kind, *self.parts = arguments
        self.goes_on, self.returncode = threading.Event(), 0
        self._folder = folder

    @property
    def stdout(self) -> Iterator[bytes]:
        for number, part in enumerate(self.parts):
            if number:
                assert self.goes_on.wait(60)
            self._folder.mkdir(exist_ok=True)
            (self._folder / f"{part}-{self.kind}").touch()
            yield f"{part}\n".encode()

    def kill(self) -> None:
        self.returncode = -9
        self.goes_on.set()

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Failed(Compiler):
    """Ends without a part."""

    @property
    def stdout(self) -> Iterator[bytes]:
        self.returncode = 1
        yield from ()


class Endless(Compiler):
    """Compiles nothing until it is killed."""

    @property
    def stdout(self) -> Iterator[bytes]:
        assert self.goes_on.wait(60)
        yield from ()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Numba's cache folder, as this process sees it."""
    monkeypatch.setattr(primitives.config, "CACHE_DIR", str(tmp_path / "numba"))
    return tmp_path / "numba"


def replace_processes(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: type[Compiler]) -> list[Compiler]:
    """The processes that are started from now on, in place of which there are compilers of a kind."""
    started = list[Compiler]()

    def start(module: str, *arguments: str, **_: Any) -> Compiler:
        assert module == "tinsmith.engine.cpu.compiling"
        started.append(kind(arguments, folder))
        return started[-1]

    monkeypatch.setattr(compiling, "start_child", start)
    return started


@pytest.mark.parametrize(("kind", "parts"), [("bfloat16", ["attention"]), ("float32", ["attention", "projections"])])
def test_each_part_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, parts: list[str]) -> None:
    compilers, compilation = replace_processes(monkeypatch, folder, Compiler), Compilation()
    compilation.start_ahead(kind, panels=len(parts) > 1)
    compilation.wait()
    assert compilation.compiles_gradients
    for compiler in compilers:
        compiler.goes_on.set()
    compilation.wait(gradients=True)
    assert not compilation.compiles_gradients
    again = Compilation()
    again.start_ahead(kind, panels=len(parts) > 1)
    again.wait()
    assert not again.compiles_gradients
    commands = [[compiler.kind, *compiler.parts] for compiler in compilers]
    assert commands == [[kind, part, f"{part}-gradients"] for part in parts]


@pytest.mark.parametrize("fault", [Failed, Endless])
def test_failure_is_left_to_the_first_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, own_log: pytest.LogCaptureFixture, fault: type[Compiler]
) -> None:
    monkeypatch.setattr(compiling, "COMPILE_S", 0.01)
    replace_processes(monkeypatch, folder, fault)
    compilation = Compilation()
    with own_log.at_level("INFO"):
        compilation.start_ahead("float32", panels=False)
        compilation.wait()
        compilation.wait(gradients=True)
    assert not compilation.compiles_gradients
    assert not folder.exists()
    assert "not compiled ahead: the process ended with" in own_log.text


def test_process_that_does_not_start_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(compiling, "start_child", start)
    compilation = Compilation()
    compilation.start_ahead("float32", panels=True)
    compilation.wait()
    assert not compilation.compiles_gradients
    assert not folder.exists()


@pytest.mark.usefixtures("folder")
def test_another_process_fills_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    compilation = Compilation()
    compilation.start_ahead("float32", panels=False)
    compilation.wait()
    assert is_compiled("attention", "float32")
    compilation.wait(gradients=True)
    assert is_compiled("attention-gradients", "float32")
    files = {file.name.split("-")[0] for file in (tmp_path / "numba").rglob("*.nbc")}
    assert {name for name in files if name.startswith("packed.")} == {
        "packed.forward_function.locals.attend", "packed.backward_function.locals.attend_backward"
    }  # fmt: skip


@pytest.mark.parametrize("part", ["attention", "layers", "decoding-2-16"])
def test_parts_that_are_compiled_are_read(folder: Path, part: str) -> None:
    assert not is_compiled(part, "float32")
    compile_part(part, "float32")
    assert is_compiled(part, "float32")
    assert [file.name for file in folder.glob("*-float32")] == [f"{part}-float32"]
