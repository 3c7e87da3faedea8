"""FlexAttention finds a kernel for an H100 for the heads of all models that are served, whatever the length."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.engine.triton_programs import needs_triton

HEADS = ("4/2", "4/4", "9/3", "14/2", "16/8", "16/2", "24/8", "28/4", "32/4", "32/8", "40/8", "64/8", "8/1", "16/16")
"""Those of the tiny models of docs/reference/models.md, and by groups: SmolLM2, Qwen2.5-0.5B, Qwen3-0.6B and 1.7B,
Qwen3.5, Llama-3.2-3B, Qwen2.5-7B, Qwen3-30B-A3B, Qwen3-4B and 8B with Llama-3.1-8B and Mistral-7B, Qwen3-14B,
Qwen3-32B and gpt-oss, Gemma, OLMo."""


@needs_triton
def test_flex_attention_finds_kernels_for_all_heads():
    command = [sys.executable, "-m", "tests.engine.device.lowering", *HEADS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) >= len(HEADS)
    assert [row for row in rows if not row[-1]] == [], done.stderr
