"""Steps 0 to 2: the card itself, the kernel of packed attention, and the attention kernels of decoding."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import numpy as np
import torch
from torch import Tensor

from benchmarks.comparison import timed
from benchmarks.gpu_check.device import datasheet_tflops, product_tflops, seconds, settle
from benchmarks.gpu_check.shapes import Size
from benchmarks.gpu_check.step import Values
from tinsmith.engine.model import attention_kernels, flex_attention
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.packing import PackedRow, pack

PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "numpy", "vllm", "flash-attn", "bitsandbytes")
HEADS = ((1, 128), (2, 128), (3, 128), (4, 128), (8, 128), (2, 64))
"""Query heads for each key head, and the width of a head; tests/gpu has more groups."""
LENGTHS = (1, 36, 100, 128, 137, 385, 8192)
DECODE_SHAPES = tuple(product((1, 4, 16, 64, 256), (256, 512, 1024, 2048)))
"""Sequences and keys of each."""
PREFIX_SHAPES = tuple(product((17, 64, 200, 333), (512, 1000, 2048, 3001, 4096)))
"""New queries and keys before them."""


def card(size: Size) -> Values:
    """Rates of the card, and versions."""
    copied = torch.ones(size.of(1 << 30, 1 << 16), device=size.device, dtype=torch.float32)
    target = torch.empty_like(copied)
    rate = 2 * copied.nbytes / seconds(size, lambda: target.copy_(copied), turns=5, warm_up=2)
    values = {
        "copy_gb_per_s": rate / 1e9,
        "bf16_tflops": product_tflops(size),
        "datasheet_bf16_tflops": datasheet_tflops(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "compiler": shutil.which("cc") or shutil.which("gcc") or "none",
    }
    if size.tiny:
        return {**values, "card": "CPU"}
    properties = torch.cuda.get_device_properties(0)
    listed = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=15, check=False)
    return {
        **values,
        "card": properties.name,
        "memory_gb": properties.total_memory / 1e9,
        "capability": list(torch.cuda.get_device_capability()),
        "cudnn": torch.backends.cudnn.version(),
        "sdpa_order": str(torch._C._get_sdp_priority_order()),
        "nvidia_smi": listed.stdout[-3000:],
    }


def packed_attention(size: Size) -> Values:
    """FlexAttention at every head group and length, against dense attention in float32."""
    dtype = torch.float32 if size.tiny else torch.bfloat16
    supported = flex_attention.is_supported(torch.device(size.device))
    errors, failures, slowest, variants = [], [], 0.0, 0
    heads, lengths = (((1, 16), (4, 16)), (1, 137)) if size.tiny else (HEADS, LENGTHS)
    for group, width in heads:
        torch._dynamo.reset()  # an engine has the variants of one model, whose number is limited
        compiled = _graphs()
        for length, window, with_grad in product(lengths, (None, 32), (False, True)):
            if size.tiny and with_grad:
                continue  # FlexAttention has no backward on CPUs
            case = f"group {group}, {length} tokens, window {window}, head {width}, grad {with_grad}"
            try:
                took, error = _attend(size, group, length, window, width, dtype, with_grad)
            except Exception as failure:  # noqa: BLE001 - the other cases are tried too
                failures.append(f"{case}: {type(failure).__name__}: {str(failure)[:200]}")
            else:
                errors.append(error)
                slowest = max(slowest, took)
        variants = max(variants, _graphs() - compiled)
    return {
        "is_supported": supported,
        "failures": failures,
        "failed": len(failures),
        "worst_error": max(errors, default=float("nan")),
        "slowest_first_call_s": slowest,
        "variants": variants,
        "variants_limit": torch._dynamo.config.recompile_limit,
    }


def _graphs() -> int:
    """Graphs that dynamo has compiled so far in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _attend(
    size: Size, group: int, length: int, window: int | None, width: int, dtype: torch.dtype, with_grad: bool
) -> tuple[float, float]:
    """Seconds of the first call, and its greatest error relative to the largest number of the exact result."""
    heads = 2
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, count, length, width, device=size.device, dtype=dtype, requires_grad=with_grad)
        for count in (heads * group, heads, heads)
    )
    tree = pack([PackedRow(key=0, adapter=0, tokens=np.arange(length, dtype=np.int32))])
    rule = AttentionRule(width**-0.5, window=window)
    results: list[Tensor] = []

    def call() -> None:
        attended = flex_attention.packed_attention(tree, torch.device(size.device)).attend(0, query, key, value, rule)
        results.append(attended)
        if with_grad:
            attended.sum().backward()

    took = timed(call)
    settle(size)
    actual = [results[0], query.grad, key.grad, value.grad] if with_grad else [results[0]]
    expected = _dense(query, key, value, window, with_grad)
    errors = [
        float((left.float() - right).abs().max() / right.abs().max().clamp(min=1e-6))
        for left, right in zip(actual, expected, strict=True)
        if left is not None
    ]
    return took, max(errors)


def _dense(query: Tensor, key: Tensor, value: Tensor, window: int | None, with_grad: bool) -> list[Tensor]:
    """Attention in float32 with the whole score matrix, and its gradients."""
    wide = [tensor.detach().float().requires_grad_(with_grad) for tensor in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in wide[1:])
    length, parts = query.shape[2], []
    for head in range(query.shape[1]):  # one head at a time: 8,192 tokens take 268 MB each
        scores = wide[0][:, head] @ keys[:, head].transpose(1, 2) * query.shape[3] ** -0.5
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        hidden = (distance < 0) | (distance >= (window or length))
        parts.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[:, head])
    attended = torch.stack(parts, dim=2)
    if with_grad:
        attended.sum().backward()
    return [attended.detach(), *(tensor.grad for tensor in wide if tensor.grad is not None)]


def decode_attention(size: Size) -> Values:
    """First and second calls of SDPA at shapes that decoding and cached prefixes bring, as the engine has set it."""
    engine = size.engine("Qwen3-0.6B", torch.float32 if size.tiny else torch.bfloat16, layers=1)  # sets the backends
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    values: dict[str, float | bool] = {"cudnn_sdp_enabled": cudnn}
    for name, shapes in (("decode", DECODE_SHAPES), ("prefix", PREFIX_SHAPES)):
        first, second = zip(*(_sdpa(size, name, *shape) for shape in shapes[: size.of(20, 3)]), strict=True)
        values[f"{name}_first_call_ms"] = max(first)
        values[f"{name}_second_call_ms"] = max(second)
    engine.close()
    if not size.tiny:
        torch.backends.cuda.enable_cudnn_sdp(True)
        values["cudnn_first_call_ms"] = max(
            _sdpa(size, "decode", *shape)[0] for shape in ((3, 384), (5, 640), (7, 896))
        )
    return values


def _sdpa(size: Size, name: str, rows_or_queries: int, keys: int) -> tuple[float, float]:
    """Milliseconds of the first and the second call."""
    batch, queries = (rows_or_queries, 1) if name == "decode" else (1, rows_or_queries)
    query = torch.randn(batch, 32, queries, 128, device=size.device, dtype=torch.bfloat16)
    key, value = (torch.randn(batch, 8, keys, 128, device=size.device, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.zeros(batch, 1, queries, keys, device=size.device, dtype=torch.bfloat16)
    rule = AttentionRule(128**-0.5)
    settle(size)

    def call() -> None:
        attention_kernels.attend(query, key, value, mask, rule)
        settle(size)

    return timed(call) * 1000, timed(call) * 1000


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
