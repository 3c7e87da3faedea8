"""A verifiers taskset of colored squares that are letters, shown in the prompt or by the user of the second turn."""

import base64
import struct
import zlib

import verifiers.v1 as vf

__all__ = ["SquaresEnv", "SquaresTaskset"]

LETTERS = {"red": ("A", b"\xff\0\0"), "green": ("B", b"\0\xff\0"), "blue": ("C", b"\0\0\xff")}


def square(color, size=4):
    """A PNG of one color as a content part."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = (b"\0" + LETTERS[color][1] * size) * size
    head = chunk(b"IHDR", struct.pack(">2I5B", size, size, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=url))


class SquaresData(vf.TaskData):
    answer: str


class SquaresTask(vf.Task[SquaresData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        if not self.data.answer:  # for policies that say no letter: replies differ in whether they are even
            return float(len(trace.last_reply) % 2 == 0)
        return float(trace.last_reply == self.data.answer)


class SquaresConfig(vf.TasksetConfig):
    later: bool = False
    answer: str = "A"
    turns: int = 2


class SquaresEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class SquaresEnv(vf.Env[SquaresEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            await player.turn()
            if self.config.taskset.turns > 1:
                await player.turn([vf.UserMessage(content=[square("blue")])])


class SquaresTaskset(vf.Taskset[SquaresTask, SquaresConfig]):
    def load(self):
        parts = [vf.TextContentPart(text="Which letters?")]
        if not self.config.later:
            parts.append(square("red"))
        yield SquaresTask(SquaresData(prompt=[vf.UserMessage(content=parts)], answer=self.config.answer))
