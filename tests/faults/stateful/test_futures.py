"""Futures and completion log against a model of their client, through resolutions, polls and restarts."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinsmith.service.results.completion_log import Completion, Target
from tinsmith.service.results.futures import Futures
from tinsmith.service.results.unfinished_samples import UnfinishedSamples
from tinsmith.service.storage.records import FutureResult

OWNER = "tenant"
SAMPLERS = ("first", "second")


class FuturesModel(RuleBasedStateMachine):
    """A sample is open, then ended (or lost by a restart), then seen: its client knows that it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.scratch = tempfile.TemporaryDirectory()
        self.count = 0
        self.open: list[str] = []
        self.ended: dict[str, FutureResult | None] = {}
        """Not seen yet; None: lost."""
        self.results: dict[str, FutureResult] = {}
        """Results that can be fetched."""
        self.cursors = dict.fromkeys(SAMPLERS, 0)
        self.delivered: dict[str, list[str]] = {sampler: [] for sampler in SAMPLERS}
        self.futures = self.start()

    def start(self) -> Futures:
        async def make() -> Futures:
            return Futures(0.0, 3600.0, UnfinishedSamples(Path(self.scratch.name) / "samples"))

        return self.loop.run_until_complete(make())

    def teardown(self) -> None:
        self.futures.close()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        self.scratch.cleanup()

    @rule(sampler=st.sampled_from(SAMPLERS))
    def submit(self, sampler: str) -> None:
        self.count += 1
        request = f"{sampler}:{self.count}"
        assert self.futures.open(request, OWNER, stored=False, logged=True)
        assert not self.futures.open(request, OWNER, stored=False, logged=True), (
            "a repeated request gets the same promise"
        )
        self.open.append(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fails=st.booleans())
    def resolve(self, data: st.DataObject, *, fails: bool) -> None:
        request = data.draw(st.sampled_from(self.open))
        result = FutureResult(body=request.encode(), status=410 if fails else 200)
        self.futures.resolve(request, result)
        self.futures.resolve(request, FutureResult(body=b"second"))  # only the first result counts
        self.open.remove(request)
        self.ended[request] = self.results[request] = result

    @rule(sampler=st.sampled_from(SAMPLERS), lost=st.booleans())
    def poll_log(self, sampler: str, *, lost: bool) -> None:
        """`lost`: the client never gets the answer, and polls again with its old cursor."""
        for request in self.delivered[sampler]:
            self.ended.pop(request, None)
        self.delivered[sampler] = []
        expected = {request: self.completion(request) for request in self.ended if request.startswith(f"{sampler}:")}
        log = self.futures.completions
        entries, cursor = self.loop.run_until_complete(log.wait_after(Target(sampler, 0), self.cursors[sampler], 0.0))
        assert {entry.request_id: entry for entry in entries} == expected
        assert len(entries) == len(expected)
        assert cursor >= self.cursors[sampler]
        if not lost:
            self.cursors[sampler] = cursor
            self.delivered[sampler] = list(expected)

    def completion(self, request: str) -> Completion:
        result = self.ended[request]
        succeeded = result is not None and result.status == 200
        return Completion(request_id=request, size=len(result.body) if succeeded and result is not None else None)

    @precondition(lambda self: self.results)
    @rule(data=st.data(), acknowledges=st.booleans())
    def fetch(self, data: st.DataObject, *, acknowledges: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.results)))
        assert self.loop.run_until_complete(self.futures.wait(request)) == self.results[request]
        self.futures.mark_fetched(request)
        self.ended.pop(request, None)
        if acknowledges:
            self.futures.acknowledge([request], "somebody else")
            assert self.futures.knows(request, OWNER)
            self.futures.acknowledge([request], OWNER)
            assert not self.futures.knows(request, OWNER)
            del self.results[request]

    @rule(dropped=st.sampled_from((*SAMPLERS, "")))
    def restart(self, dropped: str) -> None:
        """The next process knows which samples are lost. The client of one sampling session may be gone."""
        self.futures.close()
        self.futures = self.start()
        self.futures.restore_lost(lambda request: request.partition(":")[0] != dropped)
        unseen = [request for request in (*self.open, *self.ended) if request.partition(":")[0] != dropped]
        self.open, self.ended, self.results = [], dict.fromkeys(unseen), {}
        self.delivered = {sampler: [] for sampler in SAMPLERS}

    @invariant()
    def counts_open_requests(self) -> None:
        assert self.futures.pending(OWNER) == len(self.open)

    @invariant()
    def answers_polls_without_a_result(self) -> None:
        for request in self.open[:1]:
            assert self.loop.run_until_complete(self.futures.wait(request)) is None


FuturesModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestFutures = FuturesModel.TestCase
