"""The door to algorithms: their configuration, and the one at work that it describes."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.rl.algorithms.algorithm import Algorithm, Ask, Composed
from tinsmith.rl.algorithms.config import AlgorithmConfig

__all__ = ["Algorithm", "AlgorithmConfig", "Ask", "build"]


def build(config: AlgorithmConfig, extensions: frozenset[str], columns: Mapping[str, Ask], seed: int) -> Algorithm:
    """`extensions` are the server's; `columns` has whom to ask for reference, teacher, values and so on."""
    return Composed(config, extensions, columns, seed)
