"""HTTP front ends of the services that tests start: none, unless `--frontends` or a test sets their number."""

from __future__ import annotations

import os

COUNT = "TINSMITH_TEST_FRONTENDS"
"""Environment variable with the number of front ends."""


def frontends() -> int:
    """The `frontends` setting of services of tests."""
    return int(os.environ.get(COUNT, "0"))
