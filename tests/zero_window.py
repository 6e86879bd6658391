"""A client of HTTP/2 that answers pings and lets nobody send it a byte of data."""

import socket
import struct
import threading
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACKNOWLEDGED, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


class ZeroWindow:
    """`target`: HOST:PORT of a server in plain text. Must be closed."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)))
        self._next_stream = 1
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, path: str, message: bytes) -> None:
        """Begins a call of a method of gRPC."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        headers = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in fields.items())
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._socket.sendall(
            _frame(HEADERS, END_HEADERS, stream, headers)
            + _frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)
        )

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that reads would keep it open
        self._socket.close()

    def _read(self) -> None:
        data = b""
        with suppress(OSError):
            while chunk := self._socket.recv(1 << 16):
                data += chunk
                while len(data) >= 9 and len(data) >= 9 + (length := int.from_bytes(data[:3], "big")):
                    kind, flags, payload, data = data[3], data[4], data[9 : 9 + length], data[9 + length :]
                    if kind in (SETTINGS, PING) and not flags & ACKNOWLEDGED:
                        self._socket.sendall(_frame(kind, ACKNOWLEDGED, 0, payload if kind == PING else b""))
