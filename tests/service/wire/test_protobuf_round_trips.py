"""Round trips of generated data and results through the encoder and decoder of the SDK."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from tinsmith.engine.base import PassResult, SampledSequence, SampleResult, TopK
from tinsmith.errors import UserError
from tinsmith.service.wire.protobuf import SparseLayout, decode_pass, decompress, encode_pass, encode_sampled, pb

quick = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))

ids = st.integers(0, 2**31 - 1)
floats = st.floats(width=32, allow_nan=True)
names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda n: n != "target_tokens"
)


def same(left: Any, right: Any) -> None:
    np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], kind: str) -> tuple[types.TensorData, np.ndarray]:
    """(tensor of the SDK, its dense array): dense, or CSR with its own pattern."""
    dtype = np.int64 if kind == "int64" else np.float32
    elements = ids if kind == "int64" else floats
    dense = draw(npst.arrays(dtype, shape, elements=elements))
    if len(shape) == 2 and draw(st.booleans()):
        mask = draw(npst.arrays(np.bool_, shape))
        dense = np.where(mask, dense, 0).astype(dtype)
        rows, columns = np.nonzero(mask)
        crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=shape[0]))])
        sent = types.TensorData(
            data=dense[rows, columns].tolist(),
            dtype=kind,  # type: ignore[arg-type]
            shape=list(shape),
            sparse_crow_indices=crow.tolist(),
            sparse_col_indices=columns.tolist(),
        )
        return sent, dense
    return types.TensorData(data=dense.flatten().tolist(), dtype=kind, shape=list(shape)), dense  # type: ignore[arg-type]


@st.composite
def data(draw: st.DrawFn) -> tuple[types.Datum, dict[str, np.ndarray]]:
    """(a datum, its arrays): several chunks, (N,) or (N, K), any further inputs."""
    chunks = draw(st.lists(st.lists(ids, max_size=5), max_size=3))
    length = sum(map(len, chunks))
    shape = (length,) if draw(st.booleans()) else (length, draw(st.integers(1, 4)))
    inputs, meant = {}, {"tokens": np.array([token for chunk in chunks for token in chunk])}
    inputs["target_tokens"], meant["target_tokens"] = draw(tensors(shape, "int64"))
    for name in draw(st.lists(names, max_size=2, unique=True)):
        inputs[name], meant[f"input {name}"] = draw(tensors(shape, "float32"))
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=chunk) for chunk in chunks])
    return types.Datum(model_input=prompt, loss_fn_inputs=inputs), meant


def check_request(made: list[tuple[types.Datum, dict[str, np.ndarray]]], seq: int, forward_only: bool) -> None:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[item for item, _ in made], loss_fn="cross_entropy"),
        model_id="s:train:0",
        seq_id=seq,
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    got_seq, got = decode_pass(message.SerializeToString())
    assert (got_seq, got.model_id, got.forward_only, len(got.data)) == (seq, "s:train:0", forward_only, len(made))
    for read, (_, meant) in zip(got.data, made, strict=True):
        same(read.tokens, meant["tokens"])
        same(read.targets, meant["target_tokens"])
        assert {f"input {name}" for name in read.inputs} == {name for name in meant if name.startswith("input ")}
        for name, values in read.inputs.items():
            same(values, meant[f"input {name}"])


requests = given(st.lists(data(), max_size=4), st.integers(1, 2**31 - 1), st.booleans())
test_requests_are_read_as_they_were_meant = quick(requests(check_request))
test_many_requests_are_read_as_they_were_meant = pytest.mark.slow(thorough(requests(check_request)))


@st.composite
def results(draw: st.DrawFn) -> PassResult:
    """Pass results with mixed ranks and lengths, possibly empty."""
    shape = st.one_of(st.tuples(st.integers(0, 5)), st.tuples(st.integers(0, 5), st.integers(1, 3)))
    arrays = draw(
        st.lists(shape.flatmap(lambda array_shape: npst.arrays(np.float32, array_shape, elements=floats)), max_size=6)
    )
    metrics = draw(st.dictionaries(st.sampled_from(["a:sum", "b:max", "c:mean"]), st.floats(allow_nan=True)))
    return PassResult(logprobs=tuple(arrays), metrics={"loss:sum": 0.5, **metrics})


def check_result(result: PassResult) -> None:
    read = deserialize_forward_backward_output(encode_pass(result))
    assert len(read.loss_fn_outputs) == len(result.logprobs)
    for output, meant in zip(read.loss_fn_outputs, result.logprobs, strict=True):
        got = output["logprobs"]
        assert list(got.shape or []) == list(meant.shape)
        same(np.asarray(got.data, np.float32).reshape(meant.shape), meant)
    assert {key: np.float64(value).tobytes() for key, value in read.metrics.items()} == {
        key: np.float64(value).tobytes() for key, value in result.metrics.items()
    }


test_results_are_what_the_sdk_reads = quick(given(results())(check_result))
test_many_results_are_what_the_sdk_reads = pytest.mark.slow(thorough(given(results())(check_result)))


@st.composite
def samples(draw: st.DrawFn) -> tuple[SampleResult, SparseLayout | None]:
    """Sequences of any length, with or without each option of prompt logprobs."""

    def topk(length: int, k: int) -> TopK:
        token_ids = draw(npst.arrays(np.int32, (length, k), elements=st.integers(0, 2**31 - 1)))
        return TopK(
            token_ids=token_ids,
            logprobs=draw(npst.arrays(np.float32, (length, k), elements=st.floats(-9, 0, width=32))),
        )

    def sequence() -> SampledSequence:
        length = draw(st.integers(1, 5))
        return SampledSequence(
            tokens=draw(npst.arrays(np.int32, length, elements=ids)),
            logprobs=draw(npst.arrays(np.float32, length, elements=floats)),
            stop_reason=draw(st.sampled_from(["stop", "length"])),
            topk=topk(length, k) if k else None,
        )

    k, prompt = draw(st.integers(0, 3)), draw(st.integers(2, 6))
    layout, targets = None, None
    if draw(st.booleans()):
        width = draw(st.integers(1, 3))
        targets = draw(npst.arrays(np.float32, (prompt - 1, width), elements=st.floats(-9, -1, width=32)))
        if draw(st.booleans()):
            mask = draw(npst.arrays(np.bool_, targets.shape))
            rows, columns = np.nonzero(mask)
            crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=prompt - 1))])
            layout, targets = SparseLayout(crow=crow, col=columns), np.where(mask, targets, np.nan).astype(np.float32)
    sampled = SampleResult(
        sequences=tuple(sequence() for _ in range(draw(st.integers(1, 3)))),
        prompt_logprobs=draw(st.none() | npst.arrays(np.float32, prompt, elements=floats)),
        topk_prompt=topk(prompt, k) if k and draw(st.booleans()) else None,
        target_prompt_logprobs=targets,
        prompt_cache_hit_tokens=draw(st.integers(0, 9)),
    )
    return sampled, layout


@quick
@given(samples())
def test_sdk_decodes_any_sample_result(made: tuple[SampleResult, SparseLayout | None]) -> None:
    sampled, layout = made
    read = deserialize_sample_response(encode_sampled(sampled, layout))
    for got, meant in zip(read.sequences, sampled.sequences, strict=True):
        same(got.tokens, meant.tokens)
        same(np.asarray(got.logprobs, np.float32), meant.logprobs)
        assert got.stop_reason == meant.stop_reason
    if sampled.prompt_logprobs is None:
        assert read.prompt_logprobs is None
    else:
        assert read.prompt_logprobs is not None
        same(
            np.asarray([np.nan if x is None else x for x in read.prompt_logprobs], np.float32), sampled.prompt_logprobs
        )
    assert (read.target_prompt_logprobs is None) == (sampled.target_prompt_logprobs is None)
    if sampled.target_prompt_logprobs is not None:
        got = read.target_prompt_logprobs
        meant = np.nan_to_num(sampled.target_prompt_logprobs, nan=0.0)
        same(np.asarray(got.to_numpy(), np.float32).reshape(meant.shape), meant)


@quick
@given(st.binary(max_size=300))
def test_any_bytes_are_decoded_or_rejected(body: bytes) -> None:
    for read in (decode_pass, lambda raw: decompress(raw, "zstd")):
        with suppress(UserError):  # a 4xx status; any other exception fails the test
            read(body)


@quick
@given(data(), st.data())
def test_damaged_bodies_are_decoded_or_rejected(
    made: tuple[types.Datum, dict[str, np.ndarray]], draws: st.DataObject
) -> None:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[made[0]], loss_fn="ppo", loss_fn_config={"beta": 1.0}),
        model_id="s:train:0",
        seq_id=1,
    )
    body = bytearray(forward_backward_request_to_proto(request).SerializeToString())
    for _ in range(draws.draw(st.integers(1, 4))):
        place = draws.draw(st.integers(0, len(body) - 1))
        body[place] = draws.draw(st.integers(0, 255))
    cut = draws.draw(st.integers(0, len(body)))
    with suppress(UserError):
        decode_pass(bytes(body[:cut]))


@quick
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.sampled_from([0, 1, 2, 3, 4, 17]),
    st.booleans(),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
)
def test_any_declared_shape_is_decoded_or_rejected(
    shape: list[int], dtype: int, sparse: bool, indices: list[int]
) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = dtype  # type: ignore[assignment]
    tensor.shape.extend(shape)
    if sparse:
        tensor.sparse_csr.values = np.array([1, 2], "<i8").tobytes()
        tensor.sparse_csr.crow_indices = np.array(indices, "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.array(indices[:2], "<i8").tobytes()
    else:
        tensor.dense = np.array([1, 2], "<i8").tobytes()
    with suppress(UserError):
        decode_pass(message.SerializeToString())
