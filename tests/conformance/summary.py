"""Terminal summary: supported methods of the Tinker API, and rejected ones with the reason.

A plugin of tests/conftest.py: under pytest-xdist the process that prints collects nothing, so it would not find this by
itself, and knows only what the workers hand over.
"""

from __future__ import annotations

from typing import Any

import pytest

OUTCOMES = pytest.StashKey[dict[str, str]]()
"""method -> why it was refused, or nothing."""
_HANDED_OVER = "tinker_api"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "workeroutput" in vars(session.config):  # in a worker of xdist alone
        session.config.workeroutput[_HANDED_OVER] = session.config.stash[OUTCOMES]  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = vars(node).get("workeroutput", {})  # a worker that crashed leaves none
    node.config.stash[OUTCOMES].update(output.get(_HANDED_OVER, {}))


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
