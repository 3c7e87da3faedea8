"""Checks a model at load by computing: the packed path must give what transformers' eager attention gives.

Two short rows with a common prefix are computed both ways, in float32 and in the model's own dtype. A model for which
they differ is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tinsmith.engine.cpu.arguments import has_loops
from tinsmith.engine.model import attention, flex_attention, packing, precision, support
from tinsmith.engine.model.architectures.uniform_kv import UniformKV, uniform_kv
from tinsmith.engine.model.attention_rule import AttentionRule
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.logit_rule import logit_rule
from tinsmith.errors import TinsmithError, Unsupported

log = logging.getLogger(__name__)

MAX_PROBE_WINDOW = 128
"""The probe's rows are longer than windows up to this one. Beyond larger windows only the tests have computed."""


PROBE_ROW = 60
"""Tokens of the rows with which the compiled attention is checked."""
COMPILED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Error of outputs and gradients by the largest of them: bfloat16 rounds to 1/256 of a number, and more than once."""


class NotComputable(Unsupported):
    """A model of a supported architecture that the packed path does not compute here."""


def with_flex_attention(base: BaseModel) -> BaseModel:
    """The base with FlexAttention, if this machine compiles it for the base's own heads, windows and dtype."""
    if not flex_attention.is_supported(base.device):
        return base
    base.model.set_attn_implementation(attention.register())
    return compiled_or_without(replace(base, flex_attention=True), probe)


def with_compiled_attention(base: BaseModel) -> BaseModel:
    """The base with compiled attention, if this machine compiles it and it is right."""
    outputs, gradients = (partial(_compiled_attention_works, base.dtype, gradients=each) for each in (False, True))
    works = (
        has_loops(base.device, base.dtype)
        and base.checks.result("compiled attention", outputs)
        and base.checks.gradients_result("gradients of compiled attention", gradients)
    )
    return replace(base, compiled_attention=works)


def _compiled_attention_works(dtype: torch.dtype, *, gradients: bool) -> bool:
    """Whether outputs of two rows with a common prefix, and gradients, are those of PyTorch's operators."""
    tokens, cpu = np.arange(PROBE_ROW), torch.device("cpu")
    tree = packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=tokens * (1 + key * (tokens > PROBE_ROW // 2))) for key in (0, 1)]
    )
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, len(tree.tokens), width) for heads, width in ((4, 24), (2, 24), (2, 16))]
    inputs = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]
    output_grad = torch.randn(1, len(tree.tokens), 4, 16, generator=draw).to(dtype)
    results = list[list[Tensor]]()
    try:
        for compiled in (True, False):
            context = attention.packed_attention(tree, dtype, cpu, compiled=compiled)
            with torch.enable_grad():
                query, key, value = inputs
                output = context.attend(0, query, key, value, AttentionRule(0.25))
            results.append([output, *(torch.autograd.grad(output, inputs, output_grad) if gradients else ())])
        pairs = zip(*([tensor.detach().float() for tensor in result] for result in results), strict=True)
        errors = [float((left - right).abs().max() / right.abs().max()) for left, right in pairs]
        if not max(errors) < COMPILED_TOLERANCE[dtype]:
            raise ValueError(f"its results are wrong by {max(errors):.2g}")
    except Exception:
        log.warning("The compiled attention does not work here: all is slower without it.", exc_info=True)
        return False
    return True


def compiled_or_without(base: BaseModel, compute: Callable[[BaseModel], object]) -> BaseModel:
    """The base if `compute`, which computes with its FlexAttention, succeeds; else the base without it."""
    try:
        compute(base)
    except Exception:
        log.warning(
            "FlexAttention does not compile for %s: attention is slower without it.", base.card.source, exc_info=True
        )
        return replace(base, flex_attention=False)
    return base


def check(base: BaseModel) -> None:
    """Raises NotComputable unless the packed path agrees with transformers' eager attention, which it then replaces."""
    base.checks.result("attention", lambda: _check(base))
    base.model.set_attn_implementation(attention.register())


def _check(base: BaseModel) -> None:
    """Compare in float32, where rounding hides nothing, and then in the model's own dtype."""
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
        raise NotComputable(f"{name} cannot be computed here: {reason}.", support.HINT) from error
    if not agrees:
        raise NotComputable(f"{name} computes attention or its output head in an unsupported way.", support.HINT)


@torch.no_grad()
def _error(base: BaseModel, dtype: torch.dtype) -> float:
    """Mean error of the logits in units of their standard deviation, which a wrong mask or scale makes large."""
    base.model.set_attn_implementation("eager")
    expected = base.model(input_ids=_probe_tokens(base).to(base.device)).logits.float()
    base.model.set_attn_implementation(attention.register())
    rule = logit_rule(base.model)
    products = probe(base, dtype) @ base.head.float().T
    logits = rule.apply(products if rule.bias is None else products + rule.bias.float())
    return float((logits - expected).abs().mean() / expected.std().clamp(min=1e-6))


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Compute the module in float32 within the context.

    The parameters of each submodule are converted while it runs, so that only one submodule is in memory twice.
    """
    originals: dict[nn.Parameter, Tensor] = {}

    def widen(part: nn.Module, _inputs: Any) -> None:
        for parameter in _float_parameters(part):
            originals[parameter], parameter.data = parameter.data, parameter.data.float()

    def restore(part: nn.Module, _inputs: Any, _outputs: Any) -> None:
        for parameter in _float_parameters(part):
            parameter.data = originals.pop(parameter)

    hooks = []
    for part in module.modules():
        if isinstance(part, nn.Embedding):  # large, and a lookup is exact in any dtype
            hooks.append(part.register_forward_hook(lambda _part, _inputs, output: output.float()))
        elif not isinstance(part, nn.Conv1d) and any(True for _ in _float_parameters(part)):
            hooks.append(part.register_forward_pre_hook(widen))
            hooks.append(part.register_forward_hook(restore, always_call=True))
    try:
        with precision.exact_products(), _wide_quantized_products(module):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _float_parameters(part: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that a module reads itself, except 4-bit blocks, which are bytes: its own, and those of convolutions,
    which modules of transformers read without calling the convolution."""
    convolutions = (child for child in part.children() if isinstance(child, nn.Conv1d))
    parameters = (parameter for owner in (part, *convolutions) for parameter in owner.parameters(recurse=False))
    return (parameter for parameter in parameters if parameter.is_floating_point())


@contextmanager
def _wide_quantized_products(module: nn.Module) -> Iterator[None]:
    """Compute products with 4-bit matrices in float32 within the context."""
    parts: list[Any] = [part for part in module.modules() if "compute_dtype" in vars(part)]
    previous = [part.compute_dtype for part in parts]
    try:
        for part in parts:
            part.compute_dtype = torch.float32
        yield
    finally:
        for part, dtype in zip(parts, previous, strict=True):
            part.compute_dtype = dtype


@torch.no_grad()
def probe(base: BaseModel, dtype: torch.dtype | None = None) -> Tensor:
    """float32 hidden states [2, N, D] of the probe rows through the packed path."""
    tree = probe_tree(base)
    hidden = base.hidden_of(tree, dtype)
    return torch.stack([hidden[torch.as_tensor(tree.index[key])].float() for key in (0, 1)])


@torch.no_grad()
def kv_shape(base: BaseModel) -> UniformKV | None:
    """The shape for the keys and values of all layers, if layers differ in it, as a pass over one token gives them."""
    if base.recurrent is not None:
        return None
    tree = packing.pack([packing.PackedRow(key=0, adapter=0, tokens=np.zeros(1, np.int32))])
    context = attention.PackedAttention(tree, base.dtype, base.device, save_kv=True)
    tokens, positions = (torch.as_tensor(numbers, device=base.device) for numbers in (tree.tokens, tree.positions))
    base.hidden(tokens, positions, context)
    return uniform_kv(context.saved_kv)


def probe_tree(base: BaseModel) -> packing.PackedTree:
    """Two short rows with a common prefix, packed."""
    return packing.pack(
        [packing.PackedRow(key=key, adapter=0, tokens=row.numpy()) for key, row in enumerate(_probe_tokens(base))]
    )


def _probe_tokens(base: BaseModel) -> Tensor:
    """int32 [2, N] tokens; the first half of both rows is the same. Rows are longer than a window of moderate size."""
    window = base.model.config.get_text_config().to_dict().get("sliding_window") or 0
    length = min(24 if window > MAX_PROBE_WINDOW else max(24, 2 * window + 8), base.card.context_length)
    tokens = torch.arange(2 * length).remainder(base.card.vocab_size).view(2, length).to(torch.int32)
    tokens[1, : length // 2] = tokens[0, : length // 2]
    return tokens
