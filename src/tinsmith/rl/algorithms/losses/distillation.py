"""The loss of distillation that compares distributions, in place of single tokens."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from tinsmith.rl.algorithms.arrays import Array, library_of
from tinsmith.rl.algorithms.losses.base import PolicyLoss, SamplerRatio, Tokens, token_fraction

_LEAST = 1e-6
"""Smallest probability of the rest of the vocabulary: 1 minus a sum of float32 probabilities is no more exact."""


class TopKDistillLoss(PolicyLoss):
    """KL divergence of policy p and teacher q at each token, over the teacher's k likeliest tokens and the rest of the
    vocabulary, which counts as one token.

    `reverse` is KL(p || q), which concentrates on what the teacher finds likely; `forward` is KL(q || p), which covers
    all of it. Both are exact if k is the size of the vocabulary, and otherwise never above the exact value.
    """

    type: Literal["topk_distill"] = "topk_distill"
    linear: ClassVar[bool] = False
    reads_advantage: ClassVar[bool] = False
    reads_teacher_top: ClassVar[bool] = True
    k: int = Field(default=20, ge=1)
    """Number of the teacher's likeliest tokens."""
    direction: Literal["reverse", "forward"] = "reverse"
    """KL(policy || teacher), or KL(teacher || policy)."""

    @property
    @override
    def sampler_ratio(self) -> SamplerRatio:
        return "none"

    @override
    def tokens(self, logprobs: Array, batch: Tokens) -> tuple[Array, dict[str, Array]]:
        library, teacher, student = library_of(logprobs), batch.teacher_top, batch.student_top
        if teacher is None or student is None:
            raise ValueError("topk_distill reads logprobs of the teacher's likeliest tokens")
        p, q = library.exp(student), library.exp(teacher)
        rest_p, rest_q = (library.clip(1.0 - each.sum(-1), _LEAST, None) for each in (p, q))
        rest = library.log(rest_p) - library.log(rest_q)
        if self.direction == "reverse":
            values = (p * (student - teacher)).sum(-1) + rest_p * rest
        else:
            values = (q * (teacher - student)).sum(-1) - rest_q * rest
        return values, {"teacher_covered": 1.0 - token_fraction(rest_q, batch)}
