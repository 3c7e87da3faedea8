"""What top_k and top_p leave: what ordering whole rows would leave, be they peaked, flat or full of ties."""

import numpy as np
import pytest
import torch

from tinsmith.engine.sampling import token_sampling
from tinsmith.engine.sampling.token_sampling import FIRST, Rule, narrowed

SIZE = FIRST + 1000
"""Tokens of a row: more than the first look takes."""


def by_ordering_all(chances: np.ndarray, rule: Rule) -> list[int]:
    """The ids that may be drawn, by the definition."""
    ids = np.argsort(-chances, kind="stable")[: rule.top_k if rule.top_k > 0 else None]
    mass = np.cumsum(chances[ids].astype(np.float64))
    return sorted(ids[(mass - chances[ids]) < rule.top_p * mass[-1]].tolist())


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("grain", [None, 0.5])
def test_what_is_left_is_what_ordering_all_tokens_leaves(sharpness: float, grain: float | None) -> None:
    """With a grain there are many ties, where any other order than that of the ids would show."""
    logits = torch.randn(40, SIZE, generator=torch.Generator().manual_seed(1)) * sharpness
    chances = torch.softmax(logits if grain is None else (logits / grain).round() * grain, dim=1)
    narrow = [(FIRST, 1.0), (FIRST + 1, 0.99), (SIZE - 9, 0.5), (0, 0.01), (SIZE + 5, 0.999), (40, 0.7)]
    kinds = [(-1, 0.9), (3, 1.0), *narrow]
    rules = [Rule(1.0, *kinds[row % len(kinds)]) for row in range(40)]
    left = narrowed(chances, rules)
    for row, rule in enumerate(rules):
        ids = by_ordering_all(chances[row].numpy(), rule)
        assert left[row].nonzero()[:, 0].tolist() == ids, rule
        assert torch.equal(left[row, ids], chances[row, ids])


def test_peaked_rows_are_not_ordered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    chances = torch.softmax(torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0)) * 8, dim=1)
    chances[1] = 1 / SIZE
    looks: list[tuple[int, int]] = []

    def counted(some: torch.Tensor, size: int) -> torch.Tensor:
        looks.append((len(some), size))
        return some.sort(dim=1, descending=True).values[:, :size]

    monkeypatch.setattr(token_sampling, "_greatest", counted)
    narrowed(chances, [Rule(1.0, -1, 0.9)] * 3)
    assert looks == [(3, FIRST), (1, SIZE)]


def test_the_likeliest_token_is_always_left() -> None:
    assert narrowed(torch.tensor([[0.2, 0.4, 0.4]]), [Rule(1.0, -1, 0.0)]).nonzero().tolist() == [[0, 1]]
