"""The names of the library, each documented where it is defined.
`neap_engine` gives them, and imports this module for the first.

The import sends neap's log lines to `logging`, and fits torch's number of threads.
"""

import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from structlog.typing import EventDict

from calibrator_service.calibration.pipeline import CalibrationResult, calibrate
from calibrator_service.calibration.spec import (
    AnswerFile,
    CalibrationSpec,
    HubDataset,
    ParentRouter,
    Progress,
    SelfGenerated,
    TextFile,
)
from calibrator_service.calibration.statistics import Parent
from neap_engine.hugging_face.attach import attach
from shared.constraints.constraint import Constraint
from shared.cpus import usable_cpus
from shared.digests import digest_of
from shared.engine.engine import Engine
from shared.engine.request.request import Generation
from shared.errors import NeapError, PreconditionFailed
from shared.exchange.router_files import check_folder, fetched
from shared.exchange.signatures import verifier_of
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.ladder.folder import read_ladder, read_router_folder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.load import load_model as load
from shared.model.loaded import LoadedModel
from shared.model.loaded import wrap_model as wrap
from shared.model.sampling import SamplingParams
from shared.registry.contents import encode_manifest

__all__ = [
    "AnswerFile",
    "CalibrationResult",
    "CalibrationSpec",
    "Constraint",
    "DepthPolicy",
    "Engine",
    "Generation",
    "HubDataset",
    "LoadedModel",
    "NeapError",
    "ProgressLine",
    "SamplingParams",
    "SelfGenerated",
    "TextFile",
    "attach",
    "calibrate",
    "load",
    "read_parent",
    "read_router",
    "wrap",
]


_render = structlog.processors.KeyValueRenderer(key_order=["event"])


def log_to_logging() -> None:
    """Sends what neap logs to the loggers `neap.*` and below, unless the application has configured structlog itself.

    structlog's own default would print every line on standard output.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, _as_logging_arguments],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _as_logging_arguments(logger: Any, name: str, event: EventDict) -> tuple[tuple[object], dict[str, Any]]:
    """The line, and the exception for `logging` to show."""
    exception = event.pop("exc_info", None)
    return (_render(logger, name, event),), {"exc_info": exception}


def read_router(source: Path | str, *, verify: Sequence[Path] = ()) -> Ladder:
    """The router in a folder, or at hf://OWNER/NAME@REVISION or oci://HOST/REPOSITORY:TAG. `verify`: files with public
    keys or authorities' certificates, of which one must have signed it.

    Raises as `read_router_folder`, `unpack_ladder` and `shared.exchange.router_files.fetched`; PreconditionFailed
    (SIGNATURE_MISSING, SIGNATURE_INVALID).
    """
    with fetched(str(source)) as folder:
        if (verifier := verifier_of(verify)) is not None:
            check_folder(folder, str(source), verifier=verifier)
        return read_ladder(folder)


def read_parent(folder: Path | str, *, share: float = 1.0) -> Parent:
    """The router that `CalibrationResult.save` or `neap routers export` has written, for `calibrate(..., parent=)`.

    `share`: how much a token counts that it learned from, against one of the new text, in (0, 1]. Raises `NotFound`,
    `Corrupt`, `InvalidInput` (BAD_SPEC), and `PreconditionFailed` (NO_STATISTICS) if the folder has no statistics.
    """
    manifest, blobs = read_router_folder(Path(folder), complete=True)
    if STATISTICS_BLOB not in blobs:
        raise PreconditionFailed(
            f"{folder} has no {STATISTICS_BLOB}, so no calibration can go on from it: calibrate anew, or export the "
            "router with it",
            reason="NO_STATISTICS",
        )
    # The digest that the router has in every registry.
    digest = digest_of(encode_manifest(manifest, blobs))
    router = ParentRouter(manifest_digest=digest, share=share)
    return Parent.read(Path(folder) / STATISTICS_BLOB, router)


# Share of the work after which a line is written where lines cannot be replaced.
STEP = 0.1


class ProgressLine:
    """A line on standard error about the state of a calibration: `calibrate(model, spec, progress=ProgressLine())`.

    On a terminal it is replaced; elsewhere a new one follows after each tenth and with each phase.
    """

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._shown = ""
        self._last: tuple[str, int] | None = None

    def __call__(self, progress: Progress) -> None:
        phase = progress.phase.replace("_", " ")
        seconds = time.monotonic() - self._start_s
        line = f"calibrating: {progress.fraction:4.0%}, {phase}, {seconds:.0f} s"
        if sys.stderr.isatty():
            end = "\n" if progress.fraction >= 1.0 else ""
            print("\r" + line.ljust(len(self._shown)), end=end, file=sys.stderr, flush=True)
            self._shown = line
        elif (step := (phase, int(progress.fraction / STEP))) != self._last:
            print(line, file=sys.stderr, flush=True)
            self._last = step


CPUS = Path("/sys/devices/system/cpu")
# With one of them the user has chosen a number.
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def fit_torch_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lowers torch's number of threads to `usable_cpus`, unless it has been chosen: by a variable, or by
    `torch.set_num_threads`.

    torch itself counts the CPUs that it may run on, not the time on them that a container's quota allows. Threads that
    wait for each other then stop each other: 16 threads in the time of 2 CPUs give no answer for minutes.
    """
    if any(name in environment for name in CHOSEN_BY):
        return
    num_threads, usable = torch.get_num_threads(), usable_cpus()
    # Any other number than torch's own was set.
    if num_threads > usable and num_threads in _default_numbers():
        torch.set_num_threads(usable)


def _default_numbers() -> set[int]:
    """The numbers of threads that torch may choose by itself: CPUs or cores, of the machine or allowed to this
    process."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            cores.add((CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return {os.cpu_count() or 1, len(allowed), len(cores)}


log_to_logging()
fit_torch_threads()
