"""A service on a small file system that is filled to its last byte while a job is in a phase:
`full_disk.py FOLDER MODEL PHASE..`.

One JSON line per phase: how that job and the next one ended, and what is left.
"""

import json
import os
import signal
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

from shared.light_imports import import_transformers_lightly

if __name__ == "__main__":  # as its service's jobs do
    import_transformers_lightly()

from neap_client.calibration.v1 import calibration_pb2 as pb

from shared.registry.factory import open_registry
from tests.calibrator_service.conftest import Service
from tests.calibrator_service.test_real_calibration import JOB_TIMEOUT_S, real_job
from tests.exported_metrics import scraped
from tests.waiting import wait_until

FULL_S = float(os.environ.get("FULL_DISK_S", "5"))


def jobs(service: Service) -> list[pb.Calibration]:
    request = pb.ListCalibrationsRequest(page_size=100)
    return list(service.calibrations.ListCalibrations(request, timeout=60).calibrations)


def num_whole_versions(folder: Path) -> int:
    with closing(open_registry(str(folder / "registry"))) as registry:
        versions = registry.list_versions("tiny")
        for version in versions:
            for name in version.manifest["blobs"]:
                registry.read_blob(version, name)
        assert registry.aliases("tiny").get("latest") == (versions[0].version if versions else None)
    return len(versions)


def ended_or_waits(service: Service, job: pb.Calibration) -> bool:
    now = service.get(job)
    is_held_up = scraped(service.folder / "service.log")["neap_calibration_queue_held_up",]
    return bool(now.HasField("end_time") or now.failure.reason or is_held_up)


def outcome(service: Service, phase: str) -> dict[str, object]:
    folder, filler = service.folder, service.folder / "filler"
    (folder / "stop-in").write_text(phase)
    job = real_job(service, phase)
    process = service.stopped_job()
    num_jobs = len(jobs(service))
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    process.send_signal(signal.SIGCONT)

    give_up_s = time.monotonic() + FULL_S
    # A process that waits to save its product cannot say so in a store that is full.
    while not ended_or_waits(service, job) and time.monotonic() < give_up_s:
        time.sleep(0.1)
    is_listed = len(jobs(service)) == num_jobs
    filler.unlink()
    end = service.end_of(job, JOB_TIMEOUT_S)
    following = service.end_of(real_job(service, f"after {phase}"), JOB_TIMEOUT_S)
    wait_until(lambda: not service.job_processes())
    states = [one.state for one in jobs(service)]
    return {
        "phase": phase,
        "is_listed": is_listed,
        "state": pb.State.Name(end.state).removeprefix("STATE_"),
        "reason": end.failure.reason,
        "num_resumes": end.num_resumes,
        "next": pb.State.Name(following.state).removeprefix("STATE_"),
        "num_processes": len(service.job_processes()),
        "num_succeeded": states.count(pb.STATE_SUCCEEDED),
        "num_whole_versions": num_whole_versions(folder),
    }


def main() -> None:
    folder, model, phases = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    flags = ("--model", f"tiny={model}", "--threads", "1", "--metrics-listen", "127.0.0.1:0")
    service = Service(folder, *flags)
    try:
        for phase in phases:
            print(json.dumps(outcome(service, phase)), flush=True)
    finally:
        service.kill()


if __name__ == "__main__":
    main()
