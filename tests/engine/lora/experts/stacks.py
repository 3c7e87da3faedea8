"""Experts of one layer with random weights, adapters of them, and a router's choice, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tinsmith.engine.lora.adapter import AdapterWeights, LoraPair, PlacedAdapter
from tinsmith.engine.lora.experts.stack import ExpertStack
from tinsmith.engine.lora.linear import ActiveAdapters
from tinsmith.engine.lora.targets import expert_target
from tinsmith.engine.model.support import is_expert_stack

HIDDEN, WIDTH = 12, 10

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeExperts, {"moe_intermediate_size": WIDTH}),
    "gpt_oss": (GptOssExperts, {"intermediate_size": WIDTH}),
    "nemotron_h": (NemotronHExperts, {"moe_intermediate_size": WIDTH, "mlp_hidden_act": "relu2"}),
}


def stack_of(
    kind: str, experts: int, dtype: torch.dtype = torch.float64, hidden: int = HIDDEN, width: int = WIDTH
) -> ExpertStack:
    """Experts with random weights, without a model."""
    cls, keys = KINDS[kind]
    keys = {key: width if value == WIDTH else value for key, value in keys.items()}
    names = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts)
    settings = {"hidden_size": hidden, "num_experts_per_tok": 1, **names, **keys}
    config = CONFIG_MAPPING[kind](**settings)
    config._experts_implementation = "eager"
    module = cls(config).to(dtype).requires_grad_(False)
    draw = torch.Generator().manual_seed(experts)
    for _, parameter in sorted(module.named_parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=dtype) * 0.5)
    assert is_expert_stack(module)
    stack = ExpertStack(module, "mlp.experts", ActiveAdapters())
    module.__dict__["stack"] = stack
    return stack


def using(stack: ExpertStack, placed: Sequence[PlacedAdapter]) -> AbstractContextManager[None]:
    """Serve these adapters."""
    assert isinstance(stack.active, ActiveAdapters)
    return stack.active.using(placed)


def adapter_of(
    stack: ExpertStack, rank: int, seed: int, dtype: torch.dtype = torch.float64, *, separate: bool = False
) -> AdapterWeights:
    """A random adapter with gradient buffers; `separate` if the experts share no matrix."""
    draw = torch.Generator().manual_seed(seed)
    pairs, gradients = {}, {}
    for site in expert_target("mlp.experts", stack.module).sites:
        name, shapes = site.name, (replace(site, shared="") if separate else site).shapes(rank)
        pairs[name] = LoraPair(*(torch.randn(shape, generator=draw, dtype=dtype) * 0.3 for shape in shapes))
        gradients[name] = LoraPair(
            *(torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32)) for shape in shapes)
        )
    return AdapterWeights(32 / rank / 8, pairs, gradients)


def routing_of(tokens: int, experts: int, k: int, skipped: int = 0) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, as a random router chooses them."""
    draw = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts - skipped, generator=draw, dtype=torch.float64)
    weights, index = scores.topk(k)
    return index, weights
