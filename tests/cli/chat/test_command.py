"""`tinsmith chat` as a program: with a pipe at a service with the fake engine, and with SmolLM2 in a terminal."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pexpect
import pytest
from rich.console import Console

from tinsmith.cli.chat.command import _session, chat
from tinsmith.cli.service.weights import SamplingServer, ServedWeights
from tinsmith.errors import ConfigError, UserError
from tinsmith.service.config import ServeConfig
from tinsmith.service.embedded import embedded


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplingServer]:
    with embedded(ServeConfig(models=("toy",), engine="fake", data=tmp_path_factory.mktemp("data"))) as (url, key):
        yield SamplingServer(url=url, key=key)


@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        ((), {}, "needs what to talk to"),
        (("toy", "toy"), {}, "talks to one model"),
        (("toy", "steps=2"), {}, "settings of model and service only"),
        (("toy",), {"max_tokens": 0}, "--max-tokens is 0"),
        (("toy",), {"temperature": float("nan")}, "--temperature is nan"),
    ],
)
def test_chat_refuses_what_it_cannot_do(words, options, error):
    with pytest.raises(ConfigError, match=error):
        chat(*words, **options)


@pytest.mark.e2e
def test_lines_of_a_pipe_are_answered(server, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n/reset\none\n"))
    chat("toy", system="Be brief.", max_tokens=4, temperature=0, server=server)
    printed = capsys.readouterr()
    first, again = printed.out.splitlines()
    assert first == again != ""
    assert printed.err.count("max_tokens, 4") == 2


@pytest.mark.e2e
def test_unknown_weights_are_refused_before_a_message(server):
    with pytest.raises(ConfigError, match=f"{server.url} has no model tow; it serves toy") as refused:
        chat("tow", server=server)
    assert "tinsmith serve --model tow" in refused.value.hint
    with pytest.raises(UserError):
        chat("tinker://run/weights/1", server=server)
    with pytest.raises(ConfigError, match="No server responds"):
        chat("toy", server=SamplingServer(url="http://127.0.0.1:9", key="tml-x"))


@pytest.mark.slow
def test_smollm2_in_a_terminal(smollm2: Path, tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    words = ["-m", "tinsmith", "chat", str(smollm2), "--temperature", "0"]
    environment |= {"TERM": "dumb", "COLUMNS": "100"}  # no codes for colors between the words
    terminal = pexpect.spawn(sys.executable, words, env=environment, encoding="utf-8", timeout=300, cwd=tmp_path)
    prompt = "\n> "
    terminal.expect(f"Ctrl-D ends\r{prompt}")
    terminal.sendline("Complete the sentence: The capital of France is")
    terminal.expect("Paris")
    terminal.expect(prompt)
    terminal.sendline("Describe the sea at length.")
    terminal.expect("at length.\r\n")  # as typed
    terminal.expect(r"\w+\W+\w+")
    terminal.sendintr()
    terminal.expect("stopped")
    terminal.expect(prompt)
    terminal.sendline("/undo")
    terminal.expect("1 turn left")
    terminal.expect(prompt)
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


@pytest.mark.parametrize(("prompt", "end"), [("<|assistant|><think>\n", "</think>"), ("<|assistant|>", "")])
def test_thinking_is_that_of_the_template_of_the_run(monkeypatch, prompt, end):
    codec = SimpleNamespace(prompt=lambda messages: [1], decode=lambda tokens: prompt)

    async def open_chat(*_: str, **settings: str) -> tuple[str, SimpleNamespace]:
        return "toy", codec

    monkeypatch.setattr("tinsmith.cli.chat.command.open_chat", open_chat)
    own = {"model": {"chat_template": "own"}}
    weights = ServedWeights(url="http://127.0.0.1:9", key="tml-x", base="toy", settings=own)
    with httpx.Client() as client:
        assert _session(weights, client, Console(), in_terminal=True).opened_thinking == end


def test_template_of_the_server_needs_no_tokenizer(monkeypatch):
    monkeypatch.setattr("tinsmith.cli.chat.command.open_chat", None)  # its call would fail
    weights = ServedWeights(url="http://127.0.0.1:9", key="tml-x", base="toy")
    with httpx.Client() as client:
        assert _session(weights, client, Console(), in_terminal=True).opened_thinking == ""
