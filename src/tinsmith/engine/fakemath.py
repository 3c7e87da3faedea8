"""The fake engine's formulas: the six losses with their slopes, drawing a token, the likeliest k. Pure numpy."""

from __future__ import annotations

import numpy as np

from tinsmith.engine.base import Datum, SampleRequest, TopK
from tinsmith.engine.checks import LOSSES
from tinsmith.errors import Unsupported


def loss_of(name: str, p: np.ndarray, datum: Datum, config: dict[str, float]) -> tuple[float, np.ndarray]:
    """(loss, d loss / d p) for logprobs p, summed over tokens; float64."""
    if name not in LOSSES:
        raise Unsupported(f"The fake engine has no loss '{name}'.")
    if name == "cross_entropy":
        w = datum.inputs.get("weights", np.ones(p.shape)).astype(np.float64)
        return float(-(w * p).sum()), -w
    q, adv = (datum.inputs[key].astype(np.float64) for key in ("logprobs", "advantages"))
    config = {**LOSSES[name].config, **config}
    gap = np.where(adv != 0, p - q, 0.0)  # a masked position's q is 0: exp must not overflow there
    if name == "dro":
        return float(-(p * adv - 0.5 * config["beta"] * gap**2).sum()), -(adv - config["beta"] * gap)
    if name == "gspo":
        mask = datum.inputs["sequence_ratio_mask"] != 0
        gap = np.full(p.shape, (p - q)[mask].mean() if mask.any() else 0.0)
    r = np.exp(gap)
    if name == "importance_sampling":
        return float(-(r * adv).sum()), -r * adv
    low, high = (datum.inputs.get(key, config[key]) for key in ("clip_low_threshold", "clip_high_threshold"))
    clipped = np.clip(r, low, high)
    if name == "cispo":
        return float(-(clipped * p * adv).sum()), -clipped * adv
    free = r * adv <= clipped * adv
    return float(-np.minimum(r * adv, clipped * adv).sum()), np.where(free, -r * adv, 0.0)


def normalized(logits: np.ndarray) -> np.ndarray:
    """Log-softmax of one row."""
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def draw(logp: np.ndarray, request: SampleRequest, rng: np.random.Generator) -> int:
    """A token id from tempered logprobs [V]; top_k and top_p narrow the choice, not the logprobs."""
    if request.temperature == 0:
        return int(logp.argmax())
    order = np.argsort(-logp, kind="stable")
    if request.top_k > 0:
        order = order[: request.top_k]
    weight = np.exp(logp[order].astype(np.float64))
    if request.top_p < 1:
        keep = max(1, int((np.cumsum(weight) - weight < request.top_p * weight.sum()).sum()))
        order, weight = order[:keep], weight[:keep]
    place = np.searchsorted(np.cumsum(weight), rng.random() * weight.sum(), side="right")
    return int(order[min(int(place), len(order) - 1)])


def topk(logp: np.ndarray, k: int) -> TopK:
    """The k likeliest of each row of [n, V]."""
    ids = np.argsort(-logp, axis=1, kind="stable")[:, :k]
    return TopK(token_ids=ids.astype(np.int32), logprobs=np.take_along_axis(logp, ids, axis=1).astype(np.float32))
