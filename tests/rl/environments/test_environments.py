"""Environments in a run file: what is refused, by name; custom ones; and what their tasks are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.rl.environments.plugins.checking_environment import Checking
from tinsmith.errors import ConfigError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.data.tasks import TasksConfig, split
from tinsmith.rl.environments.base import EnvironmentOptions
from tinsmith.rl.environments.custom import CustomEnvironment
from tinsmith.rl.environments.tasks import TasksEnvironment
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.types import Message, Task
from tinsmith.settings import build

ADD = {"type": "tasks", "name": "add", "train": {"type": "addition"}, "rewards": [{"type": "number"}]}
BIG = {"type": "tasks", "name": "big", "train": {"type": "largest"}, "rewards": [{"type": "number"}]}
EVAL_ONLY = {**BIG, "weight": 0, "held_out": 7}


def read(*environments, **changes) -> RunConfig:
    """Settings of a run of these environments."""
    values = {"model": {"name": "toy"}, "environments": list(environments), "steps": 3, **changes}
    return build(RunConfig, values, "run.yaml")


@pytest.mark.parametrize(
    ("environments", "changes", "words"),
    [
        ((ADD,), {"tasks": {"held_out": 3}}, "tasks is not used with environments"),
        ((ADD,), {"workflow": {"type": "math"}}, "workflow is not used with environments"),
        ((ADD,), {"rewards": [{"type": "number"}]}, "rewards is not used with environments"),
        ((ADD, {**BIG, "name": "add"}), {}, "two environments are called add"),
        (({**ADD, "name": "a/b"},), {}, "environment a/b: the name is part of metrics"),
        (({**ADD, "name": "reward"},), {}, "environment reward: the name is part of metrics"),
        ((EVAL_ONLY,), {}, "every environment has weight 0"),
        ((ADD, {**EVAL_ONLY, "held_out": 0}), {}, "environment big: weight 0 only evaluates, and no tasks are held"),
        (({**ADD, "weight": -1},), {}, "greater than or equal to 0"),
        (({**ADD, "rewards": []},), {}, "environment add: no reward function scores the rollouts"),
        ((ADD, {**EVAL_ONLY, "rewards": []}), {}, "environment big: no reward function scores the answers"),
        (({**ADD, "sampling": {"max_token": 3}},), {}, "there is no key 'max_token' in sampling. Did you mean"),
        (({**ADD, "sampling": {"max_tokens": 0}},), {}, "max_tokens: Input should be greater than or equal to 1"),
        ((ADD, {**EVAL_ONLY, "sampling": {"temperature": 1}}), {}, "set eval.sources.big.temperature"),
        (
            (ADD, {**EVAL_ONLY, "sampling": {"max_tokens": 9}}),
            {"eval": {"max_tokens": 8}},
            "set eval.sources.big.max_tokens",
        ),
        (
            (ADD, {**BIG, "sampling": {"top_p": 0.9}}),
            {"algorithm": {"type": "grpo"}},
            "environment big: sampling with top_p or top_k does not return the probabilities",
        ),
        (
            (ADD,),
            {"algorithm": {"advantage": {"type": "gigpo"}}},
            "environment add: gigpo compares turns by state, and this environment sets none",
        ),
        ((ADD, BIG), {"steps": 0, "epochs": 1}, "epochs is not used with several environments"),
        ((ADD,), {"eval": {"rewards": [{"type": "number"}]}}, "eval.rewards is not used with environments"),
        (
            (ADD,),
            {"eval": {"sources": {"add": {"workflow": {"type": "math"}}}}},
            "eval.sources.add.workflow is not used with environments",
        ),
        ((ADD,), {"eval": {"baseline": 3}}, "eval.baseline is not used with environments"),
        ((ADD,), {"eval": {"threshold": 0.5}}, "the reward number says what is right"),
        ((ADD,), {"eval": {"sources": {"sub": {"max_tokens": 3}}}}, "eval.sources.sub: no environment with held-out"),
        (({**ADD, "held_out": 0},), {"eval": {"every": 3}}, "eval needs held-out tasks; set held_out of an environ"),
        (({**ADD, "train": None},), {}, "train is missing; set train, or set weight to 0"),
        (({**ADD, "eval": {"a": {"type": "largest"}}},), {}, "eval takes a single source in an environment"),
        (({"type": "gome"},), {}, "has no type 'gome'"),
        (({**ADD, "rewardss": []},), {}, "Did you mean 'environments.0.rewards'"),
        (({"type": "custom", "path": "tinsmith.rl.types:Task"},), {}, "is not an EnvironmentOptions class"),
        (({"type": "custom", "path": Checking, "args": {}},), {}, "'label' is missing"),
        (({"type": "custom", "path": Checking, "args": {"weight": 2}},), {}, "args.weight: set weight beside path"),
    ],
)
def test_settings_that_do_not_fit_are_refused(environments, changes, words):
    with pytest.raises(ConfigError) as caught:
        read(*environments, **changes)
    assert words in str(caught.value)


def test_stage_may_replace_tasks_by_environments():
    stages = [{"name": "one"}, {"name": "two", "environments": [ADD, BIG]}]
    tasks = {"tasks": {"train": {"type": "addition"}}, "rewards": [{"type": "number"}], "stages": stages}
    config = build(RunConfig, {"model": {"name": "toy"}, "steps": 3, **tasks}, "run.yaml")
    assert [len(config.stage_config(number).environments) for number in (1, 2)] == [0, 2]
    back = read(ADD, stages=[{"name": "one"}, {"name": "two", **{key: tasks[key] for key in ("tasks", "rewards")}}])
    assert [len(back.stage_config(number).environments) for number in (1, 2)] == [1, 0]


def test_settings_survive_their_record_in_run_yaml():
    config = read(ADD, {"type": "custom", "path": Checking, "args": {"label": "yes"}, "sampling": {"stop": ["."]}})
    again = RunConfig.model_validate(config.model_dump(mode="json"))
    assert again.model_dump(mode="json") == config.model_dump(mode="json")


def test_custom_environment_has_the_defaults_of_its_class():
    custom = CustomEnvironment.model_validate({"path": Checking, "args": {"label": "yes"}})
    assert (custom.resolved.title, custom.held_out, custom.weight) == ("Checking", 5, 1.0)
    _, held_out = custom.resolved.split(0, train=False)
    assert len(held_out) == 5
    named = CustomEnvironment.model_validate({"path": Checking, "name": "n", "held_out": 3, "args": {"label": "yes"}})
    assert (named.resolved.title, len(named.resolved.split(0, train=False)[1])) == ("n", 3)


def test_sampling_overrides_keys_of_the_run():
    environment = TasksEnvironment.model_validate({**ADD, "sampling": {"max_tokens": 7, "stop": ["\n"]}})
    sampling = environment.sampling_of(SamplingConfig(temperature=0.5, max_tokens=100))
    assert sampling == SamplingConfig(temperature=0.5, max_tokens=7, stop=("\n",))


@pytest.mark.parametrize("held_out", [{}, {"eval": {"type": "largest", "size": 9}, "held_out": 3}])
def test_tasks_are_those_of_a_run_without_environments(held_out):
    keys = {"train": [{"type": "addition"}, {"type": "largest", "size": 50}], "order": {"type": "sequential"}}
    environment = TasksEnvironment.model_validate({**ADD, **keys, **held_out})
    sampler, tasks = environment.split(3, train=True)
    plain_sampler, plain_tasks = split(TasksConfig.model_validate({**keys, **held_out}), 3)
    assert tasks == plain_tasks[""]
    assert sampler.draw(40) == plain_sampler.draw(40)
    assert len(environment.tasks()) == 8100 + 50
    assert environment.tasks()[8100].id == "largest/0"


def test_held_out_tasks_of_weight_0_load_no_training_rows(tmp_path: Path):
    missing = {"type": "jsonl", "path": str(tmp_path / "missing.jsonl")}
    environment = TasksEnvironment.model_validate({**EVAL_ONLY, "train": missing, "eval": {"type": "largest"}})
    sampler, tasks = environment.split(0, train=False)
    assert sampler is None
    assert len(tasks) == 7


def test_without_a_task_to_train_on_the_error_names_it():
    environment = Checking(label="yes", rows=4, name="small")
    with pytest.raises(ConfigError, match="environment small has 4 tasks; 5 held out leave none to train on"):
        environment.split(0, train=True)


def test_tasks_without_messages_differ_by_id():
    class Silent(Checking):
        def tasks(self):
            return [Task(id=f"{row}", messages=()) for row in range(self.rows)]

        def held_out_tasks(self):
            return [Task(id="other", messages=()), Task(id="3", messages=(Message(role="system", content="x"),))]

    sampler, held_out = Silent(label="yes", rows=6).split(0, train=True)
    assert [task.id for task in held_out] == ["other", "3"]
    assert sorted(task.id for task in sampler.draw(5)) == ["0", "1", "2", "4", "5"]


def test_base_class_requires_tasks_and_rollout():
    with pytest.raises(NotImplementedError):
        EnvironmentOptions().tasks()
    with pytest.raises(NotImplementedError):
        asyncio.run(EnvironmentOptions().rollout(None, None, 0))  # type: ignore[arg-type]
