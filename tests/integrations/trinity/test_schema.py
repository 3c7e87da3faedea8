"""Every key of Trinity's files is copied, translated, noted or refused; none is ignored silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trinity.examples import EXAMPLES, NOTED, ONE_LIST, REFUSES, TASKSETS, Pairs
from tests.integrations.trinity.files import SMALL, read, with_key
from tinsmith.dialects import find_dialect
from tinsmith.dialects.base import Copied, Ignored, Key, Refused, Translated
from tinsmith.errors import ConfigError
from tinsmith.integrations.trinity.files.translate import file_keys

KEYS = list(file_keys())
TRANSLATED = [key for key in KEYS if isinstance(key.fate, Copied | Translated)]
IGNORED = [key for key in KEYS if isinstance(key.fate, Ignored)]
REFUSED = [key for key in KEYS if isinstance(key.fate, Refused)]


def each(entries: list[Key]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("key", entries, ids=lambda key: key.path)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text("{{ messages[0] }}")


def another(key: Key) -> Any:
    """A value other than the default."""
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
            choice
            for choice in ("explorer_driven", "memory", "tinker", "asynchronous", "plaintext", "sql")
            if choice in key.type
        )
    return 3 if "int" in key.type or "float" in key.type else key.type == "bool" or "some"


def required_with(key: Key) -> Pairs:
    """Keys that the entry of a list needs for this key to be read."""
    if key.path.startswith(TASKSETS):
        return (*ONE_LIST, (f"{TASKSETS}.path", "some/data"))
    if key.path.startswith("buffer.explorer_input.eval_tasksets[]"):
        return (("buffer.explorer_input.eval_tasksets[].path", "some/data"),)
    return (("explorer.auxiliary_models[].model_path", "one"),) if "auxiliary_models" in key.path else ()


def test_keys_are_unique_and_cover_every_fate():
    paths = [key.path for key in KEYS]
    assert len(paths) == len(set(paths))
    assert all((TRANSLATED, IGNORED, REFUSED))
    assert {"model.tinker.rank", "algorithm.kl_loss_fn_args", "synchronizer.sync_offset"} <= set(paths)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of the small file. They name no folder."""
    return read(tmp_path_factory.mktemp("plain")).settings.model_dump()


@each(TRANSLATED)
def test_translated_key_changes_the_run(key: Key, tmp_path: Path, plain_run: dict[str, Any]):
    value, pairs = REFUSES.get(key.path) or NOTED.get(key.path) or EXAMPLES[key.path]
    if key.path in NOTED:
        assert [note for note in read(tmp_path, *pairs, (key.path, value)).notes if place(key) in note]
        return
    if key.path in REFUSES:
        with pytest.raises(ConfigError, match=key.path.split(".")[-1].replace("_eval", "")):
            read(tmp_path, *pairs, (key.path, value))
        return
    before = read(tmp_path, *pairs).settings.model_dump() if pairs else plain_run
    assert before != read(tmp_path, *pairs, (key.path, value)).settings.model_dump()


def contexts(entries: list[Key]) -> dict[Pairs, list[Key]]:
    """Keys grouped by the other keys that must be set with them."""
    kinds: dict[Pairs, list[Key]] = {}
    for key in entries:
        kinds.setdefault(required_with(key), []).append(key)
    return kinds


def place(key: Key) -> str:
    return key.path.replace("[]", "[0]").replace("*", "some")


def test_ignored_key_is_noted_once(tmp_path: Path):
    for pairs, values in contexts(IGNORED).items():
        notes = read(tmp_path, *pairs, *((key.path, another(key)) for key in values)).notes
        for key in values:
            matches = [note for note in notes if place(key) in note.partition(":")[0].split(", ")]
            assert len(matches) == 1, key
            assert isinstance(key.fate, Ignored)
            assert key.fate.why in matches[0]


def test_unset_key_is_not_noted(tmp_path: Path):
    assert [note for note in read(tmp_path).notes if "rank is not set" not in note] == []


def test_refused_key_names_reason_and_fix(tmp_path: Path):
    for pairs, values in contexts(REFUSED).items():
        with pytest.raises(ConfigError) as refusal:
            read(tmp_path, *pairs, *((key.path, another(key)) for key in values))
        for key in values:
            assert isinstance(key.fate, Refused)
            assert f"'{place(key)}': {key.fate.reason} {key.fate.fix}" in str(refusal.value)


def test_refused_key_may_have_its_default(tmp_path: Path):
    for pairs, values in contexts([key for key in REFUSED if key.default is not None]).items():
        read(tmp_path, *pairs, *((key.path, plain(key.default)) for key in values))


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_misspelt_key_is_refused_with_the_nearest(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no key") as refusal:
        read(tmp_path, *((f"{key.path}x", 1) for key in KEYS if not key.path.startswith(TASKSETS)))
    faults = str(refusal.value).splitlines()
    for key in KEYS:
        if not key.path.startswith(TASKSETS):
            wrong = f"there is no key '{key.path}x'".replace("[]", ".0").replace("*", "some")
            assert any(wrong in fault and "Did you mean" in fault for fault in faults), key


def test_schema_faults_are_reported_together(tmp_path: Path):
    values = with_key(with_key(SMALL, "buffer.batch_size", "abc"), "modell", {})
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, values=values)
    assert "'buffer.batch_size'" in str(refusal.value)
    assert "Did you mean 'model'?" in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"buffer": {"type": "file"}, "sync": {"style": "live"}}, None),
        ({"buffer": {"replay": {"enable": True}}}, None),
        ({"buffer": {"batch_size": 8}}, "Trinity-RFT"),
        ({"buffer": {"explorer_input": {}}}, "Trinity-RFT"),
        ({"model": {"model_path": "m"}}, "Trinity-RFT"),
    ],
)
def test_dialect_is_recognized_by_its_keys(values: dict[str, Any], name: str | None):
    dialect = find_dialect(values)
    assert (dialect and dialect.name) == name
