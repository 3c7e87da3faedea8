"""Compiles a Triton kernel for a GPU that this machine need not have."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHARED_MEMORY = 48 << 10
"""Bytes of shared memory of a program on any GPU without a setting."""
OPTIONS = ("num_warps", "num_stages")


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
