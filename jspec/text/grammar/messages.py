"""Messages between the server and the process that compiles grammars: JSON objects over sockets."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def send(connection: socket.socket, message: dict[str, Any]):
    """Send a message.

    Raises:
      OSError: the connection is lost.
    """
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None if the connection is closed or lost.

    Raises:
      TimeoutError: the connection's timeout has passed.
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
        received = connection.recv(min(size - len(content), 2**20))
        if not received:
            return None
        content += received
    return bytes(content)
