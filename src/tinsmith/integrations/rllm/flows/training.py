"""Agent flows in a run: each rollout has its own endpoint, whose recorded replies become the steps of the flow.

A step is matched with a reply by its conversation, else by the text of its reply. Steps without a reply of their own
are matched by position, if there are as many as there are replies left. Anything else has failed, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from typing_extensions import override

from tinsmith.errors import UserError
from tinsmith.integrations.rllm.engines.base import model_output
from tinsmith.integrations.rllm.flows.records import AgentConfig, EvalOutput, Task
from tinsmith.integrations.rllm.records import Episode, Step, Trajectory
from tinsmith.integrations.rllm.rollouts import PROMPT_KEYS, reply_text, rollout_of, task_row
from tinsmith.integrations.rllm.training import MAX_THREADS
from tinsmith.plurals import counted
from tinsmith.rl.plugins import ImportPath
from tinsmith.rl.policy.agent_endpoint import AgentSession
from tinsmith.rl.policy.chat_session import ChatSession
from tinsmith.rl.types import Rollout, Turn
from tinsmith.rl.types import Task as RunTask
from tinsmith.rl.workflows.base import IndependentRollouts, Workflow, WorkflowContext, WorkflowOptions, WorkflowPolicy


class FlowOptions(WorkflowOptions):
    """A flow and its evaluator."""

    flow: ImportPath
    """The AgentFlow."""
    evaluator: ImportPath = None
    """The Evaluator; null: the flow sets the rewards itself."""

    @property
    @override
    def provides_rewards(self) -> bool:
        return True

    @property
    @override
    def provides_states(self) -> bool:
        return False

    @override
    def make(self, context: WorkflowContext) -> Workflow:
        return IndependentRollouts(FlowCalls(self.flow, self.evaluator, context).rollout, context)


class FlowCalls:
    """Calls of a flow, each with a session of its own; code that blocks runs in threads."""

    def __init__(self, flow: Any, scorer: Any, context: WorkflowContext) -> None:
        self._flow, self._scorer, self._context = flow, scorer, context
        self._executor = ThreadPoolExecutor(MAX_THREADS, "flow")

    async def rollout(self, task: RunTask, policy: WorkflowPolicy, seed: int) -> Rollout:
        """The episode of one call."""
        row = task_row(task)
        flow_task = Task(id=task.id, instruction=_instruction(row, task), metadata=row)
        async with policy.session(open_url=True) as session:
            episode = await self._flow.arun(flow_task, self._config(session, seed), self._executor)
            episode.id = episode.id or f"{task.id}:{seed}"
            attach_turns(episode, session)
            await self._score(flow_task, episode)
        return rollout_of(episode)

    def _config(self, session: AgentSession, seed: int) -> AgentConfig:
        return AgentConfig(
            base_url=session.base_url,
            model=session.model,
            session_uid=str(seed),
            is_validation=self._context.evaluating,
            sampling_params=self._context.sampling.model_dump(mode="json", exclude={"method"}),
        )

    async def _score(self, task: Task, episode: Episode) -> None:
        """Set rewards, correctness and metrics. Raises UserError if a trajectory has no reward."""
        if self._scorer is not None:
            apply_output(episode, await self._scorer.aevaluate(task, episode, self._executor))
        for trajectory in episode.trajectories:
            for name, value in trajectory.signals.items():
                episode.metrics.setdefault(name, value)
            if trajectory.reward is None and not self._context.rewards.configured:
                raise UserError(
                    f"The trajectory {trajectory.name!r} has no reward.", "Set it in the flow, or pass an evaluator."
                )


def apply_output(episode: Episode, output: EvalOutput) -> None:
    """Write the result of an evaluator to the episode; a trajectory that has a reward keeps it."""
    for trajectory in episode.trajectories:
        if trajectory.reward is None:
            trajectory.reward = output.reward
    episode.is_correct = output.is_correct
    episode.metrics |= {signal.name: signal.value for signal in output.signals}


def attach_turns(episode: Episode, session: ChatSession) -> None:
    """Give each step of the episode the tokens of its reply. Raises UserError if steps and replies do not match."""
    unused = list(session.turns_by_time)
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    if not steps:
        _add_steps(episode, session.turns)
        return
    waiting: list[Step] = []
    for step in steps:
        if step.response_ids:
            continue
        literal = _literal_reply(step)
        turn = _turn_of(step, literal, unused, session)
        if turn is not None:
            _fill(step, turn, unused)
        elif literal:
            raise UserError(f"No reply of the policy matches the step with the reply {literal[:80]!r}.", _MISMATCH)
        else:
            waiting.append(step)
    if waiting and len(waiting) != len(unused):
        without_reply, without_step = counted(len(waiting), "step"), counted(len(unused), "reply")
        raise UserError(f"{without_reply} without a reply, and {without_step} without a step.", _MISMATCH)
    for step, turn in zip(waiting, list(unused), strict=False):
        _fill(step, turn, unused)


_MISMATCH = "Set chat_completions of each step to its messages with the reply, or return no steps."


def _add_steps(episode: Episode, turns: Sequence[Turn]) -> None:
    """All replies as the steps of the only trajectory."""
    if not turns:
        raise UserError("The flow sampled no reply.", "Send requests to config.base_url.")
    if len(episode.trajectories) > 1:
        raise UserError(f"{len(episode.trajectories)} trajectories have no steps.", _MISMATCH)
    trajectory = episode.trajectories[0] if episode.trajectories else Trajectory()
    episode.trajectories = [trajectory]
    trajectory.steps = [Step(model_output=model_output(turn, {"content": turn.text})) for turn in turns]


def _turn_of(step: Step, literal: str, unused: Sequence[Turn], session: ChatSession) -> Turn | None:
    """The oldest unused reply with the conversation of the step, else with its text."""
    candidates: tuple[Turn, ...] = ()
    if literal:
        with suppress(UserError):  # messages in a form of the flow's own
            messages = [
                {key: value for key, value in message.items() if key != "reasoning"}
                for message in step.chat_completions
            ]
            candidates = session.turns_of(messages)
    free = {id(turn) for turn in unused}
    turn = next((turn for turn in candidates if id(turn) in free), None)
    if turn is None and literal:
        turn = next((turn for turn in unused if literal in reply_text(turn)), None)
    return turn


def _literal_reply(step: Step) -> str:
    """The reply at the end of the step's conversation, or its model_response; empty if there is neither."""
    last = step.chat_completions[-1] if step.chat_completions else {}
    content: Any = last.get("content") if last.get("role") == "assistant" else step.model_response
    return content.strip() if isinstance(content, str) else ""


def _fill(step: Step, turn: Turn, unused: list[Turn]) -> None:
    step.model_output = model_output(turn, {"content": turn.text})
    step.__post_init__()
    del unused[next(index for index, each in enumerate(unused) if each is turn)]


def _instruction(row: dict[str, Any], task: RunTask) -> str:
    text = next((row[key] for key in ("instruction", *PROMPT_KEYS) if row.get(key)), None)
    return str(text) if text is not None else task.messages[-1].content if task.messages else ""
