"""The names of `tinsmith.rllm`: all can be imported, and only when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tinsmith.rllm


def test_every_name_can_be_imported() -> None:
    assert dir(tinsmith.rllm) == sorted(tinsmith.rllm.__all__)
    assert all(getattr(tinsmith.rllm, name) is not None for name in tinsmith.rllm.__all__)


def test_import_is_lazy() -> None:
    program = (
        "import sys, tinsmith.rllm; print([name for name in ('torch', 'tinker', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_records_need_no_sdk() -> None:
    program = "import sys; from tinsmith.rllm import Episode, DatasetRegistry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'VerlEngine'"):
        _ = tinsmith.rllm.VerlEngine  # type: ignore[attr-defined]
