"""`python -m inference_service` as a process of its own, serving a tiny model called "tiny"."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.forked_services import ForkedWorker

ROOT = Path(__file__).resolve().parents[1]
LISTENING = "listening on "


def start_worker(
    *flags: str,
    listen: str = "127.0.0.1:0",
    stderr: IO[bytes] | int = subprocess.DEVNULL,
    is_forked: bool = False,
) -> "subprocess.Popen[str] | ForkedWorker":
    """Not waited for; its address is the last word of the first line of its stdout. `is_forked`: the process that it is
    a fork of has done the imports."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NEAP_START_CACHE_MB": "0"}
    if is_forked:
        return ForkedWorker(["--listen", listen, *flags], variables, errors=stderr)
    return subprocess.Popen(
        [sys.executable, "-m", "inference_service", "--listen", listen, *flags],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


@contextmanager
def worker_process(
    folder: Path,
    registry: Path,
    *flags: str,
    listen: str = "127.0.0.1:0",
    stderr: IO[bytes] | int = subprocess.DEVNULL,
    is_forked: bool = False,
) -> Iterator["tuple[subprocess.Popen[str] | ForkedWorker, str]"]:
    """(process, HOST:PORT) once it listens; killed at the end if it is still there."""
    model = ("--model", f"tiny={folder}", "--registry", str(registry))
    process = start_worker(*model, *flags, listen=listen, stderr=stderr, is_forked=is_forked)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith(LISTENING), line
        yield process, line.removeprefix(LISTENING).strip()
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()
