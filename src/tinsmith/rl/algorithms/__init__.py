"""Advantages, losses and the `Algorithm` that combines them."""

from __future__ import annotations

from tinsmith.rl.algorithms.algorithm import Algorithm, ColumnSource
from tinsmith.rl.algorithms.config import AlgorithmConfig

__all__ = ["Algorithm", "AlgorithmConfig", "ColumnSource"]
