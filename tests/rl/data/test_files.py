"""Files of data become the tasks that they say, or an error of one sentence that names the file and the line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.errors import TinsmithError
from tinsmith.rl.data.demonstrations import DemonstrationsConfig
from tinsmith.rl.data.row_sources import Files, Hub, Jsonl
from tinsmith.rllm import Dataset


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    """Gives each test its own cache of the datasets package."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def answers(source) -> list[tuple[str, str]]:
    """Prompt and answer of each task."""
    return [(task.messages[-1].content, task.answer) for task in source.load()]


def fault(source) -> str:
    """Message and hint of the error that a source raises."""
    with pytest.raises(TinsmithError) as caught:
        source.load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def stored(path: Path, content: str | bytes) -> str:
    """Write a file and return its path."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# Answers as they are written in the file, and the text that a task has.
WRITTEN = [
    ('"2021-03-04"', "2021-03-04"),
    ('"2021-03-04T10:00:00"', "2021-03-04T10:00:00"),
    ('"10:30"', "10:30"),
    ('"007"', "007"),
    ('"NA"', "NA"),
    ('"None"', "None"),
    ('"true"', "true"),
    ("9223372036854775808", "9223372036854775808"),
    ("1" + "0" * 40, "1" + "0" * 40),
    ("-7", "-7"),
    ("72", "72"),
    ("72.0", "72.0"),
    ("1.10", "1.10"),
    ("1e5", "1e5"),
    ("12345678901234567890.123456789", "12345678901234567890.123456789"),
    ("true", "true"),
    ('["a", "é"]', '["a", "é"]'),
    ('{"b": 1, "a": null}', '{"b": 1, "a": null}'),
]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json", "list.json"])
def test_json_values_become_the_text_of_the_file(tmp_path, suffix):
    objects = [f'{{"question": "q{n}", "answer": {written}, "n{n}": 0}}' for n, (written, _) in enumerate(WRITTEN)]
    text = f"[{', '.join(objects)}]" if suffix == "list.json" else "\n".join(objects)
    path = stored(tmp_path / f"rows.{suffix}", text)
    wanted = [(f"q{n}", answer) for n, (_, answer) in enumerate(WRITTEN)]
    assert answers(Files(path=path)) == answers(Jsonl(path=path)) == wanted


CELLS = [
    "None",
    "NA",
    "null",
    "nan",
    "NaN",
    "007",
    "72",
    "1e5",
    "True",
    "2021-03-04",
    "10:30",
    "1,5",
    'a "b"',
    "x\r\ny",
]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_csv_values_are_text(tmp_path, separator):
    def cell(text: str) -> str:
        return f'"{text.replace(chr(34), chr(34) * 2)}"' if set(text) & set(',;\t|"\r\n') else text

    lines = [
        separator.join(["question", "answer"]),
        *(separator.join([f" {n} ", cell(v)]) for n, v in enumerate(CELLS)),
    ]
    path = stored(tmp_path / "rows.csv", "\r\n".join(lines))
    assert answers(Files(path=path)) == [(f" {n} ", value) for n, value in enumerate(CELLS)]
    assert Dataset.load_data(path).data[5] == {"question": " 5 ", "answer": "007"}


def test_numbers_beside_a_gap_stay_as_written(tmp_path):
    path = stored(tmp_path / "rows.csv", "question,answer,level\na,72,\nb,,3\n")
    assert answers(Files(path=path, answer_optional=True)) == [("a", "72"), ("b", "")]
    path = stored(tmp_path / "rows.jsonl", '{"question": "a", "answer": 72}\n{"question": "b"}\n')
    assert answers(Files(path=path, answer_optional=True)) == [("a", "72"), ("b", "")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.jsonl", '\ufeff{"question": "q", "answer": "é"}\n\ufeff{"question": "r", "answer": "2"}'),
        ("utf16.jsonl", '{"question": "q", "answer": "é"}\n{"question": "r", "answer": "2"}'.encode("utf-16")),
        ("utf32.csv", "question,answer\nq,é\nr,2".encode("utf-32")),
        ("bom.csv", "\ufeffquestion,answer\r\nq,é\r\n\r\nr,2\r\n"),
        ("excel.csv", "sep=;\nquestion;answer\nq;é\nr;2\n"),
        ("mac.csv", "question,answer\rq,é\rr,2\r"),
        ("index.csv", ",question,answer\n0,q,é\n1,r,2\n"),
        ("blank.jsonl", '\n  \r\n{"question": "q", "answer": "é"}\r\n\r\n{"question": "r", "answer": "2"}\r\n\n'),
        ("pretty.json", json.dumps([{"question": "q", "answer": "é"}, {"question": "r", "answer": 2}], indent=1)),
        ("UPPER.CSV", "question,answer\nq,é\nr,2\n"),
    ],
)
def test_encodings_and_line_ends_are_read(tmp_path, name, content):
    assert answers(Files(path=stored(tmp_path / name, content))) == [("q", "é"), ("r", "2")]


def zstd_frames(content: bytes) -> bytes:
    """Content compressed as two frames."""
    return zstandard.compress(content[:900]) + zstandard.compress(content[900:])


COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
    "zstd": zstd_frames,
}


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("named", [True, False])
def test_compressed_files_are_read_and_cut_ones_refused(tmp_path, kind, named):
    lines = "".join(f'{{"question": "{n}?", "answer": "{n * n}"}}\n' for n in range(200))
    content = COMPRESS[kind](lines.encode())
    name = f"rows.jsonl{'.' + kind.removesuffix('d') if named else ''}"
    source = Files(path=stored(tmp_path / name, content))
    assert answers(source) == [(f"{n}?", str(n * n)) for n in range(200)]
    assert source.load()[3].id == "rows/3"
    for cut in (len(content) // 2, len(content) - 2):
        assert f"{name} cannot be decompressed" in fault(Files(path=stored(tmp_path / name, content[:cut])))


GOOD = '{"question": "q", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (GOOD + '{"question": "café"}', "line 2: .* no field 'answer'"),
        (GOOD + '{"question": "q", "answer": null}', "line 2 has no answer: 'answer' is null.*answer_optional"),
        (GOOD + '{"question": "q", "answer": " "}', "line 2 has no answer: 'answer' is empty"),
        (GOOD + '{"question": null, "answer": "1"}', "line 2 has no prompt: 'question' is null"),
        (GOOD + '{"question": "", "answer": "1"}', "line 2 has no prompt: 'question' is empty"),
        (GOOD + '{"question": "q", "anwser": 1}', "line 2: .* no field 'answer'.*Did you mean 'anwser'"),
        (GOOD + "\n" + '{"question": "q", "ans', "line 3 is not valid JSON: Unterminated string.*cut"),
        (GOOD + '{"question": "q",\n"answer": "1"}', "line 2 is not valid JSON.*next line"),
        (GOOD + '{"question": "q", "answer": "1"},', "line 2 ends with a comma.*Remove"),
        (GOOD + '{"question": "q", "answer": "1",}', "line 2 is not valid JSON"),
        (GOOD + GOOD.strip() + GOOD, "line 2 has more than one value"),
        (GOOD + '{"question": "q", "answer": "1", "answer": "2"}', "line 2 has the key 'answer' twice"),
        (GOOD + '{"question": "q", "answer": "1", "x": [{"y": 1, "y": 2}]}', "line 2 has the key 'y' twice"),
        (GOOD + '{"question": "q", "answer": NaN}', "line 2 has the value NaN, which is not JSON"),
        (GOOD + '{"question": "q", "answer": -Infinity}', "line 2 has the value -Infinity"),
        (GOOD + '{"question": "q \\uD83D", "answer": 1}', "line 2 has half of a character"),
        (GOOD + "[" * 100_000, "line 2 is nested too deeply"),
        (GOOD + '{"question": "q", "answer": ' + "9" * 5000 + "}", "line 2 has a number with too many digits"),
        (GOOD + "[1]", r"line 2 is not a JSON object: \[1\]"),
        (GOOD + "question,answer", "line 2 is not valid JSON"),
        (GOOD + "{'question': 'q'}", "line 2 is not valid JSON"),
        ('[{"question": "q", "answer": 1},\n\n{"question": "r", "answer": null}]', "line 3 has no answer"),
        ('[{"question": "q", "answer": 1},\n{"question": "r"', "line 2 is not valid JSON.*cut"),
        ('[{"question": "q", "answer": 1},\n', "line 2: the list has no end.*cut"),
        ('[{"question": "q", "answer": 1},\n]', "line 2 has a comma before the end"),
        ('[{"question": "q", "answer": 1}\n{"question": "q", "answer": 1}]', "line 2: a comma is missing"),
        ('[{"question": "q", "answer": 1}\n] []', "line 2 has more after the list"),
        ('[{"question": "q", "answer": 1},\n7]', "line 2 is not a JSON object: 7"),
        ('{\n "data": [\n {"question": "q"}]}', r"holds one JSON object over several lines.*\.data\[\]"),
        ("", "has no rows"),
        (" \n\r\n", "has no rows"),
        ("[]", "has no rows"),
        (b'{"question": "q"}\n{"question": "caf\xe9"}', "line 2 is not UTF-8: byte 0xe9 at position 18.*iconv"),
        (GOOD.encode("utf-16-le"), "line 1 contains a byte 0.*iconv -f UTF-16LE"),
        (GOOD.encode("utf-16")[:-1], "line 1 is not UTF-16"),
        (b"PAR1" + bytes(9), "is a Parquet file, not text.*files"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
            "is a pointer of Git LFS.*git lfs pull",
        ),
        (b"<!DOCTYPE html>\n<html>", "is a web page.*Download the file itself"),
        (b'{"question": ["q", "r"], "answer": ["1", "2"]}', "line 1: .* is not a chat"),
        (b"PK\x03\x04", "is a zip archive"),
    ],
)
@pytest.mark.parametrize("kind", [Jsonl, Files])
def test_invalid_json_names_the_line_and_the_fix(tmp_path, kind, content, sentence):
    message = fault(kind(path=stored(tmp_path / "rows.jsonl", content)))
    assert re.search(f"rows.jsonl.*{sentence}", message), message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("question,answer\nq,1\nr\n", "line 3 has 1 value, and the first line names 2 fields"),
        ('question,answer\n"q\n\n",1\nr,2,3\n', "line 5 has 3 values.*double quotes"),
        ('question,answer\nq,1\n"r,2\ns,3\n', "line 3: a double quote opens a value that does not end"),
        ('question,answer\nq,"a "b" c"\n', "line 2 has text after the double quote"),
        ("question,answer,answer\nq,1,2\n", "line 1 has the field 'answer' 2 times"),
        ("question,,\nq,1,2\n", "line 1 has 2 fields without a name"),
        ("question,answer\nq,1\nr,\n", "line 3 has no answer: 'answer' is empty"),
        ("question,answer\n", "has no rows"),
        ("", "has no rows"),
        ("frage,antwort\nq,1\n", "line 2: .* no field 'question'.*antwort, frage|line 2: .* no field 'answer'"),
        ("question,answer\nq,caf\xe9\n".encode("latin-1"), "line 2 is not UTF-8"),
    ],
)
def test_invalid_csv_names_the_line_and_the_fix(tmp_path, content, sentence):
    message = fault(Files(path=stored(tmp_path / "rows.csv", content)))
    assert re.search(f"rows.csv.*{sentence}", message), message


@pytest.mark.parametrize("kind", [Jsonl, Files])
def test_paths_without_a_readable_file_say_why(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    stored(tmp_path / "rows.jsonl", GOOD)
    assert "no data file rows.json. Did you mean 'rows.jsonl'?" in fault(kind(path="rows.json"))
    assert f"relative to the working directory {tmp_path}" in fault(kind(path="data/x.jsonl"))
    assert f"{tmp_path} is a folder, not a file" in fault(kind(path=str(tmp_path)))
    assert "is a URL, which is not fetched" in fault(kind(path="https://host/rows.jsonl"))
    assert "there is no user of this name" in fault(kind(path="~no-such-user/rows.jsonl"))
    assert "File name too long" in fault(kind(path="x" * 300 + ".jsonl"))
    assert "There is no data file" in fault(kind(path="a\0b.jsonl"))
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert "rows.jsonl cannot be read: Permission denied. Check its permissions." in fault(kind(path="rows.jsonl"))


def test_patterns_name_files_of_one_kind(tmp_path):
    for name, answer in (("b.csv", "question,answer\nb,2\n"), ("a.jsonl", '{"question": "a", "answer": 1}')):
        stored(tmp_path / name, answer)
    stored(tmp_path / "a[1].csv", "question,answer\nc,3\n")
    assert answers(Files(path=f"{tmp_path}/[ab].*")) == [("a", "1"), ("b", "2")]
    assert answers(Files(path=f"{tmp_path}/a[1].csv")) == [("c", "3")]
    assert "b.csv, line 2 has no answer" in fault(Files(path=f"{tmp_path}/[ab].*", answer_after="2"))
    assert "No file matches" in fault(Files(path=f"{tmp_path}/*.parquet"))
    assert "Set type to files for a pattern" in fault(Jsonl(path=f"{tmp_path}/*.jsonl"))
    assert "Set type to files, which reads csv" in fault(Jsonl(path=f"{tmp_path}/b.csv"))
    stored(tmp_path / "notes.md", "notes")
    assert "notes.md does not have the extension" in fault(Files(path=f"{tmp_path}/*"))


def test_tables_keep_their_values_and_name_the_row(tmp_path):
    import pandas

    rows = [{"question": "a", "answer": "NA"}, {"question": "b", "answer": "2021-03-04"}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    pandas.DataFrame([{"question": "c", "answer": None}]).to_parquet(tmp_path / "b.parquet")
    assert answers(Files(path=f"{tmp_path}/a.parquet")) == [("a", "NA"), ("b", "2021-03-04")]
    assert "row 3 has no answer: 'answer' is null" in fault(Files(path=f"{tmp_path}/*.parquet"))
    stored(tmp_path / "c.parquet", (tmp_path / "a.parquet").read_bytes()[:-9])
    assert "c.parquet" in fault(Files(path=f"{tmp_path}/*.parquet"))
    stored(tmp_path / "d.csv", "question,answer\n")
    assert "several formats" in fault(Files(path=f"{tmp_path}/[ad].*"))
    stored(tmp_path / "e.arrow", b"x" * 40)
    assert "Cannot load the dataset" in fault(Files(path=f"{tmp_path}/e.arrow"))


def test_tables_without_rows_or_data_say_so(tmp_path):
    import pandas

    pandas.DataFrame({"question": [], "answer": []}).to_parquet(tmp_path / "empty.parquet")
    stored(tmp_path / "pointer.parquet", "version https://git-lfs.github.com/spec/v1\n")
    assert "has no rows" in fault(Files(path=f"{tmp_path}/empty.parquet"))
    assert "is a pointer of Git LFS" in fault(Files(path=f"{tmp_path}/pointer.parquet"))


def test_text_of_dataset_folders_is_read_as_it_stands(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    lines = [f'{{"question": "{n}", "answer": "2021-03-0{n}"}}\n' for n in range(1, 5)]
    stored(folder / "train.jsonl", "".join(lines))
    stored(folder / "test.jsonl", lines[0])
    days = [(str(n), f"2021-03-0{n}") for n in range(1, 5)]
    assert answers(Hub(name=str(folder))) == days
    assert answers(Hub(name=str(folder), split="train[:50%]+test")) == [*days[:2], days[0]]
    assert "has no split dev. Its splits are: train, test." in fault(Hub(name=str(folder), split="dev"))
    stored(folder / "test.jsonl", '{"question": "a", "answer": null}')
    assert "test.jsonl, line 1 has no answer" in fault(Hub(name=str(folder), split="test"))


@pytest.mark.parametrize("keys", [{}, {"chosen": "{answer}", "rejected": "{bad}"}, {"reply": "{bad}"}])
def test_demonstrations_without_a_reply_are_refused(tmp_path, keys):
    rows = [{"question": "q", "answer": "yes", "bad": "no"}, {"question": "r", "answer": None, "bad": None}]
    path = stored(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    config = DemonstrationsConfig.model_validate({"data": {"type": "files", "path": path, **keys}})
    with pytest.raises(TinsmithError, match=r"rows.jsonl, line 2 has no reply: '(answer|bad)' is null"):
        config.load()


ALPHABET = st.sampled_from(["{", "}", "[", "]", '"', ",", ":", "\n", "\r", ";", "\\", "\\ud83d", "NaN", "1e5", "null"])
TEXT = st.lists(ALPHABET | st.text(max_size=3), max_size=30).map("".join)
CONTENT = st.binary(max_size=60) | st.builds(
    lambda text, encoding: text.encode(encoding, "ignore"), TEXT, st.sampled_from(["utf-8", "utf-8-sig", "utf-16"])
)


@settings(max_examples=60, deadline=None)
@given(
    before=st.sampled_from(["", GOOD, "[" + GOOD.strip(), "question,answer\nq,1\n"]),
    content=CONTENT,
    suffix=st.sampled_from(["jsonl", "json", "csv", "tsv", "csv.gz"]),
    pack=st.sampled_from([bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.compress]),
    cut=st.integers(0, 9),
)
def test_any_bytes_are_tasks_or_an_error(tmp_path_factory, before, content, suffix, pack, cut):
    packed = pack(before.encode() + content)
    path = stored(tmp_path_factory.getbasetemp() / f"any.{suffix}", packed[: len(packed) - cut])
    for kind in (Jsonl, Files):
        with suppress(TinsmithError):
            for prompt, answer in answers(kind(path=path)):
                assert (prompt + answer).encode()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.fixed_dictionaries({"question": st.text("ab", min_size=1), "answer": JSON_VALUES}), min_size=1))
def test_jsonl_and_files_read_equal_rows(tmp_path_factory, rows):
    folder = tmp_path_factory.getbasetemp()
    lines, listed = (
        stored(folder / "a.jsonl", "\n".join(map(json.dumps, rows))),
        stored(folder / "a.json", json.dumps(rows)),
    )
    for source in (Jsonl(path=lines), Files(path=lines), Jsonl(path=listed), Files(path=listed)):
        assert [dict(row) for row in source.read()] == rows
