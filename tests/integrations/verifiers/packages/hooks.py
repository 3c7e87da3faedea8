"""A verifiers taskset that uses hooks: it rewrites requests and replies, stops, and returns several values at once."""

import verifiers.v1 as vf

__all__ = ["HooksEnv", "HooksTaskset"]


class HooksTask(vf.Task):
    @vf.intercept
    async def shout(self, request: vf.Request) -> vf.Request:
        messages = [
            message.model_copy(update={"content": message.content.upper()}) if message.role == "user" else message
            for message in request.messages
        ]
        return request.model_copy(update={"messages": messages})

    @vf.intercept
    async def censor(self, response: vf.Response) -> vf.Response | None:
        if "secret" not in (response.message.content or ""):
            return None
        return response.model_copy(update={"message": vf.AssistantMessage(content="[removed]")})

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.stop
    async def gave_up(self, response: vf.Response) -> bool:
        return response.message.content == "no idea"

    @vf.reward(weight=2.0)
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        return {"first": 1.0, "second": 0.5}

    @vf.metric
    async def counts(self, trace: vf.Trace) -> dict[str, float]:
        return {"turns": float(trace.num_turns), "removed": float(trace.last_reply == "[removed]")}


class HooksEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HooksEnv(vf.Env[HooksEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            segment = await player.turn()
            while not segment.terminated:
                segment = await player.turn("again")


class HooksTaskset(vf.Taskset[HooksTask, vf.TasksetConfig]):
    def load(self):
        return [HooksTask(vf.TaskData(prompt="say it"))]
