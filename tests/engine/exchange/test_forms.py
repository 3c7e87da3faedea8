"""Adapters of mixtures and hybrids in PEFT's, vLLM's and Tinker's forms, against merged weights and PEFT itself."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.architectures import save_tiny, tiny_model
from tinsmith.engine.base import LoraSpec
from tinsmith.engine.exchange import adapters, forms, reading
from tinsmith.engine.lora import peft
from tinsmith.engine.lora.adapter import AdapterLayout
from tinsmith.engine.lora.saved_spec import read_spec
from tinsmith.engine.lora.targets import ExpertTarget, LinearTarget
from tinsmith.engine.model_parts import HEAD
from tinsmith.errors import ConfigError, Unsupported

PARTS = ("train_attn", "train_mlp", "train_unembed")
TOKENS = torch.arange(40).remainder(96).view(2, 20)


def adapter(model: Any, rank: int, **flags: bool) -> tuple[AdapterLayout, Tensor, forms.ModelFacts]:
    """An adapter with drawn A and B, large enough to change the logits by far more than rounding."""
    facts = forms.model_facts(model, "tiny")
    spec = LoraSpec(rank=rank, seed=1, alpha=2.0 * rank, **flags)
    layout = facts.layout(spec)
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(rank)) * 0.05
    return layout, flat, facts


def merged(model: Any, layout: AdapterLayout, flat: Tensor, facts: forms.ModelFacts) -> dict[str, Tensor]:
    """The model's weights with the adapter's product added to each slice and each expert, written out."""
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    pairs = layout.pairs(flat)
    deltas = {name: layout.scale * (pair.b @ pair.a) for name, pair in pairs.items()}  # broadcasts over experts
    for target in facts.targets:
        if target.sites[0].name not in pairs:
            continue
        if isinstance(target, LinearTarget):
            weight = weights[f"{target.name}.weight"]
            weight = weight.T if isinstance(model.get_submodule(target.name), Conv1D) else weight
            if not target.slices:
                weight += deltas[target.name]
            for rows in target.slices:
                blocks = weight.view(rows.blocks, -1, weight.shape[1])
                blocks[:, rows.start : rows.stop] += deltas[rows.name].view(rows.blocks, -1, weight.shape[1])
            continue
        module = model.get_submodule(target.name)
        first = "gate_up_proj" if target.has_gate else "up_proj"
        up, down = (weights[f"{target.name}.{name}"] for name in (first, "down_proj"))
        up, down = (up.mT, down.mT) if module.is_transposed else (up, down)
        size = target.intermediate
        down += deltas[f"{target.name}.w2"]
        if not target.has_gate:
            up += deltas[f"{target.name}.w1"]
        elif module.is_concatenated:
            up[:, :size] += deltas[f"{target.name}.w1"]
            up[:, size:] += deltas[f"{target.name}.w3"]
        else:
            up[:, ::2] += deltas[f"{target.name}.w1"]
            up[:, 1::2] += deltas[f"{target.name}.w3"]
    if HEAD in pairs:  # also where it is tied, and has no name of its own
        weights[f"{HEAD}.weight"] = model.get_output_embeddings().weight.detach() + deltas[HEAD]
    return weights


@torch.no_grad()
def logits(model: Any, weights: dict[str, Tensor] | None = None) -> Tensor:
    if weights is None:
        return model(input_ids=TOKENS).logits
    return functional_call(model, weights, kwargs={"input_ids": TOKENS}).logits


def assert_peft_agrees(model_type: str, folder: Path, form: Any = None, rank: int = 4, **flags: bool) -> None:
    model = tiny_model(model_type)
    layout, flat, facts = adapter(model, rank, **flags)
    plain, expected = logits(model), logits(model, merged(model, layout, flat, facts))
    assert (expected - plain).abs().max() > 0.1 * plain.std()
    forms.write_peft(folder, layout, flat, facts, form)
    assert torch.equal(reading.read_with_facts(folder, facts)[1], flat)
    loaded = load_with_peft(tiny_model(model_type), folder)
    assert (logits(loaded) - expected).abs().max() < 1e-4 * expected.std()


def load_with_peft(model: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for patterns of ranks among modules alone
        return PeftModel.from_pretrained(model, folder).eval()


WITH_EXPERTS = ("qwen3_moe", "gpt_oss", "nemotron_h", "mixtral", "qwen3_5_moe_text")
WITHOUT = ("qwen3_5_text", "qwen3_next", "granitemoehybrid", "deepseek_v3")


@pytest.mark.parametrize("model_type", WITH_EXPERTS)
def test_peft_loads_fused_experts(model_type: str, tmp_path: Path):
    assert_peft_agrees(model_type, tmp_path / "adapter", train_attn=model_type != "nemotron_h")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_peft_loads_a_pair_for_each_expert(model_type: str, tmp_path: Path):
    assert_peft_agrees(model_type, tmp_path / "adapter", "per_expert", rank=9)


@pytest.mark.parametrize("model_type", WITHOUT)
def test_peft_loads_fused_projections(model_type: str, tmp_path: Path):
    assert_peft_agrees(model_type, tmp_path / "adapter", rank=9, train_mlp=False)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text"])
def test_exported_checkpoint_is_loaded_by_peft(model_type: str, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny(model_type, tmp_path / "base"), dtype=torch.float32).eval()
    layout, flat, facts = adapter(model, 4)
    expected = logits(model, merged(model, layout, flat, facts))
    peft.write(tmp_path / "checkpoint", layout, flat, str(tmp_path / "base"), None)
    adapters.write(tmp_path / "checkpoint", tmp_path / "adapter", "peft")
    adapters.write(tmp_path / "checkpoint", tmp_path / "vllm", "vllm")
    assert torch.equal(reading.read_with_facts(tmp_path / "vllm", facts)[1], flat)
    assert (logits(load_with_peft(model, tmp_path / "adapter")) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("flag", PARTS)
def test_peft_loads_each_part_alone(flag: str, tmp_path: Path):
    flags = {name: name == flag for name in PARTS}
    assert_peft_agrees("gpt_oss", tmp_path / "adapter", **flags)


REFUSED = {"deepseek_v3": ("gate_proj", {}), "nemotron_h": ("out_proj", {"train_mlp": False})}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_peft_would_not_load_is_refused(model_type: str, tmp_path: Path):
    name, flags = REFUSED[model_type]
    layout, flat, facts = adapter(tiny_model(model_type), 4, **flags)
    with pytest.raises(Unsupported, match=name):
        forms.write_peft(tmp_path / "adapter", layout, flat, facts)


@pytest.mark.parametrize("model_type", [*WITH_EXPERTS, *WITHOUT])
def test_every_form_reads_back(model_type: str, tmp_path: Path):
    layout, flat, facts = adapter(tiny_model(model_type), 4)
    for name, write in (("tinker", forms.write_tinker), ("vllm", forms.write_vllm)):
        size = write(tmp_path / name, layout, flat, facts)
        assert size == sum(file.stat().st_size for file in (tmp_path / name).iterdir())
        assert torch.equal(reading.read_with_facts(tmp_path / name, facts)[1], flat)


FLAGS = [PARTS, *((name,) for name in PARTS)]


@pytest.mark.parametrize("model_type", [*WITH_EXPERTS, *WITHOUT])
def test_checkpoint_reads_back_with_its_flags(model_type: str, tmp_path: Path):
    model = tiny_model(model_type)
    for number, trained in enumerate(FLAGS):
        layout, flat, facts = adapter(model, 4, **{name: name in trained for name in PARTS})
        peft.write(tmp_path / str(number), layout, flat, "tiny", None)
        spec = read_spec(tmp_path / str(number))
        assert {name for name in PARTS if getattr(spec, name)} == set(trained)
        assert torch.equal(reading.read_with_facts(tmp_path / str(number), facts)[1], flat)


def test_tinker_form_has_the_services_names(tmp_path: Path):
    layout, flat, facts = adapter(tiny_model("nemotron_h"), 4)
    forms.write_tinker(tmp_path / "adapter", layout, flat, facts)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    experts = next(target for target in facts.targets if isinstance(target, ExpertTarget))
    prefix = f"base_model.model.{experts.name}"
    assert tensors[f"{prefix}.w1.lora_A.weight"].shape == (1, 4, experts.hidden)
    assert tensors[f"{prefix}.w1.lora_B.weight"].shape == (experts.experts, experts.intermediate, 4)
    assert tensors[f"{prefix}.w2.lora_A.weight"].shape == (experts.experts, 4, experts.intermediate)
    assert tensors[f"{prefix}.w2.lora_B.weight"].shape == (1, experts.hidden, 4)
    assert tensors[f"{prefix}.w3.lora_A.weight"].numel() == 0
    assert "base_model.model.model.unembed_tokens.lora_A.weight" in tensors
    assert any(key.endswith("mixer.x_proj.lora_B.weight") for key in tensors)


def test_file_without_some_matrices_is_refused(tmp_path: Path):
    layout, flat, facts = adapter(tiny_model("qwen3_moe"), 4)
    forms.write_peft(tmp_path / "adapter", layout, flat, facts)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    half = next(key for key in tensors if key.endswith("experts.base_layer.lora_A.weight"))
    save_file({key: tensor for key, tensor in tensors.items() if key != half}, file)
    with pytest.raises(ConfigError, match=r"experts\.base_layer\.lora_A"):
        reading.read_with_facts(tmp_path / "adapter", facts)
    save_file({key: tensor for key, tensor in tensors.items() if "layers.2.self_attn.q_proj" not in key}, file)
    with pytest.raises(Unsupported, match=r"lacks model\.layers\.2\.self_attn\.q_proj"):
        reading.read_with_facts(tmp_path / "adapter", facts)


def test_short_name_of_a_module_is_not_that_of_a_slice(tmp_path: Path):
    """PEFT's gate_proj is the MLP's; the rows of Mamba's in_proj that have this name here were not trained."""
    layout, flat, facts = adapter(tiny_model("bamba"), 4, train_attn=False, train_unembed=False)
    forms.write_peft(tmp_path / "adapter", layout, flat, facts)
    config = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(config.read_text()) | {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    config.write_text(json.dumps(settings))
    read, values = reading.read_with_facts(tmp_path / "adapter", facts)
    assert {name for name in read.pairs(values) if name.endswith("mamba.gate_proj")} == set()
    assert torch.equal(values, flat)
