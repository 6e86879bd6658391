"""A program that calibrates and is told to end leaves no files."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tests.worker import save_model

PROGRAM = """
import sys
import neap_engine
neap_engine.calibrate(neap_engine.load(sys.argv[1]))
"""


@pytest.mark.full
def test_sigterm_removes_the_work_folder_of_a_calibration(tmp_path: Path) -> None:
    model, scratch = save_model(tmp_path / "model"), tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(model)], env={**os.environ, "TMPDIR": str(scratch)})
    try:
        wait_until(lambda: any(scratch.glob("neap-calibration-*/*")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not list(scratch.glob("neap-*"))
