"""Protobuf messages of the Tinker protocol: bodies of forward_backward in, results of it and of asample out.

The only module that reads protobuf, CSR tensors and zstd. Field names are those of SDK 0.38's schema, which is loaded
from the SDK's file without importing `tinker`: that would import torch, seconds and hundreds of megabytes for the API
process. Features that are not implemented are rejected by name. JSON bodies are in `schemas` and `sample_request`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from tinsmith.engine.base import Datum, InputImage, Pass, PassResult, SampleResult, TopK
from tinsmith.engine.training.loss_specs import CUSTOM, ROUTED_EXPERTS
from tinsmith.errors import BadRequest, TooLarge, Unsupported
from tinsmith.imports import import_file
from tinsmith.plurals import counted
from tinsmith.service.wire.model_input import image_chunk, join_chunks, unsupported_chunk


def _load() -> ModuleType:
    package = find_spec("tinker")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
    return import_file(file)


if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as pb
else:
    pb = _load()

__all__ = ["pb"]


GRAPH = "graph"
"""Key of a custom loss that the service adds; bodies that contain it are rejected."""
MAX_BODY_BYTES = 256 * 2**20
"""Largest body after decompression."""
MAX_DENSE_CELLS = 16 * 2**20
"""Largest dense size of one tensor: a CSR tensor of a few bytes may declare any shape."""
MAX_BODY_CELLS = 2 * MAX_DENSE_CELLS
"""Largest dense size of all sparse tensors of a body: enough for the largest targets and their weights."""
MAX_COLUMNS = 2**20
"""Largest number of columns of a sparse tensor; no vocabulary has more."""
_CHUNK = 2**10
"""Bytes of a zstd body decompressed at a time: four bytes may expand to 128 KiB."""

_DTYPES = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8"), pb.DTYPE_INT32: np.dtype("<i4")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """CSR row pointers and columns of a sparse target_prompt_logprobs, int64."""

    crow: np.ndarray
    col: np.ndarray


def decompress(body: bytes, encoding: str | None) -> bytes:
    """Undo the body's Content-Encoding, one whole zstd frame. Raises Unsupported, BadRequest or TooLarge.

    The frame is read in chunks that cannot expand to more than 32 MiB beyond the limit, whatever size it declares.
    """
    if not encoding or encoding == "identity":
        return body
    if encoding != "zstd":
        raise Unsupported(f"Content-Encoding {encoding} is not supported.", "Send zstd or plain bytes.")
    frame, out, at = zstandard.ZstdDecompressor().decompressobj(), bytearray(), 0
    try:
        while at < len(body) and not frame.eof:
            out += frame.decompress(body[at : at + _CHUNK])
            at += _CHUNK
            if len(out) > MAX_BODY_BYTES:
                raise TooLarge(
                    f"The body is over {MAX_BODY_BYTES} bytes when decompressed.", "Send fewer data per request."
                )
    except zstandard.ZstdError as error:
        raise BadRequest(f"The body is not zstd: {error}") from error
    if not frame.eof or frame.unused_data or at < len(body):
        raise BadRequest("The body is not one whole zstd frame.", "Compress the body as a single frame.")
    return bytes(out)


def decode_pass(body: bytes) -> tuple[int, Pass]:
    """(seq_id, request) of a ForwardBackwardRequest's bytes, with dense tensors."""
    return pass_from_message(parse_pass(body))


def parse_pass(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse a message without validating its content. Raises BadRequest."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadRequest("The body is not a ForwardBackwardRequest.", "Use tinker SDK 0.25 or newer.") from error
    return message


def pass_from_message(message: pb.ForwardBackwardRequest) -> tuple[int, Pass]:
    """(seq_id, request) of a message, with dense tensors."""
    _check_dense_size(message)
    is_custom = message.loss_fn == CUSTOM
    data = tuple(_datum(f"data[{index}]", datum, as_sent=is_custom) for index, datum in enumerate(message.data))
    request = Pass(
        model_id=message.model_id,
        data=data,
        loss_fn=message.loss_fn,
        loss_config=_loss_config(message),
        forward_only=message.forward_only,
    )
    return message.seq_id, request


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        key: value.number if value.WhichOneof("value") == "number" else value.text
        for key, value in message.loss_fn_config_v2.items()
    }


def _check_dense_size(message: pb.ForwardBackwardRequest) -> None:
    """Raise TooLarge, before anything is made dense, if all sparse tensors together exceed MAX_BODY_CELLS."""
    tensors = (tensor for datum in message.data for tensor in datum.loss_fn_inputs.values())
    cells = sum(prod(max(side, 0) for side in tensor.shape) for tensor in tensors if tensor.HasField("sparse_csr"))
    if cells > MAX_BODY_CELLS:
        raise TooLarge(
            f"The sparse tensors of the body, its target_tokens and others, have {cells} cells when dense.",
            f"At most {MAX_BODY_CELLS}: send fewer data per request.",
        )


def _datum(where: str, datum: pb.Datum, *, as_sent: bool) -> Datum:
    """A datum. Inputs become float32 unless `as_sent`: a custom loss may read integers."""
    chunks = [_chunk(f"{where}.model_input", chunk) for chunk in datum.model_input]
    tensors = {name: _tensor(f"{where}.{name}", value) for name, value in datum.loss_fn_inputs.items()}
    targets = tensors.pop("target_tokens", None)
    if targets is None:
        raise BadRequest(f"{where} has no target_tokens.", "Every loss needs loss_fn_inputs['target_tokens'].")
    if targets.dtype.kind != "i":
        raise BadRequest(f"{where}.target_tokens is {targets.dtype.name}.", "Send int64 token ids.")
    routed = tensors.pop(ROUTED_EXPERTS, None)
    if routed is not None and (routed.dtype != np.int64 or routed.ndim != 2):
        raise BadRequest(
            f"{where}.{ROUTED_EXPERTS} is {routed.dtype.name} of shape {list(routed.shape)}.",
            "Send int64 words, one row for each token (docs/serve/models.md).",
        )
    tokens, images = join_chunks(f"{where}.model_input", chunks, total=len(targets))
    return Datum(
        tokens=tokens,
        images=images,
        targets=targets.astype(np.int64, copy=False),
        inputs=tensors if as_sent else {name: value.astype(np.float32, copy=False) for name, value in tensors.items()},
        routed_experts=routed,
    )


def _chunk(where: str, chunk: pb.Chunk) -> np.ndarray | InputImage:
    """Tokens of a chunk, or its image, which has no place yet."""
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        return _array(where, chunk.encoded_text.tokens, np.dtype("<i4"))
    if kind != "image":
        raise unsupported_chunk(where, kind or "(empty)")
    image = chunk.image
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    size = image.override_dimensions if image.HasField("override_dimensions") else None
    return image_chunk(where, image.data, image.format, expected, (size.width, size.height) if size else None)


def _array(where: str, data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise BadRequest(f"{where} has {counted(len(data), 'byte')}.", f"Send a multiple of {dtype.itemsize}.")
    return np.frombuffer(data, dtype=dtype)


def _tensor(where: str, tensor: pb.Tensor) -> np.ndarray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise Unsupported(f"{where} has dtype number {tensor.dtype}.", "Send float32 or int64.")
    shape = tuple(tensor.shape)
    if tensor.HasField("sparse_csr"):
        csr, i8 = tensor.sparse_csr, np.dtype("<i8")
        values, crow, col = (
            _array(where, part, kind)
            for part, kind in ((csr.values, dtype), (csr.crow_indices, i8), (csr.col_indices, i8))
        )
        return densify(where, shape, values, crow, col, 0)
    values = _array(where, tensor.dense, dtype)
    return reshape_checked(where, values, shape or (len(values),))


def reshape_checked(where: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Flat values in their declared shape. Raises BadRequest if the sizes differ."""
    if min(shape, default=0) < 0 or int(np.prod(shape, dtype=object)) != values.size:
        raise BadRequest(
            f"{where} has {counted(values.size, 'value')} for shape {list(shape)}.", "Send values that fill the shape."
        )
    return values.reshape(shape)


def densify(
    where: str, shape: tuple[int, ...], values: np.ndarray, crow: np.ndarray, col: np.ndarray, fill: int
) -> np.ndarray:
    """A CSR tensor as a dense array, `fill` in its empty cells. Raises BadRequest or TooLarge."""
    if len(shape) != 2 or min(shape) < 0:
        raise BadRequest(f"{where} is sparse with shape {list(shape)}.", "CSR tensors have two dimensions.")
    if shape[1] > MAX_COLUMNS or shape[0] * shape[1] > MAX_DENSE_CELLS:
        raise TooLarge(
            f"{where} has shape {list(shape)}.", f"At most {MAX_COLUMNS} columns, and {MAX_DENSE_CELLS} cells."
        )
    steps = np.diff(crow)
    is_valid = len(crow) == shape[0] + 1 and crow[0] == 0 and (steps >= 0).all() and crow[-1] == len(col) == len(values)
    if not is_valid or (len(col) and not (col.min() >= 0 and col.max() < shape[1])):
        raise BadRequest(f"{where} is not a CSR tensor of shape {list(shape)}.", "Check its crow and col indices.")
    dense = np.full(shape, fill, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), steps), col] = values
    return dense


def append_config(body: bytes, config: Mapping[str, float | str]) -> bytes:
    """A ForwardBackwardRequest's bytes with more settings, such as the graph of its custom loss.

    Protobuf merges concatenated messages, and the last entry of a map wins.
    """
    addition = pb.ForwardBackwardRequest()
    for key, value in config.items():
        if isinstance(value, str):
            addition.loss_fn_config_v2[key].text = value
        else:
            addition.loss_fn_config_v2[key].number = value
    return body + addition.SerializeToString()


def encode_pass(result: PassResult) -> bytes:
    """A ForwardBackwardOutput's bytes: one ArrayRecord for consecutive data with the same trailing shape.

    The SDK requires the same fields of all data, so a field is empty for data that it does not apply to.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(result.metrics))
    numbered = enumerate(result.logprobs)
    for trailing, group in groupby(numbered, key=lambda item: item[1].shape[1:]):
        places = [place for place, _ in group]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(places))
        _fill(record.fields["logprobs"], [result.logprobs[place] for place in places], trailing)
        if result.entropies is not None:
            _fill(record.fields["entropy"], [result.entropies[place] for place in places], ())
        for name, arrays in _shadow_fields(result, places).items():
            _fill(record.fields[name], arrays, ())
    return message.SerializeToString()


def _shadow_fields(result: PassResult, places: Sequence[int]) -> dict[str, list[np.ndarray]]:
    """What loss_fn `shadow` adds to the outputs, empty for train data; nothing for other losses."""
    if not result.probes:
        return {}
    empty, probes = np.empty(0), [result.probes.get(place) for place in places]
    fields = {
        "logprobs_pre": [result.logprobs[place] if place in result.probes else empty for place in places],
        "delta": [empty if probe is None else np.asarray([probe.delta]) for probe in probes],
    }
    if all(probe.logprobs_post is None for probe in result.probes.values()):
        return fields
    post = [empty if probe is None or probe.logprobs_post is None else probe.logprobs_post for probe in probes]
    return {**fields, "logprobs_post": post}


def _fill(field: pb.BatchedTensor, arrays: Sequence[np.ndarray], trailing: tuple[int, ...]) -> None:
    arrays = [array.astype("<f4", copy=False) for array in arrays]
    field.dtype = pb.DTYPE_FLOAT32
    field.trailing_shape.extend(trailing)
    field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
    field.data = b"".join(array.tobytes() for array in arrays)


def encode_sampled(sampled: SampleResult, layout: SparseLayout | None) -> bytes:
    """A SampleResponse's bytes; target logprobs have the layout of the requested targets, 0 elsewhere."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=sampled.prompt_cache_hit_tokens)
    for sequence in sampled.sequences:
        stopped = sequence.stop_reason == "stop"
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=sequence.tokens.astype("<i4", copy=False).tobytes(),
            logprobs=sequence.logprobs.astype("<f4", copy=False).tobytes(),
        )
        if sequence.topk is not None:
            added.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk))
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = sampled.prompt_logprobs.astype("<f4", copy=False).tobytes()
    if sampled.topk_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(sampled.topk_prompt))
    if sampled.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_target_logprobs(sampled.target_prompt_logprobs, layout))
    if sampled.prompt_alt is not None:
        alt = sampled.prompt_alt
        message.prompt_alt_tokens.tokens.CopyFrom(_dense(alt.token_ids.astype("<i8"), pb.DTYPE_INT64))
        message.prompt_alt_tokens.logprobs.CopyFrom(_dense(alt.logprobs.astype("<f4"), pb.DTYPE_FLOAT32))
    return message.SerializeToString()


def _target_logprobs(logprobs: np.ndarray, layout: SparseLayout | None) -> pb.Tensor:
    values = np.nan_to_num(logprobs.astype("<f4"), nan=0.0)
    if layout is None:
        return _dense(values, pb.DTYPE_FLOAT32)
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=values.shape)
    rows = np.repeat(np.arange(len(values)), np.diff(layout.crow))
    tensor.sparse_csr.values = values[rows, layout.col].tobytes()
    tensor.sparse_csr.crow_indices = layout.crow.astype("<i8").tobytes()
    tensor.sparse_csr.col_indices = layout.col.astype("<i8").tobytes()
    return tensor


def _dense(values: np.ndarray, dtype: pb.DType.ValueType) -> pb.Tensor:
    return pb.Tensor(dtype=dtype, shape=values.shape, dense=values.tobytes())


def _topk(top: TopK) -> pb.TopkLogprobs:
    length, k = top.token_ids.shape
    ids, logprobs = top.token_ids.astype("<i4", copy=False), top.logprobs.astype("<f4", copy=False)
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)
