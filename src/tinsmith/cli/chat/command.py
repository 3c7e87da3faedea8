"""The command `tinsmith chat`.

Notes go to standard error where standard input or output is no terminal: standard output is the replies.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tinsmith.cli.service.folder import temporary_folder
from tinsmith.cli.service.weights import CheckpointChoice, SamplingServer, open_chat
from tinsmith.errors import ConfigError
from tinsmith.terminal import new_console

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from tinsmith.cli.chat.replies import Messages
    from tinsmith.cli.chat.session import ChatSession
    from tinsmith.cli.service.weights import ServedWeights

Words = Annotated[
    str,
    Parameter(
        name="MODEL|RUN|tinker://…",
        help="What to talk to: a base model, the folder of a run, or a checkpoint. Words such as service.engine=fake "
        "are settings of the model and of the service that is started.",
        allow_leading_hyphen=False,
    ),
]


def chat(
    *words: Words,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    choice: CheckpointChoice | None = None,
    server: SamplingServer | None = None,
) -> None:
    """Talk to a model, to the weights of a run or to a checkpoint. Ctrl-C stops a reply, Ctrl-D ends; /help in the chat
    lists its commands.

    A run's own system prompt, sampling settings and chat template apply. Where standard input is no terminal, each of
    its lines is a message, and the replies are standard output.

    Parameters
    ----------
    system
        System prompt. Default: that of the run, else none. "" is none.
    max_tokens
        Largest number of tokens in a reply. Default: that of the run, else as many as the context holds.
    temperature
        Sampling temperature; 0 is greedy. Default: that of the run, else 1.
    """
    from tinsmith.cli.chat import of_run
    from tinsmith.cli.chat.replies import server_client
    from tinsmith.cli.chat.session import piped_lines, typed_lines
    from tinsmith.cli.service.weights import missing_model, open_weights, settings_among

    target, overrides = settings_among(words, "chat")
    if not target:
        raise ConfigError("tinsmith chat needs what to talk to.", "Example: tinsmith chat runs/addition")
    if len(target) > 1:
        raise ConfigError(f"tinsmith chat talks to one model, and does not take {target[1]!r}.")
    of_run.check_options(max_tokens, temperature)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of another encoding
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    console = new_console(stderr=not in_terminal, soft_wrap=True, highlight=False)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        weights = open_weights(stack, target[0], overrides, folder, console, server=server, choice=choice)
        client = stack.enter_context(server_client(weights.url, weights.key))
        session = _session(weights, client, console, in_terminal=in_terminal)
        session.replies.check(missing_model(weights.name))
        settings = session.replies.settings
        session.replies.settings = replace(
            settings,
            max_tokens=settings.max_tokens if max_tokens is None else max_tokens,
            temperature=settings.temperature if temperature is None else temperature,
        )
        session.conversation.system = session.conversation.system if system is None else system
        if unused := of_run.unused_settings(weights):
            console.print(f"note: {', '.join(unused)}: no effect in a chat", style="dim")
        if in_terminal:
            _introduce(weights, session)
        session.run(typed_lines() if in_terminal else piped_lines())


def _session(weights: ServedWeights, client: httpx.Client, console: Console, *, in_terminal: bool) -> ChatSession:
    """A chat as the run has it, or with the server's settings."""
    from tinsmith.cli.chat import of_run
    from tinsmith.cli.chat.conversation import Conversation
    from tinsmith.cli.chat.replies import ReplyStream
    from tinsmith.cli.chat.session import ChatSession

    encode, opened, settings = None, "", of_run.reply_settings(weights)
    if of_run.has_own_template(weights):
        encode, opened = _template(weights)
        settings = replace(settings, template_values={})  # the template has them
    return ChatSession(
        ReplyStream(client, weights.name, settings, encode),
        Conversation(of_run.system_prompt(weights)),
        console,
        in_terminal,
        opened,
    )


def _template(weights: ServedWeights) -> tuple[Callable[[Messages], Sequence[int]], str]:
    """What renders a conversation with the chat template of the run, and the mark that ends the thinking in which it
    leaves a reply. Raises UserError for a tokenizer or a template that cannot be loaded."""
    from tinsmith.chat.tool_calls.formats import opened_thinking
    from tinsmith.cli.chat import of_run

    settings = of_run.template_settings(weights)
    codec = asyncio.run(open_chat(weights.base, weights.path, weights.url, weights.key, **settings))[1]
    encode = of_run.encoder(codec)
    return encode, opened_thinking(codec.decode(encode([{"role": "user", "content": "?"}])))


def _introduce(weights: ServedWeights, session: ChatSession) -> None:
    """Say whom the chat is with, and how its replies are sampled."""
    from tinsmith.rl.history.console_text import plain

    step = "" if weights.step is None else f" of step {weights.step}"
    sampled = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in session.replies.settings.parameters.items()
    )
    lines = [f"{weights.name}{step}", *filter(None, [sampled])]
    if session.conversation.system:
        lines.append(f"system prompt: {session.conversation.system}")
    for line in (*lines, "/help lists commands, Ctrl-D ends"):
        session.console.out(plain(line), style="dim", highlight=False)
