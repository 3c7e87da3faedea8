"""Formats of tool calls, by the chat template that teaches them.

tagged    `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen), or `<function=…>` inside (Qwen Coder)
bare      the whole reply is `{"name": …, "parameters": {…}}` (Llama 3), or such JSON follows `<|python_tag|>`
mistral   `[TOOL_CALLS]` and a list, or `[TOOL_CALLS]name[ARGS]{…}`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tinsmith.errors import Unsupported

TAG, END_TAG = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
PYTHON = "<|python_tag|>"
MISTRAL, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

Syntax = Literal["tagged", "bare", "mistral"]
_MARKERS: dict[Syntax, tuple[str, ...]] = {"tagged": (TAG, FUNCTION), "bare": (PYTHON,), "mistral": (MISTRAL,)}
_DELIMITERS: dict[Syntax, tuple[str, ...]] = {
    "tagged": (TAG, END_TAG),
    "bare": (PYTHON,),
    "mistral": (MISTRAL, CALL_ID, ARGS),
}

THINKING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<scratch_pad>", "</scratch_pad>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("◁think▷", "◁/think▷"),
)
"""Markers around the reasoning of known models: (begin, end)."""
_REASONING_TAG = re.compile(r"<([\w:-]*(?:think|thought|reason|scratch)[\w:-]*)>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes its calls, and its reasoning, in which there are none."""

    syntax: Syntax
    thinking: tuple[tuple[str, str], ...] = THINKING
    until: str = ""
    """The marker that ends the reasoning in which the reply begins; empty if it begins outside."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin a call."""
        return _MARKERS[self.syntax]

    def after(self, prompt: str, continued: str = "") -> ToolCallFormat:
        """The format of a reply to a prompt, which may begin the reply's reasoning.

        `prompt` is the end of the prompt's text, `continued` the part of the reply that the prompt holds.
        """
        for begin, end in self.thinking:
            if prompt.rstrip().endswith(begin) or continued.rfind(begin) > continued.rfind(end):
                return replace(self, until=end)
        return self


def opened_thinking(prompt: str) -> str:
    """The mark that ends the thinking in which a prompt leaves the reply; empty if there is none."""
    text = prompt.rstrip()
    return next((end for begin, end in THINKING if text.endswith(begin)), "")


def tool_call_format(
    template: str, name: str, alternative: str = "serve a model trained to use them"
) -> ToolCallFormat:
    """The tool-call format of the model `name` with this chat template.

    Raises Unsupported if the template has no tools or an unknown format; `alternative` completes the error's hint.
    """
    if not re.search(r"\btools\b", template):
        raise Unsupported(f"The chat template of {name} does not support tools.", f"Remove tools, or {alternative}.")
    if TAG in template and "<arg_key>" not in template:
        return ToolCallFormat("tagged", _thinking(template))
    if MISTRAL in template:
        return ToolCallFormat("mistral", _thinking(template))
    if PYTHON in template or ('"name"' in template and '"parameters"' in template):
        return ToolCallFormat("bare", _thinking(template))
    raise Unsupported(
        f"The chat template of {name} uses an unknown tool-call format.",
        "Remove tools; the formats of Hermes, Qwen, Llama 3 and Mistral are supported.",
    )


def marker_texts(form: ToolCallFormat | None) -> tuple[str, ...]:
    """Texts that separate calls from text: to be decoded even where the tokenizer has them as special tokens."""
    if form is None:
        return ()
    return (*_DELIMITERS[form.syntax], *(marker for pair in form.thinking for marker in pair))


def partial_match(text: str, patterns: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `patterns`."""
    longest = max((len(pattern) for pattern in patterns), default=1) - 1
    begins = {pattern[:1] for pattern in patterns}
    for at in range(max(0, len(text) - longest), len(text)):
        if text[at] in begins:
            suffix = text[at:]
            if any(len(pattern) > len(suffix) and pattern.startswith(suffix) for pattern in patterns):
                return len(suffix)
    return 0


def _thinking(template: str) -> tuple[tuple[str, str], ...]:
    """The known reasoning markers and tags of this template that are named like them."""
    tags = dict.fromkeys(_REASONING_TAG.findall(template))
    declared = ((f"<{tag}>", f"</{tag}>") for tag in tags if f"</{tag}>" in template)
    return tuple(dict.fromkeys((*THINKING, *declared)))
