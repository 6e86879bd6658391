"""Log lines: escapes, tracebacks and lines that cannot be written."""

import errno
import io

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
