"""The trials of `bench.faults_worker` about certificates."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import trustme
from neap_client import ClientSecurity, NeapClient

from neap_engine.cli.processes import ServiceProcess
from shared.errors import NeapError, Unavailable

NUM_ROTATIONS = 20
READY_S = 240.0


def tls_trials(
    worker: Callable[..., AbstractContextManager[ServiceProcess]],
    folder: Path,
    request: Callable[[int], Any],
) -> dict[str, Callable[[], str]]:
    """`worker` starts a worker with flags; `request` makes a request of so many tokens."""
    return {"tls": lambda: _trial(worker, folder / "tls", request)}


def _trial(
    worker: Callable[..., AbstractContextManager[ServiceProcess]],
    folder: Path,
    request: Callable[[int], Any],
) -> str:
    """One worker under mutual TLS: strangers, rotations under load, and a file that is no certificate."""
    folder.mkdir()
    authority, other = trustme.CA(), trustme.CA()
    names = {name: folder / name for name in ("ca", "certificate", "key", "client", "client-key")}
    authority.cert_pem.write_to_path(str(names["ca"]))
    other.cert_pem.write_to_path(str(folder / "other-ca"))
    client = authority.issue_cert("client.example")
    client.private_key_and_cert_chain_pem.write_to_path(str(names["client"]))
    client.private_key_pem.write_to_path(str(names["client-key"]))
    _issue(authority, names)
    trusted = ClientSecurity(ca=names["ca"], certificate=names["client"], key=names["client-key"])
    flags = ["--tls-cert", str(names["certificate"]), "--tls-key", str(names["key"])]
    flags += ["--tls-client-ca", str(names["ca"])]
    with worker(*flags, ready=False) as process:
        address = process._read_address(time.monotonic() + READY_S)
        with NeapClient(address, security=trusted) as ready:
            ready.wait_ready(timeout_s=READY_S)
        strangers = {
            "wrong authority": ClientSecurity(
                ca=folder / "other-ca", certificate=names["client"], key=names["client-key"]
            ),
            "no certificate": ClientSecurity(ca=names["ca"]),
            "plain text": ClientSecurity(),
        }
        for what, security in strangers.items():
            assert _refused(address, security), f"let in: {what}"
        seen = _rotated_under_load(address, trusted, request, lambda: _issue(authority, names))
        assert set(seen) == {"finished"}, seen
        names["certificate"].write_bytes(b"garbage")
        with NeapClient(address, security=trusted) as after:
            list(after.generate(request(2)))
        log = process.log_path.read_text()
    assert "certificate not reloaded" in log, "nothing is said of the bad file"
    lines = [line for line in log.splitlines() if not line.startswith("{")]
    assert not lines, lines
    return (
        f"refused: {', '.join(strangers)}; {NUM_ROTATIONS} rotations under load: {seen['finished']} requests, none failed; "
        "garbage: the old certificate serves on, and the log says so"
    )


def _issue(authority: trustme.CA, names: dict[str, Path]) -> None:
    """Key first: between the two writes they do not fit, and the certificate before holds."""
    leaf = authority.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(str(names["key"]))
    chain = b"".join(part.bytes() for part in leaf.cert_chain_pems)
    names["certificate"].write_bytes(chain)


def _refused(address: str, security: ClientSecurity) -> bool:
    with NeapClient(address, security=security, num_attempts=1, timeout_s=10.0) as client:
        try:
            client.list_models()
        except Unavailable:
            return True
    return False


def _rotated_under_load(
    address: str,
    security: ClientSecurity,
    request: Callable[[int], Any],
    rotate: Callable[[], None],
) -> Counter[str]:
    """Clients that make a connection for each request, while certificates change: how their requests ended."""
    seen: Counter[str] = Counter()
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            try:
                with NeapClient(address, security=security, num_attempts=1) as client:
                    list(client.generate(request(4)))
                seen["finished"] += 1
            except NeapError as error:
                seen[f"{error.reason}: {error.message}"] += 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(NUM_ROTATIONS):
        time.sleep(0.5)
        rotate()
    over.set()
    for thread in threads:
        thread.join()
    return seen
