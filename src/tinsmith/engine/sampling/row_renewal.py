"""Computes the cache rows of running sequences again when these outgrow the short factors of `architectures.longrope`.

The keys of a row have the rotary embeddings of short rows until it reaches the base model's original context. With the
next token all of its keys change, and with them every hidden state after the first layer, so nothing of the row can
stay. All sequences of a job reach that length together, and are computed in passes of their own, so that a job whose
weights have diverged reaches no other job's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tinsmith.engine.lora import adapter, linear
from tinsmith.engine.model import packing
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.sampling.kv_cache import CacheRow, KVCache, RowCache
from tinsmith.engine.sampling.prefill import PrefilledPrompt, Prompt, prefill_pass
from tinsmith.engine.sampling.prefixes.cache import PrefixCache
from tinsmith.engine.sampling.sequences import SampleJob
from tinsmith.engine.sampling.sequences import Sequence as Sample


@dataclass(frozen=True, slots=True)
class RowRenewal:
    """Replaces cache rows with short factors by rows with long ones."""

    base: BaseModel
    active: linear.ActiveAdapters
    kv_cache: RowCache
    prefix_cache: PrefixCache
    pass_tokens: int

    def renew(self, samples: Sequence[Sample]) -> None:
        """Give each sequence a row with long factors of the tokens that its row has now."""
        for _, of_job in groupby(sorted(samples, key=lambda sample: id(sample.job)), key=lambda sample: id(sample.job)):
            self._renew_job(list(of_job))

    def _renew_job(self, samples: list[Sample]) -> None:
        job, shared = samples[0].job, dict[int, CacheRow]()
        scope = job.scope_of(job.original_context + 1)
        try:
            for group in self._passes(samples):
                prompts = self._prefill(job, group)
                if len(group) < len(samples):  # the next passes attend to the prompt in place
                    self.prefix_cache.add(scope, job.prompt_ids, prompts[0].head(len(job.prompt_ids)).copy_from)
                for sample, prompt in zip(group, prompts, strict=True):
                    self._replace_row(sample, prompt, shared, len(group))
        finally:
            for row in shared.values():
                # If an error came before its first reader: only the last reader frees it.
                if not row.readers and isinstance(self.kv_cache, KVCache):
                    self.kv_cache.remove(row)

    def _passes(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Sequences of a job that fit into one pass each: the prompt counts once."""
        group: list[Sample] = []
        tokens = 0
        for sample in samples:
            if group and tokens + len(sample.tokens) > self.pass_tokens:
                yield group
                group, tokens = [], 0
            tokens += len(sample.tokens) if group else len(sample.job.prompt_ids) + len(sample.tokens)
            group.append(sample)
        if group:
            yield group

    def _prefill(self, job: SampleJob, samples: Sequence[Sample]) -> list[PrefilledPrompt]:
        """The rows of some sequences of a job, with long factors."""
        scope, rows = job.scope_of(job.original_context + 1), [sample.cached_tokens() for sample in samples]
        inputs = prefill_pass(
            [
                Prompt(
                    row=packing.PackedRow(
                        key=key,
                        adapter=0,
                        tokens=np.concatenate([job.request.prompt, row[len(job.request.prompt) :]]).astype(np.int32),
                        images=job.request.images,
                        long_factors=True,
                    ),
                    match=self.prefix_cache.match(scope, row, len(row) - 1),
                    first_hidden=len(row) - 1,
                )
                for key, row in enumerate(rows)
            ],
            self.base,
        )
        visual = self.base.visual_inputs(inputs.images)
        with self.active.using(adapter.place_adapters(inputs.spans, [job.weights])):
            hidden = self.base.hidden(inputs.tokens, inputs.positions, inputs.context, visual)
        ends = [int(inputs.hidden_index[key][-1]) for key in range(len(rows))]
        return [
            PrefilledPrompt(hidden[end], inputs.segments[key], inputs.context.saved_kv, inputs.state(key))
            for key, end in enumerate(ends)
        ]

    def _replace_row(self, sample: Sample, prompt: PrefilledPrompt, shared: dict[int, CacheRow], arriving: int) -> None:
        """Move a sequence to a new row. `shared`: the new rows of shared prefixes by the identity of the old ones."""
        old, cache = sample.row, self.kv_cache
        assert old is not None
        if not isinstance(old, CacheRow) or not isinstance(cache, KVCache) or old.shared_prefix is None:
            row = cache.insert(prompt, old.capacity, arriving)
        else:
            prefix = old.shared_prefix
            if id(prefix) not in shared:
                shared[id(prefix)] = cache.insert_shared_prefix(prompt.head(prefix.length), prefix.readers)
            row = cache.insert_after(shared[id(prefix)], old.capacity, prompt)
        self.kv_cache.remove(old)
        self.kv_cache.start_state(row, prompt.state)
        sample.row = row
