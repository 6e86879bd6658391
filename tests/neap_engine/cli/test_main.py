"""What all commands share: version, completion, and a start that imports little."""

import socket
import subprocess
import sys
import threading
from concurrent import futures
from contextlib import suppress

import grpc
import pytest

from neap_engine.cli import connection
from neap_engine.cli.console import checked_address
from tests.servers import free_ports
from tests.tiers import tiered

HEAVY = ("torch", "transformers", "matplotlib", "datasets", "huggingface_hub", "redis")


def test_version(neap, monkeypatch):
    monkeypatch.setattr(connection, "installed_version", lambda: "1.2.3")
    assert neap("--version").stdout == "neap 1.2.3\n"
    monkeypatch.setattr(connection, "installed_version", lambda: None)
    assert neap("--version").stdout == "neap (not installed as a package)\n"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("neap jobs ", {"list", "watch", "cancel", "retry"}),
        ("neap calibrate --deta", {"--detach"}),
        ("neap calibrate --label ", {"agreement", "cosine"}),
        ("neap generate x --policy re", {"relaxed"}),
    ],
)
def test_completion(neap, typed, expected):
    words = typed.split(" ")
    variables = {"_NEAP_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words) - 1)}
    result = neap(env={**variables, "COMP_WORDS": typed}, prog_name="neap")
    assert set(result.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_the_command(neap, shell):
    result = neap(env={"_NEAP_COMPLETE": f"source_{shell}"}, prog_name="neap")
    assert f"_NEAP_COMPLETE=complete_{shell}" in result.stdout


def test_help_imports_nothing_heavy():
    program = f"import sys, neap_engine.cli.main;print(*[name for name in {HEAVY!r} if name in sys.modules], end='')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_no_service_at_the_address(neap):
    (port,) = free_ports(1)
    for command in (["generate", "hi", "--worker"], ["jobs", "list", "--calibrator"]):
        result = neap(*command, f"127.0.0.1:{port}", "--wait", "0", code=1)
        assert f"127.0.0.1:{port}" in result.stderr
        assert "does a service run at this address" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("address", ["", "127.0.0.1", "http://127.0.0.1:7071", "a b:1", "x:y"])
def test_what_is_no_address_is_refused(neap, address):
    for command in (["generate", "hi", "--worker"], ["jobs", "list", "--calibrator"]):
        result = neap(*command, address, env={"COLUMNS": "200"}, code=2)
        assert f"{address!r} is not an address HOST:PORT" in result.stderr


@pytest.mark.parametrize(
    "address", ["h:1", "[::1]:1", "dns:///a:1", "ipv4:10.0.0.7:1,10.0.0.8:1", "unix:/tmp/s", "xds:///s"]
)
def test_every_target_of_grpc_is_an_address(address):
    assert checked_address(address) == address


def test_another_service_at_the_address(neap):
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        result = neap("generate", "hi", "--worker", f"127.0.0.1:{port}", code=1)
    finally:
        server.stop(None).wait()
    assert "another service runs at this address" in result.stderr


def test_grpc_writes_no_lines_of_its_own():
    """Here about a failed handshake: TLS with a port that speaks something else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=speak_nonsense, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = ["-m", "neap_engine.cli.main", "--tls", "generate", "hi", "--worker", address]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 1
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error"]


def speak_nonsense(listener):
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            with client:
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                client.recv(1 << 16)


@pytest.mark.parametrize("write", tiered(["print_line", "sys.stdout.write"], {"print_line"}))
def test_nothing_is_said_to_a_reader_that_has_had_enough(write):
    """As `head -1` is."""
    code = (
        "from neap_engine.cli.console import exit_on_error, print_line\n"
        "import sys, typer\n"
        f"typer.run(exit_on_error(lambda: [{write}('x' * 1000 + chr(10)) for _ in range(1000)] and None))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 1)
