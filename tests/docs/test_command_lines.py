"""Command lines on the pages, in the examples and in the deployment files use commands and options that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_pages import ROOT
from tinsmith.cli import app

COMMAND = re.compile(r"(?:^|[\s`])tinsmith ([a-z]+ [^`\n]*)")
FILES = sorted(
    file
    for folder, kinds in ((".", "README.md"), ("docs", "**/*.md"), ("examples", "**/*"), ("deploy", "*"))
    for file in (ROOT / folder).glob(kinds)
    if file.suffix in (".md", ".sh", ".yaml", ".service") and "reference" not in file.parts
)


def unknown_options(line: str) -> Iterator[str]:
    """The long options of a command line that its command does not have."""
    try:
        words = shlex.split(line.replace("…", ""), comments=True)
    except ValueError:  # a quotation that ends on the next line
        words = line.split()
    command = app
    while words and not words[0].startswith("-") and words[0] in command:
        command = command[words.pop(0)]
    if command is app or command.default_command is None:
        return
    options = {name for argument in command.assemble_argument_collection() for name in argument.names}
    for word in words:
        if word in ("&", "&&", "|", ";", "--"):
            return
        if word.startswith("--") and word.partition("=")[0] not in options | {"--help", "--debug"}:
            yield word


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_options_on_pages_exist(file: Path) -> None:
    text = file.read_text().replace("\\\n", " ")
    unknown = [f"{word} in: tinsmith {line}" for line in COMMAND.findall(text) for word in unknown_options(line)]
    assert unknown == []


def test_unknown_option_is_found() -> None:
    assert list(unknown_options("serve --trainers 2 --no-such-option x=1")) == ["--no-such-option"]
    assert list(unknown_options("keys create --no-such-option")) == ["--no-such-option"]
