"""Requests stay within `concurrency`; waiting is no time of an attempt; token rates are those of the server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from tests.rl.scripted_run import REPLIES, rows, run, settings
from tinsmith.rl.policy import request_limit
from tinsmith.rl.policy.request_limit import RequestLimit
from tinsmith.rl.policy.sampling import ModelVersion, SampleRequest, SampleResult, SamplingConfig, Snapshot, recomputing
from tinsmith.rl.rollouts.runner import RolloutConfig, RolloutRunner
from tinsmith.rl.types import Rollout, Task, Turn
from tinsmith.testing import CharacterCodec, ScriptedPolicy, run_virtually

SAMPLING = SamplingConfig()


class Server(Snapshot):
    """Counts requests in flight; each ends after a few turns of the event loop, or never if it `hangs`."""

    def __init__(self, *, hangs: bool = False) -> None:
        super().__init__(
            ModelVersion(version=0, chat=CharacterCodec(), sample=self._answer, open_model=self._open_model)
        )
        self.now = self.most = self.total = 0
        self.hangs = hangs

    async def _answer(self, request: SampleRequest) -> SampleResult:
        self.now, self.total = self.now + 1, self.total + 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(3600 if self.hangs else 0)
            await asyncio.sleep(0)
        finally:
            self.now -= 1
        turn = Turn(prompt=(1,), tokens=(2, 3), logprobs=(0.0, 0.0), text="", stop="stop")
        return SampleResult(turns=(turn,) * request.count, logprobs=np.zeros(len(request.prompt), np.float32)[1:])

    async def _open_model(self, name: str) -> Snapshot:
        return self


class Concurrent:
    """A workflow that sends all its requests at once: one for each rollout, to the policy and to a judge."""

    async def run(self, task, policy, *, count, seed):
        judge = await policy.open_model("judge")
        requests = [
            each.sample((), count=1, seed=at, sampling=SAMPLING) for at in range(count) for each in (policy, judge)
        ]
        turns = [
            turns for turns, *_ in await asyncio.gather(*requests, *(policy.logprobs([1, 2]) for _ in range(count)))
        ][:count]
        return tuple(Rollout.single((turn,), 1.0) for turn in turns)


def played(server: Snapshot, limit: RequestLimit, tasks: int = 4, size: int = 3, workflow=None, **config):
    """Groups of `tasks` tasks by a workflow."""
    runner = RolloutRunner(RolloutConfig(**config), limit)
    made = [Task(id=str(at), messages=()) for at in range(tasks)]
    workflow = workflow or Concurrent()
    return run_virtually(runner.run_groups(workflow, made, server, size=size, seeds=range(tasks)))


@pytest.mark.parametrize("size", [1, 5])
def test_requests_of_all_workflows_stay_within_the_limit(size):
    server, limit = Server(), RequestLimit(size)
    groups = played(server, limit)
    assert not any(rollout.error for group in groups for rollout in group.rollouts)
    assert (server.most, server.total) == (size, 4 * 3 * 3)
    assert limit.sampled_tokens == 4 * 3 * 2 * 2


def test_recomputed_logprobs_of_live_weights_take_places_too():
    server = Server()
    recomputed = server.around(recomputing(lambda _sampling: True))

    class Single:
        async def run(self, task, policy, *, count, seed):
            turns = await policy.sample((), count=count, seed=seed, sampling=SAMPLING)
            return tuple(Rollout.single((turn,), 1.0) for turn in turns)

    groups = played(Snapshot.following(lambda: recomputed), RequestLimit(2), workflow=Single())
    assert not any(rollout.error for group in groups for rollout in group.rollouts)
    assert (server.most, server.total) == (2, 4 * (1 + 3))


def test_reference_logprobs_stay_within_concurrency(tmp_path):
    most = [0, 0]

    async def counted(request, sample):
        most[0] += 1
        most[1] = max(most)
        await asyncio.sleep(0)
        most[0] -= 1
        return await sample(request)

    async def connect(state, version):
        return ScriptedPolicy(REPLIES, tmp_path / "weights", state=state, version=version, middleware=(counted,))

    run(settings(tmp_path, steps=2, concurrency=2, algorithm={"kl": {"type": "k2", "coef": 0.1}}), connect)
    assert most == [0, 2]


def test_time_of_an_attempt_stands_still_while_its_requests_wait():
    async def main() -> list[str]:
        limit, server = RequestLimit(1), Server()
        runner = RolloutRunner(RolloutConfig(timeout=0.05), limit)
        async with limit.place(None):
            rolling = asyncio.create_task(
                runner.run_groups(Concurrent(), [Task(id="0", messages=())], server, size=2, seeds=[0])
            )
            await asyncio.sleep(0.15)
            assert not rolling.done()
        (group,) = await rolling
        return [rollout.error for rollout in group.rollouts]

    assert run_virtually(main()) == ["", ""]


def test_time_of_an_attempt_runs_while_a_request_is_answered():
    server = Server(hangs=True)
    (group,) = played(server, RequestLimit(1), tasks=1, timeout=0.05)
    assert [rollout.error for rollout in group.rollouts] == ["timed out after 0.05 seconds"] * 3
    assert server.now == 0


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_token_rate_never_exceeds_that_of_the_server(tmp_path, monkeypatch, staleness):
    """A server that answers one request a second, of four replies, with virtual time."""
    now = [0.0]

    async def slow(request, sample):
        now[0] += 1.0
        return await sample(request)

    async def connect(state, version):
        return ScriptedPolicy(REPLIES, tmp_path / "weights", state=state, version=version, middleware=(slow,))

    monkeypatch.setattr(request_limit, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    run(settings(tmp_path, staleness=staleness, eval={"every": 0, "before": False, "after": False}), connect)
    steps = [row for row in rows(tmp_path, timeless=False) if "reward/mean" in row]
    longest = 4 * (max(map(len, REPLIES)) + 1)
    assert all(row["speed/sampled_tokens_per_second"] <= longest for row in steps)
    if staleness == 0:
        for row in steps:
            assert row["speed/sampled_tokens_per_second"] == pytest.approx(row["tokens/sampled"] / 3)
            assert row["speed/trained_tokens_per_second"] == pytest.approx(row.get("tokens/trained", 0) / 3)
