"""Models beyond the four tested families: computed as transformers does, limited, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models import save_tokenizer
from tinsmith.engine.base import Datum, LoraSpec, Pass
from tinsmith.engine.build import build
from tinsmith.engine.config import EngineConfig
from tinsmith.errors import Unsupported

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 40
TOKENS = np.random.default_rng(0).integers(3, 512, 129)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Saves a random model of a transformers family, such as `saved("Mistral", sliding_window=64)`."""

    def save(kind: str, **settings: Any) -> Path:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
        model = getattr(transformers, f"{kind}ForCausalLM")(config(**{**SHAPE, **settings}))
        with torch.no_grad():
            model.lm_head.weight.mul_(2.5)
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        model.save_pretrained(tmp_path / kind)
        save_tokenizer(tmp_path / kind)
        return tmp_path / kind

    return save


def served(folder: Path, dtype: str = "float32") -> Any:
    return build(EngineConfig(source=str(folder), dtype=dtype, device="cpu", threads=1, path="fast"))  # type: ignore[arg-type]


def forward_pass(length: int) -> Pass:
    """A forward pass over the first tokens of TOKENS, with the next tokens as targets."""
    datum = Datum(tokens=TOKENS[:length].astype(np.int32), targets=TOKENS[1 : length + 1].astype(np.int64))
    return Pass(model_id="fresh", data=(datum,), loss_fn="cross_entropy", forward_only=True)


def logprobs(engine: Any, wait: Any, length: int) -> np.ndarray:
    """The engine's logprobs of these targets, under a new adapter."""
    wait(engine.create("fresh", LoraSpec(rank=1, seed=0)))
    (result,) = wait(engine.run([forward_pass(length)]))
    if isinstance(result, Exception):
        raise result
    return result.logprobs[0]


def expected(folder: Path, length: int, dtype: str = "float32") -> np.ndarray:
    """The same by plain transformers."""
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(TOKENS[None, :length])).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.from_numpy(TOKENS[1 : length + 1, None]))[:, 0].numpy()


WINDOWED = {
    "Mistral": {},
    "Ministral": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "Gemma3": {},
    "Cohere2": {"logit_scale": 1.0},
    "Exaone4": {"sliding_window_pattern": 4},
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_slide_at_every_length(kind: str, saved: Any, wait: Any) -> None:
    folder = saved(kind, sliding_window=WINDOW, **WINDOWED[kind])
    engine = served(folder)
    assert engine.card.context_length == 128
    np.testing.assert_allclose(logprobs(engine, wait, 128), expected(folder, 128), atol=2e-5)


@pytest.mark.parametrize("settings", [{"sliding_window": None}, {"sliding_window": 4096}])
def test_window_longer_than_context_is_ignored(settings: Any, saved: Any) -> None:
    assert served(saved("Mistral", **settings)).card.context_length == 128


def test_unused_sliding_window_is_ignored(saved: Any) -> None:
    folder = saved("Qwen2", use_sliding_window=False, sliding_window=WINDOW)
    assert served(folder).card.context_length == 128


REFUSED = {
    "StableLm": ({}, "cannot be computed here: TypeError"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_model_is_refused_by_name(kind: str, dtype: str, saved: Any) -> None:
    settings, named = REFUSED[kind]
    with pytest.raises(Unsupported, match=named):
        served(saved(kind, **settings), dtype)


OTHER_LAYERS = {
    "Olmo2": {},
    "SmolLM3": {"use_sliding_window": False},
    "Exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "Cohere": {"logit_scale": 1.0},
    "Granite": {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "Gemma": {},
    "Gemma2": {"sliding_window": WINDOW},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_models_with_other_layers_keep_their_modules(kind: str, dtype: str, saved: Any, wait: Any) -> None:
    folder = saved(kind, **OTHER_LAYERS[kind])
    exact = expected(folder, 128)
    rounding = np.abs(expected(folder, 128, dtype) - exact).mean()
    assert np.abs(logprobs(served(folder, dtype), wait, 128) - exact).mean() < 1.5 * rounding + 1e-5
