"""Shows a calibration job while it runs, and says what Ctrl-C does to it."""

from typing import NoReturn

import typer
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from neap_engine.cli.connection import equivalent_command
from neap_engine.cli.console import err, fail, out, print_line
from neap_engine.cli.interruption import interruptible
from shared.errors import NeapError
from shared.plain_text import one_line

ENDED = (pb.STATE_SUCCEEDED, pb.STATE_FAILED, pb.STATE_CANCELLED)
# States that no patience changes.
SETTLED = (*ENDED, pb.STATE_WAITING)
# Shares of fewer positions than this are not shown: they may be chance.
LEAST_POSITIONS_SHOWN = 200
# The exit status of a command that Ctrl-C ended: 128 + SIGINT, as shells have it.
INTERRUPTED = 130


def cancel_and_follow(client: NeapClient, calibration_id: str, afterwards: str) -> pb.Calibration:
    """Cancel a job after Ctrl-C, show its progress until it ends, and return its last state.

    Another Ctrl-C ends the command. It prints `afterwards` then: what becomes of the job.
    """
    name = f"calibration {calibration_id}"
    try:
        note(f"cancelling {name}; another Ctrl-C leaves without waiting for its end")
        try:
            client.cancel_calibration(calibration_id)
        except NeapError as error:
            fail(f"{name} is perhaps not cancelled: {error.message} [{error.reason}]; {afterwards}")
        return follow(client, calibration_id)
    except KeyboardInterrupt:
        leave(f"{name} had not ended yet; {afterwards}")


def follow(client: NeapClient, calibration_id: str) -> pb.Calibration:
    """Show a job's progress until it ends or waits for somebody, and return its last state.

    Ctrl-C raises KeyboardInterrupt and changes nothing.
    """
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    # Where the output is no terminal, there is no live bar: one line per phase and per tenth of the work.
    with Progress(*columns, console=out, disable=not out.is_terminal) as progress:
        task = progress.add_task("queued", total=1.0, figures="")
        last_stage, last_problem = ("", 0), ""
        job = pb.Calibration()
        for job in interruptible(client.watch_calibration(calibration_id, on_lost=say_lost)):
            phase = phase_name(job)
            progress.update(
                task, description=phase, completed=job.fraction, figures=escape(one_line(figures_line(job)))
            )
            stage = (phase, int(10 * job.fraction))
            if not out.is_terminal and stage != last_stage:
                print_line(f"   {phase} {job.fraction:.0%} {figures_line(job)}".rstrip())
            last_stage = stage
            if job.state in SETTLED:
                break
            if job.failure.reason not in ("", last_problem):
                note(f"not published yet: {problem_text(job)}; the service tries again")
            last_problem = job.failure.reason
    return job if job.state in SETTLED else client.get_calibration(calibration_id)


def say_lost(error: NeapError) -> None:
    note(f"the service is away: {error.message} [{error.reason}]; waiting until it is back")


def print_result(job: pb.Calibration) -> None:
    """Print the version that a job published. Ends the command with exit code 1 if it published none."""
    if job.state == pb.STATE_FAILED:
        fail(f"the calibration failed: {problem_text(job)}")
    if job.state == pb.STATE_WAITING:
        fail(
            f"the router is finished and kept, but cannot be published: {problem_text(job)}; `neap jobs retry "
            f"{job.calibration_id}` tries again, `neap jobs cancel {job.calibration_id}` removes it"
        )
    if job.state == pb.STATE_CANCELLED:
        fail("the calibration was cancelled; nothing was published")
    print_line(f"published version {job.router_version} ({job.manifest_digest})")
    if speed_up := job.figures.get("speed_up"):
        print_line(f"it answers {speed_up:.2f} times as fast as full depth here, at unchanged output")


def problem_text(job: pb.Calibration) -> str:
    return f"{job.failure.message} [{job.failure.reason}]"


def note(message: str) -> None:
    """Print a line for people to standard error."""
    err.print(one_line(message), markup=False)


def how_to_watch(client: NeapClient, calibration_id: str) -> str:
    command = equivalent_command("jobs", "watch", calibration_id, calibrator=client.target)
    return f"`{command}` watches it"


def leave(message: str) -> NoReturn:
    """Print the message and end the command as Ctrl-C does."""
    note(message)
    raise typer.Exit(INTERRUPTED)


def phase_name(job: pb.Calibration) -> str:
    """Return the phase of a running job, or the state of any other, in words."""
    if job.state == pb.STATE_RUNNING and job.phase != pb.PHASE_UNSPECIFIED:
        return pb.Phase.Name(job.phase).removeprefix("PHASE_").replace("_", " ").lower()
    return state_name(job.state)


def state_name(state: "pb.State") -> str:
    return pb.State.Name(state).removeprefix("STATE_").lower()


def figures_line(job: pb.Calibration) -> str:
    """Say in plain words what a calibration has: its text, and then how often each proposer agrees with the model.
    The manifest has more."""
    figures = dict(job.figures)
    agreements = []
    for name in sorted(figures):
        proposer, _, kind = name.rpartition(".")
        if kind == "agreement":
            num_positions = figures.get(f"{proposer}.positions", 0.0)
            agreements.append(f"{proposer_in_words(proposer)} {shown_share(figures[name], num_positions)}")
    if agreements:
        return f"agrees with the model on held-out positions: {', '.join(agreements)}"
    texts = {
        "generated_tokens": "{:,.0f} tokens written",
        "tokens_per_s": "{:,.1f} tokens/s",
        "tokens": "{:,.0f} tokens read",
    }
    return ", ".join(form.format(figures[name]) for name, form in texts.items() if figures.get(name))


def proposer_in_words(name: str) -> str:
    """Return what a proposer is, for people who do not know its name."""
    known = {"prompt-lookup": "repeated text", "ngram-table": "n-gram table"}
    if name.startswith("depth-"):
        return f"exit at depth {name.removeprefix('depth-')}"
    return known.get(name, name)


def shown_share(share: float, num_positions: float) -> str:
    """Format a share of held-out positions."""
    if num_positions < LEAST_POSITIONS_SHOWN:
        return f"not known (only {num_positions:.0f} positions)"
    return f"{share:.0%}"
