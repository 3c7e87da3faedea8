"""Losses that raise or lower likelihoods: no ratio to the sampler."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from tinsmith.rl.algorithms.losses.base import PolicyLoss, Tokens


class Opmd(PolicyLoss):
    """-A p / (1 + tau)."""

    type: Literal["opmd"] = "opmd"
    tau: float = Field(default=0.0, ge=0)
    """Temperature of the mirror descent."""

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """[T]."""
        return -batch.advantages * logprobs / (1.0 + self.tau), {}


class Sft(PolicyLoss):
    """-p: advantages do not count."""

    type: Literal["sft"] = "sft"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """[T]."""
        return -logprobs, {}


class SftIs(PolicyLoss):
    """-sg(exp(p)) p: likely tokens count most."""

    type: Literal["sft_is"] = "sft_is"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """[T]."""
        return -logprobs.detach().exp() * logprobs, {}


class SftPhi(PolicyLoss):
    """-sg(P (1 - P)) p, P = exp(p): tokens that are neither certain nor hopeless count (CHORD, arXiv 2508.11408)."""

    type: Literal["sft_phi"] = "sft_phi"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False

    def tokens(self, logprobs: Tensor, batch: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """[T]."""
        chance = logprobs.detach().exp()
        return -chance * (1.0 - chance) * logprobs, {}
