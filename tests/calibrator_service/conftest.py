"""A calibration service in a real process, and its clients."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.calibration.v1 import calibration_pb2_grpc
from neap_client.router.v1 import router_pb2, router_pb2_grpc
from neap_client.status import from_rpc_error
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shared.errors import NeapError
from tests.families import VOCABULARY_SIZE, build_family
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
WITH_FAKES = (
    "import sys; from calibrator_service import __main__, job_process;"
    "job_process.PROGRAM = ('-m', 'fake_recipes');"
    "sys.exit(__main__.main(sys.argv[1:]))"
)


def rewrite(database: Path, calibration_id: str, **columns: object) -> None:
    """Changes the record of a job, as another build of the service may have written it."""
    changes = ", ".join(f"{name} = ?" for name in columns)
    with sqlite3.connect(database) as connection:
        query = f"UPDATE jobs SET {changes} WHERE calibration_id = ?"
        assert connection.execute(query, (*columns.values(), calibration_id)).rowcount == 1
    connection.close()


class Service:
    """A service process on `folder`, which it does not delete.
    `patch`: statements that it executes first, to inject a fault."""

    def __init__(self, folder: Path, *flags: str, real: bool = False, patch: str = "") -> None:
        self.folder = folder
        self.flags = flags
        self.real = real
        self.patch = patch
        self.process: subprocess.Popen[str] | None = None
        self.channel: grpc.Channel | None = None
        self.start()

    def start(self) -> None:
        entry = ["-m", "calibrator_service"] if self.real else ["-c", f"{self.patch}\n{WITH_FAKES}"]
        path = [REPOSITORY, REPOSITORY / "protos", Path(__file__).parent]
        with (self.folder / "service.log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, *entry, "--listen", "127.0.0.1:0", "--grace-s", "0"),
                    *("--data-dir", str(self.folder), "--registry", f"file://{self.folder}/registry"),
                    *self.flags,
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = self.process.stdout.readline().strip()
        assert line.startswith("listening on 127.0.0.1:"), (self.folder / "service.log").read_text()
        self.target = line.removeprefix("listening on ")
        self.channel = grpc.insecure_channel(self.target)
        self.calibrations: Any = calibration_pb2_grpc.CalibrationServiceStub(self.channel)
        self.routers: Any = router_pb2_grpc.RouterServiceStub(self.channel)

    def kill(self) -> None:
        """As a power cut would, as far as a test can."""
        self.process.kill()
        self._ended()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def _ended(self) -> int:
        status = self.process.wait(60)
        self.process.stdout.close()
        self.channel.close()
        self.process = None
        return status

    def job_processes(self) -> list[psutil.Process]:
        """The processes of this service, wherever they hang now: found by the log file they write to."""
        logs = self.folder / "calibrator" / "logs"
        found = []
        for process in psutil.process_iter():
            try:
                if Path(f"/proc/{process.pid}/fd/2").readlink().parent == logs:
                    found.append(process)
            except OSError:
                continue
        return found

    def stopped_job(self) -> psutil.Process:
        """The job's process once it has stopped itself (SIGSTOP)."""

        def stopped() -> list[psutil.Process]:
            processes = self.job_processes()
            return [one for one in processes if one.status() == psutil.STATUS_STOPPED]

        wait_until(stopped)
        (process,) = stopped()
        return process

    def record(self, job: pb.Calibration) -> sqlite3.Row:
        """The job's row, as its store has it."""
        path = self.folder / "calibrator" / "jobs.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            query = "SELECT * FROM jobs WHERE calibration_id = ?"
            row: sqlite3.Row = connection.execute(query, (job.calibration_id,)).fetchone()
        return row

    def create(self, behaviour: str = "", request_id: str = "one", **spec: Any) -> pb.Calibration:
        if not {"text_file", "answer_file", "hub_dataset", "self_generated"} & spec.keys():
            prompts = [behaviour] if behaviour else []
            spec["self_generated"] = pb.SelfGenerated(prompts=prompts)
        request = pb.CreateCalibrationRequest(
            request_id=request_id, spec=pb.CalibrationSpec(**{"model_id": "tiny", **spec})
        )
        return self.calibrations.CreateCalibration(request, timeout=60).calibration

    def get(self, job: pb.Calibration) -> pb.Calibration:
        request = pb.GetCalibrationRequest(calibration_id=job.calibration_id)
        return self.calibrations.GetCalibration(request, timeout=60).calibration

    def versions(self) -> list[router_pb2.RouterVersion]:
        """Published routers of the model "tiny", the newest first."""
        request = router_pb2.ListVersionsRequest(model_id="tiny")
        return list(self.routers.ListVersions(request, timeout=60).versions)

    def version(self, number: int) -> router_pb2.RouterVersion:
        request = router_pb2.GetVersionRequest(model_id="tiny", version=number)
        return self.routers.GetVersion(request, timeout=60).version

    def aliases(self) -> dict[str, int]:
        """The aliases of the model "tiny"."""
        request = router_pb2.ListAliasesRequest(model_id="tiny")
        found = self.routers.ListAliases(request, timeout=60).aliases
        return {alias.name: alias.version for alias in found}

    def health(self, name: str = "neap.calibration.v1.CalibrationService") -> int:
        assert self.channel is not None
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status

    def watch(self, job: pb.Calibration, timeout_s: float = 200) -> Iterator[pb.Calibration]:
        request = pb.WatchCalibrationRequest(calibration_id=job.calibration_id)
        for response in self.calibrations.WatchCalibration(request, timeout=timeout_s):
            yield response.calibration

    def end_of(self, job: pb.Calibration, timeout_s: float = 200) -> pb.Calibration:
        return list(self.watch(job, timeout_s))[-1]

    def wait_for(self, job: pb.Calibration, phase: "pb.Phase | int") -> pb.Calibration:
        for now in self.watch(job):
            if now.phase == phase:
                return now
        raise AssertionError("the job ended before that phase")


def error_of(call: Callable[[], Any]) -> NeapError:
    """The NeapError that the service raised in this call."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return from_rpc_error(raised.value)


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    started: list[Service] = []

    def start(*flags: str, real: bool = False, patch: str = "") -> Service:
        chosen = flags or ("--model", "tiny=/nowhere")
        started.append(Service(tmp_path, *chosen, real=real, patch=patch))
        return started[-1]

    yield start
    for service in started:
        if service.process is not None:
            service.terminate()
    for service in started:
        wait_until(lambda s=service: not s.job_processes())


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and words as tokens."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    build_family("llama").save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, **{f"w{n}": n for n in range(2, VOCABULARY_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.fixture
def service(start_service: Callable[..., Service]) -> Service:
    return start_service()
