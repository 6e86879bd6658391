"""`neap jobs`: lists, watches, cancels and retries calibration jobs."""

from itertools import islice
from typing import Annotated

import typer
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb
from rich.table import Table

from neap_engine.cli.connection import calls_service, connect
from neap_engine.cli.console import (
    DEFAULT_CALIBRATOR,
    Calibrator,
    fail,
    format_time,
    out,
    print_line,
    print_message,
    table_cell,
)
from neap_engine.cli.interruption import interruptible
from neap_engine.cli.job_progress import (
    ENDED,
    SETTLED,
    follow,
    how_to_watch,
    leave,
    note,
    phase_name,
    print_result,
    say_lost,
    state_name,
)

app = typer.Typer(help="List, watch, cancel and retry calibration jobs.", no_args_is_help=True)

# Of a time as `format_time` writes it, without seconds.
MINUTES = len("2026-11-22 12:00")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, as `neap calibrate` printed it.")]


@app.command("list")
@calls_service
def list_jobs(
    model: Annotated[str, typer.Option("--model", help="Only jobs of this model. Default: jobs of all models.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of jobs to list.")] = 20,
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print each job as one line of JSON.")] = False,
) -> None:
    """List jobs, newest first: what runs, what waits, and how the others ended."""
    unreadable: list[pb.UnreadableCalibration] = []
    with connect(calibrator) as client:
        listing = client.list_calibrations(model, on_unreadable=unreadable.append)
        jobs = list(islice(listing, limit))
    if as_json:
        for job in jobs:
            print_message(job)
    elif jobs:
        out.print(job_table(jobs))
        for job in jobs:
            if job.failure.reason:
                print_line(f"{job.calibration_id}: {result_text(job)}")
    else:
        print_line(f"there is no job for {model}" if model else "there is no job")
    for record in unreadable:
        note(f"{record.calibration_id} cannot be read: {record.message} [{record.reason}]")


@app.command("watch")
@calls_service
def watch(
    job_id: JobId,
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
    as_json: Annotated[bool, typer.Option("--json", help="Print each state of the job as one line of JSON.")] = False,
) -> None:
    """Show the progress of a job until it ends. The exit status is 0 if the job has published a version, otherwise 1.

    Ctrl-C ends only this command, with exit status 130. The job goes on.
    """
    with connect(calibrator) as client:
        try:
            job = print_states(client, job_id) if as_json else follow(client, job_id)
        except KeyboardInterrupt:
            leave(f"calibration {job_id} goes on; {how_to_watch(client, job_id)}")
    if job.state != pb.STATE_SUCCEEDED or not as_json:
        print_result(job)


@app.command("cancel")
@calls_service
def cancel(job_id: JobId, calibrator: Calibrator = DEFAULT_CALIBRATOR) -> None:
    """Cancel a job and wait until it has ended. A cancelled job publishes nothing.

    Ctrl-C ends only the wait. The exit status is 1 if the job ends in another way, because it had ended or had been
    published.
    """
    with connect(calibrator) as client:
        job = client.cancel_calibration(job_id)
        try:
            job = job if job.state in ENDED else follow(client, job_id)
        except KeyboardInterrupt:
            leave(f"calibration {job_id} was asked to stop; {how_to_watch(client, job_id)}")
    if job.state != pb.STATE_CANCELLED:
        fail(f"calibration {job_id} {state_name(job.state)} before it could be cancelled ({result_text(job)})")
    print_line(f"calibration {job_id} is cancelled; nothing was published")


@app.command("retry")
@calls_service
def retry(job_id: JobId, calibrator: Calibrator = DEFAULT_CALIBRATOR) -> None:
    """Try now to publish the finished router of a job that waits, and wait until it is published.

    Ctrl-C ends only the wait. The exit status is 0 if the job has published a version, otherwise 1.
    """
    with connect(calibrator) as client:
        try:
            client.retry_calibration(job_id)
            job = follow(client, job_id)
        except KeyboardInterrupt:
            leave(f"calibration {job_id} goes on; {how_to_watch(client, job_id)}")
    print_result(job)


def print_states(client: NeapClient, calibration_id: str) -> pb.Calibration:
    """Print each state of a job until it ends or waits for somebody, and return the last one."""
    job = pb.Calibration()
    for job in interruptible(client.watch_calibration(calibration_id, on_lost=say_lost)):
        print_message(job)
        if job.state in SETTLED:
            break
    return job if job.state in SETTLED else client.get_calibration(calibration_id)


def job_table(jobs: list[pb.Calibration]) -> Table:
    """In 80 columns, which most terminals have: messages stand below it."""
    table = Table("job", "model", "state", "created (UTC)", "result")
    table.columns[0].no_wrap = True  # ids are there to be copied
    for job in jobs:
        running = f" {job.fraction:.0%}" if job.state == pb.STATE_RUNNING else ""
        table.add_row(
            table_cell(job.calibration_id),
            table_cell(job.spec.model_id),
            table_cell(phase_name(job) + running),
            format_time(job.create_time)[:MINUTES],
            table_cell(job.failure.reason or result_text(job)),
        )
    return table


def result_text(job: pb.Calibration) -> str:
    """Return what an ended job has brought, or why a job is not published yet. Empty for any other."""
    if job.state == pb.STATE_SUCCEEDED:
        return f"version {job.router_version}"
    if job.failure.reason:
        return f"{job.failure.reason}: {job.failure.message}"
    return ""
