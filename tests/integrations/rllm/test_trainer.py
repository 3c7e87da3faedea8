"""AgentTrainer: a configuration, a workflow and datasets become a run that trains, evaluates and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from typing_extensions import override

from tests.integrations.rllm.flows import GuessAgent, GuessEnv, TwoSolvers
from tests.rl.scripted_run import rows, run
from tinsmith.errors import ConfigError, UserError
from tinsmith.rl.run.state import read_state
from tinsmith.rllm import (
    AgentConfig,
    AgentTrainer,
    Dataset,
    DatasetRegistry,
    Episode,
    InMemoryStore,
    Task,
    Trajectory,
    Workflow,
    evaluator,
    rollout,
)

TRAIN = [{"question": f"{n}: yes or no?", "right": "yes"} for n in range(6)]
VAL = [{"question": f"{n}: really?", "right": "yes"} for n in range(2)]


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration of rLLM for a short run; `changes` replace whole sections."""
    values = {
        "model": {"name": "tiny", "lora_rank": 4},
        "training": {"group_size": 4, "learning_rate": 0.3},
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "data": {"train_batch_size": 3, "max_prompt_length": 64, "max_response_length": 8},
        "trainer": {
            "total_epochs": 2, "test_freq": 2, "save_freq": 1, "default_local_dir": str(folder), "logger": []
        },
    }  # fmt: skip
    return {**values, **changes}


def trainer(folder: Path, **more: Any) -> AgentTrainer:
    options: dict[str, Any] = {"config": config(folder), "train_dataset": TRAIN, "val_dataset": VAL}
    if not more.keys() & {"agent_flow", "agent_class"}:
        options["workflow_class"] = TwoSolvers
    return AgentTrainer(**{**options, **more})


def test_solvers_learn_on_the_scripted_policy(tmp_path: Path):
    settings = trainer(tmp_path, config=config(tmp_path, training={"group_size": 8, "learning_rate": 0.02})).run_config
    assert (settings.groups_per_step, settings.group_size, settings.model.rank) == (3, 8, 4)
    run(settings.model_copy(update={"epochs": None, "steps": 12}))
    metrics = rows(tmp_path)
    accuracy = [row["workflow/solver_acc"] for row in metrics if "workflow/solver_acc" in row]
    assert sum(accuracy[-4:]) / 4 > sum(accuracy[:4]) / 4 + 0.1
    evaluated = [row for row in metrics if "eval/pass@1" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4, 6, 8, 10, 12]
    assert {"eval/workflow/judge_acc", "eval/reward/judge/mean"} <= evaluated[0].keys()


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    def part(folder: str, steps: int) -> None:
        settings = trainer(tmp_path / folder).run_config
        run(settings.model_copy(update={"epochs": None, "steps": steps}))

    part("whole", 4)
    part("parts", 2)
    part("parts", 4)
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row for row in parts if row["step"] > 2] == [row for row in whole if row["step"] > 2]


def test_resume_refuses_other_rows(tmp_path: Path):
    settings = trainer(tmp_path).run_config.model_copy(update={"epochs": None, "steps": 1})
    run(settings)
    changed = [*TRAIN[:-1], {**TRAIN[-1], "right": "no"}]
    other = trainer(tmp_path, train_dataset=changed).run_config.model_copy(update={"epochs": None, "steps": 2})
    with pytest.raises(ConfigError, match=r"different settings: tasks\.train\.data"):
        run(other)


class FailsOften(Workflow):
    """Raises, hangs, returns nothing, or returns NaN, by the number in the question."""

    @override
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        import asyncio

        number = int(task["question"].partition(":")[0])
        if number == 0:
            raise ValueError("broken")
        if number == 1:
            await asyncio.Event().wait()
        if number == 2:
            return None
        episode = await TwoSolvers(self.rollout_engine).run(task, uid)
        if number == 3:
            episode.trajectories[0].reward = float("nan")
        return episode


def test_run_goes_on_with_failed_rollouts(tmp_path: Path):
    settings = trainer(
        tmp_path, workflow_class=FailsOften, workflow_args={"timeout": 0.05}, val_dataset=None,
        overrides=["rollout.retries=0", "groups_per_step=6"],
    ).run_config  # fmt: skip
    run(settings.model_copy(update={"epochs": None, "steps": 1}))
    (row,) = rows(tmp_path)
    assert row["rollouts/failed"] == 16  # of 24: two of six questions succeed
    text = (tmp_path / "log.txt").read_text()
    assert "16 rollouts of step 1 failed; the first: " in text
    stored = (tmp_path / "rollouts").read_text() if (tmp_path / "rollouts").is_file() else _rollouts(tmp_path)
    for error in ("ValueError: broken", "the workflow returned no steps", "the reward of solver is nan"):
        assert error in stored


def _rollouts(folder: Path) -> str:
    return "".join(file.read_text() for file in (folder / "rollouts").iterdir())


@rollout(name="solver")
async def answers(task: Task, agent: AgentConfig) -> str:
    async with openai.AsyncOpenAI(base_url=agent.base_url, api_key="EMPTY") as client:
        messages: Any = [{"role": "user", "content": task.instruction}]
        answer = await client.chat.completions.create(model=agent.model, messages=messages)
    return str(answer.choices[0].message.content)


@evaluator
def is_right(task: Task, episode: Episode) -> bool:
    return episode.artifacts["answer"] == task["right"]


def test_agent_flow_is_trained(tmp_path: Path):
    settings = trainer(tmp_path, agent_flow=answers, evaluator=is_right).run_config
    run(settings.model_copy(update={"epochs": None, "steps": 2}))
    metrics = rows(tmp_path)
    assert {row["rollouts/failed"] for row in metrics if "rollouts/failed" in row} == {0}
    assert all(0 <= row["eval/pass@1"] <= 1 for row in metrics if "eval/pass@1" in row)


class PerTaskEnv(GuessEnv):
    """An environment that is made for each task."""

    def __init__(self, right: str) -> None:
        super().__init__()
        self.right = right

    @staticmethod
    def from_dict(info: dict[str, Any]) -> PerTaskEnv:
        return PerTaskEnv(info["right"])

    @override
    def reset(self, task: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.task = {"question": "yes or no?", "right": self.right}
        return self.task["question"], {}


@pytest.mark.parametrize("environment", [GuessEnv, PerTaskEnv])
def test_agent_and_environment_are_trained(tmp_path: Path, environment: type[GuessEnv]):
    settings = trainer(
        tmp_path,
        config=config(tmp_path, agent={"max_steps": 1}),
        agent_class=GuessAgent,
        env_class=environment,
    ).run_config
    run(settings.model_copy(update={"epochs": None, "steps": 1}))
    (row,) = [row for row in rows(tmp_path) if "turns/guesser" in row and row["step"] == 1 and "reward/mean" in row]
    assert row["turns/guesser"] == 1
    assert row["rollouts/failed"] == 0


def test_store_of_a_run_is_saved_with_it(tmp_path: Path):
    settings = trainer(tmp_path, workflow_class=Counts, val_dataset=None).run_config
    run(settings.model_copy(update={"epochs": None, "steps": 1}))
    state = read_state(tmp_path)
    assert state is not None
    assert state.store == {"n": 12}
    own = InMemoryStore()
    assert trainer(tmp_path, workflow_class=Counts, store=own).run_config.workflow.args["store"] is own


class Counts(TwoSolvers):
    """Counts its rollouts in the store."""

    @override
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        assert self.store is not None
        await self.store.set("n", await self.store.get("n", 0) + 1)
        return await super().run(task, uid)


def test_workflow_arguments_of_the_configuration_are_passed(tmp_path: Path):
    changes = {"rllm": {"workflow": {"workflow_args": {"gamma": 0.9, "reward_bonus_coeff": 0.1}}}}
    unified = {"model": {"name": "tiny"}, "training": {"default_local_dir": str(tmp_path)}, **changes}
    settings = trainer(tmp_path, config=unified, workflow_args={"gamma": 0.8}).run_config
    assert settings.workflow.model_dump()["args"] == {"gamma": 0.8, "reward_bonus_coeff": 0.1}


def test_workflow_that_cannot_be_created_ends_the_run(tmp_path: Path):
    settings = trainer(tmp_path, workflow_args={"n_solutions": 2}).run_config
    with pytest.raises(ConfigError, match=r"TwoSolvers cannot be created: .*no argument 'n_solutions'"):
        run(settings.model_copy(update={"epochs": None, "steps": 1}))


def test_train_runs_on_a_service_and_leaves_a_finished_run(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    (tmp_path / "tiny").symlink_to(tiny_llama)
    options: dict[str, Any] = {
        "config": config(Path("run"), trainer={"total_epochs": 1, "test_freq": 1, "default_local_dir": "run"}),
        "workflow_class": Parity,
        "overrides": ["service.engine=fake", "service.source=tiny", "monitors=[]"],
    }
    result = trainer(tmp_path, **options).train()
    assert (result.step, result.folder) == (2, Path("run"))
    assert result.sampling_path.startswith("tinker://")
    trained = [row for row in rows(tmp_path / "run") if "optim/rows" in row]
    assert trained
    assert trainer(tmp_path, **options).train() == result


class Parity(TwoSolvers):
    """Rewards replies with an even number of characters."""

    @override
    def trajectory(self, name: str, messages: list[dict[str, Any]], output: Any) -> Trajectory:
        result = super().trajectory(name, messages, output)
        result.steps[0].reward = float(len(output.text) % 2 == 0)
        return result


def test_registered_datasets_are_given_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINSMITH_DATASETS", str(tmp_path / "datasets"))
    DatasetRegistry.register_dataset("count", TRAIN, "train")
    DatasetRegistry.register_dataset("count", VAL, "test")
    settings = trainer(tmp_path, train_dataset="count", val_dataset="count/test").run_config
    (source,) = settings.tasks.sources
    task = source.load()[0]
    assert (task.id, task.extra) == ("count/train/0", {"row": TRAIN[0]})
    with pytest.raises(ConfigError, match=r"There is no dataset count/dev\. Registered datasets: count"):
        trainer(tmp_path, train_dataset="count/dev")
    assert trainer(tmp_path, train_dataset=Dataset(TRAIN, "own", "x")).run_config.tasks.sources[0].label == "own/x"


def test_estimators_differ_by_role(tmp_path: Path):
    settings = trainer(
        tmp_path, traj_group_adv_estimator_map={"solver": "grpo", "judge": ("reinforce", "importance_sampling")}
    ).run_config
    kinds = {role: part.advantage.type for role, part in settings.algorithm.roles.items() if part.advantage}
    assert kinds == {"solver": "grpo", "judge": "reinforce"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "verl"}, "backend='verl' is not supported"),
        ({"traj_grouping_hook": print}, "traj_grouping_hook is not supported. Give the trajectories"),
        ({"hooks": [1]}, "hooks is not supported"),
        ({"speed": 1}, "speed is not supported"),
        ({"agent_flow": answers, "workflow_class": TwoSolvers}, "takes one of workflow_class and agent_flow"),
        ({"agent_class": GuessAgent}, "agent_class needs env_class"),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": None}, "tasks.train is missing"),
        ({"overrides": ["workflow.path=x"]}, "workflow is set in Python"),
        ({"overrides": ["stesp=1"]}, "Did you mean 'steps'"),
        ({"config": {"algorithm": {"adv_estimator": "grop"}}}, "grpo"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        trainer(tmp_path, **options)
