"""The last line of a run that updated nothing says so, and its exit code too."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.rl.scripted_run import settings
from tinsmith import cli
from tinsmith.rl.diagnosis import Diagnosis

NOTHING = Diagnosis(steps=8, updates=0, missing={"all replies wrong": 8})


def test_run_without_an_update_exits_with_its_own_code():
    output = io.StringIO()
    with pytest.raises(SystemExit) as ended:
        cli._end(settings(Path("unused")), NOTHING, Console(file=output, width=200))
    assert ended.value.code == cli.TRAINED_NOTHING == 3
    assert output.getvalue() == (
        "small has learned nothing: none of 8 steps updated the weights: all replies wrong in 8\n"
    )


def test_dry_run_and_a_run_that_learned_exit_as_usual():
    output = io.StringIO()
    cli._end(settings(Path("unused"), service={"engine": "fake"}), NOTHING, Console(file=output))
    assert "learned nothing" in output.getvalue()
    cli._end(settings(Path("unused")), Diagnosis(steps=8, updates=8), Console(file=io.StringIO()))
    cli._end(settings(Path("unused")), Diagnosis(), Console(file=io.StringIO()))
