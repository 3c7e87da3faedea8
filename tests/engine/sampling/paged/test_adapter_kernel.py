"""The kernels for adapters in slots: PyTorch's numbers in Triton's interpreter, and compiled without spills."""

from __future__ import annotations

import pytest

from tests.engine.triton_programs import needs_triton, run_python

INTERPRETED = """
import torch
from tinsmith.engine.lora.adapter import LoraPair
from tinsmith.engine.sampling.paged import adapter_kernel, adapter_slots
adapter_slots.check(adapter_kernel.add_in_place, torch.device("cpu"), torch.float32)
draw = torch.Generator().manual_seed(1)
inputs, outputs = (torch.randn(40, width, generator=draw) for width in (80, 96))
pair = LoraPair(torch.randn(16, 80, generator=draw), torch.randn(20, 16, generator=draw))
own, scales = torch.arange(40)[:, None] % 2 == torch.arange(16) // 8, torch.rand(40, 1, generator=draw)
def added(rows):
    actual = outputs[rows, 3:23].contiguous()
    adapter_kernel.add_in_place(inputs[rows], [actual], [pair], own[rows].contiguous(), scales[rows].contiguous())
    return actual
together = added(slice(0, 40))
assert torch.equal(together[30:33], added(slice(30, 33)))  # in any company
wide = outputs.clone()
adapter_kernel.add_in_place(inputs, [wide[:, 3:23]], [pair], own, scales)  # columns of a wider tensor
assert torch.equal(wide[:, 3:23], together) and torch.equal(wide[:, 23:], outputs[:, 23:])
"""
COMPILED = """
from tests.engine.triton_programs import assert_compiles
from tinsmith.engine.sampling.paged import adapter_kernel, attention_kernel
def numbered(name, kind):
    return {f"{name}_{number}": kind for number in range(3)}
for capability in (80, 90):
    for rows, ranks in ((64, 32), (16, 16)):
        blocks = {"ROWS": rows, "RANKS": ranks, "COLUMNS": 8 * ranks}
        types = {"inputs": "*bf16", **numbered("a", "*bf16"), "own": "*i1", "sums": "*fp32"}
        types |= {"rows": "i32", "INPUT_STRIDE": "i32"}
        sizes = {"RANK_BLOCKS": 8, "PART": 256, "WIDTH": 2560, "BLOCK": adapter_kernel.BLOCK}
        assert_compiles(adapter_kernel.multiply_a, types, sizes | blocks, capability)
        types = {"sums": "*fp32", **numbered("b", "*bf16"), **numbered("output", "*bf16"), "own": "*i1"}
        types |= {"scales": "*fp32", "rows": "i32", **numbered("STRIDE", "i32")}
        sizes = {"WIDTH_0": 4096, "WIDTH_1": 1024, "WIDTH_2": 1024, "PARTS": 10, "OUTPUTS": adapter_kernel.OUTPUTS}
        assert_compiles(adapter_kernel.add_b, types, sizes | blocks, capability)
    types = {**dict.fromkeys(("key", "value", "keys", "values"), "*bf16"), "targets": "*i64"}
    types |= dict.fromkeys(("KEY_ROW", "KEY_HEAD", "VALUE_ROW", "VALUE_HEAD"), "i32")
    sizes = {"HEADS": 8, "WIDTH": 128, "VALUE_WIDTH": 128, "BLOCK": 128}
    assert_compiles(attention_kernel.store_tokens, types, sizes, capability)
"""


@needs_triton
@pytest.mark.parametrize(
    ("program", "interpret"), [(INTERPRETED, True), (COMPILED, False)], ids=["interpreted", "compiled"]
)
def test_kernels_equal_operators_and_compile(program: str, interpret: bool) -> None:
    run_python("-c", program, interpret=interpret)
