"""The scheduler while requests arrive, groups end and engines die, in any order."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.service.training.test_scheduler import BUDGET, row
from tinsmith.service.storage.records import QueuedRequest
from tinsmith.service.training.scheduler import MAX_BARRIERS, Group, next_groups


class SchedulerModel(RuleBasedStateMachine):
    """Requests wait, run in groups, and are done; a death of the engine sends those that run back, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, QueuedRequest] = {}
        self.running: list[Group] = []
        self.done: dict[str, list[int]] = defaultdict(list)
        self.seqs: Counter[str] = Counter()
        self.arrived = 0

    @rule(
        owner=st.sampled_from("abc"),
        model=st.sampled_from("xyz"),
        tokens=st.one_of(st.none(), st.integers(1, 150)),
        gap=st.integers(1, 3),
    )
    def arrive(self, owner: str, model: str, tokens: int | None, gap: int) -> None:
        self.seqs[owner + model] += gap
        self.arrived += 1
        request = row(owner, model, self.seqs[owner + model], tokens, self.arrived)
        self.waiting[request.id] = request

    @rule()
    def start(self) -> None:
        started = next_groups(list(self.waiting.values()), self.running, BUDGET)
        isolating = any(request.alone for request in self.waiting.values())
        for group in started:
            self.check_group(group)
            for request in group:
                del self.waiting[request.id]
            self.running.append(group)
        if isolating:
            assert len(started) <= 1
            assert not started or len(self.running) == 1, "a suspect runs by itself"
        assert self.running or not self.waiting, "requests wait but nothing runs"
        self.check_limits()

    def check_group(self, group: Group) -> None:
        model = group[0].model_id
        queue = sorted((r for r in self.waiting.values() if r.model_id == model), key=lambda request: request.seq)
        assert [request.id for request in group] == [request.id for request in queue[: len(group)]]
        assert all(request.model_id != model for other in self.running for request in other)
        if len(group) > 1:
            assert all(request.packs and not request.alone for request in group)
            assert sum(request.tokens for request in group) <= BUDGET

    def check_limits(self) -> None:
        tokens: Counter[str] = Counter()
        barriers: Counter[str] = Counter()
        for group in self.running:
            total = sum(request.tokens for request in group)
            tokens[group[0].owner] += total if total <= BUDGET else 0
            barriers[group[0].owner] += not group[0].packs
        assert max(tokens.values(), default=0) <= BUDGET
        assert max(barriers.values(), default=0) <= MAX_BARRIERS

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.integers(0, len(self.running) - 1)))

    def end(self, index: int) -> None:
        for request in self.running.pop(index):
            assert all(seq < request.seq for seq in self.done[request.model_id]), (
                "the requests of a model change places"
            )
            self.done[request.model_id].append(request.seq)

    @precondition(lambda self: self.running)
    @rule()
    def die(self) -> None:
        for group in self.running:
            self.waiting |= {request.id: replace(request, alone=True) for request in group}
        self.running = []

    def teardown(self) -> None:
        """Without new requests everything is done, each request once."""
        while self.waiting or self.running:
            self.start()
            self.end(0)
        assert sum(map(len, self.done.values())) == self.arrived


SchedulerModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerModel.TestCase
