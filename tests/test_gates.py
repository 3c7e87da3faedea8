"""What style asks of every file, as far as a program can see it; `make check` runs it after ruff, pyright and walls."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = sorted((ROOT / "src").rglob("*.py"))
MODULES = SOURCE + [
    file for room in ("tests", "benchmarks", "examples") for file in sorted((ROOT / room).rglob("*.py"))
]
TEXTS = MODULES + [
    file
    for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".ci/*", "docs/**/*", "examples/**/*", "benchmarks/**/*")
    for file in sorted(ROOT.glob(pattern))
    if file.is_file() and file.suffix not in (".py", ".pyc", ".png", ".svg")
]

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
FOREIGN_WORDS = ("episode", "experience", "explorer", "manager", "handler", "helper", "util")
PLURAL = re.compile("|".join(f"{word}s?" for word in FOREIGN_WORDS))
# Put together from pieces, so that this file does not hold them.
UNWANTED = (
    "pypi" + ".org",
    "python" + "hosted",
    "/opt/" + "pypi",
    "/work/" + "shared",
    "../" + "shared",
    "." + "library/",
)


def each(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda file: str(file.relative_to(ROOT)))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@each(MODULES)
def test_a_module_says_what_it_is(file: Path) -> None:
    if file.name == "__init__.py" and not file.read_text().strip():
        return  # an empty one says enough
    assert ast.get_docstring(tree(file))


@each(MODULES)
def test_files_and_functions_stay_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= LINES_OF_A_FILE
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(file)}  # type: ignore[operator]
    assert {name: lines for name, lines in long.items() if lines > LINES_OF_A_FUNCTION} == {}


@each(SOURCE)
def test_http_errors_are_made_in_one_place(file: Path) -> None:
    assert file.name == "app.py" or "HTTPException" not in file.read_text()


@each(SOURCE)
def test_nobody_sniffs_for_attributes(file: Path) -> None:
    calls = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    sniffing = [c for c in calls if c.func.id == "hasattr" or (c.func.id == "getattr" and len(c.args) == 3)]  # type: ignore[union-attr]
    assert [call.lineno for call in sniffing] == []


@each([file for file in SOURCE if "dialects" not in file.parts])
def test_words_are_ours(file: Path) -> None:
    found = {word.lower() for name in _own_names(file) for word in _parts(name) if PLURAL.fullmatch(word.lower())}
    prose = " ".join(_prose(file))
    found |= {word.lower() for word in re.findall(r"[A-Za-z]+", prose) if PLURAL.fullmatch(word.lower())}
    assert found == set()


@each(TEXTS)
def test_no_file_names_a_registry_or_what_lies_outside(file: Path) -> None:
    text = file.read_text()
    assert [name for name in UNWANTED if name in text] == []


def test_every_setting_is_read_somewhere() -> None:
    read = {
        node.attr
        for file in SOURCE
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = {f"{kind}.{name}" for kind, names in _settings().items() for name in names if name not in read}
    assert unread == set()


def test_the_license_is_apache() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_versions_are_exact() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert len(lines) > 50
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)] == []


def _settings() -> dict[str, list[str]]:
    """Every class of settings and its fields."""
    found = {}
    kinds = {"Settings"}
    classes = [node for file in SOURCE for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # classes of settings may stand on each other
        for node in classes:
            if any(isinstance(base, ast.Name) and base.id in kinds for base in node.bases):
                kinds.add(node.name)
                found[node.name] = [
                    line.target.id
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                ]
    return found


def _own_names(file: Path) -> Iterator[str]:
    """Names that this file gives: its own, of classes, functions, parameters and variables."""
    yield file.stem
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _parts(name: str) -> list[str]:
    """`RewardHelper`, `reward_helper` -> their words."""
    return re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)


def _prose(file: Path) -> Iterator[str]:
    """Comments and docstrings."""
    with file.open("rb") as lines:
        yield from (token.string for token in tokenize.tokenize(lines.readline) if token.type == tokenize.COMMENT)
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
