"""Every architecture on the general path against transformers' own eager forward, in float32.

For each type: logits of padded rows, of prefill and decoding one row alone, and of rows that decode together.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.architectures import REFUSED, TYPES, tiny_model
from tinsmith.engine.general import cache, choice
from tinsmith.engine.general.cache import CachedRows
from tinsmith.engine.general.model import GeneralModel
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model import packing
from tinsmith.engine.model.loading import LoadedModel
from tinsmith.engine.model.logit_rule import logit_rule
from tinsmith.errors import Unsupported

QUICK = ("llama", "gpt2", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "nemotron_h", "phi")
TOLERANCE = 1e-4
"""Of the standard deviation of the logits."""
LENGTHS = (21, 5, 13)
STEPS = 4
"""Tokens of each row that come from the cache."""

SERVED = [kind for kind in TYPES if kind not in REFUSED]
PARAMETERS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in SERVED]


def general(model_type: str) -> GeneralModel:
    tokenizer = SimpleNamespace(eos_token_id=2)
    return choice.prepare(LoadedModel(tiny_model(model_type), tokenizer, model_type, model_type))


def rows_of(base: GeneralModel) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, base.card.vocab_size, (length,), generator=generator) for length in LENGTHS]
    rows[2][:3] = rows[0][:3]  # a shared prefix
    return rows


def plain_logits(base: GeneralModel, row: Tensor) -> Tensor:
    return base.model(input_ids=row[None], position_ids=torch.arange(len(row))[None], use_cache=False).logits[0]


def error(results: list[Tensor], expected: list[Tensor]) -> float:
    return float((torch.cat(results) - torch.cat(expected)).abs().max() / torch.cat(expected).std())


@pytest.mark.parametrize("model_type", PARAMETERS)
@torch.no_grad()
def test_logits_equal_transformers(model_type: str) -> None:
    base = general(model_type)
    rows, head = rows_of(base), LMHead(base.head, logit_rule(base.model))
    expected = [plain_logits(base, row) for row in rows]
    tree = packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=row.int().numpy()) for key, row in enumerate(rows)]
    )
    hidden = base.hidden_of(tree)
    padded = [head.logits(hidden[torch.as_tensor(tree.index[key])], None) for key in range(len(rows))]
    assert error(padded, expected) < TOLERANCE
    last = [logits[-STEPS:] for logits in expected]
    assert error([decoded(base, head, [row])[0] for row in rows], last) < TOLERANCE
    assert base.joins is (model_type not in ALONE)
    if base.joins:
        assert error(decoded(base, head, rows), last) < TOLERANCE


ALONE = {"deepseek_v4"}
"""Types whose rows decode one at a time."""


def decoded(base: GeneralModel, head: LMHead, rows: list[Tensor]) -> list[Tensor]:
    parts = []
    for row in rows:
        prompt = row[None, :-STEPS]
        steps = torch.arange(prompt.shape[1])[None]
        output = base.rows(prompt, attention_mask=torch.ones_like(prompt), position_ids=steps, use_cache=True)
        parts.append(CachedRows(output.past_key_values, (prompt.shape[1],)))
    joined = parts[0] if len(parts) == 1 else cache.join([(part, [0]) for part in parts])
    logits = []
    for step in range(STEPS, 0, -1):
        output = base.rows(
            torch.stack([row[-step] for row in rows])[:, None],
            attention_mask=joined.mask(torch.device("cpu")),
            position_ids=torch.tensor(joined.lengths)[:, None],
            past_key_values=joined.cache,
            use_cache=True,
        )
        joined = joined.grown(output.past_key_values)
        logits.append(head.logits(output.last_hidden_state[:, -1], None))
    return list(torch.stack(logits, dim=1))


@pytest.mark.parametrize("model_type", REFUSED)
def test_types_without_a_cache_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(Unsupported, match=model_type):
        general(model_type)
