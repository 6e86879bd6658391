"""The service starts at once and stays small: neither it nor a job's process imports torch before there is work."""

import subprocess
import sys

import pytest

MODULES = ["calibrator_service.__main__", "calibrator_service.worker_process"]


@pytest.mark.parametrize("module", MODULES)
def test_torch_is_not_imported(module: str) -> None:
    program = f"import sys, {module}; print({{'torch', 'transformers'}} & sys.modules.keys())"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "set()"
