"""What the tests with a real vLLM share: the vLLM of `make vllm`, and a cache that fits beside other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.engine.vllm.server import find_python
from tinsmith.engine_options import VllmConfig
from tinsmith.errors import ConfigError

# A size, since vLLM does not start if a share of the machine's memory is not free.
ARGS = ("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30))


def vllm_python() -> Path:
    """Python of the environment of `make vllm`, or of the `vllm` on PATH; the test is skipped without one."""
    try:
        return find_python(VllmConfig())
    except ConfigError as error:
        pytest.skip(f"no vLLM here: {error}")
