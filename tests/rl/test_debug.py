"""`tinsmith debug` shows one rollout in full and trains nothing."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from tests.rl.scripted_run import scripted, settings
from tinsmith.errors import TinsmithError
from tinsmith.rl import debug
from tinsmith.rl.config import RunConfig


def shown(config, connect) -> str:
    """Console output for one rollout."""
    console = Console(file=io.StringIO(), width=200)
    debug.show_rollout(asyncio.run(debug.debug_rollout(config, connect)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_debug_shows_every_part_of_a_rollout(tmp_path):
    text = shown(settings(tmp_path), scripted(tmp_path))
    for words in ("task addition/", "user  What is", "answer  ", "turn 1 of 1, policy, version 0", "prompt  What is",
                  "sampled, ended by stop", "reply  ", "logprobs  mean -", "token ids  ", "format  ", "total  ",
                  "connect  ", "rollout  "):  # fmt: skip
        assert words in text
    assert not list(tmp_path.glob("*.json*"))


def test_debug_shows_the_error_of_a_failed_rollout(tmp_path):
    text = shown(settings(tmp_path, rewards=[{"type": "reasoning_gym"}]), scripted(tmp_path))
    assert "failed  " in text
    assert "is not a task of reasoning-gym" in text


def test_debug_rejects_runs_without_rollouts(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n')
    config = RunConfig.model_validate(
        {
            "model": {"name": "scripted"},
            "algorithm": {"type": "sft"},
            "demonstrations": {"data": {"type": "jsonl", "path": str(rows)}},
            "steps": 1,
        }
    )
    with pytest.raises(TinsmithError, match="trains on demonstrations alone"):
        asyncio.run(debug.debug_rollout(config, scripted(tmp_path)))
