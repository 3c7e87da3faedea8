"""A verifiers environment with two roles, one of which is not trained, and rewards given to both at the end."""

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]


class DuelData(vf.TaskData):
    info: dict


class DuelTask(vf.Task[DuelData]):
    pass


class DuelConfig(vf.TasksetConfig):
    split: str = "train"
    fail: bool = False


class DuelEnvConfig(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    solver: vf.AgentConfig = vf.AgentConfig()
    turns: int = 2


class DuelEnv(vf.Env[DuelEnvConfig]):
    async def setup(self, agents):
        agents.asker.trainable = False

    async def run(self, task, agents):
        question = await agents.asker.run(vf.Task(vf.TaskData(prompt=f"Ask number {task.data.info['number']}.")))
        if self.config.taskset.fail:
            raise OSError("the board is gone")
        async with agents.solver.interaction(vf.Task(vf.TaskData(system_prompt="Solve it."))) as solver:
            segment = await solver.turn(question.last_reply)
            for _ in range(self.config.turns - 1):
                if segment.terminated:
                    break
                segment = await solver.turn(f"You said {segment.last_reply}. Sure?")

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("length", float(len(trace.last_reply)), 0.5)
            trace.record_metric("turns", float(trace.num_turns))


class DuelTaskset(vf.Taskset[DuelTask, DuelConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield DuelTask(DuelData(info={"number": number, "split": self.config.split}))
            number += 1
