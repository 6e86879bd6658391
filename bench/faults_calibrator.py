"""A calibration service under kills, stops and full disks, in every phase of a job; any surprise makes the exit status 1.

    python -m bench.faults_calibrator --model DIR [--trials folder kill stop disk]

Each trial starts real services over a folder of its own and prints one row of a table. A small tmpfs stands for the disk that gets
full, so the trial `disk` needs Linux and the right to mount (root, or `unshare -Urm`).
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb

from bench.trials import run_trials
from neap_engine.cli.processes import ServiceProcess
from shared.registry.factory import open_registry

MODEL_ID = "trial"
PHASES = (
    "loading",
    "collecting",
    "training_heads",
    "training_routers",
    "evaluating",
    "publishing",
)
ENDED = (pb.STATE_SUCCEEDED, pb.STATE_FAILED, pb.STATE_CANCELLED)
READY_S, JOB_S, LOOK_S = 60.0, 600.0, 0.0005
# How long nothing may change on a full disk before the trial makes room again.
FULL_S = 20.0
DISK_BYTES = 96 << 20
TRIES = 5
START_DELAYS_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
JOB_DELAYS_S = (0.0, 0.1, 0.3, 0.6, 1.0, 2.0)


class Surprise(AssertionError):
    """What must not be."""


class Missed(Surprise):
    """A phase so short that it was over before anybody looked."""


class Trial:
    """Services over one folder, one after the other."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self._model, self._num_started = folder, model, 0
        self.registry = folder / "registry"

    def service(self) -> ServiceProcess:
        """Not entered yet. Its log lies outside the folder, which may be full."""
        self._num_started += 1
        log = self.folder.parent / f"{self.folder.name}-{self._num_started}.log"
        flags = ("--data-dir", str(self.folder), "--registry", str(self.registry))
        model = ("--model", f"{MODEL_ID}={self._model}", "--threads", "1", "--grace-s", "0")
        metrics = ("--metrics-listen", "127.0.0.1:0")
        return ServiceProcess("calibrator", "calibrator_service", (*flags, *model, *metrics), log)

    @contextmanager
    def serving(self) -> Iterator[tuple[ServiceProcess, NeapClient]]:
        with (
            self.service() as process,
            closing(NeapClient(process.wait_serving(READY_S))) as client,
        ):
            yield process, client

    @contextmanager
    def record(self, calibration_id: str) -> Iterator[Callable[[], sqlite3.Row]]:
        """Reads the job's row, beside the service."""
        path = self.folder / "calibrator" / "jobs.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            connection.row_factory = sqlite3.Row
            query = "SELECT * FROM jobs WHERE calibration_id = ?"
            yield lambda: connection.execute(query, (calibration_id,)).fetchone()

    def recorded(self, calibration_id: str) -> sqlite3.Row:
        with self.record(calibration_id) as read:
            return read()

    def pause_in(self, calibration_id: str, phase: str) -> list[int]:
        """Stops the job's process as soon as it is in `phase`, and returns it. Raises Missed where it was through too soon."""
        with self.record(calibration_id) as read:

            def is_there() -> bool:
                row = read()
                if row["state"] not in ("queued", "running"):
                    raise Missed(f"{row['state']} before {phase} was seen")
                return bool(row["phase"] == phase)

            wait_until(is_there, JOB_S, f"the job to be in {phase}", LOOK_S)
        found = self.job_processes()
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        return found

    def job_processes(self) -> list[int]:
        """Wherever they hang now: found by the log they write to."""
        logs = str(self.folder / "calibrator" / "logs")
        found = []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdigit() and str((process / "fd/2").readlink()).startswith(logs):
                    found.append(int(process.name))
        return found

    def check_nothing_is_left(self) -> None:
        wait_until(lambda: not self.job_processes(), 10, "the job's process to be gone")

    def check_registry(self, num_versions: int) -> None:
        """So many versions, whole, and the newest is the latest."""
        with closing(open_registry(str(self.registry))) as registry:
            versions = registry.list_versions(MODEL_ID)
            if len(versions) != num_versions:
                raise Surprise(f"{len(versions)} versions are published, not {num_versions}")
            for version in versions:
                for name in version.manifest["blobs"]:
                    registry.read_blob(version, name)
            latest = registry.aliases(MODEL_ID).get("latest")
            if latest != (versions[0].version if versions else None):
                raise Surprise(f"latest is {latest}")


def request(client: NeapClient, request_id: str) -> str:
    """A job of seconds: short answers to given prompts."""
    prompts = [f"{word} {number}" for word in ("Count to", "Add one to") for number in range(20)]
    spec = pb.CalibrationSpec(
        model_id=MODEL_ID, rung_depths=[1], router_width=16, draft_vocabulary_size=128
    )
    spec.max_tokens = 100_000
    spec.self_generated.CopyFrom(pb.SelfGenerated(prompts=prompts, max_new_tokens=16))
    return client.create_calibration(spec, request_id=request_id).calibration_id


def end_of(client: NeapClient, calibration_id: str) -> pb.Calibration:
    def has_ended() -> bool:
        return client.get_calibration(calibration_id).state in ENDED

    wait_until(has_ended, JOB_S, "the job to end")
    return client.get_calibration(calibration_id)


def check_succeeds(client: NeapClient, calibration_id: str) -> pb.Calibration:
    job = end_of(client, calibration_id)
    if job.state != pb.STATE_SUCCEEDED:
        raise Surprise(f"{pb.State.Name(job.state)}: {job.failure.reason}, {job.failure.message}")
    return job


def wait_until(
    is_so: Callable[[], bool], timeout_s: float, what: str, pause_s: float = 0.1
) -> None:
    give_up_at_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > give_up_at_s:
            raise Surprise(f"waited {timeout_s:g} s for {what}")
        time.sleep(pause_s)


def two_on_one_folder(trial: Trial) -> str:
    """The second is refused while the first lives, and takes over as soon as it has been killed."""
    with trial.serving() as (first, client):
        with trial.service() as second:
            status = second.wait_ended(READY_S)
            said = second.log_path.read_text()
        if status != 2 or "DATA_DIR_IN_USE" not in said:
            raise Surprise(f"the second ended with {status}")
        job = request(client, "one")
        trial.pause_in(job, "collecting")
        first.send_signal(signal.SIGKILL)
        started_s = time.monotonic()
        with trial.serving() as (_, again):
            took_s = time.monotonic() - started_s
            check_succeeds(again, job)
    trial.check_registry(1)
    return f"refused with DATA_DIR_IN_USE, status 2; serves {took_s:.1f} s after the first was killed, its job succeeds"


def kill_in_every_phase(trial: Trial) -> str:
    """One job, whose service is killed in each phase in turn."""
    job = ""
    for phase in PHASES:
        with trial.serving() as (process, client):
            job = job or request(client, "one")
            trial.pause_in(job, phase)
            process.send_signal(signal.SIGKILL)
            process.wait_ended(10)
            trial.check_nothing_is_left()
    with trial.serving() as (_, client):
        after = check_succeeds(client, job)
    row = trial.recorded(job)
    if row["num_deaths"] or after.num_resumes != len(PHASES):
        raise Surprise(f"{row['num_deaths']} deaths, {after.num_resumes} resumes")
    trial.check_registry(1)
    return f"{len(PHASES)} kills, {after.num_resumes} resumes, 0 deaths counted, no process left, one version"


def stop_at_any_moment(trial: Trial) -> str:
    """SIGTERM while the service starts, and while a job's process starts and loads its model."""
    slowest_s = 0.0
    for delay_s in START_DELAYS_S:
        with trial.service() as process:
            time.sleep(delay_s)
            slowest_s = max(slowest_s, stopped(process, (0, -signal.SIGTERM)))
        trial.check_nothing_is_left()
    job = ""
    for delay_s in JOB_DELAYS_S:
        with trial.serving() as (process, client):
            job = job or request(client, "one")
            wait_until(partial(has_started, trial, job), 60, "a start", LOOK_S)
            time.sleep(delay_s)
            slowest_s = max(slowest_s, stopped(process, (0,)))
        trial.check_nothing_is_left()
    with trial.serving() as (_, client):
        check_succeeds(client, job)
    if trial.recorded(job)["num_deaths"]:
        raise Surprise("a stop counted as a death")
    trial.check_registry(1)
    num_stops = len(START_DELAYS_S) + len(JOB_DELAYS_S)
    return (
        f"{num_stops} stops, the slowest took {slowest_s:.1f} s, no process left, the job succeeds"
    )


def has_started(trial: Trial, calibration_id: str) -> bool:
    return bool(trial.recorded(calibration_id)["state"] != "queued")


def stopped(process: ServiceProcess, allowed: tuple[int, ...]) -> float:
    """Seconds from SIGTERM to the end."""
    started_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    status = process.wait_ended(30)
    if status not in allowed:
        raise Surprise(f"SIGTERM ended it with {status}")
    return time.monotonic() - started_s


def fill_the_disk(trial: Trial, phase: str) -> str:
    """Nothing is free from the moment the job is in `phase`, until the job has ended or the queue waits."""
    with trial.serving() as (process, client):
        check_succeeds(client, request(client, "before"))
        job, paused = paused_job(trial, client, phase)
        num_jobs = len(list(client.list_calibrations(MODEL_ID)))
        fill(trial.folder / "filler")
        for pid in paused:
            os.kill(pid, signal.SIGCONT)
        waits = Waits(process)
        wait_until(lambda: waits.over(client, job), JOB_S, "the job to end or to wait")
        now = client.get_calibration(job)
        if len(list(client.list_calibrations(MODEL_ID))) != num_jobs:
            raise Surprise("jobs are missing in the list on the full disk")
        (trial.folder / "filler").unlink()
        end = end_of(client, job)
        said = f"{pb.State.Name(end.state).removeprefix('STATE_')} {end.failure.reason}".strip()
        if end.state != pb.STATE_SUCCEEDED and end.failure.reason != "DISK_FULL":
            raise Surprise(f"{said}: {end.failure.message}")
        check_succeeds(client, request(client, "after"))
        num_deaths = trial.recorded(job)["num_deaths"]
        states = [job.state for job in client.list_calibrations(MODEL_ID)]
    trial.check_nothing_is_left()
    trial.check_registry(states.count(pb.STATE_SUCCEEDED))
    waited = "" if now.state in ENDED else " after it has waited for room"
    return f"{said}{waited}; {num_deaths} deaths counted; the next job succeeds"


def paused_job(trial: Trial, client: NeapClient, phase: str) -> tuple[str, list[int]]:
    """A job whose processes are stopped in `phase`. Some phases are so short that it takes several."""
    for number in range(TRIES):
        job = request(client, f"one-{number}")
        with suppress(Missed):
            return job, trial.pause_in(job, phase)
    raise Surprise(f"{phase} was over too soon {TRIES} times")


class Waits:
    """Whether a job has ended, or it or its queue has waited for FULL_S."""

    def __init__(self, process: ServiceProcess) -> None:
        lines = process.log_path.read_text().splitlines()
        (port,) = [json.loads(line)["port"] for line in lines if '"metrics listening"' in line]
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._since_s: float | None = None

    def over(self, client: NeapClient, calibration_id: str) -> bool:
        job = client.get_calibration(calibration_id)
        if job.state in ENDED:
            return True
        with urllib.request.urlopen(self._url, timeout=10) as response:
            is_held_up = b"neap_calibration_queue_held_up 1.0" in response.read()
        if not (is_held_up or job.failure.reason):
            self._since_s = None
            return False
        self._since_s = self._since_s or time.monotonic()
        return time.monotonic() - self._since_s > FULL_S


def fill(path: Path) -> None:
    """Until not one byte more can be written."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    size = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def trials(
    names: list[str], phases: list[str]
) -> Iterator[tuple[str, Callable[[Trial], str], bool]]:
    """(name, what to do, whether on a small disk)."""
    if "folder" in names:
        yield "two services on one folder", two_on_one_folder, False
    if "kill" in names:
        yield "SIGKILL in every phase", kill_in_every_phase, False
    if "stop" in names:
        yield "SIGTERM at a start", stop_at_any_moment, False
    for phase in phases if "disk" in names else ():
        yield f"disk full in {phase}", partial(fill_the_disk, phase=phase), True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.faults_calibrator")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    kinds = ("folder", "kill", "stop", "disk")
    parser.add_argument("--trials", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, help="of disk")
    options = parser.parse_args()
    # So that services are ended and disks unmounted then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def run(what: Callable[[Trial], str], *, is_small: bool) -> str:
        with tempfile.TemporaryDirectory(prefix="neap-trial-") as parent:
            folder = Path(parent, "data")
            folder.mkdir()
            with small_disk(folder) if is_small else nullcontext():
                return what(Trial(folder, options.model))

    chosen = trials(list(options.trials), list(options.phases))
    return run_trials(
        (name, partial(run, what, is_small=is_small)) for name, what, is_small in chosen
    )


if __name__ == "__main__":
    sys.exit(main())
