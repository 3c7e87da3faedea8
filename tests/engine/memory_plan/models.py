"""Configs of well-known models, as transformers' classes with their published shapes; nothing is downloaded."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig


def _qwen3(layers: int, hidden: int, inner: int, heads: int, *, tied: bool = False) -> PreTrainedConfig:
    return AutoConfig.for_model(
        "qwen3", vocab_size=151_936, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )  # fmt: skip


def _llama(layers: int, hidden: int, inner: int, heads: int, *, tied: bool = False) -> PreTrainedConfig:
    return AutoConfig.for_model(
        "llama", vocab_size=128_256, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=131_072, tie_word_embeddings=tied,
    )  # fmt: skip


def configs() -> dict[str, PreTrainedConfig]:
    """By the name of the model."""
    long = _qwen3(36, 2560, 9728, 32, tied=True)
    long.max_position_embeddings = 262_144
    return {
        "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
        "Qwen3-4B": _qwen3(36, 2560, 9728, 32, tied=True),
        "Qwen3-4B-Instruct-2507": long,
        "Qwen3-8B": _qwen3(36, 4096, 12_288, 32),
        "Qwen3-32B": _qwen3(64, 5120, 25_600, 64),
        "Qwen3-30B-A3B": AutoConfig.for_model(
            "qwen3_moe", vocab_size=151_936,
            num_hidden_layers=48, hidden_size=2048, intermediate_size=6144, num_experts=128,
            moe_intermediate_size=768, num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=False,
        ),
        "Qwen2.5-7B": AutoConfig.for_model(
            "qwen2", vocab_size=152_064, num_hidden_layers=28, hidden_size=3584, intermediate_size=18_944,
            num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32_768, tie_word_embeddings=False,
        ),
        "Llama-3.2-3B": _llama(28, 3072, 8192, 24, tied=True),
        "Llama-3.1-8B": _llama(32, 4096, 14_336, 32),
        "Mistral-7B-v0.3": AutoConfig.for_model(
            "mistral", vocab_size=32_768, num_hidden_layers=32, hidden_size=4096, intermediate_size=14_336,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=32_768, sliding_window=None,
        ),
        "gemma-2-9b": AutoConfig.for_model(
            "gemma2", vocab_size=256_000, num_hidden_layers=42, hidden_size=3584, intermediate_size=14_336,
            num_attention_heads=16, num_key_value_heads=8, head_dim=256, max_position_embeddings=8192,
        ),
        "gpt-oss-20b": AutoConfig.for_model(
            "gpt_oss", vocab_size=201_088,
            num_hidden_layers=24, hidden_size=2880, intermediate_size=2880, num_local_experts=32,
            num_experts_per_tok=4, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
            max_position_embeddings=131_072,
        ),
        "DeepSeek-V2-Lite": AutoConfig.for_model(
            "deepseek_v2", vocab_size=102_400, num_hidden_layers=27, hidden_size=2048, intermediate_size=10_944,
            moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
            first_k_dense_replace=1, num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512,
            q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            max_position_embeddings=163_840, topk_method="greedy", n_group=1, topk_group=1,
        ),
    }  # fmt: skip
