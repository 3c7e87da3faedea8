"""Parts of one's own that misbehave: one error each, which names the part and its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rl.scripted_run import run, settings
from tinsmith.errors import ConfigError

HERE = Path(__file__).name


def tasks(count: int = 30) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {n}?", "answer": n} for n in range(count)]


def section_of(kind: str, part: Callable[..., Any]) -> dict[str, Any]:
    """The sections of a run with a part."""
    train = part if kind == "source" else tasks
    order = {"order": part} if kind == "order" else {}
    sections = {
        "filter": {"filters": [part]},
        "evaluation": {"eval": {"functions": [part]}},
        "callback": {"callbacks": [part]},
        "monitor": {"monitors": [part]},
        "advantage": {"algorithm": {"advantage": part}},
        "algorithm": {"algorithm": part},
    }
    return {"tasks": {"train": train, "held_out": 2, **order}, **sections.get(kind, {})}


async def _waiting(step: int, metrics: Any) -> None: ...


class _NoMethods: ...


@pytest.mark.parametrize(
    ("kind", "part", "sentence"),
    [
        ("source", lambda: [], "returned no tasks"),
        ("source", lambda: [3], "returned 3 as its task 0"),
        ("source", lambda: {}["nowhere"], "failed: KeyError: 'nowhere'"),
        ("order", lambda tasks: [0], r"returned \[0\] for 28 tasks"),
        ("order", lambda tasks: [99] * len(tasks), "for 28 tasks"),
        ("order", lambda tasks: [0.5] * len(tasks), "for 28 tasks"),
        ("filter", lambda group: None, "returned None"),
        ("filter", lambda group: group.nothing, "failed: AttributeError"),
        ("evaluation", lambda policy: "high", "returned 'high'"),
        ("evaluation", lambda step: {"a": float("nan")}, "returned nan as a"),
        ("callback", lambda step: 3, "returned 3 from on_step"),
        ("callback", lambda run: run.nothing, "failed: AttributeError"),
        ("advantage", lambda groups: [[float("nan")] * len(group) for group in groups], "a number that is not finite"),
        ("advantage", lambda groups: [[[1.0] * 99] * len(group) for group in groups], r"shape \(99,\)"),
    ],
)
def test_part_that_misbehaves_is_named(kind: str, part: Callable[..., Any], sentence: str, tmp_path: Path) -> None:
    config = settings(tmp_path, **section_of(kind, part), steps=1)
    with pytest.raises(ConfigError, match=sentence) as caught:
        run(config)
    assert f"The {kind} " in caught.value.message
    assert f"{HERE}:{part.__code__.co_firstlineno}" in caught.value.message


@pytest.mark.parametrize(
    ("kind", "part", "sentence"),
    [
        ("callback", lambda nothing: None, "has the parameter 'nothing'"),
        ("monitor", _waiting, "metrics of a monitor is async"),
        ("monitor", _NoMethods, "is neither a function nor has it a method"),
        ("algorithm", lambda: 3, "returned 3"),
        ("algorithm", lambda: {"optimiser": {}}, "returned the key 'optimiser'. Did you mean 'optimizer'"),
        ("source", lambda size: [], "has no argument|needs the argument 'size'"),
    ],
)
def test_wrong_part_is_refused_with_the_file(
    kind: str, part: Callable[..., Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        settings(tmp_path, **section_of(kind, part))


def test_monitor_that_fails_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(step: int, metrics: Any) -> None:
        raise ValueError("no screen")

    assert run(settings(tmp_path, monitors=[failing], steps=1)).step == 1
    assert any("no screen" in record.message and HERE in record.message for record in caplog.records)


def test_order_learns_and_resumes(tmp_path: Path) -> None:
    def least_rewarded(tasks: Any, rewards: Any) -> Any:
        return (-1.0 * (rewards == rewards)).argsort(kind="stable")[::-1]  # those without a reward first

    def trained(name: str, *stops: int) -> Any:
        for steps in stops:
            sections = section_of("order", least_rewarded)
            state = run(settings(tmp_path / name, **sections, steps=steps, checkpoint={"every": 1}, eval={"every": 0}))
        return state.order

    assert trained("whole", 6) == trained("resumed", 3, 6)


def test_two_parts_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = (
        "from tinsmith import loss\n@loss('same')\ndef first(logprobs): ...\n@loss('same')\ndef second(logprobs): ...\n"
    )
    (file := tmp_path / "twice_the_same.py").write_text(code)
    with pytest.raises(ConfigError, match="twice_the_same:first and twice_the_same:second are both the loss 'same'"):
        settings(tmp_path, plugins=str(file))
