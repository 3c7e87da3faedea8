"""Tasks that ask for the length of a word."""

import verifiers.v1 as vf

from word_tools.server import WordTools


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData]):
    @classmethod
    def toolsets(cls, config):
        return [WordTools(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        return [WordTask(WordData(prompt=f"How long is {word}?", answer=str(len(word)))) for word in ("ant", "horse")]
