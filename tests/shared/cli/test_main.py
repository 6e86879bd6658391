"""What all commands share: version, completion, and a start that imports little."""

import subprocess
import sys
from concurrent import futures

import grpc
import pytest

from shared.cli import connection
from tests.servers import free_ports

HEAVY = ("torch", "transformers", "matplotlib", "datasets", "huggingface_hub", "redis")


def test_version(neap, monkeypatch):
    monkeypatch.setattr(connection, "installed_version", lambda: "1.2.3")
    assert neap("--version").stdout == "neap 1.2.3\n"
    monkeypatch.setattr(connection, "installed_version", lambda: None)
    assert neap("--version").stdout == "neap (not installed as a package)\n"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("neap jobs ", {"list", "watch", "cancel"}),
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
    program = (
        "import sys, shared.cli.main;"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules], end='')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_no_service_at_the_address(neap):
    (port,) = free_ports(1)
    for command in (["generate", "hi", "--worker"], ["jobs", "list", "--calibrator"]):
        result = neap(*command, f"127.0.0.1:{port}")
        assert result.exit_code == 1
        assert f"127.0.0.1:{port}" in result.stderr
        assert "does a service run at this address" in result.stderr
        assert result.stderr.count("\n") == 1


def test_another_service_at_the_address(neap):
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        result = neap("generate", "hi", "--worker", f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
    assert result.exit_code == 1
    assert "another service runs at this address" in result.stderr
