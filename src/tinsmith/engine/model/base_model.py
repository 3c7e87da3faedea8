"""A loaded base model as training and sampling call it: tokens of a packed pass in, hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinsmith.engine.base import ModelCard
from tinsmith.engine.images.rows import ImageTokens
from tinsmith.engine.images.tower import VisionTower, VisualInputs
from tinsmith.engine.load_checks import LoadChecks
from tinsmith.engine.model import attention, packing
from tinsmith.engine.model.architectures import longrope
from tinsmith.engine.model.architectures.uniform_kv import UniformKV
from tinsmith.engine.model.hybrid.states import HybridContext, RecurrentShape, hybrid_context
from tinsmith.engine.model.mixture.routing import Routing
from tinsmith.errors import Unsupported


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
    flex_attention: bool = False
    """Whether one FlexAttention call computes a packed tree."""
    compiled_attention: bool = False
    """Whether compiled functions compute it, on a CPU."""
    recurrent: RecurrentShape | None = None
    """The states of its recurrent layers, if it has any."""
    latent_width: int = 0
    """Width of the latents that caches keep in place of keys and values; 0 for a model that has none."""
    routing: Routing = field(default_factory=Routing)
    """Recording and replay of its routers, if it has any."""
    vision: VisionTower | None = None
    """Computes the features of images; None for a model that takes none."""
    uniform_kv: UniformKV | None = None
    """The shape of all layers' keys and values, if layers differ in it."""
    checks: LoadChecks = field(default_factory=LoadChecks)
    """Results of the checks at load."""
    per_layer_embeddings: bool = False
    """Whether each layer reads the token ids through embeddings of its own."""

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

    @property
    def cuts_trees(self) -> bool:
        """Whether a packed tree can be computed in pieces, which pass on keys and values alone: not recurrent states,
        recorded experts, or what FlexAttention sees on a GPU."""
        return self.device.type == "cpu" and self.recurrent is None and self.routing.shape is None

    @property
    def computes_in_threads(self) -> bool:
        """Whether several threads may compute passes at the same time: on a CPU, if no module keeps anything of a pass.
        Rotary embeddings of some types keep factors for its length, and towers the features of its images."""
        return self.device.type == "cpu" and self.vision is None and not longrope.keeps_factors(self.model)

    def hidden_of(
        self,
        tree: packing.PackedTree,
        dtype: torch.dtype | None = None,
        context: attention.AttentionContext | None = None,
    ) -> Tensor:
        """Hidden states [T, D] of the packed tokens; `dtype`, if not the base's own, is that of its activations.
        Attention is `context`'s if that is given, else the tree's."""
        dtype = dtype or self.dtype
        own = dtype == self.dtype  # for which alone functions are compiled
        context = context or attention.packed_attention(
            tree, dtype, self.device, flex=own and self.flex_attention, compiled=own and self.compiled_attention
        )
        recurrent = self.recurrent
        return self.hidden(
            torch.as_tensor(tree.tokens, device=self.device),
            torch.as_tensor(tree.positions if tree.rotary is None else tree.rotary, device=self.device),
            context if recurrent is None else hybrid_context(recurrent, tree, context, self.device),
            self.visual_inputs(tree.images),
        )

    def visual_inputs(self, images: Sequence[ImageTokens]) -> VisualInputs | None:
        """The features of the images' tokens in a pass; None if there are none."""
        if not images:
            return None
        if self.vision is None:
            raise Unsupported(f"{self.card.source} takes no images.", "Send text only.")
        return self.vision.inputs(images, self.device)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: attention.AttentionContext | HybridContext,
        visual: VisualInputs | None = None,
    ) -> Tensor:
        """int [T] tokens at int [T] positions, or [3, T] among images, -> [T, D] hidden states, with an autograd graph
        if gradients are enabled."""
        embedded = self.model.get_input_embeddings()(tokens)
        if visual is not None:
            embedded = visual.embedded(embedded)
        if self.float32_residual:
            embedded = embedded.float()
        if torch.is_grad_enabled():  # adapters compute their gradients by hand: the graph needs another leaf
            embedded = embedded.detach().requires_grad_()
        settings: dict[str, Any] = visual.settings(len(tokens)) if visual is not None else {}
        if self.per_layer_embeddings:
            settings["per_layer_inputs"] = self.body.get_per_layer_inputs(tokens[None])  # type: ignore[operator]
        if self.uniform_kv is not None:
            assert not isinstance(context, HybridContext)
            context = self.uniform_kv.within(context)
        return self.body(
            inputs_embeds=embedded[None],
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            context=context,
            **settings,
        ).last_hidden_state[0]
