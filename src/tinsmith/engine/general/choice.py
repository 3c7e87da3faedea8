"""Chooses between the fast path and the general path at load, and checks the general path by computing.

The fast path runs packed trees through kernels of this engine; where it does not support a model, transformers' own
modules do. A model is refused only if neither gives transformers' own logits.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinsmith.engine.base import LoraSpec, ModelCard
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.general import cache
from tinsmith.engine.general.cache import CachedRows
from tinsmith.engine.general.model import GeneralModel
from tinsmith.engine.load_checks import LoadChecks
from tinsmith.engine.lora import targets
from tinsmith.engine.lora.linear import ActiveAdapters
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model import loading, packing, precision, self_check, support
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.logit_rule import logit_rule
from tinsmith.engine.sampling.kv_cache import cache_shape
from tinsmith.errors import TinsmithError, Unsupported

log = logging.getLogger(__name__)

MAX_ERROR = 1e-3
"""Largest error of a float32 logit, in units of the logits' standard deviation."""
MEAN_ERROR = 0.1
"""Mean error in other dtypes, where a flipped choice of a router moves single tokens."""

_HINT = "Serve another model, or report this one with its config.json."

_NO_CACHE = {
    "mamba": "keeps its state outside of transformers' key-value caches",
    "mamba2": "keeps its state outside of transformers' key-value caches",
    "falcon_mamba": "keeps its state outside of transformers' key-value caches",
    "minimax": "does not continue exactly after a prompt that ends inside a block of its linear attention",
    "recurrent_gemma": "keeps its state in its modules, so that rows cannot be separated",
}


def load(config: EngineConfig) -> BaseModel:
    """Load a model for the path that the settings name or, with `auto`, the fast path if it is supported."""
    loaded = loading.read(config)
    if config.path == "general":
        return prepare(loaded)
    fault = ""
    try:
        return _fast(loaded)
    except Unsupported as error:
        if config.path == "fast":
            raise
        if isinstance(error, self_check.NotComputable):  # of an architecture that the fast path supports
            fault = str(error)
        # As text: a log that keeps its records would keep the error, and its frames the model.
        log.log(logging.WARNING if fault else logging.INFO, "%s takes the general path: %s", config.source, str(error))
    # The fast path may have replaced modules. Its error has ended, whose frames refer to the model.
    del loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    base = prepare(loading.read(config))
    return replace(base, card=replace(base.card, general_path_fault=fault))


def _fast(loaded: loading.LoadedModel) -> BaseModel:
    base = loading.prepare(loaded)
    cache_shape(base)  # raises for layers that differ in it
    return base


def prepare(loaded: loading.LoadedModel) -> GeneralModel:
    """Freeze and check a model. Raises Unsupported if transformers' own logits do not come out.

    A vision tower is dropped: padded rows take no images.
    """
    model, tokenizer, source, tokenizer_source, _, checks = loaded
    model.eval().requires_grad_(False)
    precision.set_matmul_precision(model.dtype)
    model.set_attn_implementation("eager")
    name = f"{source} ({model.config.model_type})"
    if reason := _NO_CACHE.get(model.config.model_type):
        raise Unsupported(f"{name} {reason}.", _HINT)
    base = GeneralModel(
        card=_card(loading.card_of(source, tokenizer_source, model, tokenizer)),
        model=model,
        body=_body(model),
        tokenizer=tokenizer,
        checks=checks or LoadChecks(),
    )
    try:
        return checked(base, name)
    except TinsmithError:
        raise
    except Exception as error:
        raise Unsupported(f"{name} cannot be computed here: {type(error).__name__}: {error}.", _HINT) from error


def _card(card: ModelCard) -> ModelCard:
    """The card of a model on this path, where a pass has one kind of rotary embeddings: those of its longest row."""
    if not card.original_context:
        return replace(card, path="general")
    limit = support.limit_of_longrope(card.context_length, card.original_context)
    log.warning("%s is served up to %d tokens: %s.", card.source, card.original_context, limit)
    return replace(card, path="general", context_length=card.original_context, context_limit=limit, original_context=0)


def _body(model: PreTrainedModel) -> nn.Module:
    """The part that ends before the output head."""
    return model.get_submodule("model") if model.base_model is model else model.base_model


@torch.no_grad()
def checked(base: GeneralModel, name: str) -> GeneralModel:
    """The base, with `joins` as measured. Raises Unsupported unless rows and decoding agree with transformers."""
    rows = _probe_rows(base)
    plain = [base.model(input_ids=row[None], position_ids=_steps(row), use_cache=False).logits[0] for row in rows]
    head = LMHead(base.head, logit_rule(base.model), checks=base.checks)
    tree = packing.pack(
        [
            packing.PackedRow(key=key, adapter=0, tokens=row.cpu().numpy().astype(np.int32))
            for key, row in enumerate(rows)
        ]
    )
    hidden = base.hidden_of(tree)
    packed = [head.logits(hidden[torch.as_tensor(tree.index[key])], None) for key in range(len(rows))]
    if not _agree(base, packed, plain):
        raise Unsupported(f"{name} computes padded rows or its output head in an unsupported way.", _HINT)
    if not _agree(base, [_decoded(base, head, [row])[0] for row in rows], [logits[-3:] for logits in plain]):
        raise Unsupported(f"{name} does not continue rows from its cache exactly.", _HINT)
    try:
        joins = _agree(base, _decoded(base, head, rows), [logits[-3:] for logits in plain])
    except (Unsupported, RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        log.info("%s decodes one row at a time: %s", name, error)
        joins = False
    return replace(base, joins=joins)


def check_adapted(base: BaseModel, active: ActiveAdapters) -> None:
    """Connect the general path to an adapted base. Raises Unsupported if its modules do not run with adapters."""
    if not isinstance(base, GeneralModel):
        return
    base.adapters.append(active)
    try:
        checked(base, f"{base.card.source} ({base.card.arch})")
    except TinsmithError:
        raise
    except Exception as error:
        raise Unsupported(f"{base.card.source} does not run with LoRA: {error!r}.", _HINT) from error


def check_spec(base: BaseModel, spec: LoraSpec) -> None:
    """Raises Unsupported for an adapter on weights that no adapter of this path covers."""
    if not isinstance(base, GeneralModel) or not spec.train_mlp:
        return
    stacks = list(targets.unreached(base.model))
    if stacks:
        raise Unsupported(
            f"{base.card.source}: no LoRA on the mixture-of-experts weights {stacks[0]} on the general path.",
            "Create the model with train_mlp false.",
        )


def _decoded(base: GeneralModel, head: LMHead, rows: Sequence[Tensor]) -> list[Tensor]:
    """Logits [3, V] of the last three tokens of each row: one prefilled with the row alone, two from a cache."""
    parts, last = [], []
    for row in rows:
        output = base.rows(
            row[None, :-2], attention_mask=torch.ones_like(row[None, :-2]), position_ids=_steps(row[:-2]),
            use_cache=True,
        )  # fmt: skip
        parts.append(CachedRows(output.past_key_values, (len(row) - 2,)))
        last.append([output.last_hidden_state[0, -1:]])
    joined = parts[0] if len(parts) == 1 else cache.join([(part, [0]) for part in parts])
    for step in (2, 1):
        output = base.rows(
            torch.stack([row[-step] for row in rows])[:, None],
            attention_mask=joined.mask(base.device),
            position_ids=torch.tensor(joined.lengths, device=base.device)[:, None],
            past_key_values=joined.cache,
            use_cache=True,
        )
        joined = joined.grown(output.past_key_values)
        for number, hidden in enumerate(output.last_hidden_state):
            last[number].append(hidden)
    return [head.logits(torch.cat(hidden), None) for hidden in last]


def _agree(base: BaseModel, results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    error = torch.cat([result.float() - plain.float() for result, plain in zip(results, expected, strict=True)]).abs()
    scale = torch.cat([plain.float() for plain in expected]).std().clamp(min=1e-6)
    worst, limit = (error.max(), MAX_ERROR) if base.dtype == torch.float32 else (error.mean(), MEAN_ERROR)
    return bool(worst / scale < limit)


def _probe_rows(base: BaseModel) -> list[Tensor]:
    """Rows of three lengths; the second starts as the first does, and branches off it."""
    vocabulary, longest = base.card.vocab_size, min(24, base.card.context_length)
    first = torch.arange(longest) * 7 % vocabulary
    second, third = first[: max(3, longest - 7)].clone(), (torch.arange(max(3, longest // 3)) * 5 + 1) % vocabulary
    second[longest // 3 :] = (second[longest // 3 :] + 1) % vocabulary
    return [row.to(base.device) for row in (first, second, third)]


def _steps(row: Tensor) -> Tensor:
    return torch.arange(len(row), device=row.device)[None]
