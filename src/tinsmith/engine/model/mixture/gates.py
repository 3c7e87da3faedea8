"""Linear modules that route tokens to experts, or weigh what experts share, found by their place in a model.

Most routers of transformers are modules of a class of their own. Others are linear modules, or made of them, as
projections are; `quantization` must not confuse the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from tinsmith.engine.model.support import is_experts_module
from tinsmith.engine.model_parts import part_of


def linear_gates(model: PreTrainedModel) -> set[str]:
    """Paths of the linear modules of routers and of gates of shared experts.

    What stands beside the experts of a layer and has no projection that adapters reach routes or gates. The number of
    outputs alone does not distinguish them: routers may have more outputs than there are experts, and a projection may
    have as many.
    """
    return {
        path
        for parent, block in model.named_modules()
        if any(is_experts_module(child) for child in block.children())
        for name, child in block.named_children()
        if (paths := set(_linear_paths(f"{parent}.{name}", child))) and not any(map(part_of, paths))
        for path in paths
    }


def _linear_paths(path: str, module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules(prefix=path):
        if isinstance(part, nn.Linear):
            yield name
