"""The running batch of the general path: prefill and decoding with transformers' own caches.

Each prompt is prefilled alone, which is exact for every architecture; its sequences then join the rows that are
running, and leave when they end. Models whose rows cannot join decode each sequence by itself. There is no prefix
cache: a state of a recurrent layer stands for one position only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tinsmith.engine.general import cache
from tinsmith.engine.general.cache import CachedRows
from tinsmith.engine.general.model import GeneralModel, place_rows
from tinsmith.engine.lora.adapter import adapter_spans
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.sampling import prompt_logprobs
from tinsmith.engine.sampling.batch import Faults, TokenSampler, emit, not_finite
from tinsmith.engine.sampling.scheduler import JobSize, Load
from tinsmith.engine.sampling.sequences import SampleJob, Sequence, jobs_of
from tinsmith.engine.sampling.versions import AdapterVersions


class _Group:
    """Sequences that decode together; sequence i is row i of the cache."""

    def __init__(self, rows: CachedRows, sequences: list[Sequence]) -> None:
        self.rows, self.sequences = rows, sequences


class GeneralBatch:
    """Running sequences with transformers' caches. The same methods as `sampling.batch.RunningBatch`."""

    def __init__(self, base: GeneralModel, head: LMHead) -> None:
        self._base, self._head = base, head
        self._token_sampler = TokenSampler(head, base.tokenizer)
        self.versions = AdapterVersions(base, lambda _version: None)
        self._groups: list[_Group] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All running sequences."""
        return [sequence for group in self._groups for sequence in group.sequences]

    @property
    def load(self) -> Load:
        tokens = sum(group.rows.longest * len(group.sequences) for group in self._groups)
        return Load(sequences=len(self.sequences), cache_tokens=tokens)

    def size_of(self, job: SampleJob) -> JobSize:
        """A waiting job's size."""
        return JobSize(
            prompt_tokens=len(job.request.prompt),
            cached_tokens=0,
            sequences=len(job.sequences),
            max_tokens=job.max_tokens,
        )

    def prefill(self, jobs: list[SampleJob]) -> list[SampleJob]:
        """Prefill the prompts one by one and sample every sequence's first token. No job must be prefilled again."""
        for job in jobs:
            try:
                self._start(job)
            except Exception as error:  # noqa: BLE001 - the fault of one job must not end the others
                self._fail({job: error})
        self._merge()
        return []

    def decode(self) -> list[SampleJob]:
        """Sample one more token of every running sequence. No job must be prefilled again."""
        for group in list(self._groups):
            hidden = self._step(group)
            spans = adapter_spans([sequence.job.weights for sequence in group.sequences])
            self._fail(self._token_sampler.next_tokens(list(group.sequences), hidden, spans))
            self._emit_and_retire(list(group.sequences))
        return []

    def release_memory(self) -> None:
        """Nothing is kept that is not in use."""

    def remove(self, jobs: list[SampleJob]) -> None:
        """Remove jobs, as if they had never been in the batch."""
        for sequence in [sequence for job in jobs for sequence in job.sequences]:
            sequence.reset()
        self._keep(lambda sequence: sequence.job not in jobs)

    def _start(self, job: SampleJob) -> None:
        """Prefill a prompt; its unfinished sequences become a group of their own, or several."""
        tokens = torch.as_tensor(job.request.prompt, device=self._base.device).long()[None]
        length = tokens.shape[1]
        with self._base.serving(tuple(place_rows([job.weights], length))):
            output = self._base.rows(
                tokens,
                attention_mask=torch.ones_like(tokens),
                position_ids=torch.arange(length, device=self._base.device)[None],
                use_cache=True,
            )
        hidden = output.last_hidden_state[0]
        if not bool(hidden[prompt_logprobs.first_hidden(job.request) :].isfinite().all()):
            raise not_finite(job)
        if prompt_logprobs.needs_logits(job.request):
            job.prompt_results = prompt_logprobs.compute(job.request, self._head, hidden, job.weights, job.seed)
        faults = self._token_sampler.first_tokens([job], hidden[-1:])
        if job in faults:
            raise faults[job]
        running = [sequence for sequence in job.sequences if sequence.stop_reason is None]
        rows = CachedRows(output.past_key_values, (length,))
        if running and self._base.joins:
            self._groups.append(_Group(cache.join([(rows, [0] * len(running))]), running))
        elif running:
            self._groups += [_Group(cache.copied(rows), [sequence]) for sequence in running]
        self._emit_and_retire(list(job.sequences))

    def _merge(self) -> None:
        """Join all groups into one, sequences of an adapter side by side."""
        if not self._base.joins or len(self._groups) < 2:
            return
        groups = sorted(self._groups, key=lambda group: id(group.sequences[0].job.weights))
        joined = cache.join([(group.rows, range(len(group.sequences))) for group in groups])
        self._groups = [_Group(joined, [sequence for group in groups for sequence in group.sequences])]

    def _step(self, group: _Group) -> Tensor:
        """Feed the last token of each sequence; returns the hidden states [R, D]."""
        device = self._base.device
        tokens = torch.tensor([[sequence.tokens[-1]] for sequence in group.sequences], device=device)
        positions = torch.tensor(group.rows.lengths, device=device)[:, None]
        with self._base.serving(tuple(place_rows([sequence.job.weights for sequence in group.sequences], 1))):
            output = self._base.rows(
                tokens,
                attention_mask=group.rows.mask(device),
                position_ids=positions,
                past_key_values=group.rows.cache,
                use_cache=True,
            )
        group.rows = group.rows.grown(output.past_key_values)
        return output.last_hidden_state[:, -1]

    def _emit_and_retire(self, sequences: list[Sequence]) -> None:
        """Emit new tokens, remove finished sequences, and finish the jobs whose last sequence has ended."""
        self._fail(emit(sequences))
        finished = [sequence for sequence in sequences if sequence.stop_reason is not None]
        if finished:
            self._keep(lambda sequence: sequence.stop_reason is None)
            for job in jobs_of(finished):
                job.finish()

    def _keep(self, keeps: Callable[[Sequence], bool]) -> None:
        """Remove the other sequences, and the padding that only their lengths made necessary."""
        groups = []
        for group in self._groups:
            rows = [row for row, sequence in enumerate(group.sequences) if keeps(sequence)]
            if len(rows) == len(group.sequences):
                groups.append(group)
            elif rows:
                groups.append(_Group(cache.join([(group.rows, rows)]), [group.sequences[row] for row in rows]))
        self._groups = groups

    def _fail(self, faults: Faults) -> None:
        """Remove failed jobs and set their errors."""
        if faults:
            self.remove(list(faults))
        for job, error in faults.items():
            job.fail(error)
