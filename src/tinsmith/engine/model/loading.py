"""Loads a base model through transformers' own model code, and checks that it is supported.

Supported are causal language models whose layers are attention with q, k, v and o projections and a gated MLP (Llama,
Qwen2, Qwen3, Mistral and relatives); `support` checks config and modules. At load, two short rows with a common prefix
are computed through the packed path and through transformers' eager attention; a model for which the two differ is
refused. Not supported: images, MoE models, quantized weights at run time. `sources` locates the files.
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
    """A loaded base model with frozen weights."""

    card: ModelCard
    model: PreTrainedModel
    body: nn.Module
    """Token embeddings -> last hidden states, without the output head."""
    tokenizer: Any
    float32_residual: bool = False
    """Whether the residual stream is float32 for every dtype of the base."""

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
        """int [T] tokens at int [T] positions -> [T, D] hidden states, with an autograd graph if gradients are
        enabled."""
        embedded = self.model.get_input_embeddings()(tokens)
        if self.float32_residual:
            embedded = embedded.float()
        if torch.is_grad_enabled():  # adapters compute their gradients by hand: the graph needs another leaf
            embedded = embedded.detach().requires_grad_()
        return self.body(
            inputs_embeds=embedded[None], position_ids=positions[None], use_cache=False, context=context
        ).last_hidden_state[0]


def load(config: EngineConfig) -> BaseModel:
    """Load the model. Raises ConfigError if it cannot be loaded, Unsupported if it is not supported."""
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    located = locate(config.source)
    if not sys.stderr.isatty():  # progress bars clutter a log
        disable_progress_bar()
    with load_errors(config.source):
        tokenizer = AutoTokenizer.from_pretrained(located.folder)
        model = AutoModelForCausalLM.from_pretrained(located.folder, dtype=dtype, attn_implementation="eager")
        model.to(device)  # pyright: ignore[reportArgumentType]
    return prepare(model, tokenizer, config.source, located.tokenizer)


def prepare(model: PreTrainedModel, tokenizer: Any, source: str, tokenizer_source: str) -> BaseModel:
    """Freeze and check a model with eager attention. Raises Unsupported if it is not supported."""
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


def _device(setting: str) -> torch.device:
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "Device cuda is requested, but PyTorch finds no GPU.", "Install a CUDA build of torch, or use cpu."
        )
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(setting: str, device: torch.device) -> torch.dtype:
    if setting != "auto":
        return getattr(torch, setting)
    native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


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
    """Raises Unsupported unless the packed path agrees with transformers' eager attention.

    Compared in float32, where rounding hides nothing, and then in the model's own dtype.
    """
    name = f"{base.card.source} ({base.card.arch})"
    try:
        with in_float32(base.model):
            agrees = _error(base, torch.float32) < 1e-3
        if base.dtype != torch.float32:
            # Rounding alone makes an error of 0.15 in sharp attention, so this only detects a broken kernel.
            agrees = agrees and _error(base, base.dtype) < 0.5
    except TinsmithError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise Unsupported(f"{name} cannot be computed here: {reason}.", support.HINT) from error
    if not agrees:
        raise Unsupported(f"{name} computes attention or its output head in an unsupported way.", support.HINT)


@torch.no_grad()
def _error(base: BaseModel, dtype: torch.dtype) -> float:
    """Mean error of the logits in units of their standard deviation, which a wrong mask or scale makes large.

    Leaves the model with the packed path's attention.
    """
    base.model.set_attn_implementation("eager")
    expected = base.model(input_ids=_probe_tokens(base).to(base.device)).logits.float()
    base.model.set_attn_implementation(attention.register(base.card.context_length))
    logits = probe(base, dtype) @ base.head.float().T
    return float((logits - expected).abs().mean() / expected.std().clamp(min=1e-6))


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Compute the module in float32 within the context.

    The parameters of each submodule are converted while it runs, so that only one submodule is in memory twice.
    """
    originals: dict[nn.Parameter, Tensor] = {}

    def widen(part: nn.Module, _inputs: Any) -> None:
        for parameter in part.parameters(recurse=False):
            originals[parameter], parameter.data = parameter.data, parameter.data.float()

    def restore(part: nn.Module, _inputs: Any, _outputs: Any) -> None:
        for parameter in part.parameters(recurse=False):
            parameter.data = originals.pop(parameter)

    hooks = []
    for part in module.modules():
        if isinstance(part, nn.Embedding):  # large, and a lookup is exact in any dtype
            hooks.append(part.register_forward_hook(lambda _part, _inputs, output: output.float()))
        elif any(True for _ in part.parameters(recurse=False)):
            hooks.append(part.register_forward_pre_hook(widen))
            hooks.append(part.register_forward_hook(restore, always_call=True))
    try:
        with _ieee_products():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _ieee_products() -> Iterator[None]:
    """Multiply float32 exactly within the context, whatever an engine of this process has set."""
    backends: Any = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # pyright: ignore[reportAttributeAccessIssue]
    previous = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, previous, strict=True):
            backend.fp32_precision = precision


@torch.no_grad()
def probe(base: BaseModel, dtype: torch.dtype | None = None) -> Tensor:
    """float32 hidden states [2, N, D] of the probe rows through the packed path."""
    tree = probe_tree(base)
    hidden = base.hidden(
        torch.as_tensor(tree.tokens, device=base.device),
        torch.as_tensor(tree.positions, device=base.device),
        attention.packed_attention(tree, dtype or base.dtype, base.device),
    )
    return torch.stack([hidden[torch.as_tensor(tree.index[key])].float() for key in (0, 1)])


def probe_tree(base: BaseModel) -> packing.PackedTree:
    """Two short rows with a common prefix, packed."""
    return packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=row.numpy()) for key, row in enumerate(_probe_tokens(base))]
    )


def _probe_tokens(base: BaseModel) -> Tensor:
    """int32 [2, N] tokens; the first half of both rows is the same."""
    length = min(24, base.card.context_length)
    tokens = torch.arange(2 * length).remainder(base.card.vocab_size).view(2, length).to(torch.int32)
    tokens[1, : length // 2] = tokens[0, : length // 2]
    return tokens
