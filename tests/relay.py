"""A port that hands on to another one, and may change what passes."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def relay(
    target_port: int | Callable[[], int],
    *,
    accept: Callable[[socket.socket], socket.socket] = lambda client: client,
    answer: Callable[[bytes], tuple[bytes, bool]] = lambda data: (data, True),
) -> Iterator[int]:
    """Yields the port. A function gives the target of each new connection, as names do. `accept` makes
    of each client's socket the one to talk over; where it raises OSError, nobody is served.

    `answer` makes of what the target says what the client gets, and whether the connection goes on.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, change: Callable[[bytes], tuple[bytes, bool]]) -> None:
        with suppress(OSError, ValueError):
            goes_on = True
            while goes_on and (data := source.recv(1 << 16)):
                data, goes_on = change(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError):
                near = accept(client)
                port = target_port if isinstance(target_port, int) else target_port()
                far = socket.create_connection(("127.0.0.1", port))
                for ends in ((near, far, lambda data: (data, True)), (far, near, answer)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)


@contextmanager
def cut_off(target_port: int) -> Iterator[tuple[int, threading.Event]]:
    """(port, event): while the event is set, the port drops its connections and takes no new ones."""
    is_cut = threading.Event()

    def accept(client: socket.socket) -> socket.socket:
        if is_cut.is_set():
            client.close()
            raise ConnectionResetError
        return client

    def answer(data: bytes) -> tuple[bytes, bool]:
        return (b"", False) if is_cut.is_set() else (data, True)

    with relay(target_port, accept=accept, answer=answer) as port:
        yield port, is_cut
