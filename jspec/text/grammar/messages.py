"""What the server and the process that compiles grammars send each other: JSON objects over sockets."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def send(connection: socket.socket, message: dict[str, Any]):
    """Send a message.

    Raises:
      OSError: the other side is not there.
    """
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None if the other side has closed the connection, or is not there.

    Raises:
      TimeoutError: the connection has a timeout, and it has passed.
    """
    try:
        header = _exactly(connection, _LENGTH.size)
        content = header and _exactly(connection, _LENGTH.unpack(header)[0])
    except ConnectionError:
        return None
    return json.loads(content) if content else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        some = connection.recv(min(size - len(content), 2**20))
        if not some:
            return None
        content += some
    return bytes(content)
