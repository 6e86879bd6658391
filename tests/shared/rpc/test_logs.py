"""Log lines: escapes, tracebacks and lines that cannot be written."""

import errno
import io
import json
import subprocess
import sys

import pytest
import structlog

from shared.rpc.logs import configure_logging


@pytest.fixture(autouse=True)
def _as_before():
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("json_lines", [True, False])
def test_control_characters_in_logs_are_escaped(capsys, json_lines):
    configure_logging(json_lines=json_lines)
    structlog.get_logger().info("job ended", problem="a\x1b]0;b\x9b\u202e\nc")
    written = capsys.readouterr().err
    assert "\\u001b]0;b\\u009b\\u202e" in written
    assert len(written.splitlines()) == 1


@pytest.mark.parametrize("json_lines", [True, False])
def test_tracebacks_hold_no_local_variables(capsys, json_lines):
    configure_logging(json_lines=json_lines)

    def connect(url: str) -> None:
        raise OSError("refused")

    try:
        connect("redis://ann:" + "".join(["hun", "ter2"]) + "@host")
    except OSError:
        structlog.get_logger().exception("failed")
    written = capsys.readouterr()
    assert written.out == ""
    assert "refused" in written.err
    assert "connect" in written.err
    assert "hunter2" not in written.err


class FullDisk(io.RawIOBase):
    num_refused = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.num_refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_does_not_raise(monkeypatch):
    configure_logging(json_lines=True)
    disk = FullDisk()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(disk, write_through=True))
    for level in ("info", "warning", "error", "exception"):
        getattr(structlog.get_logger(), level)("there is no room for this")
    assert disk.num_refused >= 4


PROGRAM = """
import asyncio, logging, sys, threading, warnings
handler = logging.StreamHandler()  # as transformers makes one when it is imported
logging.getLogger("library").addHandler(handler)
logging.getLogger("library").propagate = False
from shared.rpc.logs import configure_logging
from shared.rpc.logs import log_all_output, log_stdout
log_all_output()
configure_logging("info")
log_stdout()
from tqdm import tqdm
for _ in tqdm(range(3), desc="Loading weights"):
    pass
tqdm(total=3, disable=False).update(1)
logging.getLogger("library").warning("from a library")
logging.getLogger("library").info("not worth a line")
logging.getLogger("shared.x").info("from a module of ours")
logging.getLogger("shared.x").debug("below the level")
warnings.warn("a warning")
print("printed")
sys.stderr.write("half a line")
sys.stderr.write(" and the rest\\nwithout end")
def fail(what):
    raise RuntimeError(what)
thread = threading.Thread(target=fail, args=("in a thread",))
thread.start()
thread.join()
async def failing():
    asyncio.get_running_loop().call_soon(fail, "in a callback")
    await asyncio.sleep(0.01)
asyncio.run(failing())
class Bad:
    def __del__(self):
        fail("unraisable")
Bad()
fail("in the main thread")
"""


def test_every_line_is_json_whatever_code_writes_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"event", "level", "timestamp"} <= set(line) for line in lines)
    text = done.stderr
    for expected in (
        "from a library",
        "from a module of ours",
        "a warning",
        "printed",
        "half a line and the rest",
        "without end",
        "in a thread",
        "in a callback",
        "unraisable",
        "in the main thread",
    ):
        assert text.count(expected) >= 1, expected
    for unwanted in ("Loading weights", "not worth a line", "below the level"):
        assert unwanted not in text
