"""The fake engine's replies: one request's draws, token by token, and what it asks about its prompt. Numpy."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tinsmith.engine.base import Heard, Piece, Sampled, SampledSequence, SampleRequest, TopK
from tinsmith.engine.fakefiles import Weights
from tinsmith.engine.fakemodel import Bigram
from tinsmith.errors import Gone


@dataclass(frozen=True, slots=True)
class Reply:
    """A request under its adapter, or under none, for as long as nobody cancels it."""

    bigram: Bigram
    request: SampleRequest
    weights: Weights | None
    goes_on: Callable[[], bool]

    async def sequence(self, index: int, heard: Heard | None) -> SampledSequence:
        """Token by token, yielding to other callers. Raises Gone once the request is cancelled."""
        request, card = self.request, self.bigram.card
        seed = request.seed if request.seed is not None else zlib.crc32(request.request_id.encode())
        rng = np.random.default_rng([seed & (2**64 - 1), index, zlib.crc32(request.prompt.tobytes())])
        stops = card.eos_token_ids if request.stop_tokens is None else request.stop_tokens
        room = card.context_length - len(request.prompt) + 1
        tokens, logprobs, tops = [], [], []
        last, reason = int(request.prompt[-1]), "length"
        while len(tokens) < (request.max_tokens or room):
            if len(tokens) % 16 == 0:
                await asyncio.sleep(0)
            if not self.goes_on():
                raise Gone(f"Request {request.request_id} was cancelled.")
            logp = next(self.bigram.logprobs(np.asarray([last]), self.weights))[2][0]
            if request.temperature > 0:
                logp = normalized(logp / np.float32(request.temperature))
            last = draw(logp, request, rng)
            tokens.append(last)
            logprobs.append(logp[last])
            tops.append(logp)
            if heard is not None:
                best = topk(logp[None], request.topk_sample_logprobs) if request.topk_sample_logprobs else None
                heard(Piece(sample=index, tokens=(last,), logprobs=(float(logp[last]),), topk=best))
                await asyncio.sleep(0)
            text = self.bigram.spell(tokens) if request.stop_strings else ""
            if last in stops or any(stop in text for stop in request.stop_strings):
                reason = "stop"
                break
        top = topk(np.stack(tops), request.topk_sample_logprobs) if request.topk_sample_logprobs else None
        return SampledSequence(
            tokens=np.asarray(tokens, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            stop_reason="stop" if reason == "stop" else "length",
            topk=top,
        )

    def about_prompt(self, answer: Sampled) -> Sampled:
        """The answer with what was asked about the prompt itself."""
        request = self.request
        asked, k = request.target_prompt_logprobs, request.topk_prompt_logprobs
        if request.prompt_alt_tokens_k:
            answer = replace(answer, prompt_alt=self._beside())
        if not (request.prompt_logprobs or k or asked is not None):
            return answer
        prompt, n = request.prompt, len(request.prompt)
        own = np.full(n, np.nan, dtype=np.float32)
        top = TopK(token_ids=np.zeros((n, k), np.int32), logprobs=np.full((n, k), -99999.0, np.float32))
        targets = None if asked is None else np.full(asked.shape, np.nan, dtype=np.float32)
        for rows, _, logp in self.bigram.logprobs(prompt[:-1], self.weights):
            after = slice(rows.start + 1, rows.stop + 1)
            own[after] = np.take_along_axis(logp, prompt[after, None], axis=1)[:, 0]
            piece = topk(logp, k)
            top.token_ids[after], top.logprobs[after] = piece.token_ids, piece.logprobs
            if asked is not None and targets is not None:
                found = np.take_along_axis(logp, np.maximum(asked[rows], 0), axis=1)
                targets[rows] = np.where(asked[rows] >= 0, found, np.nan)
        if request.prompt_logprobs_last_n is not None:
            own[: n - request.prompt_logprobs_last_n] = np.nan
        return replace(
            answer,
            prompt_logprobs=own if request.prompt_logprobs else None,
            topk_prompt=top if k else None,
            target_prompt_logprobs=targets,
        )

    def _beside(self) -> TopK:
        """Draws at each prompt position after the first, by the request's temperature alone."""
        request = self.request
        shape = (len(request.prompt) - 1, request.prompt_alt_tokens_k)
        rng = np.random.default_rng([*request.prompt.tolist(), (request.seed or 0) & (2**64 - 1)])
        every = replace(request, top_k=-1, top_p=1.0)
        found = TopK(token_ids=np.zeros(shape, np.int32), logprobs=np.zeros(shape, np.float32))
        for rows, _, pieces in self.bigram.logprobs(request.prompt[:-1], self.weights):
            for place, logp in enumerate(pieces, start=rows.start):
                tempered = normalized(logp / np.float32(request.temperature)) if request.temperature > 0 else logp
                drawn = [draw(tempered, every, rng) for _ in range(shape[1])]
                found.token_ids[place], found.logprobs[place] = drawn, tempered[drawn]
        return found


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
