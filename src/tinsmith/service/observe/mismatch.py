"""How far the trainer's logprobs are from those that the sampler gave with its tokens, seen in what clients train on.

A datum of an RL loss brings the sampler's logprobs q, its result has the trainer's p: no pass is made for this. On
the weights that were sampled from, |q - p| is the mismatch of two implementations; later, what was learned is in it.
"""

from __future__ import annotations

import numpy as np

from tinsmith.engine.base import Pass, PassResult


def of_pass(request: Pass, result: PassResult) -> float | None:
    """Mean |q - p| over the positions with an advantage (prompts have none); None where nothing was sampled."""
    apart = [
        np.abs(datum.inputs["logprobs"] - logprobs)[datum.inputs["advantages"] != 0]
        for datum, logprobs in zip(request.data, result.logprobs, strict=True)
        if "logprobs" in datum.inputs and "advantages" in datum.inputs
    ]
    count = sum(len(one) for one in apart)
    return float(sum(one.sum(dtype=np.float64) for one in apart) / count) if count else None
