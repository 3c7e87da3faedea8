"""Rollouts of a verifiers environment: its own code runs in this process, against the run's endpoint of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tinsmith.integrations.verifiers.rollouts import episode_rollout
from tinsmith.integrations.verifiers.tasks import verifiers_task
from tinsmith.rl.policy.agent_endpoint import AgentSession
from tinsmith.rl.policy.chat_session import MODEL
from tinsmith.rl.policy.sampling import request_seed
from tinsmith.rl.types import Rollout, Task, Turn
from tinsmith.rl.workflows.base import WorkflowPolicy

if TYPE_CHECKING:
    import verifiers.v1 as vf


async def episode(environment: vf.Env, task: Task, policy: WorkflowPolicy, seed: int) -> Rollout:
    """An episode of the environment; what its agents sample is recorded by the endpoint."""
    from verifiers.v1 import EvalClientConfig, ModelContext

    endpoint = policy.context.agent_endpoint
    await endpoint.serve(f"verifiers/{id(environment)}", environment.serving)
    client = EvalClientConfig(base_url=endpoint.base_url, api_key_var="")
    (slot,) = environment.slots(verifiers_task(task, environment.taskset))
    with ExitStack() as stack:
        sessions: dict[str, AgentSession] = {}

        def record(trace: vf.Trace) -> None:
            session = endpoint.named_session(
                trace.id, policy.snapshot, policy.sampling, request_seed(seed, len(sessions))
            )
            sessions[trace.id] = stack.enter_context(session)

        context = ModelContext(model=MODEL, client=client)
        result = await environment.run_slot(slot, context, on_trace=record)
    turns: dict[str, Sequence[Turn]] = {name: session.turns for name, session in sessions.items()}
    return episode_rollout(result, turns, complete=environment.complete(result))
