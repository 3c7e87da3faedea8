"""Script that prints the peak memory of training passes over many long rows, one line for each row count.

    python -m tests.engine.training.peak_memory FOLDER COUNT...

Runs in a separate process because peak memory is counted per process. Each line is the peak in bytes above the resident
size before the pass. The rows of the largest count are made before the first measurement; smaller counts take a prefix.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import numpy as np

from benchmarks.parts.memory import peak, reset_peak, resident
from tests.engine.data import tokens_of
from tinsmith.engine.base import Datum, LoraSpec, Pass
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig

LENGTH = 2048


def save_model(folder: Path) -> Path:
    """Save the smallest possible model whose context has LENGTH tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.models import VOCABULARY, save_tokenizer

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def datum(draw: np.random.Generator) -> Datum:
    """A row with advantages, as in reinforcement learning."""
    tokens = tokens_of(draw, LENGTH)
    inputs = {
        "logprobs": np.full(LENGTH, -6.0, np.float32),
        "advantages": draw.normal(size=LENGTH).astype(np.float32),
    }
    return Datum(tokens=tokens, targets=np.roll(tokens, -1).astype(np.int64), inputs=inputs)


async def main(folder: Path, counts: list[int]) -> None:
    draw = np.random.default_rng(0)
    data = tuple(datum(draw) for _ in range(max(counts)))
    engine = build(EngineConfig(source=str(folder), dtype="float32", device="cpu", threads=1))
    await engine.create("m", LoraSpec(rank=4, seed=0))
    for count in (4, *counts):  # the first run allocates what is allocated only once
        gc.collect()
        before = resident()
        reset_peak()
        [result] = await engine.run([Pass(model_id="m", data=data[:count], loss_fn="importance_sampling")])
        if isinstance(result, Exception):
            raise result
        if count in counts:
            print(count, max(0, peak() - before), len(result.logprobs), flush=True)
        del result
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), [int(count) for count in sys.argv[2:]]))
