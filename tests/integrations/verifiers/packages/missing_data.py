"""A verifiers taskset whose data is not there."""

import verifiers.v1 as vf

__all__ = ["MissingTaskset"]


class MissingTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        raise LookupError("Resource words not found.")
        yield
