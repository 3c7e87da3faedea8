"""A small random model with Gated DeltaNet layers, trained and sampled, against transformers with PEFT.

The baseline computes the same layers by transformers' chunks of padded rows; its `generate` takes one prompt after the
other. The model has the shape of Qwen3.5 at a tenth of its width: 6 recurrent and 2 attention layers.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks.baseline import TARGETS, Baseline, load
from benchmarks.comparison import Line, Setting, in_turns
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts.sampling import against_generate
from benchmarks.workloads import grpo

RANK = 16
PROMPTS, SAMPLES, TOKENS = 8, 8, 32
RECURRENT_TARGETS = ["in_proj_qkv", "in_proj_z", "out_proj"]
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 2048,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def measure(setting: Setting) -> list[Line]:
    """Training with shared prompts, and sampling."""
    with tempfile.TemporaryDirectory() as folder:
        return _lines(replace(setting, folder=save_hybrid(Path(folder), setting.folder)))


def save_hybrid(folder: Path, tokenizer: Path) -> Path:
    """A random model with the tokenizer of another one; its weights are drawn from a seed."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SHAPE)).save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return folder


def _lines(setting: Setting) -> list[Line]:
    ours = EngineDriver(setting)
    theirs = Baseline(load(setting), RANK, [*TARGETS, *RECURRENT_TARGETS])
    batch = grpo(groups=4)
    ours.create("bench", RANK)

    def train() -> None:
        ours.run(batch.as_pass("bench"))
        ours.step("bench")

    training = in_turns(train, lambda: theirs.train(batch.rows, batch.prompts), setting.turns)
    ours.capture("bench", "version")
    sampling = against_generate(ours, theirs, setting, PROMPTS, SAMPLES, TOKENS)
    ours.close()
    tokens, name = PROMPTS * SAMPLES * TOKENS, "hybrid (Gated DeltaNet)"
    return [
        training.line(f"{name}: {batch.name}", "transformers + PEFT, padded rows of 8", 3.0, 4.0, batch.tokens),
        sampling.line(
            f"{name}: {PROMPTS} prompts x {SAMPLES} samples x {TOKENS} tokens",
            f"transformers.generate(num_return_sequences={SAMPLES})",
            4.0,
            5.0,
            tokens,
        ),
    ]
