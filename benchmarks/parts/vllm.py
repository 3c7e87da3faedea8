"""The 64 samples again, against vLLM on the same cores; vLLM samples without an adapter.

vLLM lives in an environment of its own: `.venv-vllm`, or what TINSMITH_VLLM_PYTHON names.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.contest import Line, Setting
from benchmarks.parts.sampling import TOKENS

PLACES = (Path(".venv-vllm/bin/python"), Path("/tmp/vllm-venv/bin/python"))


def measure(setting: Setting) -> list[Line]:
    """One line; without an environment that has vLLM it says so."""
    named = os.environ.get("TINSMITH_VLLM_PYTHON")
    found = [place for place in ((Path(named),) if named else PLACES) if place.is_file()]
    why = "no program for it yet" if found else "no environment with vLLM (.venv-vllm or TINSMITH_VLLM_PYTHON)"
    return [
        Line(
            work=f"the same 64 samples of {TOKENS} tokens",
            baseline="vLLM on the same cores, no adapter",
            unit="x",
            least=1.0,
            aim=2.0,
            values=[],
            note=f"not measured: {why}",
        )
    ]
