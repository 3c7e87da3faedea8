"""Merged models: W + (alpha / rank) B A in the layout of every kind of checkpoint, loaded again by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.architectures import DENSE, MIXTURES, RECURRENT, save_tiny
from tests.engine.exchange.test_exchange import logits, write_peft
from tests.engine.exchange.test_forms import adapter as drawn_adapter
from tests.engine.exchange.test_forms import merged as merged_weights
from tests.engine.model.test_quantization import declare, quantize_experts
from tests.engine.reference import write_adapter
from tests.vision import save_vision_model
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.exchange.forms import write_tinker
from tinsmith.engine.exchange.merge import merge
from tinsmith.engine.exchange.stored_weights import INDEX
from tinsmith.engine.lora import peft
from tinsmith.errors import TinsmithError, Unsupported

LAYOUTS = (
    "qwen3_moe",  # a matrix for each expert
    "mixtral",  # the same, with other names
    "nemotron_h",  # without a gate, another prefix, slices of rows
    "gpt_oss",  # stacks, transposed and interleaved, as they are
    "qwen3_5_moe_text",  # stacks; slices of rows
    "qwen3_next",  # slices of interleaved rows
    "granitemoe",  # stacks with other names
    "deepseek_v4",  # every name is another
    "gpt2",  # transposed projections, tied
)
OTHERS = tuple(sorted({*DENSE, *MIXTURES, *RECURRENT} - {*LAYOUTS}))


def plain(folder: Path, auto: Any = AutoModelForCausalLM) -> Any:
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def assert_merged(base: Path, tmp_path: Path, auto: Any = AutoModelForCausalLM) -> None:
    """All parameters of the loaded merged model are those of the base with the adapter's products added."""
    model = plain(base, auto)
    layout, flat, facts = drawn_adapter(model, 3)
    peft.write(tmp_path / "adapter", layout, flat, str(base), None)
    merge(tmp_path / "adapter", base, tmp_path / "merged")
    expected, actual = (
        merged_weights(model, layout, flat, facts),
        dict(plain(tmp_path / "merged", auto).named_parameters()),
    )
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, atol=2e-6, rtol=1e-6)
    changed = sum(not torch.equal(actual[name], weight) for name, weight in model.named_parameters())
    assert changed >= len(facts.targets)


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_merged_weights_in_each_layout(model_type: str, tmp_path: Path):
    """Fails without the reversed conversions, or with a wrong orientation or order of rows."""
    assert_merged(save_tiny(model_type, tmp_path / "base"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OTHERS)
def test_merged_weights_of_every_type(model_type: str, tmp_path: Path):
    assert_merged(save_tiny(model_type, tmp_path / "base"), tmp_path)


@pytest.mark.parametrize(
    ("model_type", "auto"), [("qwen3_vl_moe", AutoModelForImageTextToText), ("qwen3_5", AutoModelForCausalLM)]
)
def test_text_model_of_a_vision_model_is_merged(model_type: str, auto: Any, tmp_path: Path):
    """The files' names have a prefix that the names of a text model do not have; the tower stays as it is."""
    base = save_vision_model(tmp_path / "base", model_type)
    assert_merged(base, tmp_path, auto)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    tower = [name for name in before if "visual" in name]
    assert tower
    assert all(torch.equal(before[name], after[name]) for name in tower)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_merged_model_in_shards_equals_adapter(kind: str, tiny, tmp_path: Path):
    base = tiny(kind)
    adapter = write_adapter(base, tmp_path / "adapter", LoraSpec(rank=5, seed=1), size=0.2)
    changed = merge(adapter, base, tmp_path / "merged", shard_bytes=300_000)
    assert len(json.loads((tmp_path / "merged" / INDEX).read_text())["weight_map"]) > changed
    expected = logits(base, adapter)
    assert (expected - logits(base)).abs().max() > 0.1
    difference = logits(tmp_path / "merged") - expected
    assert difference.abs().max() < 1e-4 * expected.std()
    text = "a smith of tin"
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "merged")
        .decode(AutoTokenizer.from_pretrained(base)(text).input_ids)
        .endswith(text)
    )


def test_merged_model_keeps_dtype_of_base(tiny_llama: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    adapter = write_adapter(tiny_llama, tmp_path / "adapter", LoraSpec(rank=5, seed=1, train_unembed=False), size=0.2)
    merge(adapter, tmp_path / "base", tmp_path / "merged")
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    name, pair = "model.layers.1.mlp.down_proj", load_file(adapter / "adapter_model.safetensors")
    a, b = (pair[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    expected = (base[f"{name}.weight"].float() + 32 / 5 * b @ a).bfloat16()
    torch.testing.assert_close(merged[f"{name}.weight"], expected, atol=0, rtol=0.01)
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"])


def test_adapters_in_other_forms_are_merged(tmp_path: Path):
    """Tinker's form, and one of PEFT in which every expert has both matrices of its own."""
    base = save_tiny("qwen3_moe", tmp_path / "base")
    model = plain(base)
    layout, flat, facts = drawn_adapter(model, 3)
    write_tinker(tmp_path / "tinker", layout, flat, facts)
    merge(tmp_path / "tinker", base, tmp_path / "first")
    expected, loaded = merged_weights(model, layout, flat, facts), plain(tmp_path / "first")
    for name, weight in loaded.named_parameters():
        torch.testing.assert_close(weight, expected[name], atol=2e-6, rtol=1e-6)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": parameters}
    adapter = write_peft(base, tmp_path / "peft", r=4, lora_alpha=8, **settings)
    merge(adapter, base, tmp_path / "second")
    difference = logits(tmp_path / "second") - (expected_logits := logits(base, adapter))
    assert difference.abs().max() < 1e-4 * expected_logits.std()
    assert (logits(base) - expected_logits).abs().max() > 0.1


def test_scale_of_rslora_is_merged(tiny_llama: Path, tmp_path: Path):
    """Fails without `make_readable` before the merge: alpha / rank would be half of alpha / sqrt(rank)."""
    adapter = write_peft(tiny_llama, tmp_path / "peft", r=4, lora_alpha=8, target_modules=["q_proj"], use_rslora=True)
    merge(adapter, tiny_llama, tmp_path / "merged")
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(tiny_llama, adapter), atol=1e-5, rtol=1e-5)


def test_quantised_experts_are_dequantised_and_merged(tmp_path: Path):
    """A checkpoint of gpt-oss: the merged model is in bfloat16, and its config says nothing of a quantisation."""
    base = save_tiny("gpt_oss", tmp_path / "base")
    values = quantize_experts(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
    layout, flat, facts = drawn_adapter(model, 3)
    peft.write(tmp_path / "adapter", layout, flat, str(base), None)
    merge(tmp_path / "adapter", base, tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    expected = merged_weights(model, layout, flat, facts)
    for name, weight in loaded.named_parameters():
        torch.testing.assert_close(weight, expected[name].bfloat16(), atol=1e-6, rtol=8e-3)
    assert any(not torch.equal(loaded.get_parameter(name), weight) for name, weight in values.items())


def test_quantised_base_in_another_form_is_refused(tiny_llama: Path, tmp_path: Path):
    base = save_tiny("qwen3_moe", tmp_path / "base")
    adapter = write_adapter(tiny_llama, tmp_path / "adapter", LoraSpec(rank=2, seed=1))
    declare(base, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(Unsupported, match="quantized by gptq"):
        merge(adapter, base, tmp_path / "merged")


@pytest.mark.parametrize("missing", ["mlp.experts.3.up_proj", "self_attn.q_proj", "lm_head"])
def test_base_without_a_weight_is_refused_by_name(missing: str, tmp_path: Path):
    base = save_tiny("qwen3_moe", tmp_path / "base")
    layout, flat, _ = drawn_adapter(plain(base), 3)
    peft.write(tmp_path / "adapter", layout, flat, str(base), None)
    file = base / "model.safetensors"
    tensors = load_file(file)
    drop = {name for name in tensors if missing in name or (missing == "lm_head" and "embed_tokens" in name)}
    save_file({name: tensor for name, tensor in tensors.items() if name not in drop}, file, {"format": "pt"})
    with pytest.raises(TinsmithError, match=r"which the base's files do not hold"):
        merge(tmp_path / "adapter", base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
