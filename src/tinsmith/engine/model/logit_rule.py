"""How logits follow from the product of the output weights with the hidden states: bias, factor and soft cap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Elementwise: c tanh(z / c) with z = scale (W h + bias), and c the soft cap."""

    scale: float = 1.0
    softcap: float | None = None
    bias: Tensor | None = None
    """[V]."""

    def apply(self, products: Tensor) -> Tensor:
        """The logits of products [R, V], in place; the bias is added already."""
        if self.scale != 1:
            products *= self.scale
        return products if self.softcap is None else products.div_(self.softcap).tanh_().mul_(self.softcap)

    def gradient(self, logits: Tensor, dtype: torch.dtype) -> Tensor | None:
        """d logit / d product [R, V] at these logits; None if it is `scale` everywhere."""
        if self.softcap is None:
            return None
        return (logits / self.softcap).square_().neg_().add_(1).mul_(self.scale).to(dtype)


def logit_rule(model: PreTrainedModel) -> LogitRule:
    """The rule of a model, from the names that transformers' configs give to its parts."""
    settings = model.config.get_text_config().to_dict()
    scale = 1.0
    for factor in ("logit_scale", "lm_head_multiplier"):
        scale *= float(settings.get(factor) or 1)
    for divisor in ("logits_scaling", "logits_mup_width_multiplier"):
        scale /= float(settings.get(divisor) or 1)
    if "logits_scaling" not in settings and settings.get("dim_model_base"):  # minicpm3
        scale /= settings["hidden_size"] / settings["dim_model_base"]
    head = model.get_output_embeddings()
    bias = head.bias.detach() if isinstance(head, nn.Linear) and head.bias is not None else None
    return LogitRule(scale, settings.get("final_logit_softcapping"), bias)
