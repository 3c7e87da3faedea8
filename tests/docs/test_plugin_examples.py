"""Every example of docs/train/rewards.md and docs/train/environments.md runs as it stands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.rl.scripted_run import rows, run, settings
from tinsmith.testing import ScriptedPolicy

TRAIN = Path(__file__).parents[2] / "docs" / "train"
PAGE = "".join((TRAIN / name).read_text() for name in ("rewards.md", "environments.md"))
FILES = re.findall(r"```python\n# my_plugins/(\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
PARTS = [
    part for part in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if re.search("^(workflow|rewards):", part, re.M)
]
PROGRAMS = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]
SERVER = re.search(r"```python\n# add_server.py\n(.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    plugins = tmp_path / "my_plugins"
    plugins.mkdir()
    for name, text in FILES:
        (plugins / name).write_text(text)
    path = list(sys.path)
    yield plugins
    sys.path[:] = path
    for name, _ in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("part", [part for part in PARTS if not re.search("type: (rank_)?judge\\b", part)])
def test_example_runs_without_failed_rollouts(folder, part, monkeypatch):
    monkeypatch.chdir(folder.parent)
    Path("programs.jsonl").write_text(PROGRAMS)
    Path("add_server.py").write_text(SERVER)
    part = part.replace("[python,", f"[{sys.executable},")

    async def connect(state: str, version: int) -> ScriptedPolicy:
        return ScriptedPolicy(("yes, it is", "no", CALL), folder.parent / "weights", state=state, version=version)

    out = folder.parent / "run"
    config = settings(out, plugins=str(folder), **yaml.safe_load(part), steps=1, optimizer={"learning_rate": 1e-9})
    if config.workflow.type == "single_turn" or part.startswith("workflow: {type: multi_turn"):
        run(config, connect)  # the scripted policy trains on one reply per row
        assert all(row["rollouts/failed"] == 0 for row in rows(out) if "reward/mean" in row)
    else:
        rollouts = play(config)
        assert [rollout.error for rollout in rollouts] == [""] * len(rollouts)
        assert len({rollout.reward for rollout in rollouts}) > 1


def play(config):
    """Rollouts of one task, without an update."""
    import asyncio

    import numpy as np

    from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
    from tinsmith.rl.rewards import Rewards
    from tinsmith.rl.workflows.base import WorkflowContext
    from tinsmith.testing import ScriptedSnapshot

    async def main():
        agent_endpoint = AgentEndpoint()
        parts = WorkflowContext(
            sampling=config.sampling, rewards=Rewards(config.rewards), agent_endpoint=agent_endpoint
        )
        try:
            task = config.tasks.train.load()[0]
            policy = ScriptedSnapshot(("yes, it is", "no", CALL), np.zeros(3), 0)
            return await config.workflow.make(parts).run(task, policy, count=24, seed=1)
        finally:
            await agent_endpoint.close()

    return asyncio.run(main())


def test_judge_example_is_a_valid_config(tmp_path):
    (part,) = [part for part in PARTS if "type: judge" in part]
    assert len(settings(tmp_path, **yaml.safe_load(part)).rewards) == 3


def test_rank_judge_example_is_a_valid_config(tmp_path):
    (part,) = [part for part in PARTS if "type: rank_judge" in part]
    (reward,) = settings(tmp_path, eval={}, **yaml.safe_load(part)).rewards
    assert reward.of_group


def test_reward_model_example_is_a_valid_config(tmp_path):
    (part,) = [part for part in PARTS if "type: reward_model" in part]
    assert len(settings(tmp_path, **yaml.safe_load(part)).rewards) == 1


def test_prime_example_is_a_valid_config(tmp_path):
    (part,) = [part for part in PARTS if "type: prime" in part]
    (prime,) = settings(tmp_path, **yaml.safe_load(part)).algorithm.primes
    assert (prime.beta, prime.reference) == (0.05, "")


def test_page_has_each_kind_of_example():
    assert len(FILES) == 6
    assert len(PARTS) == 12


def test_examples_import_only_the_public_api():
    imports = {line for _, text in FILES for line in text.splitlines() if "tinsmith" in line}
    assert imports
    assert all(line.startswith("from tinsmith import ") for line in imports)
