"""Random requests for every loss, including edge cases, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinsmith.engine.base import Datum, Pass

RL_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
LOSSES = ("cross_entropy", *RL_LOSSES, "trinity_ppo")
CONFIGS: Mapping[str, Mapping[str, float | str]] = {"trinity_ppo": {"num_total_datums": 4, "kl_coef": 0.3}}
"""Required settings of a loss."""
LENGTHS = (9, 1, 23, 14)


def tokens_of(draw: np.random.Generator, length: int, vocabulary: int = 512) -> np.ndarray:
    """Random tokens, int32 [length]."""
    return draw.integers(3, vocabulary, length, dtype=np.int32)


def datum_for(loss_fn: str, draw: np.random.Generator, length: int, tokens: np.ndarray | None = None) -> Datum:
    """One datum with the inputs that `loss_fn` takes; about a third of an RL datum's positions are prompt."""
    tokens = tokens_of(draw, length) if tokens is None else tokens
    targets = np.append(tokens[1:], draw.integers(3, 512)).astype(np.int64)
    if loss_fn == "cross_entropy":
        weights = draw.normal(size=len(tokens)).astype(np.float32)  # fractional, of any sign
        weights[draw.random(len(tokens)) < 0.3] = 0.0
        return Datum(tokens=tokens, targets=targets, inputs={"weights": weights})
    sampled = (np.arange(len(tokens)) >= len(tokens) // 3).astype(np.float32)
    advantages = (draw.normal(size=len(tokens)) * sampled).astype(np.float32)
    # Close to the logprobs of the tiny models, so that ratios fall on both sides of every clip.
    logprobs = (draw.normal(-6.0, 1.5, size=len(tokens)) * sampled).astype(np.float32)
    inputs = {"logprobs": logprobs, "advantages": advantages}
    if loss_fn == "dro":  # every position counts in its quadratic term
        inputs = {"logprobs": draw.normal(-6.0, 1.5, size=len(tokens)).astype(np.float32), "advantages": advantages}
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = sampled
    if loss_fn == "trinity_ppo":
        inputs |= {"weights": sampled, "ref_logprobs": with_reference(draw, sampled)}
    return Datum(tokens=tokens, targets=targets, inputs=inputs)


def with_reference(draw: np.random.Generator, sampled: np.ndarray) -> np.ndarray:
    """A reference model's logprobs close to those of the tiny models, 0 where nothing was sampled."""
    return (draw.normal(-6.0, 1.0, size=len(sampled)) * sampled).astype(np.float32)


def pass_for(
    loss_fn: str,
    model_id: str = "m",
    *,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
    config: Mapping[str, float | str] | None = None,
    forward_only: bool = False,
) -> Pass:
    """A request of several datums, one of length 1 among them."""
    draw = np.random.default_rng(seed)
    data = tuple(datum_for(loss_fn, draw, length) for length in lengths)
    settings = {**CONFIGS.get(loss_fn, {}), **(config or {})}
    return Pass(model_id=model_id, data=data, loss_fn=loss_fn, loss_config=settings, forward_only=forward_only)


def replace_inputs(datum: Datum, **inputs: np.ndarray) -> Datum:
    """The datum with some inputs replaced."""
    return Datum(tokens=datum.tokens, targets=datum.targets, inputs={**datum.inputs, **inputs})
