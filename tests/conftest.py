"""Fixtures for all tests: tiny base models on disk, and SmolLM2 where its file is."""

from __future__ import annotations

import ast
import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from tests import certificates, forkserver, sdk_faults
from tinsmith.processes.garbage_collection import leave_out_existing

pytest_plugins = ["tests.conformance.summary", "tests.object_stores"]

# The same examples in each run, and no time limits: a machine of CI may stand still for seconds.
hypothesis_settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
hypothesis_settings.load_profile("steady")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
certificates.replace()
sdk_faults.keep_cancellations()
# A shell that starts the tests in the background has them ignore Ctrl-C, and with them each program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# SDK clients outlive the servers of their tests and would warn of failed requests in the logs of later tests.
logging.getLogger("tinker.lib.internal_client_holder").setLevel(logging.ERROR)
logging.getLogger("tinker.lib.telemetry").setLevel(logging.ERROR)


def _parse_in_one_thread_at_a_time() -> None:
    """Before 3.11.8, `ast.parse` raises SystemError if another thread parses meanwhile, as it does to show a traceback.

    The depth of recursion is counted for all threads together (python/cpython issue 106905), and a garbage collection
    while the tree is made can let another thread go on.
    """
    lock, parse = threading.RLock(), ast.parse

    @functools.wraps(parse)
    def locked(*args: Any, **options: Any) -> ast.AST:
        with lock:
            return parse(*args, **options)

    ast.parse = locked


if sys.version_info < (3, 11, 8):
    _parse_in_one_thread_at_a_time()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--database",
        choices=["sqlite", "postgresql"],
        help="database of all service tests; by default SQLite, and both in tests of the database itself",
    )
    faults = parser.getgroup("faults", "the long tests of make test-faults")
    faults.addoption("--faults", type=int, default=1600, help="faults of the long run: about two of three are kills")
    faults.addoption("--cuts", type=int, default=400, help="power cuts that are tried")
    faults.addoption("--seed", type=int, default=16, help="seed of both plans")
    faults.addoption("--add", action="store_true", help="write the outcome into benchmarks/results")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        sdk_faults.use_httpx()


UNLIMITED = {"slow", "faults", "gpu", "cluster"}
"""Markers of tests that may take longer than `timeout` in pyproject.toml."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run pyright first: a minute in one process would otherwise come last, with nothing to run beside it."""
    items.sort(key=lambda item: item.path.name != "test_check.py")
    for item in items:
        if any(marker.name in UNLIMITED for marker in item.iter_markers()):
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish() -> None:
    """Each later garbage collection would visit the objects of all modules and tests, which stay."""
    leave_out_existing()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports travel between processes as UTF-8: half of an emoji in a captured log would end the whole run."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture
def own_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """caplog without what tests before have left: asyncio logs their lost tasks and errors when these are collected."""
    gc.collect()
    caplog.clear()
    return caplog


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny base model by kind (see tests.models.KINDS); each is made once a session."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            from tests.models import save_model  # importing torch takes seconds; most tests do not need it

            made[kind] = save_model(kind, tmp_path_factory.mktemp(f"tiny-{kind}"))
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny: Callable[[str], Path]) -> Path:
    """Folder of the tiny Llama."""
    return tiny("llama")


@pytest.fixture(scope="session")
def forking_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Path of a Python that starts fast (tests/forkserver)."""
    with forkserver.python(tmp_path_factory.mktemp("python")) as path:
        yield path


@pytest.fixture(scope="module")
def forked_programs(forking_python: str) -> Iterator[str]:
    """Programs that are started with sys.executable start fast. Yields the path of the ordinary Python."""
    ordinary = sys.executable
    with forkserver.in_place(forking_python):
        yield ordinary


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct as `tinsmith serve` locates it: converted once and cached."""
    program = (
        "from tinsmith.engine.config import DEFAULT_MODEL; from tinsmith.engine.model.sources import locate;"
        "print(locate(DEFAULT_MODEL).folder)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return Path(done.stdout.split()[-1])
