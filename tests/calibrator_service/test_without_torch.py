"""The service starts at once and stays small: neither it nor a job's process imports torch before there is work."""

import subprocess
import sys

import pytest

MODULES = ["calibrator_service.__main__", "calibrator_service.worker_process"]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_heavy_is_imported(module: str) -> None:
    unwanted = {"torch", "transformers", "starlette", "uvicorn"}
    program = f"import sys, {module}; print({unwanted} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "set()"
