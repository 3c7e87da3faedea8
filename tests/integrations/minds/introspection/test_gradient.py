"""gradient_intuition and gradient_choice with a scripted policy and scripted shadow steps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from tests.integrations.minds.shadow.scripted_server import ScriptedShadowServer
from tests.rl.scripted_run import rows, run, settings
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.integrations.minds.introspection.gradient_choice import CATEGORIES
from tinsmith.integrations.minds.shadow.config import ShadowConfig
from tinsmith.integrations.minds.shadow.environment import SHADOW
from tinsmith.integrations.minds.shadow.records import ProbeDelta, ShadowGroup
from tinsmith.integrations.minds.shadow.service import ShadowService
from tinsmith.rl.config import RunConfig
from tinsmith.rl.environments.registry import EnvironmentConfig
from tinsmith.rl.policy.agent_endpoint import AgentEndpoint
from tinsmith.rl.policy.sampling import Sample, SampleRequest, SampleResult, SamplingConfig
from tinsmith.rl.rewards import Rewards
from tinsmith.rl.types import Rollout, Task
from tinsmith.rl.workflows.base import WorkflowContext
from tinsmith.testing import CharacterCodec, ScriptedSnapshot
from tinsmith.testing.scripted import reply_turn

SUMS = {"type": "tasks", "train": {"type": "addition"}, "rewards": [{"type": "number"}]}


class LengthServer(ScriptedShadowServer):
    """The effect on a probe is the number of trained tokens minus the number of the probe's, in hundredths."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[ShadowGroup] = []

    def _effect(self, group: ShadowGroup, probe: Any, mode: Any) -> ProbeDelta:
        self.groups.append(group)
        return ProbeDelta.of(probe, (group.train[0].value(np.ones(len(group.train[0].weights))) - probe.weight) / 100)


def environment(**values: Any) -> Any:
    return TypeAdapter(EnvironmentConfig).validate_python({"type": "gradient_intuition", "inner": SUMS, **values})


def rollouts(
    options: Any, task: Task, replies: Sequence[str], server: ScriptedShadowServer, store: dict[str, Any] | None = None
) -> tuple[Rollout, ...]:
    """A rollout of the task for each reply of the scripted policy, in their order."""

    async def in_order(request: SampleRequest, sample: Sample) -> SampleResult:
        del sample
        limit = request.sampling.max_tokens
        return SampleResult(turns=tuple(reply_turn((1, 2), reply, 0.0, limit, server.version) for reply in replies))

    async def main() -> tuple[Rollout, ...]:
        context = WorkflowContext(
            sampling=SamplingConfig(),
            rewards=Rewards(()),
            agent_endpoint=AgentEndpoint(),
            store={} if store is None else store,
            resources={SHADOW: ShadowService(ShadowConfig(gather_seconds=0), server)},
        )
        snapshot = ScriptedSnapshot(replies, np.zeros(len(replies)), server.version, in_order)
        return await options.make(context).run(task, snapshot, count=len(replies), seed=1)

    return asyncio.run(main())


def test_group_has_one_task_and_one_probe():
    tasks = environment().tasks()
    assert len(tasks) > 1000
    probes = Counter(task.extra["gradient_intuition"]["probes"][0][0] for task in tasks[:480])
    assert len(probes) == 24
    assert tasks[7] == environment().tasks()[7]
    content = tasks[7].messages[-1].content
    question, answer = tasks[7].extra["gradient_intuition"]["probes"][0]
    assert f'Probe: "{question}" Answer: "{answer}"' in content
    assert content.startswith(SUMS and environment().inner.tasks()[7].messages[-1].content)


def test_reward_is_inner_plus_prediction_by_hand():
    options = environment(score="absolute", alpha=0.5)
    task = options.tasks()[0]
    answer = task.answer
    server = LengthServer()
    replies = [f"PREDICTION: 0.1\nANSWER: {answer}", "PREDICTION: -0.1\nANSWER: 1000000", f"ANSWER: {answer}", answer]
    right, wrong, unpredicted, unparsed = rollouts(options, task, replies, server)
    probe_tokens = len(task.extra["gradient_intuition"]["probes"][0][1]) + 1
    delta = (len(answer) + 1 - probe_tokens) / 100  # a token is a character; each reply has an end token
    assert right.reward == pytest.approx(1 + 0.5 * (1 - abs(0.1 - delta)))
    assert right.metrics["delta"] == pytest.approx(delta)
    wrong_delta = (8 - probe_tokens) / 100
    assert wrong.reward == pytest.approx(0.5 * (1 - abs(-0.1 - wrong_delta)))
    assert (unpredicted.reward, unparsed.reward) == (1.0, 0.0)
    assert (unpredicted.metrics["predicted"], unparsed.metrics["answered"]) == (0.0, 0.0)
    assert [each.text for each in (right, wrong, unpredicted, unparsed)] == replies
    assert (right.correct, wrong.correct) == (True, False)
    assert right.metrics["over_zero/error"] == pytest.approx(abs(0.1 - delta))
    assert right.metrics["over_zero/baseline"] == pytest.approx(abs(delta))


def test_step_trains_on_the_answer_in_the_inner_prompt():
    options = environment(score="sign")
    task, server = options.tasks()[3], LengthServer()
    rollouts(options, task, ["Let me see.\nPREDICTION: +\nANSWER: 77"], server)
    (group,) = server.groups
    (text,) = group.train
    prompt = options.inner.tasks()[3].messages[-1].content
    assert CharacterCodec().decode(text.tokens) == f"{prompt}77\0"
    assert [weight for weight in text.weights if weight] == [1.0] * 3
    question, answer = task.extra["gradient_intuition"]["probes"][0]
    assert CharacterCodec().decode(group.probes[0].tokens) == f"{question}{answer}\0"


def test_step_may_be_weighted_by_the_advantage():
    options = environment(score="sign", train_weight="advantage")
    task, server = options.tasks()[3], LengthServer()
    replies = [f"PREDICTION: +\nANSWER: {answer}" for answer in (task.answer, "9999", "8888", "7777")]
    rollouts(options, task, replies, server)
    weights = sorted({weight for group in server.groups for weight in group.train[0].weights if weight})
    assert weights == [-0.25, 0.75]
    server.groups.clear()
    same = rollouts(options, task, replies[1:], server)
    assert not server.groups  # a step of weight 0 changes nothing
    assert [each.metrics["delta"] for each in same] == [0.0] * 3


def test_normalised_scores_use_earlier_versions():
    options = environment(score="normalised", probes=[{"question": "q", "answer": "a"}])
    server, store = LengthServer(), dict[str, Any]()
    task = options.tasks()[0]
    lengths = (3, 5, 8)
    rollouts(options, task, [f"PREDICTION: 0\nANSWER: {'1' * length}" for length in lengths], server, store)
    server.newest = 1
    (rollout,) = rollouts(options, task, ["PREDICTION: 2\nANSWER: 11"], server, store)
    deltas = (np.array(lengths) + 1 - 2) / 100
    z = (0.01 - deltas.mean()) / deltas.std(ddof=1)
    assert rollout.reward_parts["prediction"] == pytest.approx(1 / (1 + (2 - z) ** 2))
    assert rollout.metrics["over_probe_mean/baseline"] == pytest.approx(z**2)


def test_replies_may_begin_with_the_prediction():
    options = environment(score="absolute", begin_reply=True)
    task = options.tasks()[0]
    assert task.messages[-1].content == "PREDICTION:"
    assert environment(score="absolute").tasks()[0].messages == task.messages[:-1]
    (rollout,) = rollouts(options, task, [f" 0.1\nANSWER: {task.answer}"], LengthServer())
    assert (rollout.reward_parts["inner"], rollout.metrics["predicted"]) == (1.0, 1.0)


def test_rank_orders_several_probes():
    probes = [{"question": "q", "answer": "a" * length} for length in (1, 5, 9)]
    options = environment(score="rank", rank_probes=3, probes=probes)
    task, server = options.tasks()[0], LengthServer()
    assert "Probe 3:" in task.messages[-1].content
    answers = [len(answer) for _, answer in task.extra["gradient_intuition"]["probes"]]
    right = ", ".join(str(answers.index(length) + 1) for length in (1, 5, 9))  # the longest falls most
    wrong = ", ".join(str(answers.index(length) + 1) for length in (9, 5, 1))
    first, second = rollouts(options, task, [f"PREDICTION: {order}\nANSWER: 1" for order in (right, wrong)], server)
    assert (first.reward_parts["prediction"], second.reward_parts["prediction"]) == (pytest.approx(1), pytest.approx(0))


def test_failed_shadow_step_drops_only_its_rollout():
    options, server = environment(score="sign"), LengthServer()
    server.rejects = lambda group: TinsmithError("no memory") if ord("7") in group.train[0].tokens[-2:] else None
    task = options.tasks()[0]
    (failed,) = rollouts(options, task, ["PREDICTION: +\nANSWER: 7"], server)
    (good,) = rollouts(options, task, ["PREDICTION: +\nANSWER: 5"], server)
    assert failed.error == "shadow step: no memory"
    assert not good.error


def test_inner_environment_must_fit():
    with pytest.raises(ValidationError, match="weight is not used; set weight of gradient_intuition"):
        environment(inner={**SUMS, "weight": 2.0})
    with pytest.raises(ValidationError, match="found using 'type'"):
        environment(inner={"type": "gradient_choice"})
    with pytest.raises(ValidationError, match="rank_probes is 40, but there are 24"):
        environment(score="rank", rank_probes=40)


def test_inner_environment_must_sample_one_reply():
    inner = {
        **SUMS,
        "workflow": {"type": "custom", "path": f"{__name__}:twice"},
    }
    options = environment(inner=inner, score="sign")
    (rollout,) = rollouts(options, options.tasks()[0], ["PREDICTION: +\nANSWER: 7"], LengthServer())
    assert "with one reply for each rollout" in rollout.error


async def twice(task: Task, conversation: Any) -> float:
    """A workflow with two replies."""
    await conversation.say("again")
    await conversation.say("again")
    return 0.0


def test_gradient_choice_scores_the_answer_that_gains_more():
    options = TypeAdapter(EnvironmentConfig).validate_python({"type": "gradient_choice"})
    tasks, server = options.tasks(), LengthServer()
    task = next(task for task in tasks if len(set(map(len, task.extra["answers"]))) == 2)
    shorter, longer = sorted(task.extra["answers"], key=len)  # the longer falls more
    results = rollouts(options, task, [f"{shorter}. And so on", f'{longer.lower()}"', "Neither", ""], server)
    assert [each.reward for each in results] == [1.0, 0.0, -1.0, -1.0]
    assert [each.correct for each in results] == [True, False, False, False]
    assert len(server.groups) == 2  # two probes, once for the task
    first = task.extra["answers"][0]
    assert results[0].metrics["over_first/baseline"] == float(shorter != first)
    assert results[1].metrics["over_second/error"] == 1.0


def test_answers_of_gradient_choice():
    def tasks(**values):
        return TypeAdapter(EnvironmentConfig).validate_python({"type": "gradient_choice", **values}).tasks()

    assert all(task.extra["example"][1] in task.extra["answers"] for task in tasks())
    assert not any(task.extra["example"][1] in task.extra["answers"] for task in tasks(same=0))
    first = [task.extra["answers"].index(task.extra["example"][1]) for task in tasks()]
    assert sum(first) / len(first) == pytest.approx(0.5, abs=0.04)
    trained = {word.capitalize() for each in CATEGORIES for word in each.answers}
    assert not trained & {word for task in tasks(answers="unseen") for word in task.extra["answers"]}


def test_shadow_settings_need_an_environment(tmp_path):
    with pytest.raises(ValidationError, match="no environment of this run needs it"):
        settings(tmp_path, shadow={"learning_rate": 1e-3})
    with pytest.raises(ValidationError, match="mode bench has no policy in training"):
        choice_run(tmp_path, mode="bench")


@pytest.mark.parametrize("values", [{"type": "gradient_choice"}, {"type": "gradient_intuition", "inner": SUMS}])
def test_environments_need_a_policy_in_training(values):
    context = WorkflowContext(sampling=SamplingConfig(), rewards=Rewards(()), agent_endpoint=AgentEndpoint())
    with pytest.raises(ConfigError, match="no policy in training here"):
        TypeAdapter(EnvironmentConfig).validate_python(values).make(context)


def choice_run(folder: Path, **changes: Any) -> RunConfig:
    base = settings(folder).model_dump(exclude_unset=True)
    kept_keys = {key: value for key, value in base.items() if key not in ("tasks", "rewards")}
    return RunConfig.model_validate(
        {**kept_keys, "environments": [{"type": "gradient_choice", "held_out": 4, "count": 50}], **changes}
    )


def test_runs_report_shadow_steps_and_skill(tmp_path, monkeypatch):
    server = LengthServer()
    shadow = "tinsmith.integrations.minds.shadow.tinker.open_shadow"
    monkeypatch.setattr(shadow, lambda config, policy, versions: ShadowService(config, server))
    state = run(choice_run(tmp_path))
    assert state.step == 8
    steps = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert steps[1]["shadow/count"] == 3  # one for each group
    evaluations = [row for row in rows(tmp_path) if "eval/tasks" in row]
    assert any("over_first/skill" in name for row in evaluations for name in row)
