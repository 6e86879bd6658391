"""`neap up` as a process: it serves, learns, goes on where it was, and leaves nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neap_engine.cli.processes import WITH_PARENT
from tests.demo.test_demo import environment, model_folder, processes_naming
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]
__all__ = ["model_folder"]
PROMPT = "one two three one two three one two"


class Up:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError("".join(self.lines))

    def end(self, number: int) -> str:
        """The rest of what it prints."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        return rest


@contextmanager
def up(model: Path, data_dir: Path, *flags: str) -> Iterator[Up]:
    command = [sys.executable, "-m", "neap_engine.cli.main", "up", "--model", f"tiny={model}"]
    command += ["--data-dir", str(data_dir), *flags]
    for service in ("--worker", "--calibrator", "--gateway"):
        if service not in flags:
            command += [service, "127.0.0.1:0"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield Up(process)
        finally:
            process.kill()


def answer(address: str, prompt: str = PROMPT) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["text"])


@pytest.mark.timeout(300)
def test_it_serves_learns_and_goes_on_where_it_was(model_folder: Path, tmp_path: Path):
    data_dir, texts = tmp_path / "data", []
    for learns, number in ((True, signal.SIGINT), (False, signal.SIGTERM)):
        with up(model_folder, data_dir, "--budget", "15") as running:
            address = running.until(r"http://(\S+)/v1,")[1]
            texts.append(answer(address))  # nobody waits for a router
            running.until("router 1 was learned" if learns else "router 1$")
            texts.append(answer(address))
            rest = running.end(number)
        assert running.process.returncode == 0, "".join(running.lines) + rest
        assert "Traceback" not in rest
        assert processes_naming(str(data_dir)) == []
    assert len(set(texts)) == 1


@pytest.mark.timeout(300)
def test_it_learns_from_what_it_serves(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"TOKENS": "400", "INTERVAL_S": "0", "BUDGET_S": "20"}.items():
        monkeypatch.setenv(f"NEAP_LEARN_{name}", value)
    with up(model_folder, tmp_path / "data", "--budget", "15") as running:
        address = running.until(r"http://(\S+)/v1,")[1]
        running.until("router 1 was learned")
        before = [answer(address, f"{PROMPT} {number}") for number in range(20)]
        running.until("router 2 was learned from what was served")
        assert [answer(address, f"{PROMPT} {number}") for number in range(20)] == before


@pytest.mark.timeout(200)
def test_if_one_part_dies_all_of_it_ends_and_says_why(model_folder: Path, tmp_path: Path):
    data_dir = tmp_path / "data"
    with up(model_folder, data_dir, "--no-calibrate") as running:
        running.until("no router; `neap calibrate` learns one")
        [worker] = [pid for pid in processes_naming(str(data_dir)) if b"inference_service" in cmdline(pid)]
        os.kill(worker, signal.SIGKILL)
        running.until(r"the worker ended with code -9.*\[SERVICE_ENDED\]")
        assert running.process.wait(60) == 1
    assert processes_naming(str(data_dir)) == []


@pytest.mark.timeout(200)
@pytest.mark.skipif(not WITH_PARENT, reason="setpriv of util-linux is not installed")
def test_if_it_is_killed_all_of_it_ends(model_folder: Path, tmp_path: Path):
    data_dir = tmp_path / "data"
    with up(model_folder, data_dir, "--no-calibrate") as running:
        running.until("no router; `neap calibrate` learns one")
        assert len(processes_naming(str(data_dir))) == 3  # a gateway has no data folder
        running.process.kill()
        wait_until(lambda: not processes_naming(str(data_dir)))


@pytest.mark.timeout(200)
def test_an_address_in_use_is_named(model_folder: Path, tmp_path: Path):
    data_dir = tmp_path / "data"
    with up(model_folder, data_dir, "--no-calibrate") as running:
        address = running.until(r"http://(\S+)/v1,")[1]
        with up(model_folder, data_dir, "--gateway", address) as second:
            second.until(f"cannot listen on {re.escape(address)}.*--gateway")
            assert second.process.wait(60) == 1
        assert answer(address)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
