"""The sampler in plain torch: continuous batching, in which requests join and leave between any two tokens.

A step admits waiting jobs (`scheduler` decides how many), prefills them, and decodes one token of every running
sequence. Between steps the trainer gets its turn on the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tinsmith.engine.base import OnDelta, SampleRequest, SampleResult
from tinsmith.engine.cpu.compiling import Compilation, is_compiled
from tinsmith.engine.cpu.instructions import kind_of
from tinsmith.engine.device_sharing import DeviceScheduler
from tinsmith.engine.lora import linear
from tinsmith.engine.lora.lm_head import LMHead
from tinsmith.engine.model.base_model import BaseModel
from tinsmith.engine.sampling import decode_check
from tinsmith.engine.sampling.banks.layers import CompiledLayers
from tinsmith.engine.sampling.batch import RunningBatch
from tinsmith.engine.sampling.paged.choice import page_attention
from tinsmith.engine.sampling.scheduler import Scheduler
from tinsmith.engine.sampling.sequences import SampleJob, jobs_of
from tinsmith.engine.sampling.versions import AdapterVersions
from tinsmith.errors import Gone, Unsupported


class TorchSampler:
    """Implements `sample` and `cancel` of `engine.interface.Sampler`; `versions` has its methods for versions."""

    def __init__(
        self,
        base: BaseModel,
        head: LMHead,
        active: linear.ActiveAdapters,
        device: DeviceScheduler,
        pass_tokens: int,
        cache_tokens: int,
        deterministic: bool = False,
        batch: Any = None,
    ) -> None:
        """`batch` replaces the RunningBatch, for base models that it does not compute."""
        self._card, self._device = base.card, device
        attend_pages = None if batch else page_attention(base)
        self._scheduler = Scheduler(
            pass_tokens=pass_tokens,
            cache_tokens=cache_tokens,
            may_share_prompts=base.device.type == "cpu",
            has_pages=attend_pages is not None,
            one_at_a_time=deterministic,
        )
        self.batch: RunningBatch = batch or RunningBatch(base, head, active, self._scheduler, attend_pages)
        if batch is None and attend_pages is None:  # pages are checked where they are chosen
            self.batch.attention_function = decode_check.check_banks(
                base, self.batch.kv_cache, self.batch.attention_function
            )
        self._compiling: CompiledLayers | None = None
        """Layers that have to be compiled before they compute steps."""
        if batch is None and self.batch.attention_function is not None:
            self._compiling = CompiledLayers.of(base)
            self._use_layers()
            if self._compiling is not None:
                Compilation().start(kind_of(base.dtype), "layers")
        self._waiting: list[SampleJob] = []
        self._loop: asyncio.Task[None] | None = None

    @property
    def versions(self) -> AdapterVersions:
        return self.batch.versions

    async def sample(self, request: SampleRequest, on_delta: OnDelta | None = None) -> SampleResult:
        """Sample all sequences of a request, which joins the batch at the next step."""
        if request.routed_experts and self._card.router is None:
            raise Unsupported(f"{self._card.source} records no routed experts.", "Sample without them.")
        longest = len(request.prompt) + (request.max_tokens or self._card.context_length) - 1
        if request.routed_experts and len(request.prompt) <= self._card.original_context < longest:
            raise Unsupported(
                "Routed experts are not recorded for a sample that may become longer than "
                f"{self._card.original_context} tokens: all of its tokens then choose other experts.",
                "Lower max_tokens, or sample without them.",
            )
        weights = None if request.version is None else self.versions.weights(request.version)
        generation = 0 if request.version is None else self.versions.generation(request.version)
        job = SampleJob.of(request, weights, generation, self._card, on_delta)
        self._waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await job.future

    async def cancel(self, request_id: str) -> None:
        """Remove the request before the next step."""
        jobs = [*self._waiting, *jobs_of(self.batch.sequences)]
        cancelled = [job for job in jobs if job.request.request_id == request_id]
        self._fail(cancelled, Gone(f"Request {request_id} was cancelled.", "Submit it again."))

    async def _run(self) -> None:
        while self._waiting or self.batch.sequences:
            async with self._device.turn("sampling"):
                with torch.no_grad():
                    self.step()

    def step(self) -> None:
        """Prefill the waiting jobs that fit, then decode one token of every running sequence."""
        if not self.batch.sequences:
            self._use_layers()
        with self._failing(lambda: self._waiting):
            self._prefill(self._schedule())
        with self._failing(lambda: jobs_of(self.batch.sequences)):
            if self.batch.sequences:
                self._waiting = [*self.batch.decode(), *self._waiting]

    def _use_layers(self) -> None:
        """Have steps computed in one call once it is compiled, for which no request waits."""
        layers, batch = self._compiling, self.batch
        if layers is not None and is_compiled("layers", kind_of(layers.base.dtype)):
            self._compiling = None
            if decode_check.check_layers(layers.base, batch.kv_cache, batch.attention_function, layers):
                batch.layers = layers

    def _schedule(self) -> list[SampleJob]:
        """Take the jobs that are admitted now out of the queue."""
        admitted = self._scheduler.admit(map(self.batch.size_of, self._waiting), self.batch.load)
        jobs, self._waiting = self._waiting[:admitted], self._waiting[admitted:]
        return jobs

    def _prefill(self, jobs: list[SampleJob]) -> None:
        """Prefill jobs in one pass; if that fails, each alone, so that only the job at fault fails."""
        if not jobs:
            return
        try:
            alone = self.batch.prefill(jobs)
        except Exception as error:  # noqa: BLE001 - the running sequences must go on
            self.batch.remove(jobs)
            if len(jobs) == 1:
                jobs[0].fail(error)
                return
            alone = jobs
        for job in alone:
            self._prefill([job])

    @contextmanager
    def _failing(self, jobs: Callable[[], list[SampleJob]]) -> Iterator[None]:
        """Fail `jobs()` if the block raises; the other jobs go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the loop must not end while there are other jobs
            self._fail(list(jobs()), error)

    def _fail(self, jobs: list[SampleJob], error: Exception) -> None:
        self.batch.remove(jobs)
        self._waiting = [job for job in self._waiting if job not in jobs]
        for job in jobs:
            job.fail(error)
