"""What a policy believes, in numbers: logprobs of answers in a chat, divergences and entropies of distributions.

All are computed by the snapshot that sampled the rollout, at temperature 1, on chats in the model's own template.
A server that cannot compute them fails the rollouts, which are then counted and not trained on.

Dimensions: K tokens or outcomes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tinsmith.errors import TinsmithError
from tinsmith.rl.policy.sampling import Snapshot
from tinsmith.rl.types import Message

_RESOLUTION = 1e-6
"""A sum of float32 probabilities is not known better: less than this is nothing."""


def user(text: str) -> Message:
    """A message of the user."""
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    """A message of the assistant."""
    return Message(role="assistant", content=text)


async def reply_logprobs(policy: Snapshot, chat: Sequence[Message], reply: str) -> np.ndarray:
    """Logprobs of the tokens of `reply` as the beginning of the policy's answer to a chat, float64 [K].

    The end of the turn is not among them.
    """
    context = policy.chat.prompt(tuple(chat))
    tokens = policy.chat.encode_text(reply)
    if not tokens:
        raise TinsmithError(f"The reply {reply!r} has no tokens.", "Use a task whose answer is not empty.")
    logprobs = np.asarray(await policy.logprobs([*context, *tokens], len(tokens)), np.float64)
    if not np.isfinite(logprobs).all():
        raise TinsmithError("The server returned no logprobs of the answer.", "Use a server that computes them.")
    return logprobs


async def next_token_kl(policy: Snapshot, after: Sequence[Message], before: Sequence[Message], support: int) -> float:
    """KL(after || before) of the policy's next token after two chats, in nats.

    The support is the `support` likeliest tokens of each chat; all other tokens are one outcome. Merging outcomes only
    lowers a divergence, so this is a lower bound, and exact if `support` is the size of the vocabulary.
    """
    prompts = [policy.chat.prompt(tuple(after)), policy.chat.prompt(tuple(before))]
    tops = await asyncio.gather(*(policy.top_logprobs(prompt, support) for prompt in prompts))
    ids = np.unique(np.concatenate([top_ids for top_ids, _ in tops]))
    post, prior = await asyncio.gather(
        *(_complete(policy, prompt, top, ids) for prompt, top in zip(prompts, tops, strict=True))
    )
    return kl_divergence(post, prior)


async def _complete(
    policy: Snapshot, prompt: Sequence[int], top: tuple[np.ndarray, np.ndarray], ids: np.ndarray
) -> np.ndarray:
    """Logprobs of `ids` after the prompt; those of `top` are there already. float64 [K]."""
    logprobs = dict(zip(top[0].tolist(), top[1].tolist(), strict=True))
    missing = [token for token in ids.tolist() if token not in logprobs]
    if missing:
        logprobs |= zip(missing, (await policy.next_logprobs(prompt, missing)).tolist(), strict=True)
    values = np.array([logprobs[token] for token in ids.tolist()], np.float64)
    if np.isnan(values).any():
        raise TinsmithError("The server returned no logprobs of given tokens.", "Use a server that computes them.")
    return values


def kl_divergence(post: np.ndarray, prior: np.ndarray) -> float:
    """KL(post || prior) in nats of two distributions with logprobs [K]; what they leave is one more outcome."""
    p = np.exp(post)
    possible = p > 0
    listed = float((p[possible] * (post[possible] - prior[possible])).sum())
    rest, prior_rest = (1.0 - float(np.exp(each).sum()) for each in (post, prior))
    if rest > _RESOLUTION:
        listed += rest * float(np.log(rest / max(prior_rest, _RESOLUTION)))
    return max(0.0, listed)


def normalized_entropy(probabilities: np.ndarray) -> float:
    """Entropy of a distribution over K outcomes divided by log K, from 0 to 1."""
    if len(probabilities) < 2:
        return 0.0
    p = probabilities[probabilities > 0]
    return float(-(p * np.log(p)).sum() / np.log(len(probabilities)))


def spearman(order: Sequence[int], values: Sequence[float]) -> float:
    """Rank correlation of an order of indices, largest value first, with the values.

    Without ties it is 1 - 6 sum(d^2) / (n (n^2 - 1)).
    """
    places = np.empty(len(order))
    places[list(order)] = np.arange(len(order))
    return rank_correlation(-places, values)


def rank_correlation(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    """Spearman's correlation of two lists of values; equal values share their mean rank. 0 if one list is constant."""
    ranks = [_mean_ranks(np.asarray(values, np.float64)) for values in (first, second)]
    x, y = (each - each.mean() for each in ranks)
    norm = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / norm if norm else 0.0


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value from 0, smallest first; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]
