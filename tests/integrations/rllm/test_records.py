"""Records of rollouts: JSON and back, token fields, and when a trajectory is cumulative."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tinsmith.errors import UserError
from tinsmith.rllm import (
    Action,
    Episode,
    ModelOutput,
    Step,
    TerminationReason,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
)

USER = {"role": "user", "content": "2 + 3?"}
REPLY = {"role": "assistant", "content": "five"}


def output(**more) -> ModelOutput:
    values = {
        "text": "five",
        "content": "five",
        "prompt_ids": [1, 2],
        "completion_ids": [5, 0],
        "logprobs": [-0.5, 0.0],
    }
    return ModelOutput(**{**values, "finish_reason": "stop", "weight_version": 3, **more})


def test_step_takes_its_tokens_from_the_output():
    step = Step(chat_completions=[USER, REPLY], model_output=output())
    assert (step.prompt_ids, step.response_ids, step.logprobs) == ([1, 2], [5, 0], [-0.5, 0.0])
    assert (step.weight_version, step.model_response) == (3, "five")


def test_step_keeps_tokens_of_its_own():
    step = Step(prompt_ids=[9], response_ids=[8], logprobs=[-1.0], model_output=output())
    assert (step.prompt_ids, step.response_ids, step.logprobs) == ([9], [8], [-1.0])


def test_step_refuses_logprobs_of_another_length():
    with pytest.raises(UserError, match=r"2 response_ids and 1 logprob\."):
        Step(response_ids=[1, 2], logprobs=[-0.1])


def test_step_does_not_share_the_messages_of_the_caller():
    messages = [dict(USER)]
    step = Step(chat_completions=messages)
    messages[0]["content"] = "changed"
    assert step.chat_completions == [USER]


def test_episode_survives_json():
    step = Step(
        chat_completions=[USER, REPLY],
        action=Action(action="5"),
        reward=np.float32(0.5),
        model_output=output(tool_calls=[ToolCall(name="add", arguments={"a": 2})]),
        info={"when": TerminationReason.ENV_DONE, "row": np.arange(2)},
    )
    episode = Episode(
        id="a:b:1",
        task={"question": "2 + 3?", "images": ["…"]},
        termination_reason=TerminationReason.ENV_DONE,
        is_correct=True,
        trajectories=[Trajectory(name="solver", steps=[step], reward=None, task={"image": "…", "n": 1})],
        metrics={"solver_acc": 1.0},
    )
    data = json.loads(json.dumps(episode.to_dict()))
    again = Episode.from_dict(data)
    assert again.to_dict() == episode.to_dict()
    assert again.task == {"question": "2 + 3?"}  # images are left out
    assert again.trajectories[0].steps[0].action == "5"
    assert again.trajectories[0].steps[0].info == {"when": "env_done", "row": [0, 1]}
    assert again.trajectories[0].steps[0].model_output == step.model_output
    assert (again.task_id, again.rollout_idx, again.termination_reason) == ("a:b", "1", TerminationReason.ENV_DONE)


def test_records_read_files_with_fewer_and_more_fields():
    data = {"id": "t:0", "task": None, "is_correct": False, "trajectories": [{"name": "x", "reward": 1.0, "new": 1}]}
    episode = Episode.from_dict(data)
    assert episode.trajectories[0].reward == 1.0
    assert episode.termination_reason is None


def test_trajectory_is_cumulative_if_each_chat_extends_the_last():
    first, second = [USER, REPLY], [USER, REPLY, USER, REPLY]
    assert Trajectory(steps=[Step(chat_completions=chat) for chat in (first, second)]).is_cumulative()
    assert not Trajectory(steps=[Step(chat_completions=chat) for chat in (second, first)]).is_cumulative()
    assert Trajectory().is_cumulative()


def test_reward_defaults_to_the_sum_of_the_steps():
    steps = [Step(reward=0.5), Step(reward=None), Step(reward=0.25)]
    assert Trajectory(steps=steps).total_reward == 0.75
    assert Trajectory(steps=steps, reward=0.0).total_reward == 0.0


def test_group_names_its_task_and_role():
    group = TrajectoryGroup(trajectories=[], group_id="countdown/1:solver")
    assert (group.task_id, group.group_role) == ("countdown/1", "solver")
    assert TrajectoryGroup(trajectories=[], group_id="all").group_role == "all_groups"
