"""Routers of mixtures of experts: computed in float32, their choices recorded or replayed.

Sampler and trainer compute a token's hidden state in products of different shapes, so its rounding may differ, and near
a tie a router then chooses another expert, which moves a log-probability by far more than rounding does. Two measures:

- Logits are float32 in every dtype of the base: products of bfloat16 values, accumulated and kept in float32. A hidden
  state that differs in single bits then changes a quarter fewer choices, and gate weights by a third less, than with
  bfloat16 logits (benchmarks/NOTES.md).
- Replay: the sampler records the experts of each token, and the trainer takes this choice. A router's own logits give
  the weights of the chosen experts, so their gradient flows as usual. Group limits and correction biases, which affect
  the choice only, are skipped with it.

The router's own code from transformers runs in both cases. In a replay its last `topk`, over all experts, returns the
record and the scores there; `install` checks that it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from typing_extensions import override

from tinsmith.engine.model.support import is_expert_stack
from tinsmith.engine.threads.state import ThreadState
from tinsmith.routed_experts import RouterShape, missing

PROBES = 6
"""Hidden states on which each router is checked at load."""


@dataclass(slots=True)
class _PassRouting:
    """What routers do in the pass that a thread computes."""

    replayed: Tensor | None = None
    """int64 [T, layers, k]: the experts to take; -1 where a router chooses."""
    chosen: dict[int, Tensor] | None = None
    """int64 [T, k] by layer: the routers' own choices, while they are recorded."""


class Routing:
    """What the routers of a base model do in the current pass; shared by all of them."""

    def __init__(self) -> None:
        self.shape: RouterShape | None = None
        """None without routers whose choice can be recorded and replayed."""
        self._of_pass = ThreadState(_PassRouting)

    @property
    def now(self) -> _PassRouting:
        """What they do in the pass that the current thread computes."""
        return self._of_pass.now

    @contextmanager
    def using(self, replayed: Tensor | None = None, *, record: bool = False) -> Iterator[None]:
        """Replay and record within the context, for forward and backward."""
        now = self._of_pass.own
        now.replayed = replayed
        now.chosen = {} if record and self.shape is not None else None
        try:
            yield
        finally:
            now.replayed = now.chosen = None

    def record(self) -> np.ndarray:
        """The routers' own choices in the pass: unsigned [T, layers, k]. Only while they are recorded."""
        assert self.shape is not None
        chosen = self.now.chosen
        assert chosen is not None
        return (
            torch.stack([chosen[layer] for layer in range(self.shape.layers)], 1).cpu().numpy().astype(self.shape.dtype)
        )

    def replay_of(self, record: np.ndarray, device: torch.device) -> Tensor:
        """The argument of `using` for a record of the positions of a pass."""
        wide = record.astype(np.int64)
        wide[record == missing(record.dtype)] = -1
        return torch.as_tensor(wide, device=device)


class Router(nn.Module):
    """A router of transformers, in float32 at least, that records and replays."""

    def __init__(self, base: nn.Module, layer: int, experts: int, routing: Routing) -> None:
        super().__init__()
        self.base, self.layer, self.experts, self.routing = base, layer, experts, routing
        self.dtypes = [parameter.dtype for parameter in base.parameters()]
        for parameter in base.parameters():
            parameter.data = parameter.data.to(_at_least_float32(parameter.dtype))

    @override
    def forward(self, hidden: Tensor, *biases: Tensor) -> Any:
        """hidden [T, D] or [1, T, D], some types also the biases of the choice [E] -> (logits [T, E], weights [T, k],
        experts [T, k])."""
        hidden, routing = hidden.to(_at_least_float32(hidden.dtype)), self.routing.now
        if routing.replayed is None:
            result = self.base(hidden, *biases)
            self._record(result[2])
            return result
        with torch.no_grad():
            own = self.base(hidden, *biases)[2]
        self._record(own)
        replayed = routing.replayed[:, self.layer]
        with _FixedChoice(torch.where(replayed < 0, own, replayed), self.experts):
            return self.base(hidden, *biases)

    def release(self) -> None:
        """Give the router its own dtype back."""
        for parameter, dtype in zip(self.base.parameters(), self.dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)

    def _record(self, chosen: Tensor) -> None:
        if self.routing.now.chosen is not None:
            self.routing.now.chosen[self.layer] = chosen


class _FixedChoice(TorchFunctionMode):
    """Within the context, the k best of scores [T, E] are the experts `chosen` [T, k]."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk) and args[0].shape == (len(self.chosen), self.experts):
            return torch.return_types.topk((args[0].gather(1, self.chosen), self.chosen))
        return func(*args, **(kwargs or {}))


def install(model: PreTrainedModel) -> Routing:
    """Replace the routers next to stacks of experts; returns what they share.

    Its `shape` is None, and the routers stay as they are, if the model has none, if layers differ in their numbers of
    experts, or if a router computes in another way.
    """
    routing = Routing()
    stacks: list[tuple[nn.Module, Any]]
    stacks = [(parent, module) for parent in model.modules() for module in parent.children() if is_expert_stack(module)]
    routers = []
    for parent, stack in stacks:
        names = [name for name, child in parent.named_children() if type(child).__name__.endswith("Router")]
        if len(names) != 1:
            return routing
        routers.append((parent, names[0], len(stack.down_proj)))
    wrapped = [
        Router(parent.get_submodule(name), layer, experts, routing)
        for layer, (parent, name, experts) in enumerate(routers)
    ]
    chosen = [_chosen(router) for router in wrapped]
    if not wrapped or None in chosen or len({*zip(chosen, (router.experts for router in wrapped), strict=True)}) != 1:
        for router in wrapped:
            router.release()
        return routing
    for (parent, name, _), router in zip(routers, wrapped, strict=True):
        setattr(parent, name, router)
    assert chosen[0] is not None
    routing.shape = RouterShape(len(wrapped), chosen[0], wrapped[0].experts)
    return routing


@torch.no_grad()
def _chosen(router: Router) -> int | None:
    """Experts of a token; None unless a replay gives the replayed experts, each with its own weight."""
    weight = next(router.base.parameters())
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBES, weight.shape[-1], generator=draw).to(weight)
    arguments = list(inspect.signature(router.base.forward).parameters.values())[1:]
    extra = [each.name for each in arguments if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    biases = [torch.zeros(router.experts, device=weight.device)] if extra == ["e_score_correction_bias"] else []
    if len(extra) > len(biases):
        return None
    result = router.base(hidden, *biases)
    if not isinstance(result, tuple) or len(result) != 3:
        return None
    _, weights, chosen = result
    if chosen.dtype != torch.int64 or chosen.shape != weights.shape or len(chosen) != PROBES:
        return None
    for fixed, expected in ((chosen, weights), (chosen.flip(1), weights.flip(1)), (chosen.roll(1, 0), None)):
        with _FixedChoice(fixed, router.experts):
            _, replayed_weights, replayed = router.base(hidden, *biases)
        if not torch.equal(replayed, fixed) or not bool(replayed_weights.isfinite().all()):
            return None
        if expected is not None and not torch.allclose(replayed_weights, expected, rtol=1e-4, atol=1e-5):
            return None
    return chosen.shape[1]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
