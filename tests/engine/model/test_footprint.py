"""The memory that a base model takes: equal to what transformers loads, and a refusal with figures before that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from tests.architectures import tiny_config
from tests.vision import save_vision_model
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import footprint, loading
from tinsmith.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss", "qwen3_5_text", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_weights_are_counted_to_the_byte(kind: str, dtype: torch.dtype) -> None:
    config = tiny_config(kind)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stored = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert footprint.footprint(config, dtype, CPU, four_bit=False).weights == stored


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_weights_of_a_vision_tower_are_counted(kind: str, tmp_path: Path) -> None:
    """Fails without `with_tower`: qwen3_5's text model has a class of its own, which lacks the tower."""
    folder = save_vision_model(tmp_path, kind)
    loaded = loading.read(EngineConfig(source=str(folder), device="cpu", dtype="float32"))
    assert loaded.vision is not None
    stored = sum(parameter.nbytes for parameter in loaded.model.parameters()) + loaded.vision.weight_bytes
    count = footprint.footprint(AutoConfig.from_pretrained(folder), torch.float32, CPU, four_bit=False, with_tower=True)
    assert count.weights == stored


def test_a_model_is_refused_with_its_vision_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without `with_tower` in `loading.read`."""
    folder = save_vision_model(tmp_path, "qwen3_5")
    text = footprint.footprint(AutoConfig.from_pretrained(folder), torch.float32, CPU, four_bit=False).peak
    monkeypatch.setattr(footprint, "device_free_bytes", lambda _: text)
    with pytest.raises(ConfigError, match="does not fit"):
        loading.load(EngineConfig(source=str(folder), device="cpu", dtype="float32"))


def test_tied_embeddings_count_once() -> None:
    shape = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = [
        footprint.footprint(LlamaConfig(tie_word_embeddings=tied, **shape), BF16, CPU, four_bit=False).weights
        for tied in (True, False)
    ]
    assert sizes[1] - sizes[0] == 1000 * 64 * 2


@pytest.mark.parametrize("head_bytes", [2, 4])
def test_the_head_is_copied_on_a_cpu_twice(monkeypatch: pytest.MonkeyPatch, head_bytes: int) -> None:
    monkeypatch.setattr(footprint, "panel_kind", lambda device, dtype: "pairs" if head_bytes == 2 else None)
    config = LlamaConfig(vocab_size=151_936, hidden_size=4096, num_hidden_layers=1)
    assert footprint.footprint(config, BF16, CPU, four_bit=False).working == 2 * head_bytes * 151_936 * 4096
    assert footprint.footprint(config, BF16, GPU, four_bit=False).working == 4 * 151_936 * 4096


def qwen3_30b_a3b() -> PreTrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
    )


def test_large_model_is_refused_with_figures() -> None:
    with pytest.raises(ConfigError, match=r"weights in bfloat16 take 61\.1 GB .* this machine has 20\.0 GB") as refusal:
        footprint.check("Qwen3-30B-A3B", qwen3_30b_a3b(), BF16, CPU, four_bit=False, free=int(20e9))
    assert refusal.value.hint == "Use a smaller model, or check_memory=false to load it anyway."


def test_refusal_names_what_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "panel_kind", lambda device, dtype: None)
    config = LlamaConfig(num_hidden_layers=2)
    with pytest.raises(ConfigError) as refusal:
        footprint.check("some/model", config, torch.float32, CPU, four_bit=False, free=0)
    assert refusal.value.hint.startswith("Use dtype=bfloat16 (2.4 GB), dtype=bfloat16 and quantize=4bit (1.8 GB), a")


def test_fused_experts_gain_nothing_from_4bit() -> None:
    plain, packed = (footprint.footprint(qwen3_30b_a3b(), BF16, GPU, four_bit=each).weights for each in (False, True))
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert packed > experts
    attention = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512)
    assert plain - packed == pytest.approx(attention * (2 - 4.5 / 8), rel=0.01)


def test_nothing_is_read_from_a_model_that_does_not_fit(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(footprint, "device_free_bytes", lambda _: 100_000)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    with pytest.raises(ConfigError, match="does not fit"):
        loading.load(EngineConfig(source=str(tiny("llama")), device="cpu", dtype="float32"))


def test_refusal_can_be_turned_off(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "device_free_bytes", lambda _: 100_000)
    config = EngineConfig(source=str(tiny("llama")), device="cpu", dtype="float32", check_memory=False)
    assert loading.load(config).card.arch == "llama"


def test_scarce_memory_leaves_numbers_and_environment(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are read one after the other if the model takes more than half of what is free."""
    config = EngineConfig(source=str(tiny("qwen3")), device="cpu", dtype="bfloat16")
    base = loading.load(config)
    expected, seen, read = base.model.state_dict(), [], AutoModelForCausalLM.from_pretrained
    needed = footprint.footprint(base.model.config, BF16, CPU, four_bit=False).peak

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"))
        return read(*args, **options)

    monkeypatch.setattr(footprint, "device_free_bytes", lambda _: needed + 1)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    loaded = loading.load(config).model.state_dict()
    assert seen == ["1"]
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
