"""The Sampler in plain torch: a running batch that requests join and leave at any token.

A round goes: admit what waits (one packed pass over the new prompts, equal beginnings computed once; each answer's
first token comes from it), then one decoding step for everyone: each sequence feeds its last token, whatever its
adapter, and draws its next. Who is finished leaves at once. Between rounds the trainer has its turn.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine import attention, batch, choice, lora, prompts
from tinsmith.engine.base import Sampled, SampledSequence, SampleRequest, TopK
from tinsmith.engine.cache import Cache, Cached, CacheShape, Row
from tinsmith.engine.head import Head
from tinsmith.engine.models import BaseModel
from tinsmith.engine.turns import Turns
from tinsmith.engine.versions import Versions
from tinsmith.errors import EngineError, Gone, TinsmithError

MAX_SEQUENCES = 256
"""In one decoding step; more wait."""


@dataclass(eq=False, slots=True)
class _Sequence:
    """One answer in the making."""

    ask: _Ask
    numbers: np.random.Generator
    row: Row | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopK] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None


@dataclass(eq=False, slots=True)
class _Ask:
    """One request, its promise and its answers."""

    request: SampleRequest
    weights: lora.Weights | None
    limit: int
    stop_tokens: frozenset[int]
    result: asyncio.Future[Sampled]
    sequences: list[_Sequence] = field(default_factory=list)
    prompt: prompts.PromptAnswers | None = None

    @property
    def rule(self) -> choice.Rule:
        return choice.Rule(self.request.temperature, self.request.top_k, self.request.top_p)


class TorchSampler:
    """Implements the sampling half of `engine.base.Sampler`; what concerns versions is in `versions`."""

    def __init__(self, base: BaseModel, router: lora.Router, turns: Turns, pass_tokens: int, cache_tokens: int) -> None:
        self._base, self._router, self._turns = base, router, turns
        self._pass_tokens, self._cache_tokens = pass_tokens, cache_tokens
        self._head = Head(base.head)
        self._cache = Cache(_cache_shape(base))
        self._waiting: list[_Ask] = []
        self._running: list[_Sequence] = []
        self._driver: asyncio.Task[None] | None = None
        self.versions = Versions(base)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Joins the running batch at the next token."""
        weights = None if request.version is None else self.versions.weights(request.version)
        left = max(1, self._base.card.context_length - len(request.prompt))
        ask = _Ask(
            request=request,
            weights=weights,
            limit=left if request.max_tokens is None else request.max_tokens,
            stop_tokens=frozenset(
                self._base.card.eos_token_ids if request.stop_tokens is None else request.stop_tokens
            ),
            result=asyncio.get_running_loop().create_future(),
        )
        seed = secrets.randbits(64) if request.seed is None else request.seed
        ask.sequences = [_Sequence(ask, choice.stream(seed, number)) for number in range(request.num_samples)]
        self._waiting.append(ask)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await ask.result

    async def cancel(self, request_id: str) -> None:
        """Takes effect before the next token."""
        asks = {id(ask): ask for ask in [*self._waiting, *(sequence.ask for sequence in self._running)]}
        cancelled = [ask for ask in asks.values() if ask.request.request_id == request_id]
        self._leave(cancelled)
        self._fail(cancelled, Gone(f"Request {request_id} was cancelled.", "Submit it again."))

    async def _drive(self) -> None:
        """Rounds until nothing is left to do."""
        while self._waiting or self._running:
            async with self._turns.of("sampling"):
                with torch.no_grad():
                    self._admit(self._next_asks())
                    self._advance()

    def _admit(self, asks: Sequence[_Ask]) -> None:
        """A fault stays with the one request that caused it: the others of its pass are admitted without it."""
        try:
            if asks:
                self._prefill(asks)
        except Exception as error:  # noqa: BLE001 - whatever it was, the batch must go on
            self._leave(asks)
            if len(asks) == 1:
                self._fail(asks, error)
            else:
                for ask in asks:
                    self._admit([ask])

    def _advance(self) -> None:
        """A fault in a step everyone shares fails all of it; those who wait are not touched."""
        try:
            if self._running:
                self._step()
        except Exception as error:  # noqa: BLE001 - whatever it was, those who wait must be served
            asks = list({id(sequence.ask): sequence.ask for sequence in self._running}.values())
            self._leave(asks)
            self._fail(asks, error)

    def _leave(self, asks: Sequence[_Ask]) -> None:
        """Take requests out of the batch, as if they had never been in it."""
        for sequence in [sequence for ask in asks for sequence in ask.sequences]:
            if sequence.row is not None:
                self._cache.remove(sequence.row)
            sequence.row, sequence.stop_reason = None, None
            sequence.tokens, sequence.logprobs, sequence.tops = [], [], []
        gone = {id(ask) for ask in asks}
        self._running = [sequence for sequence in self._running if id(sequence.ask) not in gone]
        self._waiting = [ask for ask in self._waiting if id(ask) not in gone]

    def _fail(self, asks: Sequence[_Ask], error: Exception) -> None:
        for ask in asks:
            if not ask.result.done():
                told = error if isinstance(error, TinsmithError) else EngineError(f"Sampling failed: {error!r}")
                ask.result.set_exception(told)

    def _next_asks(self) -> list[_Ask]:
        """As many of those who wait, oldest first, as fit a pass, the cache and the step; one at least when idle."""
        admitted: list[_Ask] = []
        passed, cached, running = 0, self._cache.tokens, len(self._running)
        for ask in self._waiting:
            room = ask.request.num_samples * Cache.capacity(len(ask.request.prompt) + min(ask.limit, 64))
            passed, cached, running = passed + len(ask.request.prompt), cached + room, running + len(ask.sequences)
            full = passed > self._pass_tokens or cached > self._cache_tokens or running > MAX_SEQUENCES
            if full and (admitted or self._running):
                break
            admitted.append(ask)
        self._waiting = self._waiting[len(admitted) :]
        return admitted

    def _prefill(self, asks: Sequence[_Ask]) -> None:
        """One packed pass over the new prompts: what is asked about them, and every answer's first token."""
        adapters = list({id(ask.weights): ask.weights for ask in asks}.values())
        slots = {id(weights): slot for slot, weights in enumerate(adapters)}
        forest = batch.pack(
            [
                batch.Row(key=key, adapter=slots[id(ask.weights)], tokens=ask.request.prompt)
                for key, ask in enumerate(asks)
            ]
        )
        device = self._base.device
        context = attention.packed(forest, self._base.dtype, device, keep=True)
        with self._router.using(lora.place(forest.spans, adapters)):
            hidden = self._base.hidden(
                torch.as_tensor(forest.tokens, device=device), torch.as_tensor(forest.positions, device=device), context
            )
        index = [torch.as_tensor(forest.index[key], device=device) for key in range(len(asks))]
        for ask, where in zip(asks, index, strict=True):
            if prompts.asks(ask.request):
                ask.prompt = prompts.answer(ask.request, self._head, hidden[where], ask.weights)
            logits = self._head.logits(hidden[where[-1:]], ask.weights)
            self._draw(ask.sequences, logits.expand(len(ask.sequences), -1))
            self._enter(ask, context, where)
        self._settle([sequence for ask in asks for sequence in ask.sequences])

    def _enter(self, ask: _Ask, context: attention.Packed, where: Tensor) -> None:
        """Give the unfinished answers their rows: the first from the pass, the others copied."""
        going = [sequence for sequence in ask.sequences if sequence.stop_reason is None]
        if not going:
            return
        keys, values = zip(*context.kept, strict=True)
        going[0].row = self._cache.insert(keys, values, where, len(where) + min(ask.limit, 64))
        for sequence in going[1:]:
            sequence.row = self._cache.copy(going[0].row)
        self._running.extend(going)

    def _step(self) -> None:
        """One more token for everyone."""
        self._running.sort(key=lambda sequence: id(sequence.ask.weights))
        going = list(self._running)
        rows: list[Row] = []
        for sequence in going:
            assert sequence.row is not None
            sequence.row = self._cache.ensure(sequence.row)
        rows = [sequence.row for sequence in going if sequence.row is not None]
        placed, at = [], 0
        for _, same in groupby(going, key=lambda sequence: id(sequence.ask.weights)):
            members = list(same)
            if members[0].ask.weights is not None:
                placed.append((members[0].ask.weights, at, at + len(members)))
            at += len(members)
        device = self._base.device
        context = Cached(rows)
        with self._router.using(placed):
            hidden = self._base.hidden(
                torch.tensor([sequence.tokens[-1] for sequence in going], device=device),
                torch.tensor([row.length for row in rows], device=device),
                context,
            )
        context.advance()
        for block in self._head.blocks(hidden, placed):
            self._draw(going[block.first : block.first + len(block.logits)], block.logits)
        self._settle(going)

    def _draw(self, sequences: Sequence[_Sequence], logits: Tensor) -> None:
        """Each sequence's next token from its row of logits."""
        chosen = choice.choose(
            logits, [sequence.ask.rule for sequence in sequences], [sequence.numbers.random() for sequence in sequences]
        )
        for number, (sequence, token, logprob) in enumerate(
            zip(sequences, chosen.tokens.tolist(), chosen.logprobs.tolist(), strict=True)
        ):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if k := sequence.ask.request.topk_sample_logprobs:
                sequence.tops.append(choice.top(chosen.all[number : number + 1], k))
            if token in sequence.ask.stop_tokens or self._spells_stop(sequence):
                sequence.stop_reason = "stop"
            elif len(sequence.tokens) >= sequence.ask.limit:
                sequence.stop_reason = "length"

    def _spells_stop(self, sequence: _Sequence) -> bool:
        """Whether the newest token completes a stop string: every token spells a byte at least, so a tail will do."""
        strings = sequence.ask.request.stop_strings
        if not strings:
            return False
        tail = max(len(string.encode()) for string in strings) + 4
        text = self._base.tokenizer.decode(sequence.tokens[-tail:])
        return any(string in text for string in strings)

    def _settle(self, sequences: Sequence[_Sequence]) -> None:
        """Who is finished leaves; a request whose last sequence left is answered."""
        finished = [sequence for sequence in sequences if sequence.stop_reason is not None]
        if not finished:
            return
        gone = {id(sequence) for sequence in finished}
        self._running = [sequence for sequence in self._running if id(sequence) not in gone]
        for sequence in finished:
            if sequence.row is not None:
                self._cache.remove(sequence.row)
                sequence.row = None
        for ask in {id(sequence.ask): sequence.ask for sequence in finished}.values():
            if all(sequence.stop_reason for sequence in ask.sequences) and not ask.result.done():
                ask.result.set_result(_sampled(ask))


def _sampled(ask: _Ask) -> Sampled:
    found = ask.prompt
    return Sampled(
        sequences=tuple(
            SampledSequence(
                tokens=np.array(sequence.tokens, np.int32),
                logprobs=np.array(sequence.logprobs, np.float32),
                stop_reason=sequence.stop_reason or "length",
                topk=_joined(sequence.tops) if sequence.tops else None,
            )
            for sequence in ask.sequences
        ),
        prompt_logprobs=found.logprobs if found else None,
        topk_prompt=found.topk if found else None,
        target_prompt_logprobs=found.targets if found else None,
    )


def _joined(tops: Sequence[TopK]) -> TopK:
    return TopK(
        token_ids=np.concatenate([top.token_ids for top in tops]),
        logprobs=np.concatenate([top.logprobs for top in tops]),
    )


def _cache_shape(base: BaseModel) -> CacheShape:
    config = base.model.config
    return CacheShape(
        layers=config.num_hidden_layers,
        heads=config.num_key_value_heads,
        width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=base.dtype,
        device=base.device,
    )
