"""Tests of a program: statements that must hold after it, or input with its expected output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tinsmith.rl.sandbox.execution import execute

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "py", "python3")


def code_of(text: str) -> str:
    """The program of a reply: its last block of Python, else its last block, else all of it."""
    blocks = [(language.lower(), code) for language, code in _BLOCK.findall(text)]
    python = [code for language, code in blocks if language in _PYTHON]
    return (python or [code for _, code in blocks] or [text])[-1]


def read_tests(value: Any, name: str) -> list[dict[str, str]]:
    """The tests in a field of a task: one or several texts of statements, or inputs and outputs.

    Each is {statements} or {input, output}. A text that holds JSON is parsed. Raises ValueError for anything else.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):  # statements may begin with a list or a dictionary too
            value = json.loads(value)
    if isinstance(value, Mapping) and value.get("fn_name"):
        raise ValueError(f"{name}: tests with fn_name are not supported; write them as statements, such as assert …")
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        inputs, outputs = value["inputs"], value["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"{name} has {len(inputs)} inputs and {len(outputs)} outputs")
        value = [{"input": each, "output": output} for each, output in zip(inputs, outputs, strict=True)]
    entries = value if isinstance(value, list | tuple) else [value]
    tests = [_test(each, f"{name}[{number}]") for number, each in enumerate(entries) if each not in ("", None)]
    if not tests:
        raise ValueError(f"{name} holds no tests")
    return tests


def _test(entry: Any, name: str) -> dict[str, str]:
    if isinstance(entry, str):
        return {"statements": entry}
    if isinstance(entry, Mapping) and "input" in entry and "output" in entry:
        return {key: _lines(entry[key], f"{name}.{key}") for key in ("input", "output")}
    raise ValueError(f"{name} is neither a text of statements nor {{input, output}}")


def _lines(value: Any, name: str) -> str:
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is a {type(value).__name__}, and must be a text or a list of lines")
    return value


def run_tests(
    code: str, setup: str, tests: Sequence[Mapping[str, str]], settings: Mapping[str, Any], stop_early: bool
) -> list[bool]:
    """Whether the program passes each test, each in a new process. Those after a failure are not run if `stop_early`.

    Statements pass if they end without an exception; output passes if the exit code is 0 and its lines are those
    expected, without white space at their ends and empty lines at the end. Raises ConfigError without a sandbox.
    """
    passed: list[bool] = []
    for test in tests:
        if stop_early and not all(passed):
            break
        parts = [("setup.py", setup)] if setup else []
        parts.append(("program.py", code))
        if "statements" in test:
            passed.append(execute([*parts, ("test.py", test["statements"])], settings).completed)
        else:
            execution = execute(parts, settings, stdin=test["input"])
            passed.append(execution.ending == "done" and _same_lines(execution.output, test["output"]))
    return passed + [False] * (len(tests) - len(passed))


def _same_lines(output: str, expected: str) -> bool:
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return first == second
