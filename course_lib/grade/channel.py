"""Messages between the grader and the process that holds the learner's code: JSON with a length before it.

Nothing is ever unpickled. A message that is too long, is not JSON or is no object ends the conversation.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable

LARGEST_BYTES = 8 * 2**20
MOST_BYTES = 2**30
"""Of all messages that a side receives together: more than any check needs, and less than fills the memory."""
_SIZE = struct.Struct("<I")


class Gone(BaseException):
    """The other side has ended. No `except Exception` of a check can swallow it."""


class Late(BaseException):
    """The other side did not answer in time."""


class BadMessage(BaseException):
    """The other side sent what is not a message."""


class Channel:
    """One end of the conversation. `deadline` (of `time.monotonic`) is when patience ends; None: never.

    `meanwhile` is called about ten times a second while this side waits; it may raise.
    """

    def __init__(self, sock: socket.socket, meanwhile: Callable[[], None] | None = None) -> None:
        self._sock, self._meanwhile = sock, meanwhile
        self.deadline: float | None = None
        self._arrived, self._received = bytearray(), 0

    def send(self, message: dict) -> None:
        """Raises `BadMessage` for a message that is too long, `Gone` or `Late` as `receive` does."""
        body = json.dumps(message).encode()
        if len(body) > LARGEST_BYTES:
            raise BadMessage(f"a message of {len(body) >> 20} MB; at most {LARGEST_BYTES >> 20} MB are allowed")
        try:
            self._sock.settimeout(30)
            self._sock.sendall(_SIZE.pack(len(body)) + body)
        except TimeoutError:
            raise Late from None
        except OSError:
            raise Gone from None

    def receive(self) -> dict:
        """Wait for a message. Raises `Gone`, `Late` or `BadMessage`. An exception of another kind, as of an alarm,
        loses nothing: what had arrived is there for the next call."""
        self._gather(_SIZE.size)
        (size,) = _SIZE.unpack(self._arrived[: _SIZE.size])
        if size > LARGEST_BYTES:
            raise BadMessage(f"a message of {size >> 20} MB; at most {LARGEST_BYTES >> 20} MB are allowed")
        self._gather(_SIZE.size + size)
        body = bytes(self._arrived[_SIZE.size : _SIZE.size + size])
        del self._arrived[: _SIZE.size + size]
        self._received += size
        if self._received > MOST_BYTES:
            raise BadMessage(f"more than {MOST_BYTES >> 20} MB in all")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"not JSON: {error}") from None
        if not isinstance(message, dict):
            raise BadMessage("a message that is no object")
        return message

    def close(self) -> None:
        self._sock.close()

    def _gather(self, size: int) -> None:
        """Wait until `size` bytes have arrived."""
        while len(self._arrived) < size:
            left = None if self.deadline is None else self.deadline - time.monotonic()
            if left is not None and left <= 0:
                raise Late
            self._sock.settimeout(0.1 if self._meanwhile else left)
            try:
                part = self._sock.recv(min(1 << 20, size - len(self._arrived)))
            except TimeoutError:
                if self._meanwhile:
                    self._meanwhile()
                continue
            except OSError:
                raise Gone from None
            if not part:
                raise Gone
            self._arrived += part
