"""Linear modules of routers and gates: found in every type by their place, and never in 4 bits."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from tests.architectures import TYPES, tiny_config
from tinsmith.engine.images.tower import without_weights
from tinsmith.engine.model.mixture.gates import linear_gates
from tinsmith.engine.model.quantization import four_bit_modules
from tinsmith.engine.model.support import is_experts_module
from tinsmith.engine.model_parts import place

GEMMA4_MIXTURE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
    "hidden_size_per_layer_input": 0,
}
GATES = {
    "afmoe": {"model.layers.mlp.router.gate"},
    "gemma4_text": {"model.layers.router.proj"},
    "hunyuan_v1_moe": {"model.layers.mlp.gate.wg"},
    "jetmoe": {"model.layers.mlp.router.layer", "model.layers.self_attention.experts.router.layer"},
    "llama4_text": {"model.layers.feed_forward.router"},
    "longcat_flash": {"model.layers.mlp.router.classifier"},
    "phimoe": {"model.layers.mlp.router"},
    "qwen2_moe": {"model.layers.mlp.shared_expert_gate"},
    "qwen3_5_moe_text": {"model.layers.mlp.shared_expert_gate"},
    "qwen3_next": {"model.layers.mlp.shared_expert_gate"},
    "zaya": {
        "model.layers.mlp.gate.down_proj",
        "model.layers.mlp.gate.router_mlp.fc1",
        "model.layers.mlp.gate.router_mlp.fc2",
        "model.layers.mlp.gate.router_mlp.out_proj",
    },
}
"""The types whose routers and gates are linear modules; other mixtures have a class for them."""
SMALLEST = 16
"""Outputs of the smallest projection of a tiny model. Experts are 8, routers have up to 10 outputs, gates one."""


def model_of(model_type: str) -> PreTrainedModel:
    return without_weights(tiny_config(model_type, **(GEMMA4_MIXTURE if model_type == "gemma4_text" else {})))


@pytest.mark.parametrize("model_type", TYPES)
def test_routers_and_gates_are_found_and_stay_out_of_4_bits(model_type: str) -> None:
    model = model_of(model_type)
    gates = linear_gates(model)
    assert {place(path) for path in gates} == GATES.get(model_type, set())
    assert not gates & four_bit_modules(model)


@pytest.mark.parametrize("model_type", TYPES)
def test_nothing_of_a_routers_size_beside_experts_is_in_4_bits(model_type: str) -> None:
    """By the number of outputs alone, which no name and no rule of the engine decides."""
    model = model_of(model_type)
    packed = four_bit_modules(model)
    blocks = [path for path, block in model.named_modules() if any(map(is_experts_module, block.children()))]
    for block in blocks:
        modules = {name: model.get_submodule(name) for name in packed if name.startswith(f"{block}.")}
        assert {name: module.out_features for name, module in modules.items() if module.out_features < SMALLEST} == {}


@pytest.mark.parametrize("model_type", TYPES)
def test_every_layer_with_experts_has_a_router(model_type: str) -> None:
    """As a class of its own or as linear modules: a router in a form that neither shows would be missed."""
    model = model_of(model_type)
    gates = linear_gates(model)
    for path, block in model.named_modules():
        if any(map(is_experts_module, block.children())):
            classes = [name for name, child in block.named_children() if type(child).__name__.endswith("Router")]
            linear = [gate for gate in gates if gate.startswith(f"{path}.") and _outputs(model, gate) > 1]
            assert classes or linear, path


def _outputs(model: PreTrainedModel, path: str) -> int:
    module = model.get_submodule(path)
    assert isinstance(module, nn.Linear)
    return module.out_features
