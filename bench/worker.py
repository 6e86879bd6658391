"""Worker processes for benchmarks over gRPC."""

from collections.abc import Sequence
from pathlib import Path

from neap_engine.cli.processes import ServiceProcess
from shared.ladder.folder import read_router_folder
from shared.registry.factory import open_registry

MODEL_ID = "bench"


def publish_router(folder: Path, registry: Path) -> None:
    """Publishes the ladder in `folder` to `registry`, as the newest version of MODEL_ID."""
    opened = open_registry(str(registry))
    try:
        opened.publish(MODEL_ID, *read_router_folder(folder), request_id="bench")
    finally:
        opened.close()


def worker_process(
    model: str, registry: Path, log_path: Path, flags: Sequence[str] = ()
) -> ServiceProcess:
    """A worker process that serves `model` as MODEL_ID. A context manager: entering it starts the process. Its data are in the folder "data"
    beside its log."""
    arguments = ["--model", f"{MODEL_ID}={model}", "--registry", str(registry)]
    arguments += ["--data-dir", str(log_path.parent / "data"), *flags]
    return ServiceProcess("worker", "inference_service", arguments, log_path)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process in bytes. Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/status has no VmRSS")
