"""Checks at load that a model continues from the KV cache and from recurrent states as its packed pass computes it.

`model.self_check` has compared the packed pass with transformers; the general path checks its decoding by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.model import packing
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.self_check import probe_tree
from tinsmith.engine.sampling.banks.layers import CompiledLayers
from tinsmith.engine.sampling.decode import AttentionFunction, DecodeAttention, step_context
from tinsmith.engine.sampling.kv_cache import RowCache
from tinsmith.engine.sampling.prefill import PrefilledPrompt, Prompt, prefill_pass
from tinsmith.engine.sampling.prefixes.cache import PrefixMatch
from tinsmith.errors import Unsupported

log = logging.getLogger(__name__)

STEPS = 2
"""Tokens of each row that are decoded one by one."""


def check_banks(base: BaseModel, kv_cache: RowCache, function: AttentionFunction | None) -> AttentionFunction | None:
    """Check decoding in an empty cache, as `check`. Returns the function, or None if decoding is right only without."""

    def works() -> bool:
        try:
            check(base, partial(DecodeAttention, function=function), kv_cache)
        except Unsupported as error:
            if function is None:
                raise
            log.warning("The compiled attention does not work here; decoding is slower. %s", error)
            check(base, DecodeAttention, kv_cache)
            return False
        return True

    return function if base.checks.result("decoding", works) else None


def check_layers(
    base: BaseModel, kv_cache: RowCache, function: AttentionFunction | None, layers: CompiledLayers
) -> bool:
    """Whether a step whose layers are one call has the bits of one layer by layer, in an empty cache."""
    try:
        return base.checks.result("decoding layers", lambda: _same_bits(base, kv_cache, function, layers))
    except Exception:
        log.warning("The layers of %s do not work as one call; decoding is slower.", base.card.source, exc_info=True)
        return False


@torch.no_grad()
def _same_bits(base: BaseModel, kv_cache: RowCache, function: AttentionFunction | None, layers: CompiledLayers) -> bool:
    with _probe_rows(base, kv_cache) as (rows, cached, _):
        tokens = torch.stack([row[-STEPS] for row in rows])
        positions = torch.tensor([row.position for row in cached], device=base.device)
        attention = DecodeAttention(cached, function)
        expected = base.hidden(tokens, positions, attention)
        step = DecodeAttention(cached, function).compiled
        actual = None if step is None else layers.hidden(tokens, positions, step, ())
        layers.release_memory()
        return actual is not None and torch.equal(actual, expected)


@torch.no_grad()
def check(base: BaseModel, attention: Callable[[list[Any]], Any], kv_cache: RowCache) -> None:
    """Decode the last tokens of two rows with a common prefix in an empty cache. Raises Unsupported if they differ.

    `attention` makes the context of a step from rows of the cache.
    """
    try:
        actual, expected = (hidden.float() for hidden in _decoded(base, attention, kv_cache))
    except Exception as error:
        raise _refusal(base, f"{type(error).__name__}: {error}") from error
    difference = float((actual - expected).abs().mean() / expected.std().clamp(min=1e-6))
    # In bfloat16, a router near a tie may choose other experts; then this only detects a wrong cache.
    if not difference < (1e-3 if base.dtype == torch.float32 else 0.5):
        raise _refusal(base, f"its hidden states differ by {difference:.2g} standard deviations")


def _decoded(base: BaseModel, attention: Callable[[list[Any]], Any], kv_cache: RowCache) -> tuple[Tensor, Tensor]:
    """Hidden states [rows, STEPS, D] of the last tokens of each row: decoded, and as a prefill of the whole rows
    computes them."""
    with _probe_rows(base, kv_cache) as (rows, cached, expected):
        steps = []
        for step in range(-STEPS, 0):
            context = attention(cached)
            hidden = base.hidden(
                torch.stack([row[step] for row in rows]),
                torch.tensor([row.position for row in cached], device=base.device),
                step_context(context, base.recurrent, kv_cache.states),
            )
            context.advance()
            steps.append(hidden)
        return torch.stack(steps, 1), expected


@contextmanager
def _probe_rows(base: BaseModel, kv_cache: Any) -> Iterator[tuple[list[Tensor], list[Any], Tensor]]:
    """The rows of the probe, what `_prefilled` returns of them, and an empty cache afterwards."""
    tree = probe_tree(base)
    rows = [torch.as_tensor(tree.tokens[path], device=base.device) for _, path in sorted(tree.index.items())]
    cached, expected = _prefilled(base, kv_cache, rows)
    try:
        yield rows, cached, expected
    finally:
        for cache_row in reversed(cached):
            kv_cache.remove(cache_row)


def _prefilled(base: BaseModel, kv_cache: Any, rows: list[Tensor]) -> tuple[list[Any], Tensor]:
    """A cache row for each row, without the tokens to decode, and the hidden states of these; all from one pass."""
    prompts = [
        Prompt(
            row=packing.PackedRow(key=key, adapter=0, tokens=row.cpu().numpy()),
            match=PrefixMatch(),
            first_hidden=len(row) - 1,
        )
        for key, row in enumerate([*(row[:-STEPS] for row in rows), *rows])
    ]
    inputs = prefill_pass(prompts, base)
    hidden = base.hidden(inputs.tokens, inputs.positions, inputs.context)
    cached = []
    for key, row in enumerate(rows):
        last = hidden[int(inputs.hidden_index[key][-1])]
        prompt = PrefilledPrompt(last, inputs.segments[key], inputs.context.saved_kv, inputs.state(key))
        cached.append(kv_cache.insert(prompt, len(row), len(rows)))
        kv_cache.start_state(cached[-1], prompt.state)
    whole = [inputs.hidden_index[len(rows) + key][-STEPS:] for key in range(len(rows))]
    return cached, hidden[torch.as_tensor(np.stack(whole), device=base.device)]


def _refusal(base: BaseModel, reason: str) -> Unsupported:
    return Unsupported(
        f"{base.card.source} ({base.card.arch}) does not continue rows from the cache exactly: {reason}.",
        "Serve it with path: general, and report it with its config.json.",
    )
