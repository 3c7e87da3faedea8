"""A run file and its overrides become a validated settings object, or an error that names the key and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import Field, create_model

from tinsmith.errors import ConfigError
from tinsmith.settings import Settings, field_docs, read, to_yaml


class Jsonl(Settings):
    type: Literal["jsonl"] = "jsonl"
    path: str


class Sums(Settings):
    type: Literal["sums"] = "sums"
    size: int = 10


Source = Annotated[Jsonl | Sums, Field(discriminator="type")]


class Model(Settings):
    rank: int = Field(default=8, ge=1)


class Run(Settings):
    steps: int = 1
    mode: str = "both"
    model: Model = Model()
    source: Source = Sums()
    more: tuple[Source, ...] = ()
    options: dict[str, float] = Field(default_factory=dict)


@pytest.fixture
def run_file(tmp_path: Path):
    """Writes a run file and returns its path."""

    def write(text: str, name: str = "run.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def fault(file: Path, *overrides: str) -> str:
    """Error text of a run file."""
    with pytest.raises(ConfigError) as caught:
        read(Run, file, overrides)
    return str(caught.value).replace(str(file), "run.yaml")


def test_yaml_and_toml_give_equal_settings(run_file):
    yaml = read(Run, run_file("steps: 3\nmodel: {rank: 4}\nsource: {type: jsonl, path: a}\n"))
    toml = read(Run, run_file('steps = 3\n[model]\nrank = 4\n[source]\ntype = "jsonl"\npath = "a"\n', "run.toml"))
    assert yaml == toml == Run(steps=3, model=Model(rank=4), source=Jsonl(path="a"))


def test_empty_file_gives_the_defaults(run_file):
    assert read(Run, run_file("")) == Run()


def test_overrides_replace_values_of_the_file_and_list_items(run_file):
    file = run_file("steps: 3\nmore: [{type: sums, size: 1}]\n")
    config = read(
        Run, file, ["steps=4", "model.rank=2", "more.0.size=5", "options.beta=0.5", "source={type: sums, size: 7}"]
    )
    assert config == Run(steps=4, model=Model(rank=2), more=(Sums(size=5),), options={"beta": 0.5}, source=Sums(size=7))


def test_environment_variables_are_interpolated_with_defaults(run_file, monkeypatch):
    monkeypatch.setenv("TINSMITH_TEST_STEPS", "5")
    assert read(Run, run_file("steps: ${oc.env:TINSMITH_TEST_STEPS}")).steps == 5
    assert read(Run, run_file("steps: ${oc.env:TINSMITH_NO_SUCH,6}")).steps == 6
    assert "TINSMITH_NO_SUCH" in fault(run_file("steps: ${oc.env:TINSMITH_NO_SUCH}"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stepz: 3", "run.yaml: there is no key 'stepz'. Did you mean 'steps'?"),
        ("model: {rnk: 3}", "run.yaml: there is no key 'model.rnk'. Did you mean 'model.rank'?"),
        ("modle: {rank: 3}", "run.yaml: there is no key 'modle'. Did you mean 'model'?"),
        ("modle: explore", "run.yaml: there is no key 'modle'. Did you mean 'mode'?"),
        ("optins: {a: 3}", "run.yaml: there is no key 'optins'. Did you mean 'options'?"),
        ("rank: 3", "run.yaml: there is no key 'rank'. Did you mean 'model.rank'?"),
        ("sizee: 3", "run.yaml: there is no key 'sizee'. Did you mean 'source.size'?"),
        ("zzz: 3", "run.yaml: there is no key 'zzz'. Known here: mode, model, more, options, source, steps."),
        ("source: {type: sums, siz: 2}", "run.yaml: there is no key 'source.siz'. Did you mean 'source.size'?"),
        ("more: [{type: sums, siz: 2}]", "run.yaml: there is no key 'more.0.siz'. Did you mean 'more.0.size'?"),
        (
            "source: {type: jsonl, path: a, size: 2}",
            "run.yaml: there is no key 'source.size'. It belongs to another type; this type has: path, type.",
        ),
        ("source: {type: jsonl}", "run.yaml: 'source.path' is missing."),
        ("source: {type: jsnl}", "run.yaml: 'source' has no type 'jsnl'. Did you mean 'jsonl'?"),
        ("source: {size: 3}", "run.yaml: 'source' has no type. Add type: one of jsonl, sums."),
        ("more: [{size: 3}]", "run.yaml: 'more.0' has no type. Add type: one of jsonl, sums."),
        ("model: {rank: 0}", "run.yaml: 'model.rank': Input should be greater than or equal to 1 (got 0)."),
        ("- 1", "run.yaml contains a list instead of keys and values. Write `key: value` lines."),
    ],
)
def test_error_names_the_file_the_key_and_the_fix(run_file, text, sentence):
    assert fault(run_file(text)) == sentence


def test_every_error_has_its_line(run_file):
    lines = fault(run_file("steps: many\nmodel: {rnk: 3}")).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("run.yaml: ") for line in lines)


def test_error_in_an_override_names_the_command_line(run_file):
    file = run_file("steps: 3")
    assert fault(file, "model.rnk=5") == ("the command line: there is no key 'model.rnk'. Did you mean 'model.rank'?")
    assert fault(file, "steps") == "the command line: 'steps' is not an override. Write key=value, as in steps=20."
    assert fault(file, "more.5.size=1").startswith("the command line: ")


def test_missing_or_unreadable_file_is_named(run_file, tmp_path):
    with pytest.raises(ConfigError, match="There is no file"):
        read(Run, tmp_path / "none.yaml")
    assert "run.yaml cannot be read" in fault(run_file("steps: ["))
    with pytest.raises(ConfigError, match=r"run\.toml cannot be read"):
        read(Run, run_file("steps = = 3", "run.toml"))


TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="$?\ufeff")),
    st.text("0123456789eE+-._xobnaif:", max_size=6),
    st.sampled_from(
        ("1e5", "-1E-4", "1_0e3", ".5e3", "null", "yes", "off", "~", "2026-11-26", "1:30", "0o7", "é", "🙂")
    ),
)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS)


@settings(max_examples=40)
@given(st.dictionaries(TEXTS, st.recursive(VALUES, lambda each: st.lists(each) | st.dictionaries(TEXTS, each))))
def test_written_values_are_read_back(values):
    text = to_yaml(values)
    assert OmegaConf.to_container(OmegaConf.create(text)) == values
    assert yaml.load(text, yaml.CSafeLoader) == values


class Documented(Settings):
    first: int = 1
    """The first.

    With more."""
    second: int = 2
    """The second."""
    third: int = 3


class Heir(Documented):
    second: int = 4
    third: int = 5
    """The third, of the heir."""


def test_docstrings_under_fields_are_their_help():
    class Local(Heir):
        first: int = 0
        """The first, in a function."""

    assert field_docs(Documented) == {"first": "The first.\n\nWith more.", "second": "The second."}
    assert field_docs(Heir) == {"first": "The first.\n\nWith more.", "third": "The third, of the heir."}
    assert field_docs(Local)["first"] == "The first, in a function."
    assert field_docs(create_model("Made", __base__=Heir, more=(int, 1))) == field_docs(Heir)
