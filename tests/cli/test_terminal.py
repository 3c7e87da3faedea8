"""Consoles of commands and runs."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from tinsmith.terminal import new_console


def test_console_prints_ids_and_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    new_console().print("session:train:0 :smile:")
    assert capsys.readouterr().out == "session:train:0 :smile:\n"


def test_consoles_are_made_in_one_place() -> None:
    package = Path(str(files("tinsmith")))
    makers = {file.name for file in package.rglob("*.py") if re.search(r"\bConsole\(", file.read_text())}
    assert makers == {"terminal.py"}
