"""What may stand in a log."""

import pytest
import structlog

from shared.rpc.logs import configure_logging


@pytest.fixture(autouse=True)
def _as_before():
    before = structlog.get_config()
    yield
    structlog.configure(**before)


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
