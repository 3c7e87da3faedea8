"""Protobuf bodies against the encoder and decoder of the SDK."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from tinsmith.engine.base import PassResult, SampledSequence, SampleResult, TopK
from tinsmith.errors import BadRequest, TooLarge, Unsupported
from tinsmith.routed_experts import RouterShape, from_words, to_words
from tinsmith.service.wire.protobuf import (
    MAX_BODY_BYTES,
    SparseLayout,
    decode_pass,
    decompress,
    encode_pass,
    encode_sampled,
    pb,
)


def body(data: list[types.Datum], loss_fn: str = "cross_entropy", config=None, seq: int = 3) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config),  # type: ignore[arg-type]
        model_id="s:train:0",
        seq_id=seq,
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def text(*chunks: list[int]) -> types.ModelInput:
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=chunk) for chunk in chunks])


def test_decodes_a_forward_backward_body() -> None:
    inputs = {"target_tokens": [2, 3, 4], "weights": [1.0, -2.5, 0.0]}
    seq, request = decode_pass(body([types.Datum(model_input=text([1], [2, 3]), loss_fn_inputs=inputs)]))
    assert (seq, request.model_id, request.loss_fn, request.forward_only) == (3, "s:train:0", "cross_entropy", False)
    [datum] = request.data
    assert datum.tokens.tolist() == [1, 2, 3]
    assert datum.targets.dtype == np.int64
    assert datum.targets.tolist() == [2, 3, 4]
    assert datum.inputs["weights"].tolist() == [1.0, -2.5, 0.0]
    assert datum.inputs["weights"].dtype == np.float32


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "custom"])
def test_routed_experts_are_no_input_of_the_loss(loss_fn: str) -> None:
    record = np.arange(3 * 5 * 2, dtype=np.uint16).reshape(3, 5, 2)  # 20 bytes a token: three words
    arrays = {"target_tokens": np.array([2, 3, 4]), "routed_experts": to_words(record)}
    tensors = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
    sent = body([types.Datum(model_input=text([1, 2, 3]), loss_fn_inputs=tensors)], loss_fn)
    for _ in range(2):  # the journal keeps the body, and reads it again after a crash
        [datum] = decode_pass(sent)[1].data
        assert not datum.inputs
        assert datum.routed_experts is not None
        shape = RouterShape(layers=5, chosen=2, experts=300)
        np.testing.assert_array_equal(from_words(datum.routed_experts, shape), record)
    tensors["routed_experts"] = types.TensorData.from_numpy(np.ones(3, np.int64))
    with pytest.raises(BadRequest, match=r"routed_experts is int64 of shape \[3\]"):
        decode_pass(body([types.Datum(model_input=text([1, 2, 3]), loss_fn_inputs=tensors)]))


def test_densifies_each_sparse_tensor_by_its_own_pattern() -> None:
    targets = torch.zeros((4, 9), dtype=torch.int64)
    weights = torch.zeros((4, 9))
    targets[1, 2], targets[3, 8], weights[2, 1] = 7, 9, 0.5
    datum = types.Datum(model_input=text([1, 2, 3, 4]), loss_fn_inputs={"target_tokens": targets, "weights": weights})
    assert datum.loss_fn_inputs["weights"].sparse_crow_indices is not None
    [read] = decode_pass(body([datum]))[1].data
    np.testing.assert_array_equal(read.targets, targets.numpy())
    np.testing.assert_array_equal(read.inputs["weights"], weights.numpy())


def test_loss_config_prefers_v2_and_falls_back_to_v1() -> None:
    datum = types.Datum(model_input=text([1]), loss_fn_inputs={"target_tokens": [2]})
    sent = pb.ForwardBackwardRequest.FromString(body([datum], "ppo", {"clip_low_threshold": 0.7}))
    assert decode_pass(sent.SerializeToString())[1].loss_config == {"clip_low_threshold": 0.7}
    sent.loss_fn_config["clip_low_threshold"] = 0.1
    assert decode_pass(sent.SerializeToString())[1].loss_config == {"clip_low_threshold": 0.7}
    sent.ClearField("loss_fn_config_v2")
    assert decode_pass(sent.SerializeToString())[1].loss_config == {"clip_low_threshold": 0.1}


@pytest.mark.parametrize("kind", ["dmel", "(empty)"])
def test_rejects_other_chunks_by_name(kind: str) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    chunk = message.data.add().model_input.add()
    if kind == "dmel":
        chunk.dmel.SetInParent()
    with pytest.raises(Unsupported, match=rf"data\[0\].model_input holds a chunk of type {re.escape(kind)}"):
        decode_pass(message.SerializeToString())


@pytest.mark.parametrize(
    ("expected", "targets", "start"),
    [
        ([3, 2], 8, 5),
        ([None, 2], 8, 5),
        ([3, None], 9, 5),
        ([None, None], 8, None),
        ([3, 2], 7, None),
        ([None, 8], 3, None),
    ],
)
def test_places_images_of_the_sdk(expected: list[int | None], targets: int, start: int | None) -> None:
    """One number of tokens that is missing follows from the number of targets."""
    chunks = [types.EncodedTextChunk(tokens=[5])]
    for tokens, count in zip(([6], [7]), expected, strict=True):
        chunks += [
            types.ImageChunk(data=b"xy", format="jpeg", expected_tokens=count),
            types.EncodedTextChunk(tokens=tokens),
        ]
    datum = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [0] * targets})
    sent = body([datum], "cross_entropy")
    if start is None:
        with pytest.raises(BadRequest, match="expected_tokens"):
            decode_pass(sent)
        return
    read = decode_pass(sent)[1].data[0]
    assert len(read.tokens) == targets
    assert [(image.start, image.format) for image in read.images] == [(1, "jpeg"), (start, "jpeg")]
    assert [read.tokens[index] for index in (0, 1, 4, 5)] == [5, -1, 6, -1]


def test_decompresses_zstd_of_the_sdk() -> None:
    plain = bytes(range(256)) * 1000
    assert decompress(zstandard.ZstdCompressor().compress(plain), "zstd") == plain
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    assert decompress(unsized, "zstd") == plain
    assert decompress(plain, None) == plain


def test_rejects_incomplete_zstd_frames() -> None:
    whole = zstandard.ZstdCompressor().compress(bytes(10_000) + b"end")
    for broken in (b"", whole[:-1], whole[: len(whole) // 2], whole + b"x", whole + whole, b"no zstd at all"):
        with pytest.raises(BadRequest, match="zstd"):
            decompress(broken, "zstd")
    with pytest.raises(Unsupported, match="gzip"):
        decompress(whole, "gzip")


def test_zstd_bomb_is_stopped_during_decompression() -> None:
    bomb = zstandard.ZstdCompressor(level=1, write_content_size=False)
    frame = bomb.compressobj()
    zeros = bytes(2**22)
    body = b"".join(frame.compress(zeros) for _ in range(200)) + frame.flush()  # 800 MiB
    assert len(body) < 2**20
    tracemalloc.start()
    with pytest.raises(TooLarge, match="decompressed"):
        decompress(body, "zstd")
    assert tracemalloc.get_traced_memory()[1] < 2 * MAX_BODY_BYTES
    tracemalloc.stop()


def tensor_message(**changes) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2], "<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = pb.DTYPE_INT64
    for name, value in changes.items():
        if name == "csr":
            tensor.sparse_csr.values, tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = (
                np.asarray(part, "<i8").tobytes() for part in value
            )
        elif name == "shape":
            tensor.shape.extend(value)
        else:
            setattr(tensor, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dense": b"1234567"}, BadRequest),
        ({"dense": bytes(16), "shape": [3]}, BadRequest),
        ({"dense": bytes(16), "shape": [-1, -2]}, BadRequest),
        ({"dense": bytes(8), "dtype": pb.DTYPE_BFLOAT16}, Unsupported),
        ({"dense": bytes(8), "dtype": pb.DTYPE_FLOAT32, "shape": [2]}, BadRequest),
        ({"csr": ([1], [0, 1, 1], [5]), "shape": [2, 3]}, BadRequest),
        ({"csr": ([1], [0, 2, 1], [0]), "shape": [2, 3]}, BadRequest),
        ({"csr": ([1], [0, 1], [0]), "shape": [2, 3]}, BadRequest),
        ({"csr": ([1, 1], [0, 1, 1], [0]), "shape": [2, 3]}, BadRequest),
        ({"csr": ([], [0], []), "shape": [2]}, BadRequest),
        ({"csr": ([], [0] * 3, []), "shape": [2, 2**40]}, TooLarge),
    ],
)
def test_rejects_invalid_tensors(changes: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match="target_tokens"):
        decode_pass(tensor_message(**changes))


def sparse_body(shapes: list[tuple[int, int]]) -> bytes:
    """A body with a datum for each shape: one token, sparse targets without values."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for rows, columns in shapes:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray([5], "<i4").tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype = pb.DTYPE_INT64
        tensor.shape.extend([rows, columns])
        tensor.sparse_csr.crow_indices = bytes(8 * (max(rows, 0) + 1))
    return message.SerializeToString()


@pytest.mark.parametrize(
    "shapes",
    [[(1, 2**24)], [(1, 2**24)] * 12, [(16, 2**20)] * 12, [(1, 2**20)] * 1000, [(-1, 2**60)] + [(16, 2**20)] * 3],
)
def test_sparse_bomb_is_rejected_before_densifying(shapes: list[tuple[int, int]]) -> None:
    body = sparse_body(shapes)
    tracemalloc.start()
    with pytest.raises(TooLarge, match="target_tokens"):
        decode_pass(body)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_sdk_decodes_a_result_of_mixed_ranks() -> None:
    arrays = [np.arange(3.0), np.arange(2.0), np.arange(6.0).reshape(3, 2), np.arange(4.0)]
    result = PassResult(logprobs=tuple(a.astype(np.float32) for a in arrays), metrics={"loss:sum": 2.5})
    read = deserialize_forward_backward_output(encode_pass(result))
    assert read.metrics == {"loss:sum": 2.5}
    assert read.loss_fn_output_type == "ArrayRecord"
    assert len(read.loss_fn_outputs) == 4
    for output, array in zip(read.loss_fn_outputs, arrays, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), array)
        assert output["logprobs"].shape == list(array.shape)


def sampled(**changes) -> SampleResult:
    top = TopK(token_ids=np.asarray([[1, 2], [3, 4]], np.int32), logprobs=np.asarray([[-1, -2], [-3, -4]], np.float32))
    sequence = SampledSequence(
        tokens=np.asarray([4, 2], np.int32), logprobs=np.asarray([-0.5, -1], np.float32), stop_reason="stop", topk=top
    )
    return SampleResult(sequences=(sequence,), prompt_cache_hit_tokens=3, **changes)


def test_sdk_decodes_a_sample() -> None:
    prompt = np.asarray([np.nan, -2.0, -3.0], np.float32)
    read = deserialize_sample_response(encode_sampled(sampled(prompt_logprobs=prompt), None))
    [sequence] = read.sequences
    assert (sequence.tokens, sequence.logprobs, sequence.stop_reason) == ([4, 2], [-0.5, -1.0], "stop")
    assert sequence.topk_logprobs_np.token_ids.tolist() == [[1, 2], [3, 4]]
    assert read.prompt_logprobs == [None, -2.0, -3.0]
    assert read.prompt_cache_hit_tokens == 3
    assert read.target_prompt_logprobs is None


def test_target_logprobs_keep_the_requested_layout() -> None:
    logprobs = np.asarray([[-1.0, np.nan], [np.nan, -4.0]], np.float32)
    dense = deserialize_sample_response(encode_sampled(sampled(target_prompt_logprobs=logprobs), None))
    assert dense.target_prompt_logprobs.to_numpy().tolist() == [[-1.0, 0.0], [0.0, -4.0]]
    layout = SparseLayout(crow=np.asarray([0, 1, 2]), col=np.asarray([0, 1]))
    sparse = deserialize_sample_response(encode_sampled(sampled(target_prompt_logprobs=logprobs), layout))
    tensor = sparse.target_prompt_logprobs
    assert (tensor.data, tensor.sparse_crow_indices, tensor.sparse_col_indices) == ([-1.0, -4.0], [0, 1, 2], [0, 1])


def test_sdk_decodes_prompt_alt_tokens() -> None:
    drawn = TopK(
        token_ids=np.asarray([[1, 2], [3, 4]], np.int32), logprobs=np.asarray([[-1, -2], [-3, -4]], np.float32)
    )
    read = deserialize_sample_response(encode_sampled(sampled(prompt_alt=drawn), None)).prompt_alt_tokens
    assert read is not None
    assert (read.tokens.dtype, read.tokens.to_numpy().tolist()) == ("int64", [[1, 2], [3, 4]])
    assert (read.logprobs.dtype, read.logprobs.to_numpy().tolist()) == ("float32", [[-1.0, -2.0], [-3.0, -4.0]])
