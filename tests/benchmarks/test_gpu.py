"""The GPU benchmark, on tiny shapes and a CPU."""

from __future__ import annotations

import pytest

from benchmarks import gpu


@pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own
@pytest.mark.parametrize("name", list(gpu.LARGE))
def test_gpu_lines_are_measured_and_correct(name: str):
    shape = gpu.Shape(name=name, config=gpu.TINY[name], device="cpu", tiny=True)
    lines = gpu.correctness(shape)
    assert [line.verdict for line in lines] == ["aim"] * 3
    assert all(line.values for line in gpu.speed(shape, turns=1))


def test_shapes_have_the_sizes_of_their_names():
    def parameters(config: object) -> float:
        width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers  # type: ignore[attr-defined]
        heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim  # type: ignore[attr-defined]
        block = 2 * width * heads * size + 2 * width * shared * size + 3 * width * inner
        tables = 1 if config.tie_word_embeddings else 2  # type: ignore[attr-defined]
        return layers * block + tables * config.vocab_size * width  # type: ignore[attr-defined]

    assert parameters(gpu.LARGE["Llama-3.2-3B"]) == pytest.approx(3.21e9, rel=0.01)
    assert parameters(gpu.LARGE["Qwen3-8B"]) == pytest.approx(8.19e9, rel=0.01)
