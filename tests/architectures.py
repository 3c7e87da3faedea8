"""Tiny random models of every architecture that transformers has and the tests know: configs, models, saved folders.

One recipe: about 100,000 parameters, and every parameter is drawn from a seed, because fresh weights hide errors: flat
logits, norms that are all one, biases and routers that are all zero, states that decay at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HUB_KERNELS", "0")  # read once, when transformers is imported

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.models import VOCABULARY as TOKENIZER_VOCABULARY
from tests.models import save_tokenizer

VOCABULARY = 96

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: Mapping[str, Any] = {
    # Aliases of one number: configs take the last one that they know.
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_topk": 3,
    "moe_k": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
}
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,  # taken from the width of RoPE
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_INDEXER: Mapping[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
_GATED_DELTA: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_SLIDING_AND_FULL: Mapping[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}


def _each(names: str, keys: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The same keys for each of some types."""
    return dict.fromkeys(names.split(), keys)


DENSE: Mapping[str, Mapping[str, Any]] = {
    **_each(
        "llama qwen2 qwen3 smollm3 gemma olmo2 glm glm4 phi stablelm seed_oss nanochat apertus minicpm3 cohere gpt2 "
        "granite mistral phi3 starcoder2 ministral3 doge llama4_text",
        {},
    ),
    **_each("gemma2 gemma3_text vaultgemma cohere2 olmo3 exaone4", _SLIDING_AND_FULL),
    "gpt2": {"n_embd": 64, "n_inner": 96, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "minicpm3": {**_MLA, "dim_model_base": 32},
    "gemma4_text": {**_SLIDING_AND_FULL, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
                    "global_head_dim": 16},
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "intermediate_size": [96] * 6,
                     "layer_types": ["sliding_attention", "full_attention"] * 3,
                     "activation_sparsity_pattern": [0.0] * 6, "vocab_size_per_layer_input": VOCABULARY,
                     "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    "llama4_text": {"intermediate_size_mlp": 96, "attention_chunk_size": 64, "num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["full_attention"] * 4, "block_ff_dim": 96, "block_multiple_of": 16},
}  # fmt: skip
MIXTURES: Mapping[str, Mapping[str, Any]] = {
    **_each(
        "qwen3_moe qwen2_moe olmoe mixtral minimax_m2 flex_olmo phimoe jetmoe dots1 ernie4_5_moe hunyuan_v1_moe "
        "solar_open laguna cohere2_moe exaone_moe hy_v3 mimo_v2_flash granitemoe granitemoeshared glm4_moe "
        "gpt_oss afmoe",
        {},
    ),
    **_each("glm4_moe_lite deepseek_v2 deepseek_v3 axk1", _MLA),
    **_each("deepseek_v32 glm_moe_dsa hy_v4 minimax_m3_vl_text", {**_MLA, **_INDEXER}),
    "gpt_oss": _SLIDING_AND_FULL,
    "deepseek_v4": {},
    "longcat_flash": {**_MLA, "num_hidden_layers": None, "num_layers": 2, "ffn_hidden_size": 96,
                      "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "head_dim": 8},
}  # fmt: skip
RECURRENT: Mapping[str, Mapping[str, Any]] = {
    **_each("qwen3_5_text qwen3_5_moe_text qwen3_next olmo_hybrid", _GATED_DELTA),
    "kimi_linear": {**_MLA, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 4,
                    "linear_head_dim": 16, "head_dim": None},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "mamba_d_state": 16, "use_mamba_kernels": False},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 128, "attention_head_dim": 32,
               "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 16, "num_mem_blocks": 1},
    "inkling_text": {},
    "inkling2_text": {},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
REFUSED: Mapping[str, Mapping[str, Any]] = {
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16},
    "recurrent_gemma": {"lru_width": 64, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
}
"""Types whose rows do not continue exactly from a cache of transformers."""
TYPES: tuple[str, ...] = (*DENSE, *MIXTURES, *RECURRENT, *REFUSED)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A config of one of TYPES; `changes` replace keys of the recipe. With fewer layers, these are the first ones."""
    tables = {**DENSE, **MIXTURES, **RECURRENT, **REFUSED}
    if model_type not in tables:
        raise ValueError(f"no tiny config of {model_type!r}; there are {', '.join(TYPES)}")
    keys = {**_COMMON, **(_MOE if model_type not in DENSE or model_type == "llama4_text" else {}), **tables[model_type]}
    # A config keeps keys that its type has not: a cache would see a window, and vLLM a shared expert without weights.
    for key in ("sliding_window", "shared_expert_intermediate_size"):
        if not hasattr(CONFIG_MAPPING[model_type], key):
            keys.pop(key, None)
    keys |= changes
    if "num_hidden_layers" in changes and "layer_types" in keys:
        keys["layer_types"] = keys["layer_types"][: changes["num_hidden_layers"]]
    if "vocab_size_per_layer_input" in keys:
        keys["vocab_size_per_layer_input"] = keys["vocab_size"]
    return CONFIG_MAPPING[model_type](**{key: value for key, value in keys.items() if value is not None})


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of one of TYPES with eager attention, every parameter drawn from the seed, in `eval` mode."""
    config = tiny_config(model_type, **changes)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    draw_parameters(model, seed)
    return model.eval().requires_grad_(False)


def save_tiny(model_type: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A float32 model of one of TYPES in `folder` with the tests' tokenizer, which an engine can load; returns it."""
    model = tiny_model(model_type, seed=seed, **{"vocab_size": TOKENIZER_VOCABULARY, **changes})
    if model.generation_config is not None:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@torch.no_grad()
def draw_parameters(model: nn.Module, seed: int) -> None:
    """Draw every parameter, and the buffers that choose experts, in the order of their names."""
    generator = torch.Generator("cpu").manual_seed(seed)
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if "correction_bias" in name}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name in sorted(tensors):
        tensor = tensors[name]
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        tensor.copy_(_drawn(name, tensor, noise, is_embedding=id(tensor) in embeddings))


def _drawn(name: str, tensor: torch.Tensor, noise: torch.Tensor, *, is_embedding: bool) -> torch.Tensor:
    """Values of a parameter from standard normal noise of its shape."""
    if name.endswith("A_log"):
        uniform = 0.5 * (1 + torch.erf(noise / math.sqrt(2)))
        return (0.2 + 3 * uniform).log()
    if is_embedding:
        return 0.5 * noise
    if "correction_bias" in name:
        return 0.1 * noise
    if "norm" in name and tensor.ndim == 1 and not name.endswith("bias"):
        return tensor.float() + 0.1 * noise
    if tensor.ndim < 2:
        return 0.2 * noise if "bias" in name or "sink" in name else tensor.float() + 0.1 * noise
    return noise / math.sqrt(_fan_in(name, tensor))


def _fan_in(name: str, tensor: torch.Tensor) -> int:
    """Inputs of each output of a matrix, a stack of matrices or a depthwise convolution."""
    if tensor.ndim == 3 and "conv" not in name:
        return min(tensor.shape[1:])  # a stack of matrices in either orientation
    return math.prod(tensor.shape[1:])
