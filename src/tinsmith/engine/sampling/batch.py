"""The running batch: prefill of admitted jobs, and decoding of the running sequences.

A prefill is one packed pass over the uncached tokens of several prompts; the first token of each sequence comes from
it. A decoding step feeds the last token of every running sequence, whatever its adapter, and samples the next one; over
banks (`decode`) at once, over pages (`paged.decoder`) while the results of the step before are read.
Finished sequences leave at once, and their tokens go to the prefix cache.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.lora import adapter, linear
from tinsmith.engine.lora.adapter import PlacedAdapter, adapter_spans
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model import packing
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.model.hybrid.states import RecurrentState
from tinsmith.engine.sampling import prompt_logprobs
from tinsmith.engine.sampling.banks.layers import CompiledLayers
from tinsmith.engine.sampling.decode import DecodeAttention, attention_function, step_context
from tinsmith.engine.sampling.device_sampling import sample_on_device
from tinsmith.engine.sampling.kv_cache import CacheRow, KVCache, RowCache, cache_shape, state_bank
from tinsmith.engine.sampling.paged.attention import AttendPages
from tinsmith.engine.sampling.paged.choice import step_capture
from tinsmith.engine.sampling.paged.decoder import DecodedTokens, PagedDecoder
from tinsmith.engine.sampling.paged.pages import CacheFull, PagedCache, PagedRow
from tinsmith.engine.sampling.prefill import PrefilledPrompt, Prompt, prefill_pass
from tinsmith.engine.sampling.prefixes.cache import KVReader, PrefixCache, PrefixMatch
from tinsmith.engine.sampling.row_renewal import RowRenewal
from tinsmith.engine.sampling.scheduler import JobSize, Load, Scheduler
from tinsmith.engine.sampling.sequences import PromptKey, SampleJob, Sequence, completes_stop_string, jobs_of
from tinsmith.engine.sampling.token_sampling import SampledTokens, sample_tokens
from tinsmith.engine.sampling.versions import AdapterVersions
from tinsmith.errors import BadRequest, EngineError, TinsmithError

Faults = dict[SampleJob, Exception]
"""Jobs that failed, each with its own error."""


@dataclass(frozen=True, slots=True)
class TokenSampler:
    """Samples the next token of sequences from hidden states. A fault in one sequence fails its own job only."""

    head: LMHead
    tokenizer: Any

    def first_tokens(self, jobs: list[SampleJob], last_hidden: Tensor) -> Faults:
        """Append the first token of all sequences; `last_hidden` [J, D] are the prompts' last hidden states."""
        faults: Faults = {}
        for block in self.head.blocks(last_hidden, adapter_spans([job.weights for job in jobs])):
            block_jobs = jobs[block.first : block.first + len(block.logits)]
            faults |= self._sample([job.sequences for job in block_jobs], block.logits)
        return faults

    def append(self, sequences: list[Sequence], sampled: SampledTokens) -> Faults:
        """Append a sampled token to each sequence."""
        draws = zip(sequences, sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.top_logprobs, strict=True)
        faults: Faults = {}
        for sequence, token, logprob, top in draws:
            try:
                if not math.isfinite(logprob):
                    raise not_finite(sequence.job)
                if top is not None:
                    sequence.top_logprobs.append(top)
                sequence.append(token, logprob, self._completes_stop(sequence, token))
            except Exception as error:  # noqa: BLE001 - the fault of one job must not end the others
                faults[sequence.job] = error
        return faults

    def next_tokens(self, sequences: list[Sequence], hidden: Tensor, spans: list[PlacedAdapter]) -> Faults:
        """Append one token to each sequence; `hidden` [B, D] are their hidden states."""
        faults: Faults = {}
        for block in self.head.blocks(hidden, spans):
            block_sequences = sequences[block.first : block.first + len(block.logits)]
            faults |= self._sample([[sequence] for sequence in block_sequences], block.logits)
        return faults

    def _sample(self, groups: list[list[Sequence]], logits: Tensor) -> Faults:
        """Append a token to each sequence; the sequences of a group draw from one row of logits."""
        sequences = [sequence for group in groups for sequence in group]
        sample = sample_tokens if logits.device.type == "cpu" else sample_on_device
        sampled = sample(
            logits,
            [group[0].job.rule for group in groups],
            [sequence.uniforms.random() for sequence in sequences],
            [row for row, group in enumerate(groups) for _ in group],
        )
        return self.append(sequences, sampled)

    def _completes_stop(self, sequence: Sequence, token: int) -> bool:
        request = sequence.job.request
        return completes_stop_string(self.tokenizer, request.stop_strings, request.prompt, sequence.tokens, token)


def not_finite(job: SampleJob) -> TinsmithError:
    """Error for a job whose hidden states or logits are not finite."""
    if job.weights is None:
        return EngineError("The base model gives values that are not finite for this prompt.", "Serve it in float32.")
    return BadRequest(
        "The weights that this request samples from give values that are not finite: they have diverged.",
        "Sample from an earlier checkpoint, and continue training from there with a lower learning_rate.",
    )


class RunningBatch:
    """Running sequences with their KV cache, and the prefix cache of those that have ended."""

    def __init__(
        self,
        base: BaseModel,
        head: LMHead,
        active: linear.ActiveAdapters,
        scheduler: Scheduler,
        attend_pages: AttendPages | None = None,
    ) -> None:
        """With `attend_pages` the rows are in pages, otherwise in banks; as `scheduler.has_pages` says."""
        self._base, self._head, self._active, self._scheduler = base, head, active, scheduler
        self._token_sampler = TokenSampler(head, base.tokenizer)
        states = state_bank(base, scheduler.cache_tokens)
        shape = cache_shape(base)
        self.kv_cache: RowCache = KVCache(shape, scheduler.cache_tokens, states)
        self.attention_function = attention_function(shape) if attend_pages is None else None
        """Of rows in banks; the sampler drops it where it does not work."""
        self.layers: CompiledLayers | None = None
        """Computes steps of rows in banks; the sampler sets it where it works."""
        self._decoder: PagedDecoder | None = None
        if attend_pages is not None:
            pages = PagedCache(shape, scheduler.row_tokens)
            self.kv_cache = pages
            capture = None if scheduler.one_at_a_time else step_capture(base)
            self._decoder = PagedDecoder(
                base, head, active, pages, attend_pages, capture, has_slots=not scheduler.one_at_a_time
            )
        self.state_tokens = states.row_tokens if states else 0
        """Cache tokens that the recurrent states of a sequence are worth."""
        self.prefix_cache = PrefixCache(self.state_tokens)
        self._row_renewal = RowRenewal(base, active, self.kv_cache, self.prefix_cache, scheduler.pass_tokens)
        self.versions = AdapterVersions(base, self.prefix_cache.drop_version)
        self.sequences: list[Sequence] = []

    @property
    def load(self) -> Load:
        return Load(sequences=len(self.sequences), cache_tokens=self.kv_cache.tokens)

    def size_of(self, job: SampleJob) -> JobSize:
        """A waiting job's size, with the part of its prompt that is cached now."""
        return JobSize(
            prompt_tokens=len(job.request.prompt),
            cached_tokens=self._match(job).length,
            sequences=len(job.sequences),
            max_tokens=job.max_tokens,
            state_tokens=self.state_tokens,
        )

    def prefill(self, jobs: list[SampleJob]) -> list[SampleJob]:
        """Prefill the prompts in one pass, sample every sequence's first token, and add the sequences to the batch.

        Returns the jobs that must be prefilled alone: their hidden states are not finite, because of their own weights
        or those of another job, since attention masks other jobs but not their NaN. Raises if there was only one.
        """
        matches = [self._match(job) for job in jobs]
        for job, match in zip(jobs, matches, strict=True):
            job.cached_tokens = match.length
            self.prefix_cache.touch(match)
        prompts = self._prefill_prompts(jobs, matches)
        if len(jobs) == 1 and not prompts:
            raise not_finite(jobs[0])
        started = list(prompts)
        if started:
            last_hidden = torch.stack([prompts[job].last_hidden for job in started])
            faults = self._token_sampler.first_tokens(started, last_hidden)
            self._fail(faults)
            started = [job for job in started if job not in faults]
            self._add(started, [prompts[job] for job in started])
            self._emit_and_retire([sequence for job in started for sequence in job.sequences])
        return [job for job in jobs if job not in prompts]

    def decode(self) -> list[SampleJob]:
        """Sample one more token of every running sequence. Returns the jobs that left for want of pages: they are as
        before their prefill."""
        if self._decoder is not None:
            return self._decode_pages(self._decoder)
        self._decode_banks()
        return []

    def _decode_pages(self, decoder: PagedDecoder) -> list[SampleJob]:
        """Launch a step of the sequences that go on, and take the tokens of the step before."""
        in_flight = decoder.in_flight()
        running = [sequence for sequence in self.sequences if sequence.remaining > (sequence in in_flight)]
        if any(sequence.outgrows_factors for sequence in running):
            self._take(decoder, decoder.finish())
            running = list(self.sequences)
            self._row_renewal.renew([sequence for sequence in running if sequence.outgrows_factors])
        running, removed = self._with_space(running)
        self._shrink_prefix_cache()
        self._take(decoder, decoder.next(running))
        return removed

    def _with_space(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[SampleJob]]:
        """The sequences, each with a page for its next token, without those of the jobs that came last and had to be
        removed for it."""
        removed: list[SampleJob] = []
        assert isinstance(self.kv_cache, PagedCache)
        while True:
            alone = len(jobs_of(self.sequences)) < 2
            try:
                for row in (sequence.row for sequence in sequences):
                    assert isinstance(row, PagedRow)
                    self.kv_cache.ensure_space(row, may_exceed=alone)
            except CacheFull:
                removed.insert(0, self.sequences[-1].job)
                self.remove(removed[:1])
                sequences = [sequence for sequence in sequences if sequence.job is not removed[0]]
            else:
                return sequences, removed

    def _take(self, decoder: PagedDecoder, decoded: DecodedTokens | None) -> None:
        """Append the tokens of a step, and cut those of the next step after sequences that have ended."""
        if decoded is not None:
            self._fail(self._token_sampler.append(decoded.sequences, decoded.sampled))
            in_flight = decoder.in_flight()
            for sequence in decoded.sequences:
                if sequence.stop_reason is not None and sequence.row is not None and sequence in in_flight:
                    sequence.row.length -= 1
            self._emit_and_retire(decoded.sequences)

    def _decode_banks(self) -> None:
        self._row_renewal.renew([sequence for sequence in self.sequences if sequence.outgrows_factors])
        for sequence in reversed(self.sequences):  # the last rows of a bank first, so that no other row must move
            assert sequence.row is not None
            sequence.row = self.kv_cache.ensure_space(sequence.row, sequence.remaining)
        self.sequences.sort(key=_batch_order)
        sequences = list(self.sequences)
        rows = [sequence.row for sequence in sequences if isinstance(sequence.row, CacheRow)]
        self._shrink_prefix_cache()
        spans = adapter_spans([sequence.job.weights for sequence in sequences])
        attention = DecodeAttention(rows, self.attention_function)
        context = step_context(attention, self._base.recurrent, self.kv_cache.states)
        records = any(sequence.job.request.routed_experts for sequence in sequences)
        tokens = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=self._base.device)
        positions = torch.tensor([sequence.position for sequence in sequences], device=self._base.device)
        with self._active.using(spans, repeats=True), self._base.routing.using(record=records):
            step, groups = attention.compiled, self._active.groups
            if self.layers is not None and step is not None and self.layers.serve(groups):
                hidden = self.layers.hidden(tokens, positions, step, groups)
            else:
                hidden = self._base.hidden(tokens, positions, context)
            if records:
                for sequence, experts in zip(sequences, self._base.routing.record(), strict=True):
                    if sequence.job.request.routed_experts:
                        sequence.routed_experts.append(experts)
        attention.advance()
        self._fail(self._token_sampler.next_tokens(sequences, hidden, spans))
        self._emit_and_retire(sequences)
        self._release_tables()

    def _release_tables(self) -> None:
        """Drop the tables of the last step over banks if no sequence is left: they refer to weights."""
        if self._decoder is None and not self.sequences:
            self._active.release_memory()
            if self.layers is not None:
                self.layers.release_memory()

    def release_memory(self) -> None:
        """Drop what can be computed again."""
        self.prefix_cache.shrink(0)
        if self._decoder is not None and isinstance(self.kv_cache, PagedCache):
            self._decoder.release_memory()
            self.kv_cache.release_memory()

    def remove(self, jobs: list[SampleJob]) -> None:
        """Remove jobs, as if they had never been in the batch."""
        for sequence in [sequence for job in jobs for sequence in job.sequences]:
            self._free_row(sequence)
            sequence.reset()
        self.sequences = [sequence for sequence in self.sequences if sequence.job not in jobs]
        self._release_tables()

    def _match(self, job: SampleJob) -> PrefixMatch:
        """The cached beginning of a prompt, up to the first position whose hidden state is needed."""
        request = job.request
        whole = None
        if not prompt_logprobs.needs_logits(request):
            whole = self.prefix_cache.match_prompt(job.scope, job.prompt_ids)
        return whole or self.prefix_cache.match(job.scope, job.prompt_ids, prompt_logprobs.first_hidden(request))

    def _prefill_prompts(self, jobs: list[SampleJob], matches: list[PrefixMatch]) -> dict[SampleJob, PrefilledPrompt]:
        """Prefilled prompts, without those whose hidden states are not finite. Sets the jobs' prompt results."""
        prompts = {
            job: PrefilledPrompt.from_cache(match)
            for job, match in zip(jobs, matches, strict=True)
            if match.last_hidden is not None
        }
        new = {key: job for key, job in enumerate(jobs) if job not in prompts}
        if new:
            # A job that records its experts shares no cached prefix with one that does not.
            kinds = list({_kind(job): job for job in new.values()}.values())
            slots = {_kind(job): slot for slot, job in enumerate(kinds)}
            adapters = [job.weights for job in kinds]
            inputs = prefill_pass(
                [
                    Prompt(
                        row=packing.PackedRow(
                            key=key,
                            adapter=slots[_kind(job)],
                            tokens=job.request.prompt,
                            images=job.request.images,
                            long_factors=job.has_long_factors(len(job.request.prompt)),
                        ),
                        match=matches[key],
                        first_hidden=prompt_logprobs.first_hidden(job.request),
                    )
                    for key, job in new.items()
                ],
                self._base,
            )
            records = any(job.request.routed_experts for job in new.values())
            visual = self._base.visual_inputs(inputs.images)
            with (
                self._active.using(adapter.place_adapters(inputs.spans, adapters)),
                self._base.routing.using(record=records),
            ):
                hidden = self._base.hidden(inputs.tokens, inputs.positions, inputs.context, visual)
                experts = self._base.routing.record() if records else None
            finite = hidden.isfinite().all(dim=1).cpu().numpy()
            for key, job in new.items():
                index = inputs.hidden_index[key]
                if not finite[index[prompt_logprobs.first_hidden(job.request) :]].all():
                    continue
                if prompt_logprobs.needs_logits(job.request):
                    states = hidden[torch.as_tensor(index, device=hidden.device)]
                    job.prompt_results = prompt_logprobs.compute(job.request, self._head, states, job.weights, job.seed)
                last = hidden[int(index[-1])]
                prompts[job] = PrefilledPrompt(
                    last, inputs.segments[key], inputs.context.saved_kv, inputs.state(key), experts
                )
        return {job: prompts[job] for job in jobs if job in prompts}

    def _add(self, jobs: list[SampleJob], prompts: list[PrefilledPrompt]) -> None:
        """Add the unfinished sequences of prefilled jobs to the batch, each with a cache row. Prompts are cached, also
        those of which one token is sampled."""
        groups = [[sequence for sequence in job.sequences if sequence.stop_reason is None] for job in jobs]
        for job, prompt, sequences in zip(jobs, prompts, groups, strict=True):
            if job.request.routed_experts:
                job.prompt_routed_experts = prompt.routed_experts()
            if sequences or not prompt_logprobs.needs_logits(job.request):  # a text that is scored is not continued
                self._cache_tokens(job, job.prompt_ids, prompt.copy_from, prompt.state, job.prompt_routed_experts)
                self.prefix_cache.add_last_hidden(job.scope, job.prompt_ids, prompt.last_hidden)
            self.sequences.extend(sequences)
        self._allocate_rows(jobs, prompts, groups)
        self._shrink_prefix_cache()

    def _allocate_rows(
        self, jobs: list[SampleJob], prompts: list[PrefilledPrompt], groups: list[list[Sequence]]
    ) -> None:
        cache: Any = self.kv_cache
        readers = Counter(sequence.job.prompt_key for sequences in groups for sequence in sequences)
        arriving = Counter(sequence.job.cache_reserve for sequences in groups for sequence in sequences)
        shared: dict[PromptKey, CacheRow] = {}
        in_pages: dict[PromptKey, PagedRow] = {}
        try:
            for job, prompt, sequences in zip(jobs, prompts, groups, strict=True):
                if not sequences:
                    continue
                key = job.prompt_key
                shares = self._scheduler.shares_prompt(prompt.length, readers[key])
                if shares and key not in shared:
                    shared[key] = cache.insert_shared_prefix(prompt, readers[key])
                for sequence in sequences:
                    first = sequences[0].row or in_pages.get(key)
                    if shares:
                        sequence.row = cache.insert_after(shared[key], job.cache_reserve_after_prefix)
                    elif first:
                        sequence.row = cache.copy(first)
                    else:
                        sequence.row = cache.insert(prompt, job.cache_reserve, arriving[job.cache_reserve])
                    if isinstance(sequence.row, PagedRow):
                        in_pages[key] = sequence.row
                    cache.start_state(sequence.row, prompt.state)
                whole = self.prefix_cache.match_prompt(job.scope, job.prompt_ids)
                self.prefix_cache.evict_first(whole or PrefixMatch())
        finally:
            for row in shared.values():
                if not row.readers:  # an error came before the first reader, and only the last reader frees the row
                    cache.remove(row)

    def _emit_and_retire(self, sequences: list[Sequence]) -> None:
        """Emit new tokens, retire finished sequences, and finish the jobs whose last sequence has ended.

        Comes after everything that can fail a job, so that no emitted token is ever taken back.
        """
        self._fail(emit(sequences))
        finished = [sequence for sequence in sequences if sequence.stop_reason is not None]
        if not finished:
            return
        self.sequences = [sequence for sequence in self.sequences if sequence.stop_reason is None]
        for sequence in reversed(finished):  # the last rows of a bank first, so that no other row must move
            if sequence.row is not None:
                state = self.kv_cache.state_of(sequence.row)
                tokens, experts = sequence.cached_tokens(), sequence.cached_routed_experts()
                self._cache_tokens(sequence.job, tokens, sequence.row.copy_from, state, experts)
                self._free_row(sequence)
        self._shrink_prefix_cache()
        for job in jobs_of(finished):
            job.finish()

    def _fail(self, faults: Faults) -> None:
        """Remove failed jobs and set their errors."""
        if faults:
            self.remove(list(faults))
        for job, error in faults.items():
            job.fail(error)

    def _cache_tokens(
        self,
        job: SampleJob,
        tokens: np.ndarray,
        read: KVReader,
        state: RecurrentState | None = None,
        experts: np.ndarray | None = None,
    ) -> None:
        """Add tokens, their experts and the state after them to the prefix cache, if the job's version still exists."""
        version = job.request.version
        if version is None or self.versions.generation(version) == job.generation:
            scope = job.scope_of(len(tokens))
            self.prefix_cache.add(scope, tokens, read, experts)
            if state is not None:
                self.prefix_cache.add_state(scope, tokens, state)

    def _free_row(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self.kv_cache.remove(sequence.row)
            sequence.row = None

    def _shrink_prefix_cache(self) -> None:
        """Limit the prefix cache to what the running sequences leave of the cache tokens.

        With one job at a time nothing stays: a prompt that is partly cached is computed in other shapes.
        """
        alone = self._scheduler.one_at_a_time
        taken = self.kv_cache.allocated_tokens + (self._decoder.tokens if self._decoder else 0)
        self.prefix_cache.shrink(0 if alone else self._scheduler.cache_tokens - taken)


def _kind(job: SampleJob) -> tuple[int, bool]:
    """Jobs of one kind share the positions of a prefill."""
    return id(job.weights), job.request.routed_experts


def emit(sequences: list[Sequence]) -> Faults:
    """Emit the new tokens of all sequences; returns the jobs whose `on_delta` raised."""
    faults: Faults = {}
    for sequence in sequences:
        try:
            sequence.emit()
        except Exception as error:  # noqa: BLE001 - the listener of one job must not end the others
            faults[sequence.job] = error
    return faults


def _batch_order(sequence: Sequence) -> tuple[int, int, int]:
    """Sequences of an adapter side by side, and the rows of a bank in their order there."""
    assert isinstance(sequence.row, CacheRow)
    return id(sequence.job.weights), id(sequence.row.bank), sequence.row.index
