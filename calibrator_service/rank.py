"""One rank of a calibration without a service, as torchrun or a Kubernetes Job starts it on several machines:

    torchrun --nnodes M --nproc-per-node N .. -m calibrator_service.rank SPEC --work-dir FOLDER [--request-id ID]

SPEC: a CalibrationSpec of the protos as JSON, or a file with it. Everything else is set by the calibration service's
variables (NEAP_MODELS, NEAP_REGISTRY, ..). The first rank reports, and publishes the router. Each rank keeps its files
in FOLDER, which ranks may share: a job that is started again goes on from there. SIGTERM ends a rank, and publishes
nothing.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import structlog
from google.protobuf.json_format import Parse, ParseError
from neap_client.calibration.v1 import calibration_pb2

from calibrator_service.calibration.ranks import Ranks, joined
from calibrator_service.calibration.spec import CalibrationSpec, Progress
from calibrator_service.learning.pools import pool_of_source
from calibrator_service.learning.traffic_file import with_text
from calibrator_service.lineage import fetch_parent, find_parent
from calibrator_service.publisher import publish
from calibrator_service.recipe import load_product, run, save_product
from calibrator_service.spec_messages import spec_of_request
from shared.calibrator_settings import CalibratorSettings
from shared.config import make_settings
from shared.cpus import size_thread_pools
from shared.digests import digest_of
from shared.errors import InvalidInput, NeapError, Unavailable
from shared.files import file_lock, storage_error
from shared.registry.factory import open_registry
from shared.rpc.logs import configure_logging, log_all_output, log_stdout

REPORT_INTERVAL_S = 5.0

log = structlog.get_logger("neap.calibration")


class _Report:
    """Logs progress: each phase, and within a phase every REPORT_INTERVAL_S."""

    def __init__(self) -> None:
        self._phase, self._told_s = "", 0.0

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.phase != self._phase or now_s - self._told_s >= REPORT_INTERVAL_S:
            self._phase, self._told_s = progress.phase, now_s
            log.info("progress", phase=progress.phase, fraction=round(progress.fraction, 3), **progress.figures)


def calibrate(ranks: Ranks, asked: str, request_id: str, work_dir: Path, settings: CalibratorSettings) -> None:
    """Raises as `recipe.run`, and what the registry raises."""
    versions = {f"version_of_{name.replace('-', '_')}": version(name) for name in ("neap-server", "torch")}
    ranks.check(**versions, spec=digest_of(asked.encode()), request_id=request_id)
    aliases, spec = read_request(asked, settings)
    if ranks.firsts(load_product(work_dir) is None):
        spec = ranks.firsts(made_ready(spec, work_dir, settings) if ranks.is_first else spec)
        own_dir = work_dir / f"rank-{ranks.rank}"
        own_dir.mkdir(parents=True, exist_ok=True)
        locked = Unavailable("another process still works as this rank of the calibration", reason="JOB_LOCKED")
        with file_lock(own_dir / "lock", timeout_s=settings.rank_timeout_s, locked=locked):
            parent = fetch_parent(settings.registry, spec, own_dir)
            report = _Report() if ranks.is_first else lambda _: None
            product = run(spec, settings, work_dir, parent, report, lambda: False, ranks)
            if product is not None:
                save_product(work_dir, product)
    if ranks.is_first and (made := load_product(work_dir)) is not None:
        published = publish(
            settings.registry, spec.model_id, request_id, aliases, made, signs_later=bool(settings.require_signatures)
        )
        log.info("published", version=published.version, manifest_digest=published.manifest_digest)
    ranks.end()


def read_request(asked: str, settings: CalibratorSettings) -> tuple[Sequence[str], CalibrationSpec]:
    """The aliases and the spec, as the service checks a request. Raises InvalidInput, PreconditionFailed."""
    try:
        message = Parse(asked, calibration_pb2.CalibrationSpec())
    except ParseError as error:
        raise InvalidInput(f"the spec is no CalibrationSpec: {error}", reason="BAD_SPEC") from error
    spec = spec_of_request(message, settings)
    if spec.parent is not None and not spec.parent.version:
        # An alias may name another one when the job is started again.
        raise InvalidInput("name the parent by its version", reason="BAD_SPEC", metadata={"field": "spec.parent"})
    return message.aliases, spec


def made_ready(spec: CalibrationSpec, work_dir: Path, settings: CalibratorSettings) -> CalibrationSpec:
    """The spec with the path of its text and a parent that fits. Raises NotFound, PermissionDenied, as `find_parent`,
    and what the registry raises."""
    spec = with_text(spec, work_dir, settings)
    if spec.parent is not None:
        with closing(open_registry(settings.registry)) as registry:
            parent = find_parent(registry, spec.model_id, spec.parent, pool_of_source(spec.source))
        spec = replace(spec, parent=parent)
    return spec


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when the router is published, 1 for an error, which is logged."""
    parser = argparse.ArgumentParser("python -m calibrator_service.rank", description=__doc__.split("\n")[0])
    parser.add_argument("spec", help="JSON of a CalibrationSpec, or a file with it")
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument(
        "--request-id",
        default=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        help="under which the router is published once; default: torchrun's --rdzv-id",
    )
    options = parser.parse_args(argv)
    configure_logging()
    try:
        settings = make_settings(CalibratorSettings)
        configure_logging(settings.log_level)
        log_stdout()
        if not options.request_id:
            raise InvalidInput("give --request-id, or start the ranks with torchrun", reason="BAD_CONFIGURATION")
        asked = options.spec if options.spec.lstrip().startswith("{") else Path(options.spec).read_text("utf-8")
        with joined(settings.rank_timeout_s) as ranks:
            structlog.contextvars.bind_contextvars(calibration_id=options.request_id, rank=ranks.rank)
            calibrate(ranks, asked, options.request_id, options.work_dir.absolute(), settings)
    except (NeapError, OSError) as error:
        known = error if isinstance(error, NeapError) else storage_error(error, "its files", place="its folder")
        log.error("failed", reason=known.reason, why=known.message)
        return 1
    return 0


if __name__ == "__main__":
    log_all_output()
    size_thread_pools()
    sys.exit(main())
