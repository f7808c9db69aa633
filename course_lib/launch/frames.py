"""Length-prefixed messages on a socket: how the parts of a run talk."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_SIZE = struct.Struct("<Q")
_LARGEST = 1 << 40


def send(sock: socket.socket, message: Any) -> None:
    """Send one picklable message, whole."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    sock.sendall(_SIZE.pack(len(body)) + body)


def receive(sock: socket.socket) -> Any:
    """Wait for one message. Raises `EOFError` when the other side has gone, `ConnectionError` for what is none."""
    (size,) = _SIZE.unpack(_exactly(sock, _SIZE.size))
    if size > _LARGEST:
        raise ConnectionError("what came is no message")
    return pickle.loads(_exactly(sock, size))


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(1 << 20, size - len(parts)))
        if not part:
            raise EOFError("the other side has gone")
        parts += part
    return bytes(parts)
