"""Rows come from files, tables and databases; operators change rows before they become tasks."""

from __future__ import annotations

import json
import sqlite3

import pytest

from tinsmith.errors import ConfigError
from tinsmith.rl.data.row_mapping import RowMapping
from tinsmith.rl.data.row_operators import function
from tinsmith.rl.data.row_sources import Files, Hub, InlineRows, Jsonl, Sql

ROWS = [{"question": f"{n}+{n}?", "answer": f"It is\n#### {2 * n}", "level": 5 - n} for n in range(5)]


@pytest.fixture(autouse=True)
def no_shared_cache(tmp_path, monkeypatch):
    """Gives each test its own cache of the datasets package."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def jsonl(tmp_path):
    """JSON Lines file of ROWS."""
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


@pytest.fixture
def database(tmp_path):
    """URL of a SQLite database with the table sums."""
    file = tmp_path / "tasks.db"
    with sqlite3.connect(file) as db:
        db.execute("CREATE TABLE sums (id INTEGER PRIMARY KEY, question TEXT, answer TEXT)")
        db.executemany("INSERT INTO sums VALUES (?, ?, ?)", [(9, "9?", "#### 9"), (1, "1?", "#### 1")])
    db.close()
    return f"sqlite:///{file}"


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_csv_parquet_and_jsonl_give_the_same_tasks(tmp_path, kind):
    import pandas

    file = tmp_path / f"sums.{kind}"
    table = pandas.DataFrame(ROWS)
    {
        "csv": lambda: table.to_csv(file, index=False),
        "parquet": lambda: table.to_parquet(file),
        "jsonl": lambda: table.to_json(file, orient="records", lines=True),
    }[kind]()
    tasks = Files(path=str(tmp_path / f"*.{kind}"), answer_after="####").load()
    assert [task.answer for task in tasks] == ["0", "2", "4", "6", "8"]


@pytest.mark.parametrize("inside", ["", "main"])
def test_hub_prefers_a_local_folder_of_the_same_name(inside, tmp_path, monkeypatch):
    folder = tmp_path / "openai" / "gsm8k" / inside
    folder.mkdir(parents=True)
    for split, question in {"train": "2 + 2?", "test": "3 + 3?"}.items():
        (folder / f"{split}.jsonl").write_text(json.dumps({"question": question, "answer": "#### 4"}))
    monkeypatch.chdir(tmp_path)
    (task,) = Hub(name="openai/gsm8k", subset="main", answer_after="####").load()
    assert (task.id, task.messages[-1].content, task.answer) == ("openai/gsm8k/0", "2 + 2?", "4")
    assert Hub(name="openai/gsm8k", subset="main", split="test").load()[0].messages[-1].content == "3 + 3?"


def test_rows_of_the_run_file_are_tasks(jsonl):
    tasks = InlineRows(data=ROWS, answer_after="####", name="sums").load()
    assert list(tasks) == list(Jsonl(path=str(jsonl), answer_after="####").load())
    with pytest.raises(ValueError, match="row 1 is a str"):
        InlineRows(data=[ROWS[0], "2+2?"])
    with pytest.raises(ValueError, match="the rows are a str"):
        InlineRows(data="5 rows, sha256 0")


def test_rows_are_recorded_by_their_hash():
    def record(rows):
        return InlineRows(data=rows).model_dump(mode="json")["data"]

    assert record(ROWS).startswith("5 rows, sha256 ")
    assert record(ROWS) == record([dict(reversed(row.items())) for row in ROWS])
    assert len({record(rows) for rows in (ROWS, ROWS[::-1], ROWS[:4], [*ROWS[:4], {**ROWS[4], "level": 0}])}) == 4


def test_files_reject_unknown_extensions(tmp_path):
    (tmp_path / "sums.xlsx").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"does not have the extension.*CSV"):
        Files(path=str(tmp_path / "sums.xlsx")).load()


def test_sql_table_is_ordered_by_primary_key(database):
    assert [task.answer for task in Sql(url=database, table="sums", answer_after="####").load()] == ["1", "9"]


def test_sql_query_keeps_its_order(database):
    source = Sql(url=database, query="SELECT question AS q, id FROM sums ORDER BY id DESC", prompt="{q}", answer="{id}")
    assert [(task.messages[0].content, task.answer) for task in source.load()] == [("9?", "9"), ("1?", "1")]


def test_sql_names_the_table_that_cannot_be_read(database):
    with pytest.raises(ConfigError, match="Cannot read the rows of none"):
        Sql(url=database, table="none").load()
    with pytest.raises(ValueError, match="either table or query"):
        Sql(url=database)


def test_operators_filter_map_sort_and_take(tmp_path, jsonl):
    own = tmp_path / "own.py"
    own.write_text(
        "def even(row):\n    return row['level'] % 2 == 0\n\n"
        "def louder(row):\n    return {'question': row['question'].replace('?', '!')}\n"
    )
    operators = [
        {"type": "filter", "by": f"{own}:even"},
        {"type": "map", "by": f"{own}:louder"},
        {"type": "sort", "by": ["level"]},
        {"type": "take", "skip": 1, "count": 5},
    ]
    tasks = Jsonl.model_validate({"path": str(jsonl), "operators": operators}).load()
    assert [task.messages[0].content for task in tasks] == ["1+1!"]
    with pytest.raises(ConfigError, match="no rows remain"):
        Jsonl.model_validate({"path": str(jsonl), "operators": [{"type": "take", "skip": 9}]}).load()
    with pytest.raises(ConfigError, match="have no field 'size'"):
        Jsonl.model_validate({"path": str(jsonl), "operators": [{"type": "sort", "by": ["size"]}]}).load()


def test_function_is_imported_from_module_or_file():
    assert function("json:dumps")([1]) == "[1]"
    for name, sentence in [
        ("dumps", "does not name a function"),
        ("json:none", "json has no 'none'"),
        ("json:__name__", "is not a function"),
        ("no_such_module:f", "cannot be imported"),
        ("/no/such.py:f", "cannot be imported"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            function(name)


def test_task_has_system_message_and_reply_prefix():
    row = {"question": "q", "answer": "a", "say": "Be kind.", "none": ""}
    task = RowMapping(system="Use \\boxed{}.", reply_prefix="<think>").task("r/0", row)
    assert [(message.role, message.content) for message in task.messages] == [
        ("system", "Use \\boxed{}."), ("user", "q"), ("assistant", "<think>"),
    ]  # fmt: skip
    assert RowMapping(system="Brief.", system_key="say").task("r/0", row).messages[0].content == "Be kind."
    assert RowMapping(system="Brief.", system_key="none").task("r/0", row).messages[0].content == "Brief."
    with pytest.raises(ConfigError, match="no field 'mood'"):
        RowMapping(system_key="mood").task("r/0", row)


def test_demonstration_is_a_reply_an_answer_or_a_chat():
    row = {"question": "2+2?", "answer": "Two and two.\n#### 4", "chat": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
    ]}  # fmt: skip
    assert RowMapping(answer_after="####").demonstration("r/0", row).messages[-1].content == "Two and two.\n#### 4"
    assert RowMapping(reply="<{answer}>").demonstration("r/0", row).messages[-1].content == "<Two and two.\n#### 4>"
    assert [message.content for message in RowMapping(prompt="{chat}").demonstration("r/0", row).messages] == [
        "hi",
        "ho",
    ]
    as_text = {**row, "chat": json.dumps(row["chat"])}
    assert RowMapping(prompt="{chat}").demonstration("r/0", as_text) == RowMapping(prompt="{chat}").demonstration(
        "r/0", row
    )
    assert RowMapping().text("r/0", row).messages[0].content == "2+2?"
    with pytest.raises(ConfigError, match="has no reply to train on"):
        RowMapping(answer="").demonstration("r/0", row)


def test_pair_has_chosen_and_rejected_messages():
    said = [{"role": "assistant", "content": "fine"}]
    row = {
        "question": "how?",
        "answer": "",
        "good": said,
        "whole": [{"role": "user", "content": "how?"}, *said],
        "bad": "no",
    }
    pair = RowMapping(chosen="{good}", rejected="{bad}").demonstration("r/0", row)
    assert [message.content for message in pair.messages] == ["how?", "fine"]
    assert [message.content for message in pair.rejected] == ["how?", "no"]
    assert RowMapping(chosen="{whole}", rejected="{bad}").demonstration("r/0", row) == pair
    with pytest.raises(ConfigError, match="has no reply to train on"):
        RowMapping(chosen="{good}").demonstration("r/0", row)
