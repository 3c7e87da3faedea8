"""Products by AMX on processors without it, whose instructions are emulated. On others `test_panels` uses its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
from llvmlite import binding

from tests.engine.cpu import test_panels
from tinsmith.engine.cpu.vectors import HAS_AMX, HAS_PAIRS

COMPILER = shutil.which("cc")
CHECK = """
import ctypes, sys, pytest
from tinsmith.engine.cpu.vectors import HAS_AMX
assert HAS_AMX
failed = pytest.main(["-q", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-n", "0", sys.argv[1]])
sys.exit(failed or not ctypes.CDLL(None).amx_products())
"""


@pytest.mark.skipif(COMPILER is None or HAS_AMX or not HAS_PAIRS, reason="needs AVX512-BF16, no AMX, and a C compiler")
def test_products_by_amx(tmp_path: Path):
    library = tmp_path / "amx.so"
    source = Path(__file__).with_name("amx.c")
    subprocess.run([str(COMPILER), "-O2", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    features = {**binding.get_host_cpu_features(), "amx-tile": True, "amx-bf16": True}
    environment = {
        "NUMBA_CPU_NAME": binding.get_host_cpu_name(),
        "NUMBA_CPU_FEATURES": ",".join(f"{'+' if has else '-'}{name}" for name, has in features.items()),
        "NUMBA_CACHE_DIR": str(tmp_path),
        "LD_PRELOAD": str(library),
    }
    command = [sys.executable, "-c", CHECK, str(test_panels.__file__)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
