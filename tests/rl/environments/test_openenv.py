"""Environments of OpenEnv: rollouts against a small server that speaks its protocol."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.rl.workflows.test_workflows import policy, prompt
from tinsmith.rl.environments.openenv import OpenEnvironment
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Rollout
from tinsmith.rl.workflows.base import WorkflowContext

pytest.importorskip("websockets")

Received = list[dict]


class Counting:
    """A game: each guess is worth 0.5 if it is `yes`, and the second one ends it. Sessions above `most` are refused."""

    def __init__(self, most: int) -> None:
        self.received: Received = []
        self._most, self._open = most, 0

    async def play(self, socket) -> None:
        from websockets.exceptions import ConnectionClosed

        self._open += 1
        steps = 0
        try:
            if self._open > self._most:
                await socket.send(_error("full", "CAPACITY_REACHED"))
            async for text in socket:
                message = json.loads(text)
                self.received.append(message)
                if message["type"] == "close":
                    return
                if message["type"] == "reset":
                    await socket.send(_state({"text": f"seed {message['data']['seed']}", "left": 2}))
                elif set(message["data"]) != {"guess"}:
                    await socket.send(_error("guess is missing", "VALIDATION_ERROR"))
                else:
                    steps += 1
                    reward = 0.5 * (message["data"]["guess"] == "yes")
                    await socket.send(_state({"text": "again", "left": 2 - steps}, reward, steps == 2))
        except ConnectionClosed:
            return
        finally:
            self._open -= 1


def _state(observation: dict, reward: float | None = None, done: bool = False) -> str:
    return json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})


def _error(message: str, code: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}})


def play(settings: dict, *replies: str, count: int = 1, most: int = 9) -> tuple[tuple[Rollout, ...], Received]:
    """Rollouts of the second task, and what the server received."""

    game = Counting(most)

    async def main() -> tuple[Rollout, ...]:
        from websockets.asyncio.server import serve

        async with serve(game.play, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            environment = OpenEnvironment.model_validate({"url": url, **settings})
            rewards = Rewards([], needed=False)
            context = WorkflowContext(
                sampling=SamplingConfig(max_tokens=99), rewards=rewards, agent_endpoint=AgentEndpoint()
            )
            task = environment.tasks()[1]
            return await environment.make(context).run(task, policy(*replies), count=count, seed=3)

    return asyncio.run(main()), game.received


def test_rollout_resets_with_the_seed_and_steps_with_replies():
    settings = {"action": "guess", "observation": "text", "prompt": "Guess: ", "reset": {"level": 3}}
    (rollout,), received = play(settings, "yes")
    assert rollout.error == ""
    assert [turn.reward for turn in rollout.turns] == [0.5, 0.5]
    assert (rollout.reward, rollout.termination) == (1.0, "done")
    assert prompt(rollout.turns[1]) == "Guess: seed 1yes|again"
    assert received[0] == {"type": "reset", "data": {"seed": 1, "level": 3}}
    assert received[1:] == [{"type": "step", "data": {"guess": "yes"}}] * 2 + [{"type": "close"}]


def test_reply_may_be_the_whole_action_as_json():
    (rollout,), _ = play({"action": ""}, 'I say {"guess": "yes"}.')
    assert prompt(rollout.turns[0]) == '{"text": "seed 1", "left": 2}'
    assert rollout.reward == 1.0


@pytest.mark.parametrize(
    ("reply", "error"),
    [("no", "Error: the reply holds no JSON object"), ('{"a": 1}', "Error: guess is missing")],
)
def test_refused_actions_are_shown_to_the_policy(reply, error):
    (rollout,), _ = play({"action": "", "max_turns": 2}, reply)
    assert error in prompt(rollout.turns[1])
    assert (rollout.reward, rollout.termination) == (0.0, "max_turns")


def test_sessions_limit_how_many_play_at_once():
    rollouts, _ = play({"action": "guess"}, "yes", count=5, most=1)
    assert [rollout.error for rollout in rollouts] == [""] * 5


def test_server_that_is_full_or_away_is_named():
    rollouts, _ = play({"action": "guess", "sessions": 2}, "yes", count=2, most=1)
    assert any("full" in rollout.error and "max_concurrent_envs" in rollout.error for rollout in rollouts)
    (rollout,), _ = play({"url": "http://127.0.0.1:1"}, "yes")
    assert "http://127.0.0.1:1 is not reached" in rollout.error


def test_unknown_field_of_an_observation_is_refused():
    (rollout,), _ = play({"observation": "txt"}, "yes")
    assert "no field 'txt'. It has: text, left" in rollout.error


def test_example_of_the_guide_is_valid():
    page = (Path(__file__).parents[3] / "docs" / "train" / "environments.md").read_text()
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "type: openenv" in block]
    (settings,) = yaml.safe_load(example)["environments"]
    assert OpenEnvironment.model_validate(settings).action == "code"
