"""Tutorials and some other pages run as they stand, but with the fake engine and on a free port.

The fenced blocks of a page become one shell script, in the order of the page:

- `sh` blocks are commands. Variables and background jobs last until the page ends.
- Blocks that begin with a comment `# some/file.ext` are files.
- `text` blocks are output of the commands since the last one: each line must occur, in order; `…` matches any text.

A folder with the name of the model holds the tokenizer of a tiny one, so nothing is downloaded. What the fake engine
writes may have equal rewards; a run that is finished on a page has then learned nothing here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.support.databases import free_port
from tinsmith.cli import TRAINED_NOTHING

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    DOCS / "quickstart.md",
    DOCS / "from" / "rllm.md",
    DOCS / "reference" / "api.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MARK = "@@@ output"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"\{?# ([\w./-]+\.\w+)(?: #\})?\n")
_WRAPPER = """#!/bin/sh
command=$1
shift
case $command in
    serve) exec {python} -m tinsmith serve "$@" engine=fake ;;
    run|debug|check)
        [ -n "$TINKER_BASE_URL" ] || set -- "$@" service.engine=fake
        {python} -m tinsmith $command "$@" || {{ status=$?; [ $status = {nothing} ] || exit $status; }} ;;
    *) exec {python} -m tinsmith $command "$@" ;;
esac
"""


def script_of(blocks: list[tuple[str, str]]) -> str:
    """One bash script; it prints a mark in the place of each block of output."""
    parts = ["set -e", "set -m", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for language, text in blocks:
        if file := _FILE.match(text):
            parts.append(f"mkdir -p $(dirname {file[1]})\ncat > {file[1]} <<'END_OF_FILE'\n{text}END_OF_FILE")
        elif language == "sh":
            parts.append(text)
        elif language == "text":
            parts.append(f"echo; echo '{MARK}'")
    return "\n".join(parts)


def matches(line: str, shown: str) -> bool:
    if "is finished: " in line and "has learned nothing: none of " in shown:
        return True
    return re.match(".*".join(map(re.escape, line.split("…"))), shown) is not None


def assert_shown(expected: str, output: str) -> None:
    """Each expected line begins a line of the output, in order."""
    lines: Iterator[str] = iter(output.splitlines())
    for line in filter(None, expected.splitlines()):
        assert any(matches(line, shown) for shown in lines), f"{line!r} is not in the output:\n{output}"


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: Path, forking_python: str) -> Path:
    (tmp_path / MODEL).parent.mkdir()
    (tmp_path / MODEL).symlink_to(tiny_llama)
    shutil.copytree(DOCS.parent / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    programs = tmp_path / ".bin"
    programs.mkdir()
    for name, text in {"tinsmith": _WRAPPER, "python": '#!/bin/sh\nexec {python} "$@"\n'}.items():
        (programs / name).write_text(text.format(python=forking_python, nothing=TRAINED_NOTHING))
        (programs / name).chmod(0o755)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "TRINITY_"))}
    path = os.pathsep.join([str(folder / ".bin"), str(Path(sys.executable).parent), clean["PATH"]])
    return {
        **clean,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "COLUMNS": "120",
        "TINSMITH_DATASETS": str(folder / "datasets"),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_as_it_stands(page, folder):
    port = free_port()
    blocks = _BLOCK.findall(page.read_text())
    script = script_of(blocks).replace("tinsmith serve", f"tinsmith serve --port {port}").replace(":8000", f":{port}")
    with (folder / ".out").open("w") as out:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            stdout=out,
            stderr=out,
            env=environment(folder),
            timeout=600,
            check=False,
        )
    output = (folder / ".out").read_text()
    assert done.returncode == 0, output
    expected = [text for language, text in blocks if language == "text"]
    for text, shown in zip(expected, output.split(f"{MARK}\n"), strict=False):
        assert_shown(text, shown)
