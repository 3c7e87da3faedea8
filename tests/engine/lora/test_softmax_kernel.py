"""The Triton kernel of the head: in Triton's interpreter against PyTorch's operators, and compiled for two GPUs."""

from __future__ import annotations

from tests.engine.triton_programs import needs_triton, run_python

pytestmark = needs_triton

INTERPRETED = """
import torch
from tinsmith.engine.lora.head import choice, softmax_kernel
choice.check(softmax_kernel.softmax_of_rows, torch.device("cpu"))
logits = torch.tensor([[1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0], [1.0, 2.0, float("-inf")]])
rows = softmax_kernel.softmax_of_rows(logits, entropies=True, probs=torch.bfloat16)
assert rows.log_sums.isnan().tolist() == [True, True, False]
"""
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from tinsmith.engine.lora.head import softmax_kernel
names = {"logits": "*fp32", "log_sums": "*fp32", "entropies": "*fp32"}
constants = {"COLUMNS": 151_936, "BLOCK": softmax_kernel.BLOCK}
for capability in (80, 90):
    for writes in (True, False):
        for probs in ("*bf16", "*fp32"):
            source = triton.compiler.ASTSource(
                fn=softmax_kernel.kernel,
                signature={**names, "probs": probs, **dict.fromkeys([*constants, "WRITES"], "constexpr")},
                constexprs={**constants, "WRITES": writes},
            )
            options = {"num_warps": softmax_kernel.WARPS}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            assert compiled.metadata.shared < 48 << 10
"""


def test_interpreted_kernel_equals_operators():
    run_python("-c", INTERPRETED, interpret=True)


def test_kernel_compiles_for_ampere_and_hopper():
    run_python("-c", COMPILED, interpret=False)
