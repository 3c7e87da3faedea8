"""One rollout shown: everything that a run file leads to, and nothing trained."""

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
    console = Console(file=io.StringIO(), width=200)
    debug.show_rollout(asyncio.run(debug.debug_rollout(config, connect)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_rollout_is_shown_with_all_that_belongs_to_it(tmp_path):
    text = shown(settings(tmp_path), scripted(tmp_path))
    for words in ("task addition/", "user  What is", "right  ", "turn 1 of 1, policy, version 0", "prompt  What is",
                  "sampled, ended by stop", "reply  ", "logprobs  mean -", "token ids  ", "format  ", "in all  ",
                  "connect  ", "rollout  "):  # fmt: skip
        assert words in text
    assert not list(tmp_path.glob("*.json*"))


def test_why_a_rollout_failed_is_shown(tmp_path):
    text = shown(settings(tmp_path, rewards=[{"type": "reasoning_gym"}]), scripted(tmp_path))
    assert "failed  " in text
    assert "no task of reasoning-gym" in text


def test_a_run_that_asks_nothing_has_nothing_to_show(tmp_path):
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
    with pytest.raises(TinsmithError, match="learns from data alone"):
        asyncio.run(debug.debug_rollout(config, scripted(tmp_path)))
