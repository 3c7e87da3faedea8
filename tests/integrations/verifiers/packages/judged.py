"""A verifiers taskset for judges: two questions with answers."""

import verifiers.v1 as vf

__all__ = ["JudgedTaskset"]


class JudgedData(vf.TaskData):
    answer: str


class JudgedTask(vf.Task[JudgedData]):
    pass


class JudgedConfig(vf.TasksetConfig):
    image: str | None = None


class JudgedTaskset(vf.Taskset[JudgedTask, JudgedConfig]):
    def load(self):
        rows = (("tin", "Sn"), ("lead", "Pb"))
        return [
            JudgedTask(JudgedData(prompt=f"Sign of {name}?", answer=sign, image=self.config.image), self.config.task)
            for name, sign in rows
        ]
