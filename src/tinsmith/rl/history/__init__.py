"""A run read back from the files of its folder: settings, state, metrics, rollouts. `RunHistory` is the entry.

The run may go on, have ended, have been killed, or be a copy of a folder of another machine.
"""

from tinsmith.rl.history.checkpoints import RunCheckpoint, data_folder, find_checkpoint
from tinsmith.rl.history.filters import RolloutFilter, Sort
from tinsmith.rl.history.index import RolloutIndex
from tinsmith.rl.history.metric_table import MetricTable
from tinsmith.rl.history.rollout_html import STYLE, rollout_html
from tinsmith.rl.history.rows import Page, RolloutRow
from tinsmith.rl.history.run import RunHistory, find_runs
from tinsmith.rl.history.status import RunStatus

__all__ = [
    "STYLE",
    "MetricTable",
    "Page",
    "RolloutFilter",
    "RolloutIndex",
    "RolloutRow",
    "RunCheckpoint",
    "RunHistory",
    "RunStatus",
    "Sort",
    "data_folder",
    "find_checkpoint",
    "find_runs",
    "rollout_html",
]
