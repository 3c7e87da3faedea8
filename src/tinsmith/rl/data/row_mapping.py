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
from tinsmith.rl.data.images import check_image_files, place_images, read_images, read_parts
from tinsmith.rl.types import Demonstration, Image, Message, Task
from tinsmith.settings import Settings, did_you_mean

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
    """`template` with its {fields} replaced by `values`: text as it is, null as empty text, other values as JSON text.

    A name in braces is the exact name of a field, with any characters, or a path such as {answer.value} or
    {answers[0]}. Raises ConfigError that names `place` and the fields of `values`.
    """
    return _filled(template, values, place)[0]


def _filled(template: str, row: Mapping[str, Any], place: str) -> tuple[str, dict[str, Any]]:
    """The filled template, and the values of its fields by their names."""
    name = template[1:-1]
    if template == f"{{{name}}}" and name in row:
        return _text(row[name], place, name), {name: row[name]}
    formatter = _RowFormatter(row, place)
    try:
        return formatter.vformat(template, (), row), formatter.values
    except LookupError as error:
        problem = f"there is no field {formatter.name!r}" if formatter.name else str(error)
    except (ValueError, TypeError, AttributeError) as error:
        problem = str(error).rstrip(".")
    near = did_you_mean(formatter.name, map(str, row)) if formatter.name else ""
    fields = f"Its fields are: {', '.join(sorted(map(str, row)))}."
    raise ConfigError(f"{place}: {template!r} cannot be filled: {problem}.", f"{near} {fields}".lstrip())


def _text(value: Any, place: str, name: str) -> str:
    """A value in a text: null is empty, true, lists and mappings are JSON text, bytes are UTF-8."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{place}: the field {name!r} holds bytes, not text.", "Use a field with text."
            ) from error
    if isinstance(value, bool | list | tuple | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


class _RowFormatter(Formatter):
    """Python's format syntax, with names looked up in a row."""

    def __init__(self, row: Mapping[str, Any], place: str) -> None:
        self._row, self._place = row, place
        self.name = ""
        """The field that was looked up last, or is missing."""
        self.values: dict[str, Any] = {}
        """Values of the fields so far, by name."""

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
        self.name = field_name
        self.values[field_name] = value = _value(kwargs, field_name)
        return "" if value is None else value, field_name

    @override
    def format_field(self, value: Any, format_spec: str) -> str:
        return super().format_field(value, format_spec) if format_spec else _text(value, self._place, self.name)


def _fields(template: str) -> tuple[str, ...]:
    """The names between the braces of a template, as they are written."""
    try:
        return tuple(
            f"{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
            for _, name, spec, conversion in Formatter().parse(template)
            if name is not None
        )
    except ValueError:
        return ()


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
    """Of tasks: rows may lack the field that `answer` names, or have null or no text in it, and then have no answer;
    otherwise this is an error."""
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
    label_key: str = ""
    """Of replies with a label: field that says whether the reply is good, true or false, as in {prompt, completion,
    label}; such replies are for kto."""
    tools_key: str = ""
    """Of demonstrations: field with the list of tools for the chat template, as a list or as JSON text."""

    def task(self, task_id: str, row: Mapping[str, Any], place: str = "") -> Task:
        """The task of a row. Raises ConfigError that names `place` (default: the task) if the row does not have what
        the templates name."""
        place = place or task_id
        reply_start = (Message(role="assistant", content=self.reply_prefix),) if self.reply_prefix else ()
        return Task(
            id=task_id,
            messages=(*self._prompt_messages(place, row), *reply_start),
            answer=self._answer(place, row),
            extra=self._extra(place, row),
        )

    def check_task(self, row: Mapping[str, Any], place: str) -> None:
        """Raises ConfigError as `task` does, but reads no images: their files must exist."""
        self._answer(place, row)
        self._extra(place, row)
        self._system(place, row)
        if self.images:
            check_image_files(self._field(self.images, row, place), place)
        chat = _single_field(self.prompt, row)
        if isinstance(chat, list) and self.images:
            return  # its parts of type image need the images
        if _chat(self.prompt, row, place) is None:
            self._prompt(place, row, beside_images=bool(self.images))

    def demonstration(self, demonstration_id: str, row: Mapping[str, Any], place: str = "") -> Demonstration:
        """The reply, or pair of replies, of a row. Raises ConfigError that names `place` if it has no reply."""
        place = place or demonstration_id
        messages = self._prompt_messages(place, row)
        tools = self._tools(place, row)
        if self.chosen or self.rejected:
            chosen, rejected = (
                self._with_reply(template, messages, row, place) for template in (self.chosen, self.rejected)
            )
            return Demonstration(id=demonstration_id, messages=chosen, rejected=rejected, tools=tools)
        desirable = self._label(row, place) if self.label_key else None
        if self.reply or messages[-1].role != "assistant":
            messages = self._with_reply(self.reply or self.answer, messages, row, place)
        return Demonstration(id=demonstration_id, messages=messages, desirable=desirable, tools=tools)

    def text(self, demonstration_id: str, row: Mapping[str, Any], place: str = "") -> Demonstration:
        """The filled prompt as plain text to train on, without a chat."""
        message = Message(role="assistant", content=self._prompt(place or demonstration_id, row))
        return Demonstration(id=demonstration_id, messages=(message,))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of a row that the templates and keys name, and the beginnings of paths into them."""
        templates = (self.prompt, self.answer, self.reply, self.chosen, self.rejected)
        names = [name for template in templates for name in _fields(template)]
        starts = [re.split(r"[.\[!:]", name)[0] for name in names]
        return tuple(filter(None, (*names, *starts, *self._keys, *self.extra)))

    @property
    def _keys(self) -> tuple[str, ...]:
        return self.system_key, self.label_key, self.tools_key, self.images

    def _answer(self, place: str, row: Mapping[str, Any]) -> str:
        if self.answer_optional and _single_field(self.answer, row) is None:
            return ""
        text, values = _filled(self.answer, row, place)
        if self.answer_after:
            text = text.rpartition(self.answer_after)[2]
        text = text.strip()
        if values and not self.answer_optional and (not text or None in values.values()):
            raise _no_text("answer", values, place, self.answer_after)
        return text

    def _prompt(self, place: str, row: Mapping[str, Any], *, beside_images: bool = False) -> str:
        text, values = _filled(self.prompt, row, place)
        if values and not beside_images and (not text.strip() or all(value is None for value in values.values())):
            raise _no_text("prompt", values, place)
        return text

    def _field(self, name: str, row: Mapping[str, Any], place: str) -> Any:
        if name not in row:
            near, fields = did_you_mean(name, map(str, row)), ", ".join(map(str, row))
            raise ConfigError(f"{place} has no field {name!r}.", f"{near} Its fields are: {fields}.".lstrip())
        return row[name]

    def _prompt_messages(self, row_id: str, row: Mapping[str, Any]) -> tuple[Message, ...]:
        images = read_images(self._field(self.images, row, row_id), row_id) if self.images else []
        messages = _chat(self.prompt, row, row_id, images)
        if messages is None:
            messages = (Message(role="user", content=self._prompt(row_id, row, beside_images=bool(images))),)
        messages = place_images(messages, images, row_id)
        system = self._system(row_id, row)
        return (Message(role="system", content=system), *messages) if system else messages

    def _system(self, place: str, row: Mapping[str, Any]) -> str:
        text = _text(self._field(self.system_key, row, place), place, self.system_key) if self.system_key else ""
        return text or self.system

    def _extra(self, row_id: str, row: Mapping[str, Any]) -> dict[str, Any]:
        for name in self.extra:
            if name != "*":
                self._field(name, row, row_id)
        if "*" in self.extra:
            return {name: value for name, value in row.items() if not self.images or name != self.images}
        return {name: row[name] for name in self.extra}

    def _label(self, row: Mapping[str, Any], place: str) -> bool:
        """The label of the row's reply, which text or a number may state."""
        value = self._field(self.label_key, row, place)
        label = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(str(value).lower())
        if label is None:
            raise ConfigError(
                f"{place}: the label {self.label_key!r} is {value!r:.80}.",
                "Write true for a good reply and false for a bad one.",
            )
        return label

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
            text, values = _filled(template, row, row_id)
            if values and (not text.strip() or None in values.values()):
                raise _no_text("reply", values, row_id)
            return (*messages, Message(role="assistant", content=text))
        if chat[-1].role != "assistant":
            raise ConfigError(f"{row_id}: the chat in {template} does not end with an assistant message.")
        return chat if len(chat) > 1 else (*messages, *chat)


def _no_text(part: str, values: Mapping[str, Any], place: str, mark: str = "") -> ConfigError:
    """Error for a row whose filled template is empty, or that has null in a field of it."""
    nulls = [name for name, value in values.items() if value is None]
    name = (nulls or [next(iter(values))])[0]
    why = f"nothing follows {mark!r}" if mark and not nulls else f"{name!r} is {'null' if nulls else 'empty'}"
    if part != "answer":
        hint = f"Complete or remove the row, or name another field in {part}."
    else:
        hint = "Complete or remove the row; if no reward reads the answers, set answer_optional: true on the source."
    return ConfigError(f"{place} has no {part}: {why}.", hint)


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
    if not isinstance(entry, Mapping):
        raise TypeError
    more = {name: value for name, value in entry.items() if name not in ("role", "content") and value is not None}
    content = entry["content"] or ""
    text, placed = read_parts(content, images, place) if isinstance(content, list) else (str(content), ())
    return Message(role=str(entry["role"]), content=text, more=more, images=placed)
