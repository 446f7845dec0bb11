"""Messages between two processes over TCP: a JSON object and NumPy arrays, both in one piece.

A message is its length and its head's length (two 8-byte integers), the head as JSON, and the bytes of the arrays.
Their dtypes and shapes stand in the head.
"""

import json
import math
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

_SIZES = struct.Struct("!QQ")


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()

    def send(self, head: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message. ``head`` holds what JSON holds. Raises OSError if the connection is gone."""
        described = {**head, "arrays": [[array.dtype.str, array.shape] for array in arrays]}
        text, data = json.dumps(described).encode(), b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        with self._lock:
            self._socket.sendall(_SIZES.pack(len(text) + len(data), len(text)) + text + data)

    def receive(self, most: int | None = None) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The next message. Blocks until it is there.

        Args:
          most: the most bytes that the message may have. None: any number.

        Raises:
          OSError: the connection is gone, or the message says that it is longer than ``most``.
        """
        total, size = _SIZES.unpack(self._exactly(_SIZES.size))
        if most is not None and total > most:
            raise ConnectionError(f"a message of at most {most} bytes was expected, and one of {total} came")
        data = self._exactly(total)
        head = json.loads(data[:size])
        arrays = []
        for dtype, shape in head.pop("arrays"):
            count = math.prod(shape)
            arrays.append(np.frombuffer(data, dtype, count, size).reshape(shape))
            size += arrays[-1].nbytes
        return head, arrays

    def close(self) -> None:
        """Ends the connection. The other end's ``receive`` raises."""
        self._socket.close()

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, read = memoryview(data), 0
        while read < count:
            more = self._socket.recv_into(view[read:])
            if not more:
                raise ConnectionError("the connection was closed")
            read += more
        return data
