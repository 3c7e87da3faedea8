"""Decoding of asample bodies."""

from __future__ import annotations

import json

import pytest

from tinsmith.errors import BadRequest, Unsupported
from tinsmith.service.wire.sample_request import decode_sample


def body(**changes) -> bytes:
    values = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 10**18,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
        "sampling_params": {},
    }
    return json.dumps({**values, **changes}).encode()


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [
        (None, None, ()),
        ([], (), ()),
        ("ab", None, ("ab",)),
        (["a", "b"], None, ("a", "b")),
        ([2, 5], (2, 5), ()),
    ],
)
def test_stop_accepts_five_shapes(stop: object, tokens: object, strings: object) -> None:
    request = decode_sample(body(sampling_params={"stop": stop})).request
    assert (request.stop_tokens, request.stop_strings) == (tokens, strings)


def test_defaults_are_those_of_the_protocol() -> None:
    ask = decode_sample(body())
    assert (ask.sampler_id, ask.seq, ask.layout) == ("s:sample:0", 10**18, None)
    request = ask.request
    assert request.prompt.tolist() == [1, 2, 3]
    assert (request.num_samples, request.max_tokens, request.seed) == (1, None, None)
    assert (request.temperature, request.top_k, request.top_p) == (1.0, -1, 1.0)


def test_sparse_targets_are_densified() -> None:
    tensor = {
        "data": [7, 8], "dtype": "int64", "shape": [2, 3],
        "sparse_crow_indices": [0, 0, 2], "sparse_col_indices": [0, 2],
    }  # fmt: skip
    ask = decode_sample(body(target_prompt_logprobs=tensor))
    assert ask.request.target_prompt_logprobs is not None
    assert ask.request.target_prompt_logprobs.tolist() == [[-1, -1, -1], [7, -1, 8]]
    assert ask.layout is not None
    assert ask.layout.col.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"record_stability_info": True}, Unsupported, "importance_sampling"),
        ({"seq_id": None}, Unsupported, "seq_id"),
        ({"prompt": {"chunks": [{"type": "dmel", "dmel": ""}]}}, Unsupported, "dmel"),
        ({"prompt": {"chunks": [{"type": "image", "data": "eA==", "format": "gif"}]}}, BadRequest, "format 'gif'"),
        ({"prompt": {"chunks": [{"type": "image", "data": "?", "format": "png"}]}}, BadRequest, "base64"),
        ({"prompt": {"chunks": [{"type": "image", "format": "png"}]}}, BadRequest, "without data"),
        (
            {"prompt": {"chunks": [{"type": "image", "data": "eA==", "format": "png", "expected_tokens": 0}]}},
            BadRequest,
            "expected_tokens 0",
        ),
        (
            {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "x"}]}},
            Unsupported,
            "image_asset_pointer.*fetches no files",
        ),
        ({"target_prompt_logprobs": {"data": [1.0], "dtype": "float32", "shape": [1, 1]}}, BadRequest, "float32"),
        ({"num_samples": "x"}, BadRequest, "num_samples"),
    ],
)
def test_rejects_unsupported_options_by_name(changes: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        decode_sample(body(**changes))


def test_places_images_between_tokens() -> None:
    """Of an image without expected_tokens only the engine knows the number of tokens."""
    image = {"type": "image", "data": "eHk=", "format": "png"}
    chunks = [{"tokens": [5]}, {**image, "expected_tokens": 3}, {"tokens": [6]}, image, {"tokens": [7]}]
    request = decode_sample(body(prompt={"chunks": chunks})).request
    assert request.prompt.tolist() == [5, -1, -1, -1, 6, 7]
    assert [(image.start, image.length, image.data) for image in request.images] == [(1, 3, b"xy"), (5, 0, b"xy")]
