"""What adapters reach: the vendor's parameter counts, row slices, and refusals by name."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "0")  # read once, when transformers is imported

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tinsmith.engine.lora.targets import targets
from tinsmith.errors import Unsupported

QWEN = {"vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "full_attention_interval": 4}


def qwen3_5(layers: int, hidden: int, heads: int, keys: int, values: int, **sizes: int) -> dict[str, Any]:
    return {
        **QWEN, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": keys, "linear_num_value_heads": values, **sizes,
    }  # fmt: skip


def mixture(layers: int, hidden: int, heads: int, experts: int, intermediate: int, **sizes: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_experts": experts,
        "moe_intermediate_size": intermediate, **sizes,
    }  # fmt: skip


def nemotron(pattern: dict[str, int], **sizes: int) -> dict[str, Any]:
    """A config with these numbers of layers of each type; their order does not matter here."""
    layers = [kind for kind, count in pattern.items() for _ in range(count)]
    return {
        "layers_block_type": layers, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_head_dim": 64, "vocab_size": 131072, **sizes,
    }  # fmt: skip


# Parameters per unit of rank: attention, MLP, output head. From the hosted service's own table.
COUNTS = {
    "Llama-3.2-1B": ("llama", {
        "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256,
    }, (212_992, 491_520, 130_304)),
    "Qwen3-8B": ("qwen3", {
        "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    }, (958_464, 1_769_472, 156_032)),
    "Qwen3-30B-A3B": ("qwen3_moe", mixture(
        48, 2048, 32, 128, 768, num_key_value_heads=4, head_dim=128, vocab_size=151936
    ), (835_584, 14_450_688, 153_984)),
    "Qwen3-235B-A22B": ("qwen3_moe", mixture(
        94, 4096, 64, 128, 1536, num_key_value_heads=4, head_dim=128, vocab_size=151936
    ), (3_176_448, 56_598_528, 156_032)),
    "Qwen3.5-4B": ("qwen3_5_text", qwen3_5(32, 2560, 16, 4, 32, intermediate_size=9216), (897_024, 1_130_496, 250_880)),
    "Qwen3.5-9B": ("qwen3_5_text", qwen3_5(32, 4096, 16, 4, 32, intermediate_size=12288), (
        1_130_496, 1_572_864, 252_416)),
    "Qwen3.5-27B": ("qwen3_5_text", qwen3_5(64, 5120, 24, 4, 48, intermediate_size=17408), (
        2_965_504, 4_325_376, 253_440)),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", qwen3_5(
        40, 2048, 16, 2, 32, num_experts=256, moe_intermediate_size=512, shared_expert_intermediate_size=512
    ), (1_013_760, 16_281_600, 250_368)),
    "Qwen3.5-397B-A17B": ("qwen3_5_moe_text", qwen3_5(
        60, 4096, 32, 2, 64, num_experts=512, moe_intermediate_size=1024, shared_expert_intermediate_size=1024
    ), (2_841_600, 96_030_720, 252_416)),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, (497_664, 6_842_880, 203_968)),
    "gpt-oss-120b": ("gpt_oss", {}, (746_496, 40_124_160, 203_968)),
    "DeepSeek-V3.1": ("deepseek_v3", {}, (2_440_000, 94_307_328, 136_448)),
    "Kimi-K2.6": ("deepseek_v3", {
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
        "vocab_size": 163840,
    }, (1_940_288, 144_583_680, 171_008)),
    "GLM-5.3": ("glm_moe_dsa", {}, (2_920_320, 121_356_288, 161_024)),
    "Nemotron-3-Nano": ("nemotron_h", nemotron(
        {"mamba": 23, "moe": 23, "attention": 6}, hidden_size=2688, mamba_num_heads=64, n_routed_experts=128,
        moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
    ), (584_832, 11_346_176, 133_760)),
    "Nemotron-3-Super": ("nemotron_h", nemotron(
        {"mamba": 40, "moe": 40, "attention": 8}, hidden_size=4096, mamba_num_heads=128, n_routed_experts=512,
        moe_intermediate_size=2688, moe_latent_size=1024, moe_shared_expert_intermediate_size=5376,
    ), (1_675_264, 111_349_760, 135_168)),
    "Inkling-2-Small": ("inkling2_text", {}, (2_347_008, 128_065_536, 205_632)),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_per_rank_are_the_vendors(name: str):
    model_type, sizes, expected = COUNTS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes))
    counts = Counter[str]()
    for target in targets(model):
        counts[target.part] += sum(site.parameters_per_rank for site in target.sites)
    head: Any = model.get_output_embeddings()
    assert (counts["attn"], counts["mlp"], sum(head.weight.shape)) == expected


def test_unknown_linear_is_refused_by_name():
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes))
        model.model.layers[0].mlp.sparsity_gate = nn.Linear(64, 4)
    with pytest.raises(Unsupported, match=r"layers\.mlp\.sparsity_gate"):
        list(targets(model))
