"""The turns of a chat: in a terminal with a prompt and colors, or line by line from a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from rich.console import Console

from tinsmith.chat.strict_json import encodable
from tinsmith.cli.chat.conversation import Conversation
from tinsmith.cli.chat.replies import ReplyPiece, ReplyStream
from tinsmith.cli.chat.thinking import ThinkingSplitter
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.plurals import counted
from tinsmith.rl.history.console_text import plain

COMMANDS = {
    "/system [TEXT]": "show the system prompt, or replace it",
    "/retry": "sample the last reply again",
    "/undo": "forget the last message and its reply",
    "/reset": "forget the whole conversation",
    "/quit": "end, as Ctrl-D does",
}
_PROMPT = "> "


@dataclass(slots=True)
class ChatSession:
    """A chat. In a terminal, errors are printed and Ctrl-C stops a reply; else both end the program."""

    replies: ReplyStream
    conversation: Conversation
    console: Console
    """Where notes are printed; in a terminal, replies too."""
    in_terminal: bool
    opened_thinking: str = ""
    """The mark that ends the thinking in which each reply begins, unless the server says it; empty if it begins
    outside."""

    def run(self, lines: Iterable[str]) -> None:
        """Answer the lines until they end, or /quit."""
        for line in lines:
            text = line.strip()
            if text == "/quit":
                return
            try:
                self._take(text)
            except TinsmithError as error:
                if not self.in_terminal:
                    raise
                self._note(str(error), "red")

    def _take(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//"):
            self._command(*text.split(maxsplit=1))
        elif text:
            self._answer(text.removeprefix("/"))

    def _command(self, name: str, argument: str = "") -> None:
        turns = self.conversation.turns
        if name == "/help":
            for command, meaning in COMMANDS.items():
                self._note(f"{command:<16}{meaning}")
        elif name == "/system":
            self.conversation.system = argument or self.conversation.system
            self._note(f"system prompt: {self.conversation.system or 'none'}")
        elif name == "/reset":
            turns.clear()
            self._note("The conversation is empty.")
        elif name not in ("/undo", "/retry"):
            raise ConfigError(
                f"There is no command {name}.", "/help lists them; a message that begins with / begins with two."
            )
        elif not turns:
            raise ConfigError(f"{name}: the conversation is empty.")
        elif name == "/undo":
            turns.pop()
            self._note(f"{counted(len(turns), 'turn')} left.")
        else:
            self._retry()

    def _retry(self) -> None:
        """Sample the last reply again; without one, the conversation is as it was."""
        turns = self.conversation.turns
        last, replaced = turns.pop(), False
        try:
            replaced = self._answer(last[0])
        finally:
            if not replaced:
                turns.append(last)

    def _answer(self, message: str) -> bool:
        """Sample a reply, print it and add it to the conversation; whether there is one."""
        pieces: list[str] = []
        ended = ""
        shown = _Printer(self.console if self.in_terminal else None, self.opened_thinking)
        try:
            with closing(self.replies.reply(self.conversation.with_message(message))) as stream:
                for piece in stream:
                    shown.add(piece)
                    pieces.append(piece.text)
                    ended = piece.ended or ended
        except KeyboardInterrupt:
            if not self.in_terminal:
                raise
            ended = "stopped"
        finally:
            shown.end(is_whole=bool(ended))
        if ended == "length":
            limit = self.replies.settings.max_tokens
            self._note(f"The reply reached {f'max_tokens, {limit}' if limit else 'the end of the context'}.")
        elif ended == "stopped":
            self._note("stopped")
        if reply := "".join(pieces):
            self.conversation.turns.append((message, reply))
        return bool(reply)

    def _note(self, text: str, style: str = "dim") -> None:
        self.console.out(plain(text), style=style, highlight=False)


class _Printer:
    """Prints a reply as it comes: to a terminal with the thinking dim, else as it is."""

    def __init__(self, console: Console | None, opened_thinking: str) -> None:
        self._console, self._splitter = console, ThinkingSplitter(opened_thinking)
        self._has_begun = False

    def add(self, piece: ReplyPiece) -> None:
        text = piece.text
        self._has_begun |= bool(text)
        self._splitter.end = piece.opened_thinking or self._splitter.end
        if self._console is None:
            sys.stdout.write(encodable(text))
            sys.stdout.flush()
        else:
            self._print(self._splitter.feed(text))

    def end(self, *, is_whole: bool) -> None:
        if self._console is not None:
            self._print(self._splitter.finish())
        if is_whole or self._has_begun:
            (sys.stdout if self._console is None else self._console.file).write("\n")
        sys.stdout.flush()

    def _print(self, parts: Iterator[tuple[bool, str]]) -> None:
        assert self._console is not None
        for is_thinking, text in parts:
            self._console.out(plain(text), end="", style="dim" if is_thinking else None, highlight=False)
            self._console.file.flush()


def typed_lines() -> Iterator[str]:
    """Lines that are typed in the terminal, with editing and a history; Ctrl-C discards one."""
    with suppress(ImportError):  # a Python without it edits nothing
        import readline  # noqa: F401 - input() uses it
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def piped_lines() -> Iterator[str]:
    """The lines of standard input. Raises ConfigError if they are not text."""
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError(f"Standard input is not {error.encoding} text.", "Convert it to UTF-8.") from error
