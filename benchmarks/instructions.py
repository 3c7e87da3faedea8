"""A limit on a processor's instructions, for both sides: with it, a processor with AVX-512 measures what one without
computes. What differs is its caches and its clock."""

from __future__ import annotations

LIMITS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_NAME": "znver3",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+popcnt,+sse4.2,+lzcnt,+movbe",
    }
}
"""Environment variables by the name of the limit: of PyTorch, its two libraries of products, and Numba. vLLM looks at
the processor itself, so `parts/vllm/program.py` answers for it."""
