"""The table of Trinity's keys: each is taken over with an effect, or noted, or refused; none is silently ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dialects.trinity.examples import EXAMPLES, NOTED, ONE_LIST, REFUSES, TASKSETS, Pairs
from tests.dialects.trinity.files import SMALL, laid, read
from tinsmith.dialects import find_dialect
from tinsmith.dialects.base import Copied, Ignored, Key, Refused, Translated
from tinsmith.dialects.trinity.translate import file_keys
from tinsmith.errors import ConfigError

KEYS = list(file_keys())
TAKEN = [key for key in KEYS if isinstance(key.fate, Copied | Translated)]
SAID = [key for key in KEYS if isinstance(key.fate, Ignored)]
REFUSED = [key for key in KEYS if isinstance(key.fate, Refused)]


def each(found: list[Key]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("key", found, ids=lambda key: key.path)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text("{{ messages[0] }}")


def another(key: Key) -> Any:
    """A value that is not the default."""
    match key.default:
        case bool():
            return not key.default
        case int() | float():
            return key.default + 1
        case dict():
            return {"some": 1}
        case tuple():
            return [{"some": 1}] if "dict" in key.type else ["some"]
    if "tuple" in key.type:
        return [{"some": 1}]
    if "dict" in key.type:
        return {"some": 1}
    if "Literal" in key.type:
        return next(
            one
            for one in ("explorer_driven", "memory", "tinker", "asynchronous", "plaintext", "sql")
            if one in key.type
        )
    return 3 if "int" in key.type or "float" in key.type else key.type == "bool" or "some"


def beside(key: Key) -> Pairs:
    """What a key's own list entry wants."""
    if key.path.startswith(TASKSETS):
        return (*ONE_LIST, (f"{TASKSETS}.path", "some/data"))
    if key.path.startswith("buffer.explorer_input.eval_tasksets[]"):
        return (("buffer.explorer_input.eval_tasksets[].path", "some/data"),)
    return (("explorer.auxiliary_models[].model_path", "one"),) if "auxiliary_models" in key.path else ()


def test_the_table_has_every_fate_and_no_key_twice():
    paths = [key.path for key in KEYS]
    assert len(paths) == len(set(paths))
    assert all((TAKEN, SAID, REFUSED))
    assert {"model.tinker.rank", "algorithm.kl_loss_fn_args", "synchronizer.sync_offset"} <= set(paths)


@each(TAKEN)
def test_what_is_taken_over_changes_the_run(key: Key, tmp_path: Path):
    value, pairs = REFUSES.get(key.path) or NOTED.get(key.path) or EXAMPLES[key.path]
    if key.path in NOTED:
        assert [note for note in read(tmp_path, *pairs, (key.path, value)).notes if place(key) in note]
        return
    if key.path in REFUSES:
        with pytest.raises(ConfigError, match=key.path.split(".")[-1].replace("_eval", "")):
            read(tmp_path, *pairs, (key.path, value))
        return
    without, with_it = read(tmp_path, *pairs), read(tmp_path, *pairs, (key.path, value))
    assert without.settings.model_dump() != with_it.settings.model_dump()


def contexts(found: list[Key]) -> dict[Pairs, list[Key]]:
    """Keys that can stand in one file, by what must stand there beside them."""
    kinds: dict[Pairs, list[Key]] = {}
    for key in found:
        kinds.setdefault(beside(key), []).append(key)
    return kinds


def place(key: Key) -> str:
    return key.path.replace("[]", "[0]").replace("*", "some")


def test_what_has_no_meaning_is_said_once(tmp_path: Path):
    for pairs, found in contexts(SAID).items():
        notes = read(tmp_path, *pairs, *((key.path, another(key)) for key in found)).notes
        for key in found:
            told = [note for note in notes if place(key) in note.partition(":")[0].split(", ")]
            assert len(told) == 1, key
            assert isinstance(key.fate, Ignored)
            assert key.fate.why in told[0]


def test_what_is_not_set_is_not_said(tmp_path: Path):
    assert [note for note in read(tmp_path).notes if "rank is not set" not in note] == []


def test_what_is_refused_says_why_and_what_to_do(tmp_path: Path):
    for pairs, found in contexts(REFUSED).items():
        with pytest.raises(ConfigError) as refusal:
            read(tmp_path, *pairs, *((key.path, another(key)) for key in found))
        for key in found:
            assert isinstance(key.fate, Refused)
            assert f"'{place(key)}': {key.fate.reason} {key.fate.fix}" in str(refusal.value)


def test_what_is_refused_may_have_its_default(tmp_path: Path):
    for pairs, found in contexts([key for key in REFUSED if key.default is not None]).items():
        read(tmp_path, *pairs, *((key.path, plain(key.default)) for key in found))


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_a_misspelt_key_is_refused_with_the_right_one(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no key") as refusal:
        read(tmp_path, *((f"{key.path}x", 1) for key in KEYS if not key.path.startswith(TASKSETS)))
    faults = str(refusal.value).splitlines()
    for key in KEYS:
        if not key.path.startswith(TASKSETS):
            wrong = f"there is no key '{key.path}x'".replace("[]", ".0").replace("*", "some")
            assert any(wrong in fault and "Did you mean" in fault for fault in faults), key


def test_faults_are_told_together(tmp_path: Path):
    values = laid(laid(SMALL, "buffer.batch_size", "abc"), "modell", {})
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, values=values)
    assert "'buffer.batch_size'" in str(refusal.value)
    assert "Did you mean 'model'?" in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "whose"),
    [
        ({"buffer": {"type": "file"}, "sync": {"style": "live"}}, None),
        ({"buffer": {"replay": {"enable": True}}}, None),
        ({"buffer": {"batch_size": 8}}, "Trinity-RFT"),
        ({"buffer": {"explorer_input": {}}}, "Trinity-RFT"),
        ({"model": {"model_path": "m"}}, "Trinity-RFT"),
    ],
)
def test_a_buffer_is_trinity_s_by_what_it_says(values: dict[str, Any], whose: str | None):
    found = find_dialect(values)
    assert (found and found.name) == whose
