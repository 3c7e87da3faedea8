"""The run folder: its files, and the states that a run resumes from."""

from __future__ import annotations

from tinsmith.rl.run_folder.folder import SETTINGS, RunFolder
from tinsmith.rl.run_folder.resume_from import check_adapter, check_resume_from, state_of_checkpoint
from tinsmith.rl.run_folder.state import CheckpointConfig, RandomStates, State, read_state

__all__ = [
    "SETTINGS",
    "CheckpointConfig",
    "RandomStates",
    "RunFolder",
    "State",
    "check_adapter",
    "check_resume_from",
    "read_state",
    "state_of_checkpoint",
]
