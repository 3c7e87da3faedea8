"""Images of rows: what a field may hold, and where the images come in the messages."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.vision import opened, picture
from tinsmith.errors import UserError
from tinsmith.rl.data.demonstrations import DemonstrationsConfig
from tinsmith.rl.data.row_sources import Files, InlineRows
from tinsmith.rl.data.tasks import question_key
from tinsmith.rl.types import Image, Message, Task

A, B = picture(0), picture(1, 64, 48)


def tasks(*rows: dict[str, Any], **mapping: Any) -> list[Task]:
    return list(InlineRows(data=rows, images="images", answer="", **mapping).load())


def of(file: bytes) -> Image:
    return Image.of(file)


def pixels(file: bytes) -> bytes:
    return opened(file).convert("RGB").tobytes()


def test_fields_hold_paths_bytes_urls_dicts_and_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(A)
    url = f"data:image/png;base64,{base64.b64encode(A).decode()}"
    for value in (
        str(tmp_path / "a.png"),
        A,
        url,
        {"bytes": A, "path": None},
        {"bytes": None, "path": f"{tmp_path}/a.png"},
    ):
        (task,) = tasks({"question": "What is it?", "images": value})
        assert task.messages == (Message(role="user", content="What is it?", images=((0, of(A)),)),)
    (task,) = tasks({"question": "?", "images": [opened(A), B]})
    ((_, drawn), (_, second)) = task.messages[0].images
    assert pixels(drawn.file) == pixels(A)
    assert second == of(B)
    (task,) = tasks({"question": "none", "images": None}, system="Be short.")
    assert not any(message.images for message in task.messages)


def test_other_formats_become_png() -> None:
    opened(A).save(file := BytesIO(), "WEBP", lossless=True)
    (task,) = tasks({"question": "?", "images": file.getvalue()})
    ((_, image),) = task.messages[0].images
    assert image.format == "png"
    assert pixels(image.file) == pixels(A)


def test_marks_and_parts_say_where_images_come() -> None:
    (marked,) = tasks({"question": "Is <image> or <image> larger?", "images": [A, B]})
    assert marked.messages[0] == Message(role="user", content="Is  or  larger?", images=((3, of(A)), (7, of(B))))
    text, part = {"type": "text", "text": "Look: ", "image": None}, {"type": "image", "text": None}
    (parts,) = tasks({"question": [{"role": "user", "content": [text, part]}], "images": [A]})
    assert parts.messages == (Message(role="user", content="Look: ", images=((6, of(A)),)),)
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(B).decode()}"}}
    (own,) = InlineRows(data=[{"question": [{"role": "user", "content": [url, text]}]}], answer="").load()
    assert own.messages[0].images == ((0, of(B)),)
    (chat,) = tasks({"question": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "images": A})
    assert [len(message.images) for message in chat.messages] == [0, 1]


def test_image_columns_of_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"question": ["What?"], "pictures": [[{"bytes": A, "path": None}]]}
    features = datasets.Features({"question": datasets.Value("string"), "pictures": datasets.List(datasets.Image())})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    (task,) = Files(path=str(tmp_path / "rows.parquet"), images="pictures", answer="", extra=("*",)).load()
    ((_, image),) = task.messages[0].images
    assert pixels(image.file) == pixels(A)
    assert task.extra == {"question": "What?"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "<image> <image>", "images": [A]}, "1 image and 2 places"),
        ({"question": "?", "images": "https://example.org/a.png"}, "is a URL, which is not fetched"),
        ({"question": "?", "images": "none.png"}, "there is no image file none.png"),
        ({"question": "?", "images": b"text"}, "cannot be read"),
        ({"question": "?", "images": 3}, "an image is a int"),
        ({"question": "?"}, "has no field 'images'"),
        ({"question": [{"role": "user", "content": [{"type": "video"}]}], "images": A}, "a content part of type video"),
        ({"question": [{"role": "user", "content": [{"type": "image"}]}], "images": None}, "without an image"),
    ],
)
def test_wrong_rows_are_refused_by_name(row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        tasks(row)


def test_questions_with_other_images_are_other_questions() -> None:
    first, second, same = (tasks({"question": "What?", "images": file})[0].messages for file in (A, B, A))
    assert question_key(first) == question_key(same) != question_key(second)


def test_demonstrations_take_no_images() -> None:
    source = {"type": "rows", "data": [{"question": "?", "answer": "!", "images": A}], "images": "images"}
    with pytest.raises(ValueError, match="images applies only to tasks"):
        DemonstrationsConfig.model_validate({"data": source})
