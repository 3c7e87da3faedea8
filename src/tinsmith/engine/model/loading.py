"""Load a base model through transformers' own model code, and see whether it is one that we serve.

What is served: causal language models whose layers are attention with q/k/v/o projections and a gated MLP (Llama,
Qwen2, Qwen3, Mistral and their kin). `served.py` says what their config and parts must be. At load, a short forked text
is run through the packed path and through transformers' own eager attention; a model for which the two disagree is
refused. Left out: images, mixtures of experts, quantized weights at run time. Where its files come from:
`sources.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tinsmith.engine.base import ModelCard
from tinsmith.engine.config import EngineConfig
from tinsmith.engine.model import attention, packing, support
from tinsmith.engine.model.sources import load_errors, locate
from tinsmith.errors import ConfigError, TinsmithError, Unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A base model ready to be prepare: frozen weights."""

    card: ModelCard
    model: PreTrainedModel
    body: nn.Module
    """Tokens' embeddings -> last hidden states, without the head."""
    tokenizer: Any
    float32_residual: bool = False
    """Whether the residual stream is float32 whatever the base's dtype is."""

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def head(self) -> Tensor:
        """The output weights [V, D]."""
        return self.model.get_output_embeddings().weight.detach()  # pyright: ignore[reportOptionalMemberAccess,reportReturnType,reportCallIssue]

    @property
    def device(self) -> torch.device:
        return self.head.device

    def hidden(self, tokens: Tensor, positions: Tensor, context: attention.AttentionContext) -> Tensor:
        """int [T] tokens at int [T] positions -> [T, D] hidden states; with gradients if they are enabled."""
        embedded = self.model.get_input_embeddings()(tokens)
        if self.float32_residual:
            embedded = embedded.float()
        if torch.is_grad_enabled():  # the adapters' gradients are taken by hand, in passing: the graph needs a leaf
            embedded = embedded.detach().requires_grad_()
        return self.body(
            inputs_embeds=embedded[None], position_ids=positions[None], use_cache=False, context=context
        ).last_hidden_state[0]


def load(config: EngineConfig) -> BaseModel:
    """Raises ConfigError when there is no such model, Unsupported when it is not one that we serve."""
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    located = locate(config.source)
    if not sys.stderr.isatty():  # progress bars make a mess of a log
        disable_progress_bar()
    with load_errors(config.source):
        tokenizer = AutoTokenizer.from_pretrained(located.folder)
        model = AutoModelForCausalLM.from_pretrained(located.folder, dtype=dtype, attn_implementation="eager")
        model.to(device)  # pyright: ignore[reportArgumentType]
    return prepare(model, tokenizer, config.source, located.tokenizer)


def prepare(model: PreTrainedModel, tokenizer: Any, source: str, tokenizer_source: str) -> BaseModel:
    """A model with eager attention, frozen and checked. Raises Unsupported when it is not one that we serve."""
    model.eval().requires_grad_(False)
    support.check(source, model)
    base = BaseModel(
        card=_card(source, tokenizer_source, model, tokenizer),
        model=model,
        body=model.base_model,
        tokenizer=tokenizer,
    )
    _check_attention(base)
    return base


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but PyTorch finds no GPU.", "Install a CUDA build of torch, or use cpu.")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        return getattr(torch, wanted)
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _card(source: str, tokenizer_source: str, model: PreTrainedModel, tokenizer: Any) -> ModelCard:
    eos = model.generation_config.eos_token_id if model.generation_config else None
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    return ModelCard(
        source=source,
        tokenizer=tokenizer_source,
        arch=model.config.model_type,
        vocab_size=model.config.vocab_size,
        context_length=support.context_length(source, model.config),
        eos_token_ids=tuple(sorted(ids)),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
    )


def _check_attention(base: BaseModel) -> None:
    """The packed path must give what transformers' eager attention gives, on a text with a fork in it: in float32,
    where rounding hides nothing, and then as it will run.
    """
    what = f"{base.card.source} ({base.card.arch})"
    try:
        with in_float32(base.model):
            same = _error(base, torch.float32) < 1e-3
        if (
            base.dtype != torch.float32
        ):  # sharp attention is 0.15 off by rounding alone: here only a broken kernel shows
            same = same and _error(base, base.dtype) < 0.5
    except TinsmithError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise Unsupported(f"{what} cannot be computed here: {reason}.", support.HINT) from error
    if not same:
        raise Unsupported(f"{what} computes attention or its head in a way that is not served here.", support.HINT)


@torch.no_grad()
def _error(base: BaseModel, dtype: torch.dtype) -> float:
    """Of the logits, by their spread: a wrong mask or a scaled head is off by much more than rounding is. Leaves the
    model with our attention.
    """
    base.model.set_attn_implementation("eager")
    expected = base.model(input_ids=_probe_tokens(base).to(base.device)).logits.float()
    base.model.set_attn_implementation(attention.register(base.card.context_length))
    got = probe(base, dtype) @ base.head.float().T
    return float((got - expected).abs().mean() / expected.std().clamp(min=1e-6))


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Inside, the module computes in float32. Its parts' own weights are in_float32 each while it is at work, so
    that one part's at a time stand in memory twice.
    """
    originals: dict[nn.Parameter, Tensor] = {}

    def widen(part: nn.Module, _inputs: Any) -> None:
        for one in part.parameters(recurse=False):
            originals[one], one.data = one.data, one.data.float()

    def restore(part: nn.Module, _inputs: Any, _outputs: Any) -> None:
        for one in part.parameters(recurse=False):
            one.data = originals.pop(one)

    hooks = []
    for part in module.modules():
        if isinstance(part, nn.Embedding):  # exact as it is, and large
            hooks.append(part.register_forward_hook(lambda _part, _inputs, found: found.float()))
        elif any(True for _ in part.parameters(recurse=False)):
            hooks.append(part.register_forward_pre_hook(widen))
            hooks.append(part.register_forward_hook(restore, always_call=True))
    try:
        with _exact_products():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _exact_products() -> Iterator[None]:
    """Inside, float32 is not multiplied as anything less, whatever an engine of this process has set."""
    kinds: Any = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # pyright: ignore[reportAttributeAccessIssue]
    before = [one.fp32_precision for one in kinds]
    try:
        for one in kinds:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, precision in zip(kinds, before, strict=True):
            one.fp32_precision = precision


@torch.no_grad()
def probe(base: BaseModel, dtype: torch.dtype | None = None) -> Tensor:
    """float32 hidden states [2, N, D] of a short text with a fork in it, through the packed path."""
    tree = probe_tree(base)
    hidden = base.hidden(
        torch.as_tensor(tree.tokens, device=base.device),
        torch.as_tensor(tree.positions, device=base.device),
        attention.packed_attention(tree, dtype or base.dtype, base.device),
    )
    return torch.stack([hidden[torch.as_tensor(tree.index[key])].float() for key in (0, 1)])


def probe_tree(base: BaseModel) -> packing.PackedTree:
    """That text, packed."""
    return packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=row.numpy()) for key, row in enumerate(_probe_tokens(base))]
    )


def _probe_tokens(base: BaseModel) -> Tensor:
    """int32 [2, N] tokens, the first half of both the same."""
    length = min(24, base.card.context_length)
    tokens = torch.arange(2 * length).remainder(base.card.vocab_size).view(2, length).to(torch.int32)
    tokens[1, : length // 2] = tokens[0, : length // 2]
    return tokens
