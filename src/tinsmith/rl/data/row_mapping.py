"""Convert rows of data to tasks and demonstrations. Rows come from `row_sources.py`.

Example: RowMapping(answer_after="####").task("gsm8k/0", {"question": "2+2?", "answer": "#### 4"}).answer == "4"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, TypeVar, overload

from typing_extensions import override

from tinsmith.errors import ConfigError
from tinsmith.rl.data.images import place_images, read_images, read_parts
from tinsmith.rl.types import Demonstration, Image, Message, Task
from tinsmith.settings import Settings

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """Sequence that creates its items on access: item i is `make(i)`, 0 <= i < `length`."""

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
            return [self._make(position) for position in range(*index.indices(self._length))]
        return self._make(range(self._length)[index])


def user_task(task_id: str, question: str, answer: str) -> Task:
    """A task with a single user message."""
    return Task(id=task_id, messages=(Message(role="user", content=question),), answer=answer)


def fill_template(template: str, values: Mapping[str, Any], place: str) -> str:
    """`template` with its {fields} replaced by `values`.

    A name in braces is the exact name of a field, with any characters, or a path such as {answer.value} or
    {answers[0]}. Raises ConfigError that names `place` and the fields of `values`.
    """
    try:
        return _RowFormatter(values).vformat(template, (), values)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        fields = ", ".join(sorted(map(str, values)))
        raise ConfigError(f"{place}: {template!r} cannot be filled: {error}.", f"Its fields are: {fields}.") from error


class _RowFormatter(Formatter):
    """Python's format syntax, with names looked up in a row."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row

    @override
    def parse(self, format_string: str) -> Iterator[tuple[str, str | None, str | None, str | None]]:
        for literal, name, format_spec, conversion in super().parse(format_string):
            # A field name may contain ! and :, which otherwise begin a conversion and a format.
            full_name = f"{name}{f'!{conversion}' if conversion else ''}{f':{format_spec}' if format_spec else ''}"
            if name is not None and full_name in self._row:
                yield literal, full_name, "", None
            elif name == "":
                raise ValueError("write literal braces twice, as {{ and }}")
            else:
                yield literal, name, format_spec, conversion

    @override
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value = _value(kwargs, field_name)
        return "" if value is None else value, field_name


def _value(row: Mapping[str, Any], name: str) -> Any:
    """The value of the field `name`, or at the path `name`. Raises LookupError, TypeError or ValueError if missing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in re.findall(r"[^.\[\]]+", name):
        value = value[int(part) if isinstance(value, list | tuple) else part]
    return value


class RowMapping(Settings):
    """How a row of data becomes a task or a demonstration."""

    prompt: str = "{question}"
    """Template of the prompt, with fields of the row in braces. A single field may hold a chat: a list of {role,
    content}."""
    answer: str = "{answer}"
    """Template of the answer, with fields of the row in braces; empty if the rows have no answer."""
    answer_optional: bool = False
    """Of tasks: if a row lacks the field that `answer` names, its answer is empty; otherwise this is an error."""
    answer_after: str = ""
    """Of tasks: the answer is the text after the last occurrence of this mark, such as '####' in GSM8K.
    Demonstrations keep the whole answer."""
    system: str = ""
    """System message before each prompt; not a template."""
    system_key: str = ""
    """Field with the system message of the row; if that is empty, `system` applies."""
    reply_prefix: str = ""
    """Of tasks: the start of every reply, which the policy continues."""
    extra: tuple[str, ...] = ()
    """Of tasks: fields of the row for workflows and rewards, as `task.extra`; '*' is all fields, without images."""
    images: str = ""
    """Of tasks: field with an image of the prompt, or a list of images: paths, bytes, data URLs, or the image column of
    a dataset. They come where the text says `<image>`, or before it if it never does."""
    reply: str = ""
    """Of demonstrations: template of the reply, with fields of the row in braces; empty: the last message of the chat
    if it is the assistant's, otherwise `answer`."""
    chosen: str = ""
    """Of pairs: template of the better reply; a single field may hold a chat that ends with it."""
    rejected: str = ""
    """Of pairs: template of the worse reply; a single field may hold a chat that ends with it."""
    tools_key: str = ""
    """Of demonstrations: field with the list of tools for the chat template, as a list or as JSON text."""

    def task(self, task_id: str, row: Mapping[str, Any]) -> Task:
        """The task of a row. Raises ConfigError that names the row and its fields if a field is missing."""
        has_no_answer = self.answer_optional and _single_field(self.answer, row) is None
        answer = "" if has_no_answer else fill_template(self.answer, row, task_id)
        if self.answer_after:
            answer = answer.rpartition(self.answer_after)[2]
        reply_start = (Message(role="assistant", content=self.reply_prefix),) if self.reply_prefix else ()
        return Task(
            id=task_id,
            messages=(*self._prompt_messages(task_id, row), *reply_start),
            answer=answer.strip(),
            extra=self._extra(task_id, row),
        )

    def demonstration(self, demonstration_id: str, row: Mapping[str, Any]) -> Demonstration:
        """The reply, or pair of replies, of a row. Raises ConfigError that names the row if it has no reply."""
        messages = self._prompt_messages(demonstration_id, row)
        tools = self._tools(demonstration_id, row)
        if self.chosen or self.rejected:
            chosen, rejected = (
                self._with_reply(template, messages, row, demonstration_id) for template in (self.chosen, self.rejected)
            )
            return Demonstration(id=demonstration_id, messages=chosen, rejected=rejected, tools=tools)
        if not self.reply and messages[-1].role == "assistant":
            return Demonstration(id=demonstration_id, messages=messages, tools=tools)
        messages = self._with_reply(self.reply or self.answer, messages, row, demonstration_id)
        return Demonstration(id=demonstration_id, messages=messages, tools=tools)

    def text(self, demonstration_id: str, row: Mapping[str, Any]) -> Demonstration:
        """The filled prompt as plain text to train on, without a chat."""
        message = Message(role="assistant", content=fill_template(self.prompt, row, demonstration_id))
        return Demonstration(id=demonstration_id, messages=(message,))

    def _prompt_messages(self, row_id: str, row: Mapping[str, Any]) -> tuple[Message, ...]:
        if self.images and self.images not in row:
            raise ConfigError(f"{row_id} has no field {self.images!r}.", f"Its fields are: {', '.join(row)}.")
        images = read_images(row[self.images], row_id) if self.images else []
        messages = _chat(self.prompt, row, row_id, images)
        if messages is None:
            messages = (Message(role="user", content=fill_template(self.prompt, row, row_id)),)
        messages = place_images(messages, images, row_id)
        if self.system_key and self.system_key not in row:
            raise ConfigError(f"{row_id} has no field {self.system_key!r}.", f"Its fields are: {', '.join(row)}.")
        system = str(row[self.system_key] or "") if self.system_key else ""
        system = system or self.system
        return (Message(role="system", content=system), *messages) if system else messages

    def _extra(self, row_id: str, row: Mapping[str, Any]) -> dict[str, Any]:
        if missing := [name for name in self.extra if name not in row and name != "*"]:
            raise ConfigError(f"{row_id} has no field {missing[0]!r}.", f"Its fields are: {', '.join(row)}.")
        if "*" in self.extra:
            return {name: value for name, value in row.items() if not self.images or name != self.images}
        return {name: row[name] for name in self.extra}

    def _tools(self, row_id: str, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        if not self.tools_key:
            return ()
        tools = row.get(self.tools_key) or ()
        try:
            return tuple(json.loads(tools) if isinstance(tools, str) else tools)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{row_id}: {self.tools_key!r} is not a list of tools.", "Write a JSON list.") from error

    def _with_reply(
        self, template: str, messages: Sequence[Message], row: Mapping[str, Any], row_id: str
    ) -> tuple[Message, ...]:
        """`messages` followed by the reply that `template` names."""
        if not template:
            raise ConfigError(
                f"{row_id} has no reply to train on.", "Set reply, or chosen and rejected, on the source."
            )
        chat = _chat(template, row, row_id)
        if chat is None:
            return (*messages, Message(role="assistant", content=fill_template(template, row, row_id)))
        if chat[-1].role != "assistant":
            raise ConfigError(f"{row_id}: the chat in {template} does not end with an assistant message.")
        return chat if len(chat) > 1 else (*messages, *chat)


def _single_field(template: str, row: Mapping[str, Any]) -> Any:
    """The value of the only field in `template`; None if the template is not a single field or the field is missing."""
    try:
        return _value(row, template.removeprefix("{").removesuffix("}"))
    except (LookupError, TypeError, ValueError):
        return None


def _chat(
    template: str, row: Mapping[str, Any], place: str, images: Sequence[Image] = ()
) -> tuple[Message, ...] | None:
    """The chat in the only field of `template`, as a list or as JSON text; None if there is no chat.

    Parts of type image that hold none are `images`, in order.
    """
    chat = _single_field(template, row)
    if isinstance(chat, str) and chat.startswith("[{"):
        try:
            chat = json.loads(chat)
        except ValueError:
            return None
    if not isinstance(chat, list):
        return None
    try:
        waiting = iter(images)
        messages = tuple(_message(entry, waiting, place) for entry in chat)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{place}: '{template}' is not a chat.", "Write each message as {role, content}.") from error
    if not messages:
        raise ConfigError(
            f"{place}: the chat in '{template}' is empty.", "Remove the row, for example with a filter operator."
        )
    return messages


def _message(entry: Mapping[str, Any], images: Iterator[Image], place: str) -> Message:
    more = {name: value for name, value in entry.items() if name not in ("role", "content") and value is not None}
    content = entry["content"] or ""
    text, placed = read_parts(content, images, place) if isinstance(content, list) else (str(content), ())
    return Message(role=str(entry["role"]), content=text, more=more, images=placed)
