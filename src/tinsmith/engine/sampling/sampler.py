"""The Sampler in plain torch: a running batch that requests join and leave at any token.

A round goes: admit what waits (one packed pass over what is new of the prompts, equal beginnings computed once; each
answer's first token comes from it), then one decoding step for everyone: each answer feeds its last token, whatever its
adapter, and draws its next. Who is finished leaves at once, and what it read and said is kept among the prefixes for
whoever goes on from there. Between rounds the trainer has its turn.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.base import Heard, Sampled, SampleRequest
from tinsmith.engine.device_sharing import DeviceScheduler
from tinsmith.engine.lora import adapter, linear
from tinsmith.engine.lora.adapter import Placed, Weights
from tinsmith.engine.lora.lm_head import Head
from tinsmith.engine.model import packing
from tinsmith.engine.model.loading import BaseModel
from tinsmith.engine.sampling import prompt_logprobs, sequences, token_sampling
from tinsmith.engine.sampling.capacity import MAX_SEQUENCES, reserved_tokens, shares_prompt
from tinsmith.engine.sampling.decode import Cached
from tinsmith.engine.sampling.kv_cache import Cache, Row, shape_of
from tinsmith.engine.sampling.prefill import Prompt, Read, prefill, whole
from tinsmith.engine.sampling.prefix_cache import Content, Found, Prefixes
from tinsmith.engine.sampling.sequences import Answer, Ask, Beginning, Faults, ask_of, asks_of, told
from tinsmith.engine.sampling.versions import Versions
from tinsmith.errors import BadRequest, EngineError, Gone, TinsmithError


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws with a head, and reads with a tokenizer."""

    head: Head
    tokenizer: Any

    def firsts(self, asks: Sequence[Ask], last: Tensor) -> Faults:
        """The first token of all answers; `last` [A, D] are the last hidden states of the prompts."""
        faults: Faults = {}
        for block in self.head.blocks(last, placed([ask.weights for ask in asks])):
            here = asks[block.first : block.first + len(block.logits)]
            faults |= self._draw([ask.answers for ask in here], block.logits)
        return faults

    def nexts(self, answers: Sequence[Answer], hidden: Tensor, where: Sequence[Placed]) -> Faults:
        """One more token of each; `hidden` [B, D] are theirs."""
        faults: Faults = {}
        for block in self.head.blocks(hidden, where):
            here = answers[block.first : block.first + len(block.logits)]
            faults |= self._draw([[answer] for answer in here], block.logits)
        return faults

    def _draw(self, groups: Sequence[Sequence[Answer]], logits: Tensor) -> Faults:
        """A token for each answer, from the row of logits that its group shares."""
        answers = [answer for group in groups for answer in group]
        chosen = token_sampling.choose(
            logits,
            [group[0].ask.rule for group in groups],
            [answer.numbers.random() for answer in answers],
            [row for row, group in enumerate(groups) for _ in group],
        )
        drawn = zip(answers, chosen.tokens.tolist(), chosen.logprobs.tolist(), chosen.tops, strict=True)
        faults: Faults = {}
        for answer, token, logprob, top in drawn:
            try:
                if not math.isfinite(logprob):
                    raise not_finite(answer.ask)
                if top is not None:
                    answer.tops.append(top)
                answer.add(token, logprob, self._completes_stop(answer, token))
            except Exception as error:  # noqa: BLE001 - whatever it was, it is the fault of one request
                faults[answer.ask] = error
        return faults

    def _completes_stop(self, answer: Answer, token: int) -> bool:
        asked = answer.ask.request
        return sequences.completes(self.tokenizer, asked.stop_strings, asked.prompt, answer.tokens, token)


def not_finite(ask: Ask) -> TinsmithError:
    """What a request is told whose numbers are no numbers."""
    if ask.weights is None:
        return EngineError("The base model gives numbers that are not finite for this prompt.", "Serve it in float32.")
    return BadRequest(
        "The weights that this request samples from give numbers that are not finite: they have diverged.",
        "Sample from an earlier checkpoint, and train on from there with a lower learning_rate.",
    )


def placed(weights: Sequence[Weights | None]) -> list[Placed]:
    """Where each adapter stands in a batch of one position per entry, equal ones side by side."""
    found, at = [], 0
    for _, same in groupby(weights, key=id):
        members = list(same)
        if members[0] is not None:
            found.append((members[0], at, at + len(members)))
        at += len(members)
    return found


FIRST = 3
"""Micro-batches' worth of prompt tokens in a pass that nobody has to wait for: without a backward it takes as long."""


class TorchSampler:
    """Implements the sampling half of `engine.base.Sampler`; what concerns versions is in `versions`."""

    def __init__(
        self,
        base: BaseModel,
        head: Head,
        router: linear.Router,
        scheduler: DeviceScheduler,
        pass_tokens: int,
        cache_tokens: int,
    ) -> None:
        self._base, self._router, self._device = base, router, scheduler
        self._pass_tokens, self._cache_tokens = pass_tokens, cache_tokens
        self._head, self._drawing = head, Drawing(head, base.tokenizer)
        self._cache, self._prefixes = Cache(shape_of(base), cache_tokens), Prefixes()
        self._waiting: list[Ask] = []
        self._running: list[Answer] = []
        self._driver: asyncio.Task[None] | None = None
        self.versions = Versions(base, self._prefixes.drop)

    async def sample(self, request: SampleRequest, heard: Heard | None = None) -> Sampled:
        """Joins the running batch at the next token."""
        weights = None if request.version is None else self.versions.weights(request.version)
        life = 0 if request.version is None else self.versions.life(request.version)
        ask = ask_of(request, weights, life, self._base.card, heard)
        self._waiting.append(ask)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await ask.result

    async def cancel(self, request_id: str) -> None:
        """Takes effect before the next token."""
        asks = [*self._waiting, *asks_of(self._running)]
        cancelled = [ask for ask in asks if ask.request.request_id == request_id]
        self._leave(cancelled)
        self._fail(cancelled, Gone(f"Request {request_id} was cancelled.", "Submit it again."))

    async def _drive(self) -> None:
        """Rounds until nothing is left to do."""
        while self._waiting or self._running:
            async with self._device.turn("sampling"):
                with torch.no_grad():
                    self._join()
                    self._advance()

    def _join(self) -> None:
        """Admit who can be; if that cannot even be found out, who waits is told so and does not wait for ever."""
        try:
            self._admit(self._next_asks())
        except Exception as error:  # noqa: BLE001 - the driver must not end while others run
            asks = list(self._waiting)
            self._leave(asks)
            self._fail(asks, error)

    def _admit(self, asks: Sequence[Ask]) -> None:
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
            asks = asks_of(self._running)
            self._leave(asks)
            self._fail(asks, error)

    def _leave(self, asks: Sequence[Ask]) -> None:
        """Take requests out of the batch, as if they had never been in it."""
        for answer in [answer for ask in asks for answer in ask.answers]:
            self._free(answer)
            answer.restart()
        self._running = [answer for answer in self._running if answer.ask not in asks]
        self._waiting = [ask for ask in self._waiting if ask not in asks]

    def _fail(self, asks: Sequence[Ask], error: Exception) -> None:
        for ask in asks:
            if not ask.result.done():
                told = error if isinstance(error, TinsmithError) else EngineError(f"Sampling failed: {error!r}")
                ask.result.set_exception(told)

    def _drop(self, faults: Faults) -> None:
        """Requests that went wrong leave, each with its own fault."""
        if faults:
            self._leave(list(faults))
        for ask, error in faults.items():
            self._fail([ask], error)

    def _next_asks(self) -> list[Ask]:
        """As many of those who wait, oldest first, as fit a pass, the cache and the step; one at least when idle."""
        admitted: list[Ask] = []
        most = self._pass_tokens * (1 if self._running else FIRST)
        passed, cached, running = 0, self._cache.tokens, len(self._running)
        for ask in self._waiting:
            found, length, answers = self._found(ask), len(ask.request.prompt), len(ask.answers)
            together = self._together(length, answers)
            passed, running = passed + length - found.length, running + answers
            cached += reserved_tokens(length, answers, ask.limit, shared=together)
            crowded = cached > self._cache_tokens or running > MAX_SEQUENCES
            if (admitted and passed > most) or (crowded and (admitted or self._running)):
                break
            admitted.append(ask)
        self._waiting = self._waiting[len(admitted) :]
        return admitted

    def _found(self, ask: Ask) -> Found:
        """What is known of a prompt, but for the positions that something is asked about."""
        request = ask.request
        whole = None if prompt_logprobs.asks(request) else self._prefixes.find_whole(ask.trunk, request.prompt)
        return whole or self._prefixes.find(ask.trunk, request.prompt, prompt_logprobs.needed(request))

    def _prefill(self, asks: Sequence[Ask]) -> None:
        """Every answer's first token, and what is asked about the prompts; one packed pass over what is not known."""
        asks = sorted(asks, key=lambda ask: id(ask.weights))
        found = [self._found(ask) for ask in asks]
        for ask, known in zip(asks, found, strict=True):
            ask.found = known.length
            self._prefixes.touch(known)
        read = self._read(asks, found)
        if len(asks) == 1 and not read:
            raise not_finite(asks[0])
        going = list(read)
        if going:
            faults = self._drawing.firsts(going, torch.stack([read[ask].last for ask in going]))
            self._drop(faults)
            going = [ask for ask in going if ask not in faults]
            self._enter(going, [read[ask] for ask in going])
            self._settle([answer for ask in going for answer in ask.answers])
        for ask in asks:
            if ask not in read:  # by its own weights or by its company's: attention masks them, but not their NaN
                self._admit([ask])

    def _read(self, asks: Sequence[Ask], found: Sequence[Found]) -> dict[Ask, Read]:
        """Prompts as they stand once read, and what is asked about them; without those whose numbers are not finite."""
        read = {ask: whole(known) for ask, known in zip(asks, found, strict=True) if known.last is not None}
        new = {key: ask for key, ask in enumerate(asks) if ask not in read}
        if new:
            adapters = list({id(ask.weights): ask.weights for ask in new.values()}.values())
            slots = {id(weights): slot for slot, weights in enumerate(adapters)}
            work = prefill(
                [
                    Prompt(
                        row=packing.Row(key=key, adapter=slots[id(ask.weights)], tokens=ask.request.prompt),
                        found=found[key],
                        needed=prompt_logprobs.needed(ask.request),
                    )
                    for key, ask in new.items()
                ],
                self._base,
            )
            with self._router.using(adapter.place(work.spans, adapters)):
                hidden = self._base.hidden(work.tokens, work.positions, work.context)
            finite = hidden.isfinite().all(dim=1)
            for key, ask in new.items():
                if not bool(finite[work.hidden[key][prompt_logprobs.needed(ask.request) :]].all()):
                    continue
                if prompt_logprobs.asks(ask.request):
                    states = hidden[work.hidden[key]]
                    ask.prompt = prompt_logprobs.answer(ask.request, self._head, states, ask.weights, ask.seed)
                read[ask] = Read(hidden[work.hidden[key][-1]], work.stretches[key], work.context.kept)
        return {ask: read[ask] for ask in asks if ask in read}

    def _enter(self, asks: Sequence[Ask], read: Sequence[Read]) -> None:
        """Give the unfinished answers their rows, and remember the prompts."""
        going = [[answer for answer in ask.answers if answer.stop_reason is None] for ask in asks]
        for ask, known, answers in zip(asks, read, going, strict=True):
            if answers:
                self._remember(ask, ask.request.prompt, known.since)
                self._prefixes.mark(ask.trunk, ask.request.prompt, known.last)
            self._running.extend(answers)
        readers = Counter(answer.ask.beginning for answers in going for answer in answers)
        rooms = Counter(answer.ask.room for answers in going for answer in answers)
        stems: dict[Beginning, Row] = {}
        try:
            for ask, where, answers in zip(asks, read, going, strict=True):
                together = self._together(where.length, readers[ask.beginning])
                if answers and together and ask.beginning not in stems:
                    stems[ask.beginning] = self._cache.stem(where, readers[ask.beginning])
                for answer in answers:
                    first = answers[0].row
                    if together:
                        answer.row = self._cache.open(stems[ask.beginning], ask.tail)
                    elif first:
                        answer.row = self._cache.copy(first)
                    else:
                        answer.row = self._cache.insert(where, ask.room, rooms[ask.room])
                self._prefixes.lend(self._prefixes.find_whole(ask.trunk, ask.request.prompt) or Found())
        finally:
            for stem in stems.values():
                if not stem.readers:  # something went wrong before one was there: a stem leaves with its last reader
                    self._cache.remove(stem)
        self._shrink()

    def _together(self, length: int, answers: int) -> bool:
        """Whether answers read their prompt together."""
        return self._base.device.type == "cpu" and shares_prompt(length, answers)

    def _remember(self, ask: Ask, tokens: np.ndarray, content: Content) -> None:
        """Keep what was read and said, if its version still lives."""
        version = ask.request.version
        if version is None or self.versions.life(version) == ask.life:
            self._prefixes.add(ask.trunk, tokens, content)

    def _free(self, answer: Answer) -> None:
        """It needs its row no more."""
        if answer.row is not None:
            self._cache.remove(answer.row)
            answer.row = None

    def _shrink(self) -> None:
        """Rows go first; what is remembered has the rest."""
        self._prefixes.shrink(self._cache_tokens - self._cache.tokens)

    def _step(self) -> None:
        """One more token for everyone."""
        for answer in reversed(self._running):  # the last rows of a bank leave first, so that none must move
            assert answer.row is not None
            answer.row = self._cache.ensure(answer.row, answer.left)
        self._running.sort(key=_place)
        going = list(self._running)
        rows = [answer.row for answer in going if answer.row is not None]
        self._shrink()
        where = placed([answer.ask.weights for answer in going])
        context = Cached(rows)
        with self._router.using(where):
            hidden = self._base.hidden(
                torch.tensor([answer.tokens[-1] for answer in going], device=self._base.device),
                torch.tensor([row.position for row in rows], device=self._base.device),
                context,
            )
        context.advance()
        self._drop(self._drawing.nexts(going, hidden, where))
        self._settle(going)

    def _settle(self, answers: Sequence[Answer]) -> None:
        """Who is finished leaves; a request whose last answer left is done. Only what no fault can undo is told."""
        self._drop(told(answers))
        finished = [answer for answer in answers if answer.stop_reason is not None]
        if not finished:
            return
        self._running = [answer for answer in self._running if answer.stop_reason is None]
        for answer in reversed(finished):  # the last rows of a bank leave first, so that none must move
            if answer.row is not None:
                self._remember(answer.ask, answer.read(), answer.row.since)
                self._free(answer)
        self._shrink()
        for ask in asks_of(finished):
            ask.finish()


def _place(answer: Answer) -> tuple[int, int, int]:
    """In a step: adapters one after the other, and the rows of a bank as they stand in it."""
    assert answer.row is not None
    return id(answer.ask.weights), id(answer.row.bank), answer.row.row
