"""Speed and correctness on a GPU, with random weights in the shapes of Llama-3.2-3B and Qwen3-8B (no download).

Correctness of logprobs and gradients, with few layers of full width: float32 against transformers' eager attention,
bfloat16 (with the GPU's attention kernel) against float32. Speed and memory with all layers in bfloat16, interleaved
with transformers and PEFT. `make gpu-check` runs it on a GPU; `--device cpu --tiny` runs the same code on small shapes
anywhere, without meaningful numbers.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from benchmarks import table
from benchmarks.baseline import Baseline
from benchmarks.comparison import Line, Setting, in_turns
from benchmarks.engine_driver import EngineDriver
from benchmarks.parts.training import peak_rates, share
from benchmarks.speed import RESULTS
from benchmarks.workloads import Batch, grpo, questions
from tinsmith.engine.model import loading

RANK, LAYERS = 32, 4
TITLE = "Speed and correctness on a GPU (`make gpu-check`, `benchmarks/gpu.py`)"
SAMPLES, TOKENS = 8, 96
LARGE: dict[str, PreTrainedConfig] = {
    "Llama-3.2-3B": LlamaConfig(
        vocab_size=128_256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072, tie_word_embeddings=True,
    ),
    "Qwen3-8B": Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=False,
    ),
}  # fmt: skip
TINY: dict[str, PreTrainedConfig] = {
    name: type(config)(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    for name, config in LARGE.items()
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a model, and its device."""

    name: str
    config: PreTrainedConfig
    device: str
    tiny: bool

    def model(self, dtype: torch.dtype, layers: int) -> PreTrainedModel:
        """A model with random weights from a seed and eager attention."""
        config = type(self.config)(**{**self.config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
        torch.manual_seed(0)
        # Few layers are drawn in float32, so that both dtypes have the same ones; all of them would not fit everywhere.
        drawn = torch.float32 if layers <= LAYERS else dtype
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=drawn, attn_implementation="eager").to(dtype)

    def ours(self, dtype: torch.dtype, layers: int) -> EngineDriver:
        """An engine with such a model."""
        name = str(dtype).removeprefix("torch.")
        base = loading.prepare(self.model(dtype, layers), _tokenizer(), self.name, self.name)
        return EngineDriver(Setting(folder=Path(self.name), threads=0, turns=0, dtype=name), base, device=self.device)

    def settled(self, work: Callable[[], object]) -> Callable[[], None]:
        """Seconds of the work, including the wait for the device."""

        def run() -> None:
            work()
            if self.device == "cuda":
                torch.cuda.synchronize()

        return run


def main() -> None:
    """Measure all shapes and write benchmarks/results/gpu.{md,json,png}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="shapes that any machine can run; the numbers mean nothing")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--into", type=Path, help="instead of benchmarks/results/gpu")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    into, parts = arguments.into or RESULTS / ("gpu-tiny" if arguments.tiny else "gpu"), {}
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    for name, config in (TINY if arguments.tiny else LARGE).items():
        shape = Shape(name=name, config=config, device=arguments.device, tiny=arguments.tiny)
        lines = [*correctness(shape), *speed(shape, arguments.turns)]
        machine = f"{where}, {table.machine()}"
        parts[name] = table.Part(measured=time.strftime("%Y-%m-%d %H:%M"), machine=machine, lines=lines)
        table.write(into, parts, list(parts), TITLE)
    print(into.with_suffix(".md").read_text())


def correctness(shape: Shape) -> list[Line]:
    """Logprobs and gradients of a model with few layers of full width."""
    work = grpo(groups=2, group=3)
    layers = min(LAYERS, shape.config.num_hidden_layers)
    exact = shape.ours(torch.float32, layers)
    exact.create("bench", RANK)
    (result,) = exact.run(work.as_pass("bench"))
    expected = _eager(shape.model(torch.float32, layers), work)
    line: dict[str, Any] = {"unit": "", "lower": True}
    apart = max(float(np.abs(actual - other).max()) for actual, other in zip(result.logprobs, expected, strict=True))
    lines = [
        Line(
            work=f"{shape.name}, {layers} layers: logprobs in float32, greatest difference",
            baseline="transformers, eager, float32",
            least=1e-3,
            aim=1e-4,
            values=[apart],
            **line,
        )
    ]
    with tempfile.TemporaryDirectory() as folder:
        exact.step("bench", 1e-3)  # so that B is not zero and A has a gradient
        state = Path(folder) / "state"
        exact.wait(exact.engine.save("bench", state, optimizer=False))
        wide = _scores(exact, work)
        exact.close()
        narrow = shape.ours(torch.bfloat16, layers)
        narrow.wait(narrow.engine.load("bench", state, optimizer=False))
        actual = _scores(narrow, work)
        narrow.close()
    subject = f"{shape.name}, {layers} layers: bfloat16 with adapter,"
    mean = float(np.abs(actual[0] - wide[0]).mean())
    gradient = float(np.linalg.norm(actual[1] - wide[1]) / np.linalg.norm(wide[1]))
    lines += [
        Line(
            work=f"{subject} logprobs, mean difference", baseline="float32", least=0.06, aim=0.03, values=[mean], **line
        ),
        Line(work=f"{subject} gradients, relative", baseline="float32", least=0.1, aim=0.05, values=[gradient], **line),
    ]
    return lines


def speed(shape: Shape, turns: int) -> list[Line]:
    """Training and sampling with all layers, interleaved with transformers and PEFT on the same device."""
    layers, work = shape.config.num_hidden_layers, grpo(groups=2 if shape.tiny else 8)
    ours = shape.ours(torch.bfloat16, layers)
    ours.create("bench", RANK)
    held = _memory(shape)

    def train() -> None:
        ours.run(work.as_pass("bench"))
        ours.step("bench")

    shape.settled(train)()
    peak = (_memory(shape, peak=True) - held) / 1e9
    model = shape.model(torch.bfloat16, layers)
    model.set_attn_implementation("sdpa")
    theirs = Baseline(model, RANK)
    peft = "transformers (SDPA) + PEFT, padded rows of 8"
    comparison = in_turns(shape.settled(train), shape.settled(lambda: theirs.train(work.rows, work.prompts)), turns)
    rates = [peak_rates(ours) for _ in comparison.ours_s]
    lines = [
        comparison.line(f"{shape.name}: GRPO batch of {work.name}, bfloat16", peft, 3.0, 4.5, work.tokens),
        replace(share(ours, work, comparison.ours_s, rates), work=f"{shape.name}: share of the matmul peak"),
    ]
    if shape.device == "cuda":
        lines.append(
            Line(work=f"{shape.name}: peak above the loaded base", baseline="-", unit="GB", values=[peak], lower=True)
        )
    ours.capture("bench", "version")
    prompts, tokens = questions(2 if shape.tiny else 8), 8 if shape.tiny else TOKENS
    comparison = in_turns(
        shape.settled(lambda: ours.sample(prompts, "version", SAMPLES, tokens)),
        shape.settled(lambda: theirs.sample(prompts, SAMPLES, tokens)),
        turns,
    )
    count = len(prompts) * SAMPLES * tokens
    subject = f"{shape.name}: {len(prompts)} prompts x {SAMPLES} samples x {tokens} tokens, logprobs, adapter"
    lines.append(comparison.line(subject, f"transformers.generate(num_return_sequences={SAMPLES})", 4.0, 5.5, count))
    ours.close()
    return lines


def _memory(shape: Shape, *, peak: bool = False) -> int:
    """Bytes of the GPU's memory that tensors hold, and the peak since the last call."""
    if shape.device == "cpu":
        return 0
    used = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return used


def _scores(ours: EngineDriver, work: Batch) -> tuple[np.ndarray, np.ndarray]:
    """All logprobs and all gradients, each flattened."""
    (result,) = ours.run(work.as_pass("bench"))
    gradients = ours.engine.trainer.gradients("bench")
    flat = [part.reshape(-1) for name in sorted(gradients) for part in gradients[name]]
    return np.concatenate(result.logprobs), np.concatenate(flat)


@torch.no_grad()
def _eager(model: PreTrainedModel, work: Batch) -> list[np.ndarray]:
    """Logprobs of each row."""
    logprobs = []
    for row in work.rows:
        ids = torch.as_tensor(row, device=model.device)[None]
        scores = torch.log_softmax(model(input_ids=ids[:, :-1], use_cache=False).logits[0].float(), dim=1)
        logprobs.append(scores.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy())
    return logprobs


def _tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one word: no text is encoded or decoded here."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), eos_token="a")


if __name__ == "__main__":
    main()
