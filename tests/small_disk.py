"""A file system that is really full: a small tmpfs in a mount namespace of its own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def run_on_small_disk(folder: Path, size: str, *command: object, timeout_s: float = 300) -> str:
    """Runs `command` where `folder` is an empty tmpfs of `size` ("1m") and returns its standard output.

    Skips the test where mounting is not allowed.
    """
    unshare = shutil.which("unshare") or "false"
    probe = [unshare, "-Urm", "mount", "-t", "tmpfs", "none", str(folder)]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs user namespaces that may mount a tmpfs")
    script = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'
    return subprocess.run(
        [unshare, "-Urm", "sh", "-c", script, "sh", size, folder, *map(str, command)],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'protos'}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=timeout_s,
    ).stdout
