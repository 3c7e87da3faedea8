"""The turns of a chat, with replies that are made up, in a terminal and from a pipe."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator

import httpx
import pytest
from rich.console import Console

from tinsmith.cli.chat.conversation import Conversation
from tinsmith.cli.chat.replies import Messages, ReplyPiece, ReplySettings, ReplyStream
from tinsmith.cli.chat.session import ChatSession, piped_lines, typed_lines
from tinsmith.errors import ConfigError, EngineError


class EchoReplies(ReplyStream):
    """Replies with the number of messages and the last one; `fault` is raised after the first piece."""

    def __init__(self, fault: BaseException | None = None, ended: str = "stop") -> None:
        super().__init__(httpx.Client(), "tiny", ReplySettings(max_tokens=8))
        self.fault, self.ended = fault, ended
        self.sent: list[Messages] = []

    def reply(self, messages: Messages) -> Generator[ReplyPiece]:
        self.sent.append(messages)
        yield ReplyPiece(f"{len(messages)} ")
        if self.fault:
            raise self.fault
        yield ReplyPiece(messages[-1]["content"], self.ended)


def session(replies: ReplyStream, *, in_terminal: bool = True) -> tuple[ChatSession, io.StringIO]:
    notes = io.StringIO()
    console = Console(file=notes, force_terminal=in_terminal, color_system=None, width=60, highlight=False)
    return ChatSession(replies, Conversation("Be brief."), console, in_terminal), notes


def test_conversation_goes_along_and_commands_change_it() -> None:
    replies = EchoReplies()
    chat, printed = session(replies)
    chat.run(["one", " ", "two", "/undo", "/system Be long.", "//three", "/retry", "/reset", "four", "/quit", "five"])
    sent = [[each["content"] for each in messages] for messages in replies.sent]
    assert sent == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "2 one", "two"],
        ["Be long.", "one", "2 one", "/three"],
        ["Be long.", "one", "2 one", "/three"],
        ["Be long.", "four"],
    ]
    assert [each["role"] for each in replies.sent[1]] == ["system", "user", "assistant", "user"]
    assert "system prompt: Be long." in printed.getvalue()


def test_thinking_that_the_server_names_is_dim() -> None:
    class Thinking(EchoReplies):
        def reply(self, messages: Messages) -> Generator[ReplyPiece]:
            yield ReplyPiece("", "", "</think>")
            yield ReplyPiece("39 + 13</think>52", "stop")

    notes = io.StringIO()
    console = Console(file=notes, force_terminal=True, color_system="standard", highlight=False)
    ChatSession(Thinking(), Conversation(), console, in_terminal=True).run(["?"])
    assert notes.getvalue() == "\x1b[2m39 + 13\x1b[0m52\n"


@pytest.mark.parametrize("command", ["/undo", "/retry", "/nothing", "/"])
def test_commands_without_effect_are_refused(command: str) -> None:
    chat, printed = session(EchoReplies())
    chat.run([command, "one"])
    assert command in printed.getvalue()
    assert chat.conversation.turns == [("one", "2 one")]
    with pytest.raises(ConfigError):
        session(EchoReplies(), in_terminal=False)[0].run([command])


def test_interruption_stops_a_reply_in_a_terminal_alone() -> None:
    chat, printed = session(EchoReplies(KeyboardInterrupt()))
    chat.run(["one"])
    assert (chat.conversation.turns, printed.getvalue()) == ([("one", "2 ")], "2 \nstopped\n")
    with pytest.raises(KeyboardInterrupt):
        session(EchoReplies(KeyboardInterrupt()), in_terminal=False)[0].run(["one"])


def test_failed_reply_leaves_the_conversation_as_it_was() -> None:
    replies = EchoReplies()
    chat, printed = session(replies)
    chat.run(["one"])
    replies.fault = EngineError("out of memory")
    chat.run(["two", "/retry"])
    assert chat.conversation.turns == [("one", "2 one")]
    assert printed.getvalue().count("out of memory") == 2


def test_pipe_gets_replies_alone(capsys: pytest.CaptureFixture[str]) -> None:
    chat, notes = session(EchoReplies(ended="length"), in_terminal=False)
    chat.run(["one\n", "\x1b[31mtwo\n"])
    assert capsys.readouterr().out == "2 one\n4 \x1b[31mtwo\n"
    assert notes.getvalue() == "The reply reached max_tokens, 8.\n" * 2


def test_terminal_gets_no_control_characters() -> None:
    chat, printed = session(EchoReplies())
    chat.run(["\x1b[31m\x07 <think>x</think> [red]y[/] :smile:"])
    assert printed.getvalue() == "2 ␛[31m␇ x [red]y[/] :smile:\n"


def test_standard_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\n"), encoding="utf-8"))
    with pytest.raises(ConfigError, match="utf-8"):
        list(piped_lines())


def test_interruption_discards_a_typed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: Iterator[str | BaseException] = iter(["one", KeyboardInterrupt(), "two", EOFError()])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    assert list(typed_lines()) == ["one", "two"]
