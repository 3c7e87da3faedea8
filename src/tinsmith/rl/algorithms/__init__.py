"""The table of algorithms."""

from __future__ import annotations

from tinsmith.rl.algorithms.base import Algorithm
from tinsmith.rl.algorithms.grpo import Grpo, GrpoConfig

AlgorithmConfig = GrpoConfig


def build(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that the configuration names."""
    return Grpo(config)
