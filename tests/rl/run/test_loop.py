"""The training loop: rewards rise, metrics are logged, failures are recorded, epochs become steps."""

from __future__ import annotations

import asyncio
import io
import json
import math
import threading
from pathlib import Path

import pytest
from rich.console import Console

from tests.rl.scripted_run import rows, run, scripted, settings
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.run.folder import RunFolder
from tinsmith.rl.run.open import open_run
from tinsmith.rl.run.parts import RunData, resolve_steps
from tinsmith.testing import ScriptedPolicy


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_reward_rises_at_any_staleness(tmp_path, staleness):
    state = run(settings(tmp_path, steps=30, staleness=staleness))
    reward = [row["reward/mean"] for row in rows(tmp_path) if "reward/mean" in row]
    assert state.step == 30
    assert len(reward) == 30
    assert sum(reward[:3]) / 3 < 0.6
    assert sum(reward[-5:]) / 5 > 0.9


def test_staleness_is_bounded_by_its_setting(tmp_path):
    run(
        settings(
            tmp_path, staleness=2, algorithm={"advantage": {"std_threshold": None}, "kl": {"type": "k2", "coef": 1e-9}}
        )
    )
    lags = [row["policy/staleness_max"] for row in rows(tmp_path) if "reward/mean" in row]
    assert lags == [0, 1, 2, 2, 2, 2, 2, 2]


def test_synchronous_steps_train_on_their_own_samples(finished):
    for row in rows(finished):
        if "optim/kl_sample_train_v2" in row:
            assert row["policy/staleness"] == 0
            assert row["optim/kl_sample_train_v1"] == pytest.approx(0, abs=1e-6)
            assert row["optim/kl_sample_train_v2"] == pytest.approx(0, abs=1e-9)


def test_each_step_logs_the_documented_metrics(finished):
    row = next(row for row in rows(finished, timeless=False) if row.get("optim/rows"))
    wanted = {
        "reward/mean", "groups/constant", "optim/kl_sample_train_v1", "optim/kl_sample_train_v2", "optim/entropy",
        "optim/grad_norm", "optim/lr", "optim/loss", "speed/sampled_tokens_per_second",
        "speed/trained_tokens_per_second", "time/rollouts", "time/update", "time/step", "policy/staleness",
        "rollouts/failed", "tokens/sampled",
    }  # fmt: skip
    assert wanted <= row.keys()


def test_evaluation_runs_before_during_and_after_training(finished):
    steps = [row["step"] for row in rows(finished) if "eval/pass@1" in row]
    assert steps == [0, 4, 8]
    assert {file.name for file in (finished / "rollouts").glob("eval-*")} == {
        "eval-000000.jsonl", "eval-000004.jsonl", "eval-000008.jsonl",
    }  # fmt: skip


def test_rollouts_are_stored_with_tokens_text_and_reward_parts(finished):
    lines = [json.loads(line) for line in (finished / "rollouts" / "train-000001.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 4
    (trajectory,) = lines[0]["trajectories"]
    assert trajectory["role"] == "policy"
    assert trajectory["reward"] == lines[0]["reward"]
    turn = trajectory["turns"][0]
    assert len(turn["tokens"]) == len(turn["logprobs"]) > 0
    assert turn["prompt"]
    assert lines[0]["text"] in ("no", "yes", "perhaps")
    assert lines[0]["reward_parts"] == {"format": lines[0]["reward"]}


def test_step_without_advantages_is_logged_as_skipped(tmp_path):
    run(settings(tmp_path, rewards=[{"type": "format", "pattern": "never"}], steps=2))
    trained = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert [row["optim/skipped"] for row in trained] == [1.0, 1.0]
    assert [row["groups/constant"] for row in trained] == [1.0, 1.0]


def test_run_ends_when_every_rollout_failed(tmp_path):
    config = settings(tmp_path, rewards=[{"type": "reasoning_gym"}])
    with pytest.raises(TinsmithError, match=r"Every rollout of step 1 failed.*is not a task of reasoning-gym"):
        run(config)


def test_non_finite_rewards_fail_rollouts_not_the_run(tmp_path):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "odd.py").write_text(
        "from tinsmith.rl.plugins import reward\n\n\n@reward('odd')\ndef odd(task, rollout):\n"
        "    return float('nan') if rollout.text == 'no' else float(rollout.text == 'yes')\n"
    )
    config = settings(tmp_path / "run", plugins=str(tmp_path / "plugins"), rewards=[{"type": "odd"}], steps=20)
    state = run(config)
    trained = [row for row in rows(tmp_path / "run") if "reward/mean" in row]
    assert state.version > 0
    assert sum(row["rollouts/failed"] for row in trained) > 0
    assert all(math.isfinite(value) for row in rows(tmp_path / "run") for value in row.values())
    assert "reward: odd is nan" in (tmp_path / "run" / "rollouts" / "train-000001.jsonl").read_text()


def test_connection_errors_fail_rollouts_not_the_run(tmp_path):
    async def flaky(request, sample):
        if request.seed % 3 == 0:
            raise ConnectionError("gone for a moment")
        return await sample(request)

    async def connect(state, version):
        folder = tmp_path / "weights"
        return ScriptedPolicy(("no", "yes"), folder, state=state, version=version, middleware=(flaky,))

    run(settings(tmp_path, groups_per_step=6), connect)
    failed = sum(row["rollouts/failed"] for row in rows(tmp_path) if "reward/mean" in row)
    assert failed > 0
    assert failed % 4 == 0
    lines = (tmp_path / "rollouts" / "train-000001.jsonl").read_text() + (
        tmp_path / "rollouts" / "train-000002.jsonl"
    ).read_text()
    assert "ConnectionError: gone for a moment" in lines


def test_finished_run_is_left_unchanged(finished):
    before = (finished / "metrics.jsonl").read_text()

    async def connect(state, version):
        raise AssertionError("nothing to connect for")

    assert run(settings(finished), connect).step == 8
    assert (finished / "metrics.jsonl").read_text() == before


def test_final_weights_are_saved_for_training_and_sampling(tmp_path):
    state = run(settings(tmp_path, steps=1), scripted(tmp_path))
    assert "final" in state.path
    assert "final-sampling" in state.sampling_path


def test_hundreds_of_concurrent_rollouts_use_no_threads(tmp_path):
    under_way, most, threads = 0, 0, set()
    all_begun = asyncio.Event()

    async def slow(request, sample):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 256:
            all_begun.set()
        async with asyncio.timeout(100):
            await all_begun.wait()
        under_way -= 1
        threads.update(set(threading.enumerate()) - before)
        return await sample(request)

    async def connect(state, version):
        folder = tmp_path / "weights"
        return ScriptedPolicy(("no", "yes"), folder, state=state, version=version, middleware=(slow,))

    before = set(threading.enumerate())
    alone = {"every": 0, "before": False, "after": False}
    run(settings(tmp_path, groups_per_step=256, group_size=2, steps=2, concurrency=256, eval=alone), connect)
    assert most == 256
    assert [thread.name for thread in threads] == ["event-loop-watchdog"]


def epoch_settings(folder, **changes):
    """Settings of a run whose steps follow from its epochs."""
    tasks = {"train": {"type": "largest", "size": 25}, "held_out": 5}
    return settings(folder, **{"steps": 0, "tasks": tasks, **changes})


def steps_of(config) -> int:
    return resolve_steps(config, RunData(config)).steps


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"), [(1, 0, 6), (2, 0, 13), (0.5, 0, 3), (2, 4, 4), (1, 40, 6), (None, 7, 7)]
)
def test_steps_are_epochs_times_tasks_over_groups_per_step(tmp_path, epochs, steps, expected):
    assert steps_of(epoch_settings(tmp_path, epochs=epochs, steps=steps)) == expected


def test_run_with_epochs_ends_by_itself(tmp_path):
    assert run(epoch_settings(tmp_path, epochs=1)).step == 6
    folder = RunFolder.open(tmp_path, epoch_settings(tmp_path, epochs=1, steps=6).model_dump(mode="json"))
    assert folder.state is not None
    assert folder.state.cursor == 18
    folder.close()


def test_run_needs_at_least_one_step(tmp_path):
    with pytest.raises(ValueError, match="set steps or epochs"):
        epoch_settings(tmp_path)
    with pytest.raises(ConfigError, match="less than one step of 3"):
        steps_of(epoch_settings(tmp_path, epochs=0.1))


async def by_hand(config: RunConfig) -> None:
    """The loop of docs/reference/api.md, for any number of steps."""
    async with open_run(config, scripted(Path(config.folder)), Console(file=io.StringIO())) as opened:
        ended = await opened.evaluate_before_training()
        for step in () if ended else opened.steps():
            batch = await opened.next_batch(step)
            groups = opened.filtered_groups(batch.groups)
            update = await opened.algorithm.score(step, groups, opened.next_demonstrations())
            await opened.update(step, update)
            if await opened.finish_step(step):
                break


DIFFICULTY = {"train": {"type": "addition"}, "held_out": 5, "order": {"type": "difficulty"}}


@pytest.mark.parametrize(
    "changes",
    [{"tasks": DIFFICULTY, "steps": 20}, {"until": {"metric": "reward/mean", "at_least": 0.9}, "steps": 60}],
    ids=["order", "until"],
)
def test_loop_by_hand_equals_the_built_in_loop(tmp_path, changes):
    built_in, hand = settings(tmp_path / "built-in", **changes), settings(tmp_path / "hand", **changes)
    expected = run(built_in)
    asyncio.run(by_hand(hand))
    state = json.loads((tmp_path / "hand" / "state.json").read_text())
    assert (state["step"], state["cursor"]) == (expected.step, expected.cursor)
    assert state["order"] == expected.model_dump(mode="json")["order"]
    assert state["step"] < 60
    assert rows(tmp_path / "hand") == rows(tmp_path / "built-in")
    keys, built_in_keys = (
        [row.keys() for row in rows(tmp_path / name, timeless=False)] for name in ("hand", "built-in")
    )
    assert keys == built_in_keys
    files, built_in_files = (
        {str(file.relative_to(tmp_path / name)) for file in (tmp_path / name).rglob("*")}
        for name in ("hand", "built-in")
    )
    assert files == built_in_files
