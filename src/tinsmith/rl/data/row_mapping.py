"""Mapping of a row of data to a task or a demonstration.

Leaves out where rows come from (`tables.py`).

Example: RowMapping(answer_after="####").task("gsm8k/0", {"question": "2+2?", "answer": "#### 4"}).answer == "4"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, TypeVar, overload

from tinsmith.errors import ConfigError
from tinsmith.rl.types import Demonstration, Message, Task
from tinsmith.settings import Settings

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """Sequence whose items are made on access: `make(i)` for 0 <= i < `length`."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._make(one) for one in range(*index.indices(self._length))]
        return self._make(range(self._length)[index])


def user_task(task_id: str, question: str, answer: str) -> Task:
    """A task of one user message."""
    return Task(id=task_id, messages=(Message(role="user", content=question),), answer=answer)


def fill_template(template: str, values: Mapping[str, Any], place: str) -> str:
    """`template` with its {fields} put in. Raises ConfigError that names the place and the fields it has.

    A name is that of a field as it stands, whatever characters it has, or else a path: {answer.value}, {answers[0]}.
    """
    try:
        return _Filled(values).vformat(template, (), values)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        known = ", ".join(sorted(map(str, values)))
        raise ConfigError(f"{place}: {template!r} cannot be filled: {error}.", f"Its fields are: {known}.") from error


class _Filled(Formatter):
    """Python's templates, but that names are looked up in a row."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row

    def parse(self, format_string: str) -> Iterator[tuple[str, str | None, str | None, str | None]]:
        """A field name may contain what would otherwise be a conversion or a format."""
        for literal, name, form, conversion in super().parse(format_string):
            whole = f"{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
            if name is not None and whole in self._row:
                yield literal, whole, "", None
            elif name == "":
                raise ValueError("braces that stand for themselves are written twice, {{ and }}")
            else:
                yield literal, name, form, conversion

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """The value, nothing being no text, and what it was looked up by."""
        value = _value(kwargs, field_name)
        return "" if value is None else value, field_name


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Of the field of that name, or at that path. Raises LookupError, TypeError or ValueError where nothing is."""
    if name in row:
        return row[name]
    found: Any = row
    for part in re.findall(r"[^.\[\]]+", name):
        found = found[int(part) if isinstance(found, list | tuple) else part]
    return found


class RowMapping(Settings):
    """Mapping of a row of data to a task or a demonstration."""

    prompt: str = "{question}"
    """Fields of the row in braces; a single field that holds a list of {role, content} is a chat as it stands."""
    answer: str = "{answer}"
    """Fields of the row in braces; empty where the rows have no answer."""
    answer_optional: bool = False
    """Of tasks: a row without the one field that `answer` names has an empty answer."""
    answer_after: str = ""
    """Of tasks: only what follows the last such mark is the answer, as '####' in GSM8K.
    A demonstration is the whole answer."""
    system: str = ""
    """A system message before each prompt; braces are as they stand."""
    system_key: str = ""
    """The field with the row's own system message, in place of `system` where it is not empty."""
    reply_prefix: str = ""
    """Of tasks: how every reply begins; the policy goes on from there."""
    extra: tuple[str, ...] = ()
    """Of tasks: fields of the row that workflows and rewards read besides, as `task.extra`; '*' is all of them."""
    reply: str = ""
    """Of demonstrations: what to learn to say, fields in braces; empty: the chat's last turn, or the
    whole answer field."""
    chosen: str = ""
    """Of pairs: the better reply, fields in braces; a single field may hold a chat that ends with it."""
    rejected: str = ""
    """Of pairs: the worse reply, likewise."""
    tools_key: str = ""
    """Of demonstrations: the field that lists tools for the chat template, as JSON text or as it stands."""

    def task(self, task_id: str, row: Mapping[str, Any]) -> Task:
        """Raises ConfigError that names the row and its fields."""
        without = self.answer_optional and _single(self.answer, row) is None
        answer = "" if without else fill_template(self.answer, row, task_id)
        if self.answer_after:
            answer = answer.rpartition(self.answer_after)[2]
        begun = (Message(role="assistant", content=self.reply_prefix),) if self.reply_prefix else ()
        return Task(
            id=task_id,
            messages=(*self._prompt_messages(task_id, row), *begun),
            answer=answer.strip(),
            extra=self._extra(task_id, row),
        )

    def demonstration(self, demonstration_id: str, row: Mapping[str, Any]) -> Demonstration:
        """What the row says to say. Raises ConfigError that names the row where it says nothing."""
        messages = self._prompt_messages(demonstration_id, row)
        tools = self._tools(demonstration_id, row)
        if self.chosen or self.rejected:
            said, rejected = (self._said(end, messages, row, demonstration_id) for end in (self.chosen, self.rejected))
            return Demonstration(id=demonstration_id, messages=said, rejected=rejected, tools=tools)
        if not self.reply and messages[-1].role == "assistant":
            return Demonstration(id=demonstration_id, messages=messages, tools=tools)
        said = self._said(self.reply or self.answer, messages, row, demonstration_id)
        return Demonstration(id=demonstration_id, messages=said, tools=tools)

    def text(self, demonstration_id: str, row: Mapping[str, Any]) -> Demonstration:
        """The prompt as plain text to learn, without a chat around it."""
        said = Message(role="assistant", content=fill_template(self.prompt, row, demonstration_id))
        return Demonstration(id=demonstration_id, messages=(said,))

    def _prompt_messages(self, row_id: str, row: Mapping[str, Any]) -> tuple[Message, ...]:
        messages = _chat(self.prompt, row, row_id)
        if messages is None:
            messages = (Message(role="user", content=fill_template(self.prompt, row, row_id)),)
        if self.system_key and self.system_key not in row:
            raise ConfigError(f"{row_id} has no field {self.system_key!r}.", f"Its fields are: {', '.join(row)}.")
        system = str(row[self.system_key] or "") if self.system_key else ""
        system = system or self.system
        return (Message(role="system", content=system), *messages) if system else messages

    def _extra(self, row_id: str, row: Mapping[str, Any]) -> dict[str, Any]:
        if missing := [name for name in self.extra if name not in row and name != "*"]:
            raise ConfigError(f"{row_id} has no field {missing[0]!r}.", f"Its fields are: {', '.join(row)}.")
        return dict(row) if "*" in self.extra else {name: row[name] for name in self.extra}

    def _tools(self, row_id: str, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        if not self.tools_key:
            return ()
        tools = row.get(self.tools_key) or ()
        try:
            return tuple(json.loads(tools) if isinstance(tools, str) else tools)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{row_id}: {self.tools_key!r} holds no list of tools.", "Write it as JSON.") from error

    def _said(
        self, template: str, messages: Sequence[Message], row: Mapping[str, Any], row_id: str
    ) -> tuple[Message, ...]:
        """The chat with the reply at its end."""
        if not template:
            raise ConfigError(f"{row_id} says nothing to learn.", "Set reply, or chosen and rejected, on the source.")
        chat = _chat(template, row, row_id)
        if chat is None:
            return (*messages, Message(role="assistant", content=fill_template(template, row, row_id)))
        if chat[-1].role != "assistant":
            raise ConfigError(f"{row_id}: the chat in {template} does not end with an assistant's turn.")
        return chat if len(chat) > 1 else (*messages, *chat)


def _single(template: str, row: Mapping[str, Any]) -> Any:
    """What stands in the one field that the template names; None where nothing does."""
    try:
        return _value(row, template.removeprefix("{").removesuffix("}"))
    except (LookupError, TypeError, ValueError):
        return None


def _chat(template: str, row: Mapping[str, Any], place: str) -> tuple[Message, ...] | None:
    """The chat in the one field that the template names; None where it holds none. A chat may be written as JSON."""
    chat = _single(template, row)
    if isinstance(chat, str) and chat.startswith("[{"):
        try:
            chat = json.loads(chat)
        except ValueError:
            return None
    if not isinstance(chat, list):
        return None
    try:
        messages = tuple(_message(one) for one in chat)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{place}: '{template}' is no chat.", "Each message is {role, content}.") from error
    if not messages:
        raise ConfigError(f"{place}: the chat in '{template}' is empty.", "Leave the row out, as by an operator.")
    return messages


def _message(one: Mapping[str, Any]) -> Message:
    more = {name: value for name, value in one.items() if name not in ("role", "content") and value is not None}
    return Message(role=str(one["role"]), content=str(one["content"] or ""), more=more)
