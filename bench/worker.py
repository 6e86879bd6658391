"""Worker processes for benchmarks over gRPC."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from neap_engine.cli.processes import ServiceProcess
from shared.ladder.folder import read_router_folder
from shared.registry.factory import open_registry

MODEL_ID = "bench"
READY_S = 600.0


def publish_router(folder: Path, registry: Path) -> None:
    """Publishes the ladder in `folder` to `registry`, as the newest version of MODEL_ID."""
    with closing(open_registry(str(registry))) as opened:
        opened.publish(MODEL_ID, *read_router_folder(folder), request_id="bench")


def worker_process(model: str, registry: Path, log_path: Path, flags: Sequence[str] = ()) -> ServiceProcess:
    """A worker process that serves `model` as MODEL_ID. A context manager: entering it starts the process. Its data are
    in the folder "data" beside its log."""
    arguments = ["--model", f"{MODEL_ID}={model}", "--registry", str(registry)]
    arguments += ["--data-dir", str(log_path.parent / "data"), *flags]
    return ServiceProcess("worker", "inference_service", arguments, log_path)


@contextmanager
def serving(model: str, router: Path | None, flags: Sequence[str] = ()) -> Iterator[str]:
    """The address of a worker that is ready, with a registry that has the router."""
    with tempfile.TemporaryDirectory() as folder:
        registry = Path(folder) / "registry"
        if router is not None:
            publish_router(router, registry)
        with worker_process(model, registry, Path(folder) / "log", flags) as worker:
            yield worker.wait_serving(READY_S)
