"""Programs with Triton's kernels: in a process of their own, and compiled for a GPU that this machine need not have.

Imports no Triton itself, which reads its environment when it is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton: pip install --no-deps triton==3.6.0 (190 MB)"
)

SHARED_MEMORY = 48 << 10
"""Bytes of shared memory of a program on any GPU without a setting."""
OPTIONS = ("num_warps", "num_stages")


def run_python(*arguments: str, interpret: bool) -> None:
    """Run Python with `arguments` to its end; its kernels by Triton's interpreter if `interpret`."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret))}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def assert_compiles(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, spilled: int = 0
) -> None:
    """Compile a kernel and assert that it fits shared memory, and that a thread spills at most `spilled` bytes of
    registers. Pointers and integers of `types` are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if types.get(name, "fp32") != "fp32"
    }
    source = triton.compiler.ASTSource(
        fn=kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants, attrs=aligned
    )
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert result.metadata.shared <= SHARED_MEMORY, (kernel, result.metadata.shared)
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(result.asm["ptx"])
        file.flush()
        target = re.findall(r"\.target (\w+)", result.asm["ptx"])[0]
        command = [str(assembler), "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill", report)]
    assert len(spills) == 2, report
    assert max(spills) <= spilled, (kernel, report)
