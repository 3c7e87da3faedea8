"""Workflows and rewards by Trinity's names, by names of a plugin folder and by dotted paths; and evaluation."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trinity.examples import EVAL, Pairs
from tests.integrations.trinity.files import SMALL, read, with_key, write
from tinsmith.dialects import read_run
from tinsmith.errors import ConfigError
from tinsmith.integrations.trinity.files.name_tables import REWARDS, WORKFLOWS
from tinsmith.integrations.trinity.files.prompts import THINK_BOXED
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Task
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.testing import ScriptedPolicy

WORKFLOW, TASKSET = "buffer.explorer_input.default_workflow_type", "buffer.explorer_input.taskset"
REWARD = "buffer.explorer_input.default_reward_fn_type"
JUDGE: Pairs = (("explorer.auxiliary_models[].model_path", "judge"),)

PLUGINS = '''
from tinsmith.rl.plugins import reward, workflow
from tinsmith.rl.workflows.multi_turn import Environment

@workflow("twice")
async def twice(task, conversation, question="Sure?"):
    await conversation.say(*task.messages)
    await conversation.say(question)
    return float(task.extra["level"])

@reward("brief")
def brief(task, rollout, most=20):
    return float(len(rollout.text) <= most)

async def agent(task, client, model, rounds=3):
    return 1.0

class World(Environment):
    """Never answers."""
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("plugins")
    (made / "trinity_works.py").write_text(PLUGINS)
    before = list(sys.path)
    yield made
    sys.path[:] = before
    sys.modules.pop("trinity_works", None)


def run(tmp_path: Path, *pairs: tuple[str, Any], words: tuple[str, ...] = ()) -> RunConfig:
    values = SMALL
    for key, value in pairs:
        values = with_key(values, key, value)
    return read_run(write(tmp_path, values), words).settings


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_known_workflow_can_be_chosen(name: str, tmp_path: Path):
    judged = () if WORKFLOWS[name].reward else ((REWARD, "math_reward"),)
    plain, concurrent = (run(tmp_path, *JUDGE, *judged, (WORKFLOW, word)) for word in (name, f"async_{name}"))
    assert plain == concurrent
    assert plain.workflow.type in ("single_turn", "math")
    assert plain.rewards


TRINITY_MATH_PROMPT = "6ae1bf36c9298adb33bd0af66ffca7ff6f69b0583d2bc491b52ef81aa7cafe7f"
"""SHA-256 of the system message that Trinity-RFT 0.6 sends for a taskset without system_prompt."""
NONE = sha256().hexdigest()
PROMPT = f"{TASKSET}.format.system_prompt"


@pytest.mark.parametrize(
    ("pairs", "system"),
    [
        ((), TRINITY_MATH_PROMPT),
        (((PROMPT, "Be brief."),), sha256(b"Be brief.").hexdigest()),
        (((PROMPT, ""),), NONE),
        (((REWARD, "accuracy_reward"),), NONE),
        ((*JUDGE, (WORKFLOW, "math_rm_workflow")), NONE),
    ],
    ids=["default", "own prompt", "empty prompt", "another reward", "judged"],
)
def test_math_workflow_sends_the_system_message_of_trinity(pairs: Pairs, system: str, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "2 + 2?", "response": "4"}))
    settings = run(tmp_path, (f"{TASKSET}.path", str(rows)), *pairs)
    (task,) = settings.tasks.sources[0].load()
    policy = ScriptedPolicy(["4"], tmp_path)
    context = WorkflowContext(
        sampling=SamplingConfig(), rewards=Rewards([], needed=False), agent_endpoint=AgentEndpoint()
    )

    async def prompt() -> str:
        (rollout,) = await settings.workflow.make(context).run(task, await policy.snapshot(), count=1, seed=0)
        return "".join(map(chr, rollout.turns[0].prompt))

    before = asyncio.run(prompt()).removesuffix("2 + 2?")
    assert sha256(before.encode()).hexdigest() == system


@pytest.mark.parametrize("name", REWARDS)
def test_every_known_reward_can_be_chosen(name: str, tmp_path: Path):
    assert run(tmp_path, (REWARD, name)).rewards[0].type == REWARDS[name].type


@pytest.mark.parametrize("name", ["on_policy_distill", "jsd"])
def test_distillation_needs_no_reward(name: str, tmp_path: Path):
    teacher = (*JUDGE, ("algorithm.algorithm_type", name))
    assert run(tmp_path, *teacher, (WORKFLOW, "on_policy_distill_workflow")).rewards == ()
    judged = run(tmp_path, *teacher, (WORKFLOW, "on_policy_distill_math_workflow"))
    assert [reward.type for reward in judged.rewards] == ["math"]
    with pytest.raises(ConfigError, match="there is no reward"):
        run(tmp_path, (WORKFLOW, "on_policy_distill_workflow"))


def test_workflow_arguments_reach_the_reward(tmp_path: Path):
    args = {"with_think": True, "format_score_coef": 0.3, "use_base": False}
    settings = run(tmp_path, (WORKFLOW, "math_boxed_workflow"), (f"{TASKSET}.workflow_args", args))
    assert settings.workflow.model_dump()["system"] == THINK_BOXED
    assert settings.rewards[0].model_dump(include={"think", "form"}) == {"think": True, "form": 0.3}


def test_length_penalty_is_a_reward_of_its_own(tmp_path: Path):
    args = {"enable_overlong_penalty": True, "max_response_length": 16, "cache_length": 4, "penalty_factor": 0.5}
    settings = run(tmp_path, (REWARD, "math_dapo_reward"), (f"{TASKSET}.reward_fn_args", args))
    assert [reward.type for reward in settings.rewards] == ["math_boxed", "overlong"]
    assert settings.rewards[1].model_dump(exclude={"name", "type", "role"}) == {
        "max_tokens": 16,
        "margin": 4,
        "weight": 0.5,
    }


def test_judge_reads_the_rubric_of_the_row(tmp_path: Path):
    words = ("explorer.auxiliary_models[].max_response_tokens", 64)
    settings = run(tmp_path, *JUDGE, words, (WORKFLOW, "rubric_judge_workflow"))
    judge = settings.rewards[0].model_dump(include={"model", "max_tokens", "rubric_key"})
    assert judge == {"model": "judge", "max_tokens": 64, "rubric_key": "rubric"}
    assert settings.tasks.sources[0].model_dump()["extra"] == ("rubric",)
    assert not any(
        "this run does not use it" in note for note in read(tmp_path, *JUDGE, (WORKFLOW, "math_rm_workflow")).notes
    )


def test_judge_takes_enable_thinking(tmp_path: Path):
    silent = ("explorer.auxiliary_models[].enable_thinking", False)
    settings = run(tmp_path, *JUDGE, silent, (WORKFLOW, "rubric_judge_workflow"))
    assert settings.rewards[0].model_dump()["chat_template_values"] == {"enable_thinking": False}


def test_judge_may_be_an_external_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    external = {"enable": True, "base_url_env": "JUDGE_URL", "api_key_env": "JUDGE_KEY", "model_name": "grader"}
    external_judge = ("explorer.auxiliary_models", [{"model_path": "some", "external_model_config": external}])
    monkeypatch.setenv("JUDGE_URL", "http://there/v1")
    judge = run(tmp_path, external_judge, (WORKFLOW, "math_rm_workflow")).rewards[0].model_dump()
    assert (judge["model"], judge["base_url"], judge["key_env"]) == ("grader", "http://there/v1", "JUDGE_KEY")
    monkeypatch.delenv("JUDGE_URL")
    with pytest.raises(ConfigError, match="JUDGE_URL is not set"):
        run(tmp_path, external_judge, (WORKFLOW, "math_rm_workflow"))
    with pytest.raises(ConfigError, match="a teacher must return logprobs"):
        run(tmp_path, external_judge, ("algorithm.algorithm_type", "jsd"))


def test_plugin_names_take_arguments(folder: Path, tmp_path: Path):
    settings = run(
        tmp_path,
        (WORKFLOW, "twice"),
        (REWARD, "brief"),
        (f"{TASKSET}.workflow_args", {"question": "Really?"}),
        (f"{TASKSET}.reward_fn_args", {"most": 5}),
        words=(f"plugins={folder}",),
    )
    assert settings.workflow.model_dump(include={"path", "args"}) == {
        "path": "trinity_works:twice",
        "args": {"question": "Really?"},
    }
    assert settings.rewards[0].model_dump()["args"] == {"most": 5}
    assert settings.tasks.sources[0].model_dump()["extra"] == ("*",)
    alone = run(tmp_path, (WORKFLOW, "twice"), words=(f"plugins={folder}",))
    assert alone.rewards == ()


@pytest.mark.parametrize(("path", "kind"), [("twice", "custom"), ("agent", "agent"), ("World", "multi_turn")])
def test_dotted_path_selects_the_workflow_type(path: str, kind: str, folder: Path, tmp_path: Path):
    settings = run(tmp_path, (WORKFLOW, f"trinity_works.{path}"), words=(f"plugins={folder}",))
    assert (settings.workflow.type, settings.workflow.model_dump()["path"]) == (kind, f"trinity_works:{path}")


def test_dotted_path_can_name_a_reward(folder: Path, tmp_path: Path):
    settings = run(tmp_path, (REWARD, "trinity_works.brief"), words=(f"plugins={folder}",))
    assert settings.rewards[0].model_dump()["path"] == "trinity_works:brief"


def test_misspelt_plugin_name_suggests_the_nearest(folder: Path, tmp_path: Path):
    with pytest.raises(Exception, match="Did you mean 'twice'"):
        run(tmp_path, (WORKFLOW, "twise"), words=(f"plugins={folder}",))


def first(tmp_path: Path, row: dict[str, Any], *pairs: tuple[str, Any], words: tuple[str, ...] = ()) -> Task:
    """The first task of a file with nine copies of the row."""
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    settings = run(tmp_path, (f"{TASKSET}.path", str(tmp_path / "rows.jsonl")), *pairs, words=words)
    return settings.tasks.sources[0].load()[0]


def test_environment_rows_need_no_answer(folder: Path, tmp_path: Path):
    world = ((WORKFLOW, "trinity_works.World"), (f"{TASKSET}.format.prompt_key", "game_file"))
    words = (f"plugins={folder}",)
    task = first(tmp_path, {"game_file": "a.tw"}, *world, words=words)
    assert (task.messages[0].content, task.answer, dict(task.extra)) == ("a.tw", "", {"game_file": "a.tw"})
    assert first(tmp_path, {"game_file": "a.tw", "response": 7}, *world, words=words).answer == "7"
    with pytest.raises(ConfigError, match="Its fields are: game_file"):
        first(tmp_path, {"game_file": "a.tw"}, *world, (f"{TASKSET}.format.response_key", "response"), words=words)


def test_rows_need_the_answer_a_reward_reads(tmp_path: Path):
    with pytest.raises(ConfigError, match="Its fields are: prompt"):
        first(tmp_path, {"prompt": "1 + 1?"})
    assert first(tmp_path, {"prompt": "1 + 1?"}, (REWARD, "format_reward")).answer == ""


def held(*tasksets: dict[str, Any]) -> tuple[str, Any]:
    named = [{"name": f"set{at}", "path": f"held{at}.jsonl", **taskset} for at, taskset in enumerate(tasksets)]
    return (EVAL.removesuffix("[]"), named)


def test_shared_eval_settings_are_set_once(tmp_path: Path):
    sampled = {"repeat_times": 4, "rollout_args": {"temperature": 0.6, "top_p": 0.9}}
    other = {"rollout_args": {"temperature": 0.0, "max_tokens": 4}, "default_workflow_type": "math_boxed_workflow"}
    evaluation = run(tmp_path, held(sampled, other)).eval
    first, second = evaluation.of_source("set0"), evaluation.of_source("set1")
    assert (first.num_samples, first.temperature, first.top_p, first.max_tokens) == (4, 0.6, 0.9, None)
    assert (second.num_samples, second.temperature, second.top_p, second.max_tokens) == (1, 0.0, None, 4)
    assert first.workflow is None
    assert second.workflow is not None
    assert [reward.type for reward in second.rewards] == ["math_boxed"]
    assert (evaluation.every, evaluation.before, evaluation.after) == (100, True, False)


def test_equal_evaluations_have_no_own_settings(tmp_path: Path):
    evaluation = run(tmp_path, held({"repeat_times": 2}, {"repeat_times": 2})).eval
    assert (evaluation.num_samples, evaluation.temperature, dict(evaluation.sources)) == (2, 1.0, {})


@pytest.mark.parametrize(("steps", "due"), [(8, [0, 4, 8]), (10, [0, 4, 8])])
def test_last_step_is_evaluated_on_the_interval(steps: int, due: list[int], tmp_path: Path):
    settings = run(tmp_path, held({}), ("explorer.eval_interval", 4), ("buffer.total_steps", steps))
    assert [step for step in range(steps + 1) if settings.eval.due(step, settings.steps)] == due


def test_evaluation_uses_the_models_sampling_settings(tmp_path: Path):
    trained = (f"{TASKSET}.rollout_args", {"temperature": 0.5, "top_p": 0.5, "max_tokens": 3})
    settings = run(tmp_path, trained, held({}))
    assert (settings.sampling.temperature, settings.sampling.top_p, settings.sampling.max_tokens) == (0.5, 0.5, 3)
    assert (settings.eval.temperature, settings.eval.top_p, settings.eval.max_tokens) == (1.0, 1.0, 16)
