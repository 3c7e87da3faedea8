"""Overrides of settings: any key that a file may have, with values that need not be YAML where a text is meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from tinsmith.errors import ConfigError
from tinsmith.integrations.minds.files.schema import MindsFile
from tinsmith.integrations.rllm.files.schema import RllmFile
from tinsmith.integrations.rllm.files.schema_unified import UnifiedFile
from tinsmith.integrations.trinity.files.schema import TrinityFile
from tinsmith.overrides import apply_overrides, forms_at
from tinsmith.rl.config import RunConfig
from tinsmith.rl.policy.sampling import SamplingConfig
from tinsmith.service.config import ServeConfig
from tinsmith.settings import Settings, build, paths, read

FILES: tuple[type[BaseModel], ...] = (RunConfig, ServeConfig, TrinityFile, RllmFile, UnifiedFile, MindsFile)


class Part(Settings):
    text: str = ""
    rate: float = Field(default=1.0, gt=0)


class Whole(Settings):
    text: str = ""
    place: Path | None = None
    kind: Literal["on", "off"] = "off"
    count: int = 0
    flag: bool = False
    either: bool | Literal["some"] = False
    texts: tuple[str, ...] = ()
    words: tuple[str | int, ...] | None = None
    part: Part = Part()
    parts: tuple[Part, ...] = ()
    named: dict[str, Part] = Field(default_factory=dict)


def whole(*overrides: str) -> Whole:
    return read(Whole, None, overrides)


def fault(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        whole(*overrides)
    return str(refusal.value)


TEXTS = (
    "@x", '"unclosed', "'unclosed", "Q: {question} A: ", "{question}", "*a", "&a", "!tag x", "%x", "`x`", "\t", "{",
    "[1,", "[a, b]", "- x", "a: b", "007", "1e3", "on", "no", "True", "2024-01-01", "a #b", "first\nsecond", "é 漢 🙂",
    "=x", " x", "", "1:30", "NULL x", "|", ">", "? x", "\\", "a=b",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_taken_as_it_stands(text: str):
    assert whole(f"text={text}").text == text
    assert whole(f"part.text={text}").part.text == text
    assert whole(f"parts.0.text={text}").parts[0].text == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_every_text_is_read_or_refused(text: str):
    for key in ("text", "count", "texts", "words", "part", "named", "either"):
        try:
            value = whole(f"{key}={text}")
        except ConfigError as error:
            assert str(error).startswith("the command line: ")  # noqa: PT017
        else:
            assert key != "text" or value.text == text or text.lstrip()[:1] in ("'", '"') or "${" in text


def test_quotes_of_a_text_are_not_part_of_it():
    assert whole("text='it''s'").text == "it's"
    assert whole(r'text="a\nb"').text == "a\nb"
    assert whole("kind=on").kind == "on"
    assert whole("place=007").place == Path("007")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("count=@x", "the command line: the value of 'count' is not YAML: found character that cannot start any token"),
        ("count=[1,", "the command line: the value of 'count' is not YAML: did not find expected node content"),
        ("flag='x", "the command line: the value of 'flag' is not YAML"),
        ("text=${", "the command line: the value of 'text' is not YAML"),
        ("count=", "the command line: 'count' takes a whole number (got None)."),
        ("count=yes", "the command line: 'count' takes a whole number (got 'yes')."),
        ("text=null", "the command line: 'text' takes a text: put quotes around it (got None)."),
        ("either=what", "the command line: 'either' takes true or false or 'some' (got 'what')."),
        ("words=[[1]]", "the command line: 'words.0' takes a text or a whole number (got [1])."),
        ("texts=[Q:, A:]", "the command line: the value of 'texts' is not YAML"),
        ("parts=x", "the command line: 'parts' takes a list, such as [a, b] (got 'x')."),
        ("part=x", "the command line: 'part' takes keys with values, such as {a: 1} (got 'x')."),
        ("count.x=1", "the command line: 'count' takes a whole number (got {'x': 1})."),
        ("texts.x=1", "the command line: "),
        (
            "parts.3.text=a",
            "the command line: 'parts.3.text' is beyond the end of its list",
        ),
        ("a..b=1", "the command line: 'a..b' is not a key."),
        ("=x", "the command line: '=x' is not an override."),
        ("part.rate=.inf", "the command line: 'part.rate' takes a finite number (got inf)."),
        ("part.rate=.nan", "the command line: 'part.rate' takes a finite number (got nan)."),
        ("part.rate=1e999", "the command line: 'part.rate' takes a finite number (got inf)."),
        ("part.rate=-1", "the command line: 'part.rate': Input should be greater than 0 (got -1)."),
        ("parts[0].txt=a", "the command line: there is no key 'parts.0.txt'. Did you mean 'parts.0.text'?"),
    ],
)
def test_refusal_is_one_sentence_in_the_users_words(override: str, sentence: str):
    text = fault(override)
    assert text.startswith(sentence)
    assert not re.search(r"tuple|traceback|function-|validat", text, re.IGNORECASE)


def test_lists_and_sections_are_set_whole_and_by_entry():
    assert whole("parts=[{text: a}, {text: b}]", "parts[1].text=c", "parts.2.rate=2").parts == (
        Part(text="a"), Part(text="c"), Part(rate=2.0),
    )  # fmt: skip
    assert whole("part={text: a}", "part.rate=3").part == Part(text="a", rate=3.0)
    assert whole("named.x.rate=2", "named.y={text: b}").named == {"x": Part(rate=2.0), "y": Part(text="b")}
    assert whole("texts=[]").texts == ()


@pytest.mark.parametrize(
    ("override", "stop"),
    [
        ("stop=</answer>", ("</answer>",)),
        ("stop=Q: {a}", ("Q: {a}",)),
        ("stop=@", ("@",)),
        ("stop=[a, b]", ("a", "b")),
        ("stop=5", (5,)),
        ("stop=[5, 6]", (5, 6)),
        ("stop=[]", ()),
        ("stop=null", None),
        ("stop=###", ("###",)),
        ("stop=\n", ("\n",)),
    ],
)
def test_one_text_is_a_list_of_one(override: str, stop: tuple[str | int, ...] | None):
    assert read(SamplingConfig, None, [override]).stop == stop


def test_files_may_have_one_text_for_a_list():
    assert SamplingConfig.model_validate({"stop": "</answer>"}).stop == ("</answer>",)
    with pytest.raises(ConfigError, match=r"'stop\.0' takes a text or a whole number"):
        build(SamplingConfig, {"stop": [True]}, "run.yaml")


@pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.__name__)
def test_every_key_of_a_file_is_one_of_the_command_line(kind: type[BaseModel]):
    for path in paths(kind):
        assert forms_at(kind, path.split(".")), path
        override = f"{path.replace('.0', '[0]')}=null"
        values: Any = apply_overrides({}, [override], kind)
        for part in path.split("."):
            values = values[int(part)] if isinstance(values, list) else values[part]
