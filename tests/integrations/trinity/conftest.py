"""A fake server for the model of the published files, and data files at the paths they name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded

NAME = "meta-llama/Llama-3.2-3B"
Server = tuple[str, str]
"""Base URL and key."""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Server]:
    config = ServeConfig(models=(f"{NAME}={tiny_llama}",), engine="fake", data=tmp_path_factory.mktemp("served"))
    with embedded(config) as address:
        yield address


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the data files."""
    folder = tmp_path / "openai" / "gsm8k"
    folder.mkdir(parents=True)
    rows = [{"question": f"What is {a} + 3?", "answer": f"It is {a + 3}.\n#### {a + 3}"} for a in range(9)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "test.jsonl").write_text(json.dumps(rows[0]))
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"message": messages})] * 9))
    (tmp_path / "texts.jsonl").write_text("\n".join([json.dumps({"prompt": "Two and two are four."})] * 9))
    pair = {"prompt": messages[:1], "chosen": "4", "rejected": "5"}
    (tmp_path / "pairs.jsonl").write_text("\n".join([json.dumps(pair)] * 9))
    return tmp_path
