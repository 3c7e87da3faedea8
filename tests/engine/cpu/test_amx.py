"""Products by AMX on processors without it, for which its instructions are compiled, and emulated where they are to be
used. On processors with AMX `test_panels` uses them."""

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
FLOAT32 = """
import torch
from tinsmith.engine.cpu.vectors import HAS_AMX
from tinsmith.engine.lora import compiled_adapters
from tinsmith.engine.lora.head.choice import check_products
assert HAS_AMX
check_products(torch.float32)
compiled_adapters.check(torch.float32)
"""
pytestmark = pytest.mark.skipif(HAS_AMX or not HAS_PAIRS, reason="needs AVX512-BF16 and no AMX")


def run(program: str, *arguments: str, **environment: str) -> None:
    """Run a program whose functions are compiled for this processor with AMX. Raises AssertionError if it fails."""
    features = {**binding.get_host_cpu_features(), "amx-tile": True, "amx-bf16": True}
    environment |= {
        "NUMBA_CPU_NAME": binding.get_host_cpu_name(),
        "NUMBA_CPU_FEATURES": ",".join(f"{'+' if has else '-'}{name}" for name, has in features.items()),
    }
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_products_by_amx(tmp_path: Path):
    library = tmp_path / "amx.so"
    source = Path(__file__).with_name("amx.c")
    subprocess.run([str(COMPILER), "-O2", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    run(CHECK, str(test_panels.__file__), LD_PRELOAD=str(library), NUMBA_CACHE_DIR=str(tmp_path))


def test_float32_products_do_not_use_amx(tmp_path: Path):
    run(FLOAT32, NUMBA_CACHE_DIR=str(tmp_path))  # an instruction of AMX would end the process
