"""Terminal summary: supported methods of the Tinker API, and rejected ones with the reason.

Loaded by tests/conftest.py, because under pytest-xdist the printing process collects no tests and gets the
outcomes from its workers.
"""

from __future__ import annotations

from typing import Any

import pytest

OUTCOMES = pytest.StashKey[dict[str, str]]()
"""Reason of refusal by method, empty if it is supported."""
_OUTCOMES_KEY = "tinker_api"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "workeroutput" in vars(session.config):  # only in a worker of xdist
        session.config.workeroutput[_OUTCOMES_KEY] = session.config.stash[OUTCOMES]  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = vars(node).get("workeroutput", {})  # a crashed worker has none
    node.config.stash[OUTCOMES].update(output.get(_OUTCOMES_KEY, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = config.stash[OUTCOMES]
    if not outcomes:
        return
    refused = {method: why for method, why in outcomes.items() if why}
    terminalreporter.section("Tinker API: supported and refused")
    for method in sorted(outcomes.keys() - refused.keys()):
        terminalreporter.write_line(f"supported  {method}")
    for method, why in sorted(refused.items()):
        terminalreporter.write_line(f"refused    {method}: {why}")
    terminalreporter.write_line(f"{len(outcomes) - len(refused)} of {len(outcomes)} supported")
