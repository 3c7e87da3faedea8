"""Example losses, traced and uploaded as the SDK does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss

from tinsmith.engine.custom_loss.graph import LossGraph, Node, read_graph, read_text

Fn = Callable[..., Any]


def traced(fn: Fn, ranks: Mapping[str, Any]) -> LossHandle:
    """The result of `ServiceClient.create_custom_loss` for a function."""
    return trace_loss(fn, ranks, "session")


def uploaded(handle: LossHandle) -> LossGraph:
    """The graph that the service receives, through the text that the store holds."""
    nodes = [Node(**node.model_dump()) for node in encode_graph(handle).nodes]
    return read_text(read_graph(handle.name, [(item.name, item.rank) for item in handle.inputs], nodes).text)


RANKS = {"logprobs": 1, "advantages": 1, "mask": 1}


def reinforce(logprobs, advantages, mask):
    loss = -(logprobs * advantages * mask).sum()
    return loss, {"custom/tokens:sum": mask.sum(), "custom/reinforce:mean": loss}


def clipped(logprobs, advantages, mask):
    ratio = torch.exp(logprobs - logprobs.detach() + 0.1 * advantages)
    loss = -torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    return torch.where(mask > 0, loss, torch.zeros_like(loss)).sum(), {"custom/ratio:mean": ratio.mean()}


def extremes(logprobs, advantages, mask):
    best, place = torch.max(logprobs * mask, dim=0)
    worst = logprobs.min()
    return best - worst * 0.5 + (logprobs.amax() - logprobs.amin()), {"custom/place:sum": place}


def ranked(logprobs, advantages, mask):
    ordered = torch.sort(logprobs, descending=True).values
    top, _ = torch.topk(logprobs, 3)
    return (ordered[1:] - ordered[:-1]).pow(2).sum() + top.logsumexp(0), {}


def selected(logprobs, advantages, mask):
    chosen = logprobs[mask > 0]
    other = torch.masked_select(logprobs, mask <= 0)
    return -(chosen * advantages[mask > 0]).mean() + other.sum() * 0.1, {}


def softmaxes(logprobs, advantages, mask):
    weights = torch.softmax(logprobs / 2.0, dim=0)
    more = F.log_softmax(advantages, dim=-1).exp()
    return F.kl_div(weights.log(), more, reduction="sum") + torch.logsumexp(logprobs * mask, dim=0), {}


def shaped(logprobs, advantages, mask):
    count = logprobs.shape[0]
    places = torch.arange(count, dtype=torch.float32, device=logprobs.device) / count
    decay = math.exp(-1.0) ** places
    pairs = logprobs[:, None] - logprobs[None, :]
    loss = (decay * logprobs).sum() / math.sqrt(count) + F.relu(pairs - 1.0).mean()
    return loss, {"custom/n:sum": mask.numel() + mask.sum()}


def activations(logprobs, advantages, mask):
    total = F.softplus(logprobs) + F.logsigmoid(logprobs) + F.gelu(logprobs) + torch.tanh(logprobs) + logprobs.sigmoid()
    return (total * mask).sum() + F.huber_loss(logprobs, advantages) + torch.special.entr(logprobs.exp()).sum(), {}


def products(logprobs, advantages, mask):
    square = torch.outer(logprobs, advantages)
    return torch.dot(logprobs, mask) + (square @ mask).std() + torch.stack([logprobs, advantages]).norm(dim=0).sum(), {}


def python_numbers(logprobs, advantages, mask):
    count = logprobs.size(0)
    half = (count + 1) // 2
    early, late = logprobs[:half], logprobs[half:]
    return early.sum() * 2**0.5 - late.sum() / max(1, 3) + logprobs[-1] * -1 + abs(logprobs[0]), {
        "custom/x.y-z/0:mean": early.mean()
    }


LOSSES: dict[str, Fn] = {
    fn.__name__: fn
    for fn in (reinforce, clipped, extremes, ranked, selected, softmaxes, shaped, activations, products, python_numbers)
}


def distilled(logprobs, teacher, temperature):
    """(N, K) logprobs, a rank-0 input."""
    student = torch.log_softmax(logprobs / temperature, dim=-1)
    return -(teacher * student).sum(), {"custom/agree:mean": (teacher.argmax(-1) == student.argmax(-1)).float().mean()}


DISTILLED_RANKS = {"logprobs": 2, "teacher": 2, "temperature": 0}
