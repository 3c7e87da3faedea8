"""The tiny models: each type gives logits that are far from flat, is the same for a seed, and loads from a folder."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.architectures import TYPES, save_tiny, tiny_model

FLAT = {"cohere", "cohere2", "cohere2_moe", "inkling_text"}
"""Types whose config scales the logits down."""


@pytest.mark.parametrize("model_type", [kind for kind in TYPES if kind not in FLAT])
@pytest.mark.slow
def test_logits_are_far_from_flat(model_type: str) -> None:
    model = tiny_model(model_type)
    tokens = torch.randint(3, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=tokens, position_ids=torch.arange(12)[None], use_cache=False).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.3


def test_every_parameter_follows_the_seed() -> None:
    first, again, other = (dict(tiny_model("gpt_oss", seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_moe_text"])
def test_saved_model_loads_with_the_same_logits(model_type: str, tmp_path: Path) -> None:
    saved = tiny_model(model_type, vocab_size=512)
    loaded = AutoModelForCausalLM.from_pretrained(save_tiny(model_type, tmp_path), dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, saved(tokens).logits, atol=1e-5)
