"""Rollouts of a verifiers environment: its own code runs in this process, against the run's endpoint of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from typing_extensions import override

from tinsmith.integrations.verifiers.rollouts import episode_rollout
from tinsmith.integrations.verifiers.tasks import verifiers_task
from tinsmith.rl.policy.agent_endpoint import AgentSession
from tinsmith.rl.policy.chat_session import MODEL
from tinsmith.rl.policy.sampling import Snapshot, request_seed
from tinsmith.rl.types import Rollout, Task, Turn
from tinsmith.rl.workflows.base import IndependentRollouts, WorkflowContext

if TYPE_CHECKING:
    import verifiers.v1 as vf


class VerifiersWorkflow(IndependentRollouts):
    """Runs an episode of the environment for each rollout; what its agents sample is recorded by the endpoint."""

    def __init__(self, environment: vf.Env, context: WorkflowContext) -> None:
        self._environment, self._context = environment, context
        self._service = f"verifiers/{id(environment)}"

    @override
    async def rollout(self, task: Task, policy: Snapshot, seed: int) -> Rollout:
        from verifiers.v1 import EvalClientConfig, ModelContext

        endpoint = self._context.agent_endpoint
        try:
            await endpoint.serve(self._service, self._environment.serving)
            client = EvalClientConfig(base_url=endpoint.base_url, api_key_var="")
            row = verifiers_task(task, self._environment.taskset)
            (slot,) = self._environment.slots(row)
        except Exception as error:  # noqa: BLE001  the environment's code: its error fails this rollout
            return Rollout(error=f"{type(error).__name__}: {error}")
        with ExitStack() as stack:
            sessions: dict[str, AgentSession] = {}

            def record(trace: vf.Trace) -> None:
                session = endpoint.named_session(
                    trace.id, policy, self._context.sampling, request_seed(seed, len(sessions))
                )
                sessions[trace.id] = stack.enter_context(session)

            context = ModelContext(model=MODEL, client=client)
            episode = await self._environment.run_slot(slot, context, on_trace=record)
        turns: dict[str, Sequence[Turn]] = {name: session.turns for name, session in sessions.items()}
        return episode_rollout(episode, turns, complete=self._environment.complete(episode))
