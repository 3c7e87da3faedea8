"""Lowers FlexAttention for an H100 on a machine without one, up to the choice of a kernel; needs Triton.

    python -m tests.engine.device.lowering QUERY_HEADS/KEY_HEADS ...

Prints a JSON list of [query heads, key heads, cached tokens, new tokens, soft cap, number of kernels]. Replaces
parts of torch in its process, so tests start it as a program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel.flex import flex_attention as kernels
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as torchs
from torch.utils import _pytree as pytree
from torch.utils import _triton as triton

from tinsmith.engine.model import flex_attention, packing
from tinsmith.engine.model.attention_rule import AttentionRule

GPU = torch.device("cuda:0")
H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10, regs_per_multiprocessor=1 << 16,
    shared_memory_per_multiprocessor=228 << 10, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip
WIDTH = 128
CASES = ((0, 1, None), (0, 36, None), (0, 385, None), (0, 385, 30.0), (300, 384, None))
"""Cached tokens, new tokens and soft cap: one token, a part of a block of the mask, several blocks, a turn after a
cached prefix."""


class Chosen(Exception):
    """Ends the lowering at the choice of a kernel, with the number of kernels."""


def traced(
    query_heads: int, key_heads: int, cached: int, length: int, softcap: float | None
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The graph of a call on the CPU, as the engine makes it, and its inputs."""
    graphs: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((graph, inputs))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, decompositions={})
    torch._dynamo.reset()
    flex_attention._compiled()  # for its settings
    call = torch.compile(torchs.flex_attention, dynamic=True, backend=backend)
    row = packing.PackedRow(key=0, adapter=0, tokens=np.arange(cached + length, dtype=np.int32))
    query, key = (torch.randn(1, heads, length, WIDTH, dtype=torch.bfloat16) for heads in (query_heads, key_heads))
    before = torch.randn(1, key_heads, cached, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad(), patch.object(flex_attention, "flex_attention", call):
        context = flex_attention.packed_attention(packing.pack([row]), torch.device("cpu"))
        if cached:
            context.cached = flex_attention.CachedKV(np.arange(cached), lambda part: [(before[:, :, part],) * 2])
        context.attend(0, query, key, key, AttentionRule(WIDTH**-0.5, softcap=softcap))
    return graphs[-1]


def kernels_to_choose_from(query_heads: int, key_heads: int, cached: int, length: int, softcap: float | None) -> int:
    """Number of kernels that inductor finds for a call on an H100; 0 if it fails."""
    graph, _ = traced(query_heads, key_heads, cached, length, softcap)

    def moved(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            value.fake_device = GPU
        return value

    for node in graph.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        if value is not None and not isinstance(value, torch.fx.GraphModule):
            node.meta["val"] = pytree.tree_map(moved, value)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    counts: list[int] = []

    def choose(_name: str, choices: list[Any], *_: Any, **__: Any) -> Any:
        counts.append(len(choices))
        raise Chosen

    with (
        patch.object(kernels, "autotune_select_algorithm", choose),
        patch.object(torch.cuda, "is_available", lambda: True),
        V.set_fake_mode(mode),
    ):
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True)
        try:
            with V.set_graph_handler(lowering):
                lowering.run(*inputs)
        except Exception as error:  # noqa: BLE001 - it shows in the number of kernels
            if not counts:
                print(f"{query_heads}/{key_heads} at {cached} + {length}: {error!r}"[:500], file=sys.stderr)
    return sum(counts)


def main() -> None:
    """Print the numbers of kernels for all heads and lengths."""
    torchs._validate_device = lambda *_: None
    for name, value in {
        "_get_device_properties": lambda *_: H100, "get_device_properties": lambda *_: H100,
        "get_device_capability": lambda *_: (9, 0), "current_device": lambda: 0, "device_count": lambda: 1,
        "get_device_name": lambda *_: H100.name, "_lazy_init": lambda: None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    triton.triton_hash_with_backend = lambda: "none"  # reads the driver
    heads = [map(int, pair.split("/")) for pair in sys.argv[1:]]
    cases = [(query, key, *lengths) for query, key in heads for lengths in CASES]
    rows = [[*case, kernels_to_choose_from(*case)] for case in cases]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
