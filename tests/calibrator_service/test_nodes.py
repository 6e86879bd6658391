"""Calibrations by ranks of two machines that share no disk: one of them has a full disk, and later it is lost."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from calibrator_service.calibration.text.shards import read_shard
from shared.registry.factory import open_registry
from tests.calibrator_service.conftest import REPOSITORY
from tests.servers import free_ports
from tests.waiting import wait_until

PROMPTS = [" ".join(f"w{number + at}" for at in range(2, 8)) for number in range(40)]
# All text that there is: four answers to each prompt.
SPEC = {
    "modelId": "tiny",
    "selfGenerated": {"prompts": PROMPTS, "maxNewTokens": 24},
    "maxTokens": 100_000,
    "exitDepths": [2],
    "draftVocabularySize": 64,
}
END_S = 240
# Pieces of text are smaller, states and sums are not.
FULL_DISK_BYTES = 8000


class Nodes:
    """`folder/nodes/0` and `folder/nodes/1`, each with the files of its rank."""

    def __init__(self, folder: Path, model_folder: Path) -> None:
        self.folder, self.model_folder = folder, model_folder
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *program: str, limits: Callable[[], None] | None = None, **variables: str) -> None:
        """A process of the next node. `limits`: called in it before it begins."""
        node = len(self.running)
        paths = [REPOSITORY, REPOSITORY / "protos", Path(__file__).parent]
        work = self.folder / "nodes" / str(node) / "work"
        # Files, not pipes: nobody need read them.
        with (self.folder / f"log-{node}").open("w") as log:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, *program, json.dumps(SPEC), "--work-dir", str(work), "--request-id", "one"],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(map(str, paths)),
                        "NEAP_MODELS": f"tiny={self.model_folder}",
                        "NEAP_REGISTRY": f"file://{self.folder}/registry",
                        "NEAP_THREADS": "1",
                        "NEAP_RANK_TIMEOUT_S": "150",
                        **variables,
                    },
                    stdout=log,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                    preexec_fn=limits,
                )
            )

    def start_ranks(self, *, limits: Callable[[], None] | None = None) -> None:
        """As torchrun starts them. `limits`: of the second node."""
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        self.start("-m", "calibrator_service.rank", RANK="0", **place)
        self.start("-m", "calibrator_service.rank", RANK="1", limits=limits, **place)

    def start_launchers(self) -> None:
        """As the pods of the Kubernetes Job do it."""
        launch = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0")
        meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}", "--rdzv-id=one")
        for node in ("0", "1"):
            # Both could listen at the endpoint, and the lost node must not be where they meet.
            host = f"--rdzv-conf=is_host={int(node == '0')}"
            self.start(*launch, *meet, host, f"--local-addr=127.0.0.{1 + int(node)}", "-m", "fake_ranks")

    def ended(self) -> tuple[list[int], list[list[dict]]]:
        """Exit statuses and the lines of the logs, by node, once all have ended."""
        statuses = [process.wait(END_S) for process in self.running]
        logs = [(self.folder / f"log-{node}").read_text().splitlines() for node in range(len(self.running))]
        self.running.clear()
        return statuses, [[json.loads(line) for line in log if line.startswith('{"')] for log in logs]

    def text(self, node: int) -> dict[str, int]:
        """The names of a node's pieces of text and when they were written."""
        folder = self.folder / "nodes" / str(node) / "work" / "text"
        return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    def num_answered(self, node: int) -> int:
        folder = self.folder / "nodes" / str(node) / "work" / "text"
        return sum(one.num_answer_tokens for path in folder.iterdir() for one in read_shard(path))

    def published(self) -> int:
        return len(open_registry(f"file://{self.folder}/registry").list_versions("tiny"))


@pytest.fixture
def nodes(tmp_path, model_folder):
    found = Nodes(tmp_path, model_folder)
    yield found
    for process in found.running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def failures(log: list[dict]) -> list[dict]:
    return [line for line in log if line["event"] == "failed"]


def num_generated(log: list[dict]) -> list[float]:
    """Tokens that all ranks have written in this run."""
    return [line.get("generated_tokens", 0) for line in log if line.get("phase") == "training_heads"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_full_disk_and_a_lost_node_cost_no_text_of_the_other_node(nodes: Nodes):
    def fill_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))

    nodes.start_ranks(limits=fill_disk)
    statuses, logs = nodes.ended()
    assert statuses == [1, 1]
    [(why,), (lost,)] = failures(logs[1]), failures(logs[0])
    assert (why["reason"], why["rank"]) == ("DISK_FULL", 1)
    assert "no space left" in why["why"]
    assert lost["reason"] == "RANK_LOST"
    assert "rank 0 cannot go on" in lost["why"]
    assert "Rank 1" in lost["why"] or "Ranks 1" in lost["why"], lost
    assert not list(nodes.folder.glob("nodes/**/*.part"))
    assert not nodes.published()
    written = [nodes.text(node) for node in (0, 1)]
    assert all(written)

    (nodes.folder / "stop-in").write_text("1 training_heads")
    nodes.start_launchers()
    launcher = psutil.Process(nodes.running[1].pid)

    def stopped() -> list[psutil.Process]:
        assert all(process.poll() is None for process in nodes.running), nodes.ended()
        return [one for one in launcher.children(True) if one.status() == psutil.STATUS_STOPPED]

    wait_until(stopped, timeout_s=END_S)
    of_lost = [launcher, *launcher.children(True)]
    for process in of_lost:
        process.kill()
    statuses, logs = nodes.ended()
    assert statuses[0] == 1, "its launcher ends by itself"
    assert [line["reason"] for line in failures(logs[0])] == ["RANK_LOST"]
    assert num_generated(logs[0]) == [0]
    assert [nodes.text(node) for node in (0, 1)] == written

    answered = nodes.num_answered(1)
    (nodes.folder / "nodes" / "1").rename(nodes.folder / "lost")
    nodes.start_ranks()
    nodes.running[1].wait(END_S)
    assert nodes.published() == 1, "a rank that has done its part waits for the first one"
    statuses, logs = nodes.ended()
    assert statuses == [0, 0], logs
    assert num_generated(logs[0]) == [answered]
    assert nodes.text(0) == written[0], "nothing that it has is written again"
    assert {path.name: path.read_bytes() for path in nodes.folder.glob("nodes/1/work/text/*")} == {
        path.name: path.read_bytes() for path in nodes.folder.glob("lost/work/text/*")
    }
