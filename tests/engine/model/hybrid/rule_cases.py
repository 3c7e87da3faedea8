"""Shapes at which Triton's kernels of the gated delta rule are compared and compiled:
`python -m tests.engine.model.hybrid.rule_cases NAME`."""

from __future__ import annotations

import sys

import torch

from tests.engine.triton_programs import assert_compiles
from tinsmith.engine.model.hybrid.chunk_rule import HeadShape
from tinsmith.engine.model.hybrid.rule import choice
from tinsmith.engine.model.hybrid.rule.fused import RuleInputs

TOLERANCE = 1e-5
"""Mean error of the interpreter's numbers in units of their standard deviation."""
TABLES = ("tokens", "initial", "final", "order", "bounds")
MODEL_DTYPE = ("qkv", "beta", "qkv_grad")
SPILLED = 16
"""Bytes at most that a thread of `state_gradients` spills in chunks of fewer than 64 tokens."""
QWEN3_NEXT = HeadShape(16, 128, 32, 128)


def interpreted() -> None:
    """Compare Triton's kernels in its interpreter, which takes seconds for a token."""
    _interpret(HeadShape(1, 20, 2, 8), 3)


def interpreted_at_length() -> None:
    """The same with several blocks of odd widths, and with the largest chunks."""
    _interpret(HeadShape(2, 40, 4, 20), 3)
    _interpret(HeadShape(1, 8, 1, 8), 70)


def compiled() -> None:
    """Compile Triton's kernels for sm_80 and sm_90, for chunks of all sizes."""
    from tinsmith.engine.model.hybrid.rule import backward_kernels, forward_kernels, kernels

    for size in (8, 32, 64):
        tables = dict.fromkeys(("decay", "beta", *TABLES), torch.empty(0))
        constants = kernels.settings(RuleInputs(torch.empty(1, size, 1), outside=None, shape=QWEN3_NEXT, **tables))
        del constants["size"]
        for name, kernel in {**vars(forward_kernels), **vars(backward_kernels)}.items():
            if name.endswith("_kernel"):
                types = {
                    name: "*i32" if name in TABLES else "*bf16" if name in MODEL_DTYPE else "*fp32"
                    for name in kernel.arg_names
                    if name not in constants
                }
                warps = kernels.UNIT_WARPS if name == "unit_gradients_kernel" else kernels.WARPS
                spilled = SPILLED if name == "state_gradients_kernel" and size < 64 else 0
                for capability in (80, 90):
                    settings = {**constants, "num_warps": warps}
                    assert_compiles(kernel, {**types, "size": "i32"}, settings, capability, spilled)


def _interpret(shape: HeadShape, stem: int) -> None:
    from tinsmith.engine.model.hybrid.rule import kernels

    choice.TOLERANCE[torch.float32] = TOLERANCE
    choice.check(kernels, torch.device("cpu"), torch.float32, shape, stem)


if __name__ == "__main__":
    {"interpreted": interpreted, "interpreted_at_length": interpreted_at_length, "compiled": compiled}[sys.argv[1]]()
