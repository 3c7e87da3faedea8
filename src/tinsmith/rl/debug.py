"""Run one rollout of the first training task and show it: prompt, tokens, reply, logprobs and reward.

Nothing is trained and no run folder is written. The weights are the initial weights of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.markup import escape

from tinsmith.errors import TinsmithError
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.chat import ChatCodec
from tinsmith.rl.policy.request_limit import RequestLimit
from tinsmith.rl.policy.sampling import request_seed
from tinsmith.rl.rollouts.resources import RolloutResources
from tinsmith.rl.rollouts.runner import RolloutRunner
from tinsmith.rl.run.parts import Connect, RunData, open_environments, training_workflow
from tinsmith.rl.types import POLICY, Group, Rollout, Turn

_SHOWN = 12
"""Number of least likely tokens to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugRollout:
    """A rollout, its codec and the time of each part.

    Example: DebugRollout(group=group, chat=chat, seconds={"tasks": 0.2, "connect": 3.1, "rollout": 0.8})
    """

    group: Group
    """A group of one rollout, or of two where a reward compares them; the first is shown."""
    chat: ChatCodec
    seconds: dict[str, float]
    """Seconds to load tasks, connect and sample."""


async def debug_rollout(config: RunConfig, connect: Connect) -> DebugRollout:
    """Run one rollout of the first training task. Raises TinsmithError if the run samples no rollouts."""
    if not config.uses_rollouts:
        raise TinsmithError(
            f"{config.algorithm.type} trains on demonstrations alone; there is no rollout to show.",
            "Use tinsmith check.",
        )
    start = time.perf_counter()
    task_sampler, _ = RunData(config).tasks
    (task,) = task_sampler.draw(1)
    drawn = time.perf_counter()
    policy = await connect("", 0)
    resources = RolloutResources()
    try:
        await open_environments(config, policy, resources)
        snapshot = await policy.snapshot()
        connected = time.perf_counter()
        workflow = training_workflow(config, resources)
        runner = RolloutRunner(config.rollout, RequestLimit(config.concurrency))
        size = 2 if any(each.group_rewards for each in config.trained) else 1
        seeds = [request_seed(config.seed, 1, 0)]
        (group,) = await runner.run_groups(workflow, [task], snapshot, size=size, seeds=seeds)
        done = time.perf_counter()
    finally:
        await resources.close()
        await policy.models.close()
    seconds = {"tasks": drawn - start, "connect": connected - drawn, "rollout": done - connected}
    return DebugRollout(group=group, chat=snapshot.chat, seconds=seconds)


def show_rollout(debugged: DebugRollout, console: Console) -> None:
    """Print the rollout in full."""
    task, rollout = debugged.group.task, debugged.group.rollouts[0]
    _head(console, f"task {task.id}" + (f" of environment {task.environment}" if task.environment else ""))
    for message in task.messages:
        _line(console, message.role, message.content)
    _line(console, "answer", task.answer or "(unknown)")
    turns = [(trajectory, turn) for trajectory in rollout.trajectories for turn in trajectory.turns]
    for number, (trajectory, turn) in enumerate(turns, 1):
        _head(console, f"turn {number} of {len(turns)}, {trajectory.role}, version {turn.version}")
        _line(console, "prompt", debugged.chat.text(turn.prompt, None))
        _line(console, "tokens", f"{len(turn.prompt)} in the prompt, {len(turn.tokens)} sampled, ended by {turn.stop}")
        _line(console, "reply", turn.text)
        for name, text in _likelihood(turn, debugged.chat):
            _line(console, name, text)
    _show_reward(rollout, console)
    _head(console, "seconds")
    for name, value in debugged.seconds.items():
        _line(console, name, f"{value:.2f}")


def _show_reward(rollout: Rollout, console: Console) -> None:
    _head(console, "reward")
    if rollout.error:
        _line(console, "failed", rollout.error)
    for name, value in rollout.reward_parts.items():
        _line(console, name, f"{value:g}")
    if rollout.roles not in ((), (POLICY,)):
        for each in rollout.trajectories:
            _line(console, each.role, f"{each.reward:g}")
    _line(console, "total", f"{rollout.reward:g}")
    if rollout.correct is not None:
        _line(console, "correct", "yes" if rollout.correct else "no")
    for name, value in rollout.metrics.items():
        _line(console, name, f"{value:g}")
    if rollout.termination not in ("done", "error"):
        _line(console, "ended by", rollout.termination)


def _likelihood(turn: Turn, chat: ChatCodec) -> Iterator[tuple[str, str]]:
    if not turn.logprobs:
        return
    logprobs = np.array(turn.logprobs)
    yield "logprobs", f"mean {logprobs.mean():.3f}, min {logprobs.min():.3f}, sum {logprobs.sum():.2f}"
    rare: Sequence[int] = np.argsort(logprobs, kind="stable")[:_SHOWN].tolist()
    yield "least likely", "  ".join(f"{chat.text([turn.tokens[at]], None)!r} {logprobs[at]:.2f}" for at in sorted(rare))
    yield "token ids", " ".join(map(str, turn.tokens))


def _head(console: Console, text: str) -> None:
    console.print(f"\n[bold]{escape(text)}[/]", highlight=False, soft_wrap=True)


def _line(console: Console, name: str, text: str) -> None:
    console.print(f"[dim]{escape(name):>12}[/]  {escape(text)}", highlight=False, soft_wrap=True)
