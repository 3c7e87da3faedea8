"""For tests of rewards, workflows and runs: a policy without a server, and a clock that does not wait."""

from __future__ import annotations

from tinsmith.testing.scripted import END, CharacterCodec, ScriptedAuxiliaryAdapter, ScriptedPolicy, ScriptedSnapshot
from tinsmith.testing.virtual_clock import run_virtually

__all__ = [
    "END",
    "CharacterCodec",
    "ScriptedAuxiliaryAdapter",
    "ScriptedPolicy",
    "ScriptedSnapshot",
    "run_virtually",
]
