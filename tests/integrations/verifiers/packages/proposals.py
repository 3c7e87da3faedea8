"""A verifiers environment whose proposer writes a sum for several solvers, and is rewarded if half of them solve it."""

import asyncio
import json

import verifiers.v1 as vf

__all__ = ["ProposalsEnv", "ProposalsTaskset"]


class TopicData(vf.TaskData):
    topic: str


class TopicTask(vf.Task[TopicData]):
    """The proposer's task; its reward depends on the solvers."""


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ProposalsConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    n: int = 4


class ProposalsEnv(vf.Env[ProposalsConfig]):
    async def run(self, task, agents):
        proposal = json.loads((await agents.proposer.run(task)).last_reply)
        minted = SumTask(SumData(prompt=proposal["problem"], answer=str(proposal["answer"])))
        await asyncio.gather(*(agents.solver.run(minted) for _ in range(self.config.n)))

    async def finalize(self, task, episode):
        solved = [trace.reward for trace in episode.traces if trace.agent.name == "solver"]
        rate = sum(solved) / len(solved)
        for trace in episode.traces:
            if trace.agent.name == "proposer":
                trace.record_reward("learnability", 4 * rate * (1 - rate))
                trace.record_metric("solve_rate", rate)


class ProposalsTaskset(vf.Taskset[TopicTask, vf.TasksetConfig]):
    def load(self):
        return [TopicTask(TopicData(prompt=f"Write a sum about {topic}.", topic=topic)) for topic in ("tin", "zinc")]
