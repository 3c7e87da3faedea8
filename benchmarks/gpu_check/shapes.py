"""Models with random weights in the shapes of real ones, without a download, and tiny ones of their architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.comparison import Setting
from benchmarks.engine_driver import EngineDriver
from tinsmith.engine.model import loading
from tinsmith.engine.model.precision import dtype_name

FEW_LAYERS = 4
"""Layers of the models that are compared in float32."""


def _qwen3(width: int, inner: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )  # fmt: skip


REAL: Mapping[str, PreTrainedConfig] = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32, tied=False),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=40_960, tie_word_embeddings=False,
    ),
    "Qwen3.5-4B": Qwen3_5TextConfig(
        vocab_size=248_320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
    ),
}  # fmt: skip
_SMALL: Mapping[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
}  # fmt: skip
_SMALL_EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_SMALL_STATES: Mapping[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_TINY_CHANGES: Mapping[type[PreTrainedConfig], Mapping[str, Any]] = {
    Qwen3Config: _SMALL,
    Qwen3MoeConfig: {**_SMALL, **_SMALL_EXPERTS},
    Qwen3_5TextConfig: {**_SMALL, **_SMALL_STATES, "num_hidden_layers": 4},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Whether the step measures real shapes on a GPU or tiny ones on a CPU."""

    tiny: bool

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def of(self, real: int, tiny: int) -> int:
        """A number of the work: `real` on a GPU, `tiny` with tiny shapes."""
        return tiny if self.tiny else real

    def config(self, name: str, layers: int | None = None) -> PreTrainedConfig:
        """The configuration of the model `name`, with all its layers or the first `layers`."""
        config = REAL[name]
        changes = dict(_TINY_CHANGES[type(config)]) if self.tiny else {}
        if layers is not None:
            changes["num_hidden_layers"] = min(layers, changes.get("num_hidden_layers", config.num_hidden_layers))
        return type(config)(**{**config.to_dict(), "layer_types": None, **changes})

    def model(self, name: str, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
        """A model with random weights from a seed, and eager attention.

        A model of few layers has the same weights in both dtypes.
        """
        torch.manual_seed(0)
        drawn = dtype if layers is None else torch.float32
        with torch.device(self.device):
            config = self.config(name, layers)
            return AutoModelForCausalLM.from_config(config, dtype=drawn, attn_implementation="eager").to(dtype)

    def engine(
        self, name: str, dtype: torch.dtype = torch.bfloat16, layers: int | None = None, **options: Any
    ) -> EngineDriver:
        """An engine with such a model on the fast path; raises Unsupported if the fast path refuses it."""
        base = loading.prepare(loading.LoadedModel(self.model(name, dtype, layers), _tokenizer(), name, name))
        setting = Setting(folder=Path(name), threads=0, turns=0, dtype=dtype_name(dtype))
        return EngineDriver(setting, base, device=self.device, **options)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one word: no text is encoded or decoded here."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), eos_token="a")
