"""Overrides in Hydra's syntax."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinsmith.errors import ConfigError
from tinsmith.integrations.rllm.files.overrides import Override, override_key, parse_override


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-1", -1),
        ("1_000", 1000),
        ("01", "01"),
        ("2e-5", 2e-5),
        (".5", 0.5),
        ("1e6", 1e6),
        ("inf", math.inf),
        ("null", None),
        ("true", True),
        ("False", False),
        ("", ""),
        ("'null'", "null"),
        ("'8'", "8"),
        ('"a, b"', "a, b"),
        (r"'it\'s'", "it's"),
        (r"a\,b", "a,b"),
        ("two words", "two words"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("http://localhost:8000/v1?a=b", "http://localhost:8000/v1?a=b"),
        ("tinker://4a1939e6:train:0/weights/final", "tinker://4a1939e6:train:0/weights/final"),
        ("${oc.env:NAME,else}", "${oc.env:NAME,else}"),
        ("/out/${model.name}", "/out/${model.name}"),
        ("['console','wandb']", ["console", "wandb"]),
        ("[console,wandb]", ["console", "wandb"]),
        ("['console', 'ui']", ["console", "ui"]),
        ("[]", []),
        ("[1,[2,x],null]", [1, [2, "x"], None]),
        ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}),
        ("{'a b': 'c,d'}", {"a b": "c,d"}),
    ],
)
def test_values_have_their_types(text: str, value: Any):
    assert parse_override(f"a.b={text}") == Override("set", "a.b", value)
    assert type(parse_override(f"a.b={text}").value) is type(value)


def test_prefixes_add_and_remove():
    assert parse_override("+a.b=1") == Override("add", "a.b", 1)
    assert parse_override("++a.b=1") == Override("add", "a.b", 1)
    assert parse_override("~a.b") == Override("remove", "a.b")
    assert parse_override("rllm/backend=tinker") == Override("set", "rllm.backend", "tinker")
    assert override_key("+a.b[0].c=1") == "a.b.0.c"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a", "is not an override"),
        ("=1", "is not an override"),
        ("a=1,2", "a sweep over several values"),
        ("a=choice(1,2)", "functions"),
        ("a@b=1", "packages"),
        ("a=[1", "it ends too early"),
        ("a=1]", "unexpected ']'"),
        ("a={b}", "unexpected '}'"),
        ("a='b", "a quote is not closed"),
    ],
)
def test_other_syntax_is_refused_by_name(text: str, problem: str):
    with pytest.raises(ConfigError) as refusal:
        parse_override(text)
    assert f"the command line: '{text}'" in str(refusal.value)
    assert problem in str(refusal.value)
    assert refusal.value.hint
