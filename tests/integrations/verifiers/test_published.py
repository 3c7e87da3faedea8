"""Kinds of environments that are published for verifiers: proposers, judges, hooks, images. Scripted replies."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verifiers.test_verifiers import package, rollouts
from tests.rl.workflows.test_workflows import policy
from tests.service.openai.test_tool_calls_and_disconnects import acted
from tests.service.support.inprocess import KEY
from tinsmith.errors import ConfigError
from tinsmith.integrations.verifiers import VerifiersEnvironment
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.policy.training_rows import rows_from_trajectory
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Rollout
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.service.app import create_app


@pytest.fixture(scope="module", autouse=True)
def needs_verifiers() -> None:
    """Skips the module without the package, which takes seconds to import."""
    pytest.importorskip("verifiers.v1")


PROPOSAL = json.dumps({"problem": "1 + 1?", "answer": 2})


def proposals(seed: int) -> Rollout:
    """An episode whose agents reply with the proposal or with 2."""
    return rollouts(VerifiersEnvironment(id=package("proposals.py")), [PROPOSAL, "2"], count=1, seed=seed)[0]


def test_proposer_is_rewarded_by_what_its_solvers_do():
    for seed in range(40):
        rollout = proposals(seed)
        roles = [trajectory.role for trajectory in rollout.trajectories]
        if rollout.error:  # the proposer did not write a problem: no reward, and nothing to train on
            assert roles in (["proposer"], [])
            assert "TypeError" in rollout.error
            continue
        proposer, *solvers = rollout.trajectories
        assert roles == ["proposer", *["solver"] * 4]
        rate = sum(solver.text == "2" for solver in solvers) / 4
        assert [solver.reward for solver in solvers] == [float(solver.text == "2") for solver in solvers]
        assert proposer.reward == 4 * rate * (1 - rate)
        assert rollout.metrics["proposer/solve_rate"] == rate
        assert all("".join(map(chr, solver.turns[0].prompt)) == "1 + 1?" for solver in solvers)
        if 0 < rate < 1:
            return
    pytest.fail("no episode had both right and wrong solvers")


def test_hooks_change_what_is_said_and_end_the_rollout():
    environment = VerifiersEnvironment(id=package("hooks.py"))
    (rollout,) = rollouts(environment, ["fine"], count=1)
    assert rollout.error == ""
    assert [turn.text for turn in rollout.turns] == ["fine"] * 3
    assert "".join(map(chr, rollout.turns[-1].prompt)) == "SAY ITfine\0AGAINfine\0AGAIN"
    assert len(rows_from_trajectory(rollout.trajectories[0])) == 1
    assert rollout.reward == 2 * 1.0 + 2 * 0.5
    assert dict(rollout.reward_parts) == {"player/first": 1.0, "player/second": 0.5}
    assert dict(rollout.metrics) == {"player/turns": 3.0, "player/removed": 0.0}


def test_stop_on_a_reply_ends_the_rollout():
    (rollout,) = rollouts(VerifiersEnvironment(id=package("hooks.py")), ["no idea"], count=1)
    assert (len(rollout.turns), rollout.error) == (1, "")


def test_replaced_reply_is_trained_as_it_was_sampled():
    (rollout,) = rollouts(VerifiersEnvironment(id=package("hooks.py")), ["a secret"], count=1)
    assert (rollout.error, rollout.metrics["player/removed"]) == ("", 1.0)
    rows = rows_from_trajectory(rollout.trajectories[0])
    assert ["".join(map(chr, row.targets[row.mask])) for row in rows] == ["a secret\0"] * 3
    assert "".join(map(chr, rollout.turns[-1].prompt)) == "SAY IT[removed]AGAIN[removed]AGAIN"


@asynccontextmanager
async def judge_server(data: Path, verdicts: list[str | None]) -> AsyncIterator[tuple[str, Any]]:
    """A service that replies with `verdicts` in order. Yields its URL and its engine."""
    import uvicorn

    async with acted(data, verdicts) as (served, engine, _):
        listener = socket.create_server(("127.0.0.1", 0))  # it queues requests until the server accepts them
        server = uvicorn.Server(uvicorn.Config(create_app(served.service), log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", engine
        finally:
            server.should_exit = True
            await serving


async def judged(data: Path, judge: dict[str, Any], verdicts: list[str | None]) -> tuple[Rollout, list[Any]]:
    endpoint = AgentEndpoint()
    context = WorkflowContext(sampling=SamplingConfig(max_tokens=9), rewards=Rewards([]), agent_endpoint=endpoint)
    async with judge_server(data, verdicts) as (url, engine):
        judge = {**judge, "base_url": url, "model": "toy", "api_key_var": "KEY_OF_THE_JUDGE"}
        environment = VerifiersEnvironment(id=package("judged.py"), args={"task": {"judges": [judge]}})
        try:
            (rollout,) = await environment.make(context).run(environment.tasks()[0], policy("Sn"), count=1, seed=1)
        finally:
            await endpoint.close()
        return rollout, engine.requests


def test_judge_at_a_tinsmith_server_gives_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY_OF_THE_JUDGE", KEY)
    judge = {"id": "reference", "weight": 0.5, "sampling": {"max_tokens": 8}}
    rollout, requests = asyncio.run(judged(tmp_path, judge, ["yes"]))
    assert (rollout.error, rollout.reward, dict(rollout.reward_parts)) == ("", 0.5, {"reference": 1.0})
    assert len(rollout.turns) == 1, "the judge's tokens are not the policy's"
    question = "".join(map(chr, requests[0].prompt))
    assert "Sign of tin?" in question
    assert question.count("Sn") == 2, "the reference and the reply"


def test_rubric_judge_gives_criteria_as_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY_OF_THE_JUDGE", KEY)
    rubric = tmp_path / "rubric.toml"
    rubric.write_text(
        '[[criteria]]\nname = "right"\ntext = "It is right."\n[[criteria]]\nname = "long"\ntext = "Long."\n'
    )
    verdicts = {"right": "yes", "long": "no"}
    said = json.dumps(
        {"verdicts": [{"name": name, "reason": "-", "verdict": value} for name, value in verdicts.items()]}
    )
    rollout, _ = asyncio.run(judged(tmp_path / "data", {"id": "rubric", "path": str(rubric)}, [said]))
    assert (rollout.error, rollout.reward) == ("", 0.5)
    assert dict(rollout.metrics) == {"rubric/right": 1.0, "rubric/long": 0.0}


def test_judge_without_a_verdict_fails_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY_OF_THE_JUDGE", KEY)
    rollout, _ = asyncio.run(judged(tmp_path, {"id": "reference"}, ["who knows"]))
    assert "no yes/no verdict" in rollout.error


def test_judge_with_structured_output_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY_OF_THE_JUDGE", KEY)
    rubric = tmp_path / "rubric.toml"
    rubric.write_text('[[criteria]]\nname = "right"\ntext = "It is right."\n')
    judge = {"id": "rubric", "path": str(rubric), "structured_output": True}
    rollout, _ = asyncio.run(judged(tmp_path / "data", judge, []))
    assert "response_format is not supported" in rollout.error


def test_prompt_of_messages_reaches_the_policy():
    environment = VerifiersEnvironment(id=package("squares.py"), args={"later": True, "turns": 1})
    (rollout,) = rollouts(environment, ["A"], count=1)
    assert (rollout.error, rollout.reward) == ("", 1.0)
    assert "".join(map(chr, rollout.turns[0].prompt)) == "Which letters?"


def test_images_of_a_prompt_are_those_of_its_task():
    """Held-out tasks are compared with their images. The scripted policy reads text only."""
    environment = VerifiersEnvironment(id=package("squares.py"), args={"turns": 1})
    (message,) = environment.tasks()[0].messages[:1]
    ((position, image),) = message.images
    assert (message.content, position, image.format) == ("Which letters?", len("Which letters?"), "png")
    (rollout,) = rollouts(environment, ["A"], count=1)
    assert "part of type image_url" in rollout.error


def test_image_that_comes_later_fails_the_rollout_by_name():
    environment = VerifiersEnvironment(id=package("squares.py"), args={"later": True})
    (rollout,) = rollouts(environment, ["A"], count=1)
    assert "part of type image_url" in rollout.error


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "data that is not there": ("missing_data.py", {}, "cannot be loaded: LookupError: Resource words not found"),
    "container of a task": ("judged.py", {"args": {"image": "debian:12"}}, r"container image debian:12.*docker"),
    "program in a container": ("judged.py", {"env": {"agent": {"runtime": {"type": "subprocess"}}}, "harness": "pi"},
                               "pi of agent runs only in a container"),
    "Responses": ("judged.py", {"env": {"agent": {"runtime": {"type": "modal"}}}, "harness": "codex"},
                  "codex of agent speaks Responses.*chat completions only"),
    "Anthropic": ("judged.py", {"env": {"agent": {"runtime": {"type": "modal"}}}, "harness": "claude-code"},
                  "Anthropic's messages"),
    "transport": ("judged.py", {"env": {"agent": {"harness": {"id": "pi", "transport": "responses"},
                                                  "runtime": {"type": "modal"}}}}, "pi of agent speaks responses"),
    "key of a hosted judge": ("judged.py", {"args": {"task": {"judges": [{"id": "reference"}]}}},
                              r"judge reference calls https://.*PRIME_API_KEY is not set"),
    "key of a judge": ("judged.py", {"args": {"task": {"judges": [
        {"id": "reference", "base_url": "http://127.0.0.1:1/v1", "api_key_var": "NO_SUCH_KEY"}]}}},
        "NO_SUCH_KEY is not set"),
    "judge without a name": ("judged.py", {"args": {"task": {"judges": [{"model": "toy"}]}}}, "needs an `id`"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    name, options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        VerifiersEnvironment.model_validate({"id": package(name), **options}).tasks()[0]


@pytest.mark.skipif(find_spec("textarena") is not None, reason="textarena is installed")
def test_taskset_whose_extra_is_missing_names_it():
    with pytest.raises(ConfigError, match=r"cannot load textarena: .*verifiers\[ta\]"):
        VerifiersEnvironment(id="textarena", args={"game": "Wordle-v0"}).tasks()


def test_runtime_whose_program_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = VerifiersEnvironment(
        id=package("judged.py"), harness="bash", env={"agent": {"runtime": {"type": "docker"}}}
    )
    with pytest.raises(ConfigError, match="there is no program docker"):
        environment.tasks()
