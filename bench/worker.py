"""Worker processes for benchmarks over gRPC."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from neap_engine.cli.processes import ServiceProcess
from shared.errors import Unavailable
from shared.ladder.folder import read_router_folder
from shared.registry.factory import open_registry

MODEL_ID = "bench"
READY_S = 600.0


def publish_router(folder: Path, registry: Path) -> None:
    """Publishes the ladder in `folder` to `registry`, as the newest version of MODEL_ID."""
    with closing(open_registry(str(registry))) as opened:
        opened.publish(MODEL_ID, *read_router_folder(folder), request_id="bench")


class Worker(ServiceProcess):
    """A worker process that serves `model` as MODEL_ID."""

    def wait_complete(self, timeout_s: float) -> str:
        """As `wait_serving`, and waits until what follows a start, such as measuring costs, is done, too."""
        deadline_s = time.monotonic() + timeout_s
        address = self.address or self.wait_serving(timeout_s)
        while "the start is complete" not in self.log_path.read_text():
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the start is not complete after {timeout_s:g} s", reason="NOT_READY")
            time.sleep(0.1)
        return address


def worker_process(model: str, registry: Path, log_path: Path, flags: Sequence[str] = ()) -> Worker:
    """A context manager: entering it starts the process. Its data are in the folder "data" beside its log."""
    arguments = ["--model", f"{MODEL_ID}={model}", "--registry", str(registry)]
    arguments += ["--data-dir", str(log_path.parent / "data"), *flags]
    return Worker("worker", "inference_service", arguments, log_path)


@contextmanager
def serving(model: str, router: Path | None, flags: Sequence[str] = ()) -> Iterator[str]:
    """The address of a worker that is ready, with a registry that has the router."""
    with tempfile.TemporaryDirectory() as folder:
        registry = Path(folder) / "registry"
        if router is not None:
            publish_router(router, registry)
        with worker_process(model, registry, Path(folder) / "log", flags) as worker:
            yield worker.wait_complete(READY_S)
