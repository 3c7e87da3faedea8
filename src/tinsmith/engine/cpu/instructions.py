"""What a CPU's instructions compute fast. Nothing is timed: results must not depend on the machine's load."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from tinsmith.engine.cpu.arguments import KINDS, has_loops

Bfloat16 = Literal["fast", "slow", "emulated"]
"""How a CPU multiplies bfloat16: faster than float32, slower though it has instructions for it, or without them."""
Kind = Literal["float32", "bfloat16", "pairs"]
"""What compiled functions multiply: float32, bfloat16 widened to it, or bfloat16 in pairs."""


def cpu_bfloat16(root: Path = Path("/")) -> Bfloat16:
    """How this machine's CPU multiplies bfloat16, by its instructions.

    Slow are Intel's processors with AMX while AMX is switched off, as in some virtual machines: they multiply float32
    1.6 times as fast (benchmarks/NOTES.md). They are the ones with AVX512-FP16.
    """
    if torch.cpu._is_amx_tile_supported():
        return "fast"
    if not torch.cpu._is_avx512_bf16_supported():
        return "emulated"
    described = root / "proc/cpuinfo"
    words = described.read_text().split() if described.is_file() else []
    return "slow" if "GenuineIntel" in words and "avx512_fp16" in words else "fast"


@cache
def has_pair_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled products of bfloat16 with float32 results are the fastest on this device: in AVX512-BF16's
    instruction for pairs of numbers, and in those of AMX where a processor has it, but not where float32 is faster."""
    if not has_loops(device, dtype) or dtype != torch.bfloat16 or cpu_bfloat16() != "fast":
        return False
    from tinsmith.engine.cpu.vectors import HAS_AMX, HAS_PAIRS  # with Numba

    if HAS_AMX or torch.cpu._is_amx_tile_supported():
        return HAS_AMX and torch.cpu._init_amx()  # Linux lets a process use AMX after this
    return HAS_PAIRS


def panel_kind(device: torch.device, dtype: torch.dtype) -> Kind | None:
    """What compiled functions multiply with matrices that are laid out for them; None where PyTorch's products are
    faster or not slower: of bfloat16 without AVX512-BF16, and on other processors than x86-64."""
    if not has_loops(device, dtype) or platform.machine() not in ("x86_64", "AMD64"):
        return None
    kind = kind_of(dtype)
    return None if kind == "bfloat16" else kind


@cache
def kind_of(dtype: torch.dtype) -> Kind:
    """What compiled functions multiply fastest on this CPU if their arguments have this dtype."""
    if KINDS[dtype] is float:
        return "float32"
    return "pairs" if has_pair_products(torch.device("cpu"), dtype) else "bfloat16"
