"""Messages between an engine and the process that evaluates uploaded losses: JSON and numpy arrays, no pickles.

The receiver trusts neither end to run code: the process at the other end has run a tenant's graph.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tinsmith.processes.messages import receive_exactly

MAX_BYTES = 1 << 31
_PREFIX = struct.Struct("<QQ")
_DTYPES = frozenset(("<f4", "<f8", "<i4", "<i8", "|b1"))


def send(connection: socket.socket, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
    """Send a JSON object and arrays."""
    layout = [(array.dtype.str, array.shape) for array in arrays]
    text = json.dumps({**header, "arrays": layout}).encode()
    data = b"".join(array.tobytes() for array in arrays)
    connection.sendall(_PREFIX.pack(len(text), len(data)) + text)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The next message. Raises EOFError if the other end has closed, ValueError if the message is invalid."""
    text_size, data_size = _PREFIX.unpack(receive_exactly(connection, _PREFIX.size))
    if max(text_size, data_size) > MAX_BYTES:
        raise ValueError(f"A message has {max(text_size, data_size)} bytes.")
    header, data = json.loads(bytes(receive_exactly(connection, text_size))), receive_exactly(connection, data_size)
    arrays, at = [], 0
    for name, shape in header.pop("arrays"):
        if name not in _DTYPES:
            raise ValueError(f"An array has dtype {name}.")
        count = math.prod(shape)
        arrays.append(np.frombuffer(data, name, count, at).reshape(shape))
        at += arrays[-1].nbytes
    return header, arrays
