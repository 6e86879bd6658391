"""A job by several processes of this machine, its ranks, started as torchrun starts them."""

import math
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import structlog
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from calibrator_service.calibration.ranks import joined
from calibrator_service.calibration.spec import Progress
from calibrator_service.job import Ended, JobState, Report
from calibrator_service.job_process import ProcessConfig
from calibrator_service.worker_process import ServiceLink, begin, end, made_ready, make_product, outcome
from shared.rpc.logs import log_all_output

# How soon the ranks are told to stop, and how long the others get to end after one of them has died.
RELAY_POLL_S, RANKS_SHUTDOWN_S = 0.1, 5

log = structlog.get_logger("neap.calibration")


def run_by_ranks(config: ProcessConfig, num_ranks: int, service: ServiceLink) -> Ended | None:
    """Runs the job by ranks on this machine. As torchrun starts them, and ends all of them when one has died: then this
    process dies, too, and its service resumes the job."""
    ours, theirs = zip(*(Pipe() for _ in range(num_ranks)), strict=True)
    told: list[tuple[int, Ended]] = []
    is_over = threading.Event()
    relay = threading.Thread(target=_relay, args=(ours, service, told, is_over), name="ranks", daemon=True)
    relay.start()
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=config.calibration_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        rdzv_configs={"timeout": math.ceil(config.settings.rank_timeout_s)},
        max_restarts=0,
        shutdown_timeout=RANKS_SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(config.work_dir / "launcher")),
    )
    has_died = False
    try:
        elastic_launch(launch, run_rank)(config, theirs)
    except (ChildFailedError, SignalException):
        has_died = True
    is_over.set()
    relay.join()
    # What follows from another rank's end is no reason.
    failures = [(rank, ended) for rank, ended in told if ended.state is not JobState.PUBLISHING]
    for rank, ended in failures:
        if ended.reason != "RANK_LOST":
            return replace(ended, message=f"rank {rank}: {ended.message}") if ended.message else ended
    if has_died:
        log.warning("a rank has died or hangs", why=[ended.message for _, ended in failures])
        end(1)
    return None


def _relay(
    pipes: Sequence[Connection], service: ServiceLink, told: list[tuple[int, Ended]], is_over: threading.Event
) -> None:
    """Passes on what the first rank says of its progress, keeps how ranks end, and tells them to stop."""
    open_pipes, was_told = list(pipes), False
    while open_pipes:
        # Everything is heard before the end.
        waits_s = 0.0 if is_over.is_set() else RELAY_POLL_S
        ready = wait(open_pipes, waits_s)
        if not ready and is_over.is_set():
            return
        if service.stop.is_set() and not was_told:
            was_told = True
            for pipe in open_pipes:
                with suppress(OSError):
                    pipe.send("stop")
        for pipe in [pipe for pipe in open_pipes if pipe in ready]:
            try:
                report: Report = pipe.recv()
            except (EOFError, OSError):
                open_pipes.remove(pipe)
                continue
            if isinstance(report, Ended):
                told.append((pipes.index(pipe), report))
            elif isinstance(report, Progress):
                service.progress(report)
            elif report:
                service.tell(report)


def run_rank(config: ProcessConfig, pipes: Sequence[Connection]) -> None:
    """One rank of a job, in a process of its own. `pipes`: to the job's process, by rank."""
    log_all_output()
    rank = int(os.environ["RANK"])
    begin(config, rank=rank)
    service = ServiceLink(pipes[rank], os.getppid())

    def work() -> None:
        with joined(config.settings.rank_timeout_s) as ranks:
            make_product(config, *made_ready(config), service, ranks)

    ended = outcome(work, config.calibration_id)
    service.tell(ended)
    if ended.state is not JobState.PUBLISHING:
        end(1)
