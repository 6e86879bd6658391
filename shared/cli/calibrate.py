"""`neap calibrate`: starts a calibration job, shows its progress, and cancels it on Ctrl-C."""

import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from shared.cli.connection import connect
from shared.cli.console import (
    DEFAULT_CALIBRATOR,
    Calibrator,
    Model,
    exit_on_error,
    fail,
    out,
    print_line,
)
from shared.cli.own_service import calibration_service
from shared.errors import InvalidInput
from shared.plain_text import one_line
from shared.rpc.durations import duration_of

HEAD_FORMS = {
    "auto": pb.HEAD_FORM_UNSPECIFIED,
    "affine": pb.HEAD_FORM_AFFINE,
    "gated": pb.HEAD_FORM_GATED,
}
LABELS = {"agreement": pb.LABEL_AGREEMENT, "cosine": pb.LABEL_COSINE}
ENDED = (pb.STATE_SUCCEEDED, pb.STATE_FAILED, pb.STATE_CANCELLED)
FIGURES_SHOWN = ("tokens", "generated_tokens", "agreement", "loss")
MAX_FIGURES_SHOWN = 4
T = TypeVar("T")


@exit_on_error
def calibrate(
    model: Model,
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            help="Calibrate on this file, which the service must be able to read. "
            "A .txt file is one document; each line of a .jsonl file is one document.",
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            help="Calibrate on this dataset of the Hugging Face Hub, written NAME[:CONFIG[:SPLIT]]. "
            "Each row is one document. Default split: train.",
        ),
    ] = "",
    field: Annotated[
        str,
        typer.Option(
            "--field",
            help="With --text FILE.jsonl or --dataset: the field that holds the text. Default: text.",
        ),
    ] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Calibrate on the model's own answers to the prompts in this file, one prompt per line.",
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            min=0,
            help="Number of tokens to calibrate on. 0 means as many as the time budget allows. "
            "A thorough calibration uses 700000 (hours on two CPU cores, minutes on a GPU).",
        ),
    ] = 0,
    time_budget: Annotated[
        float | None,
        typer.Option(
            "--time-budget",
            min=1,
            help="Time limit of the whole job in seconds. "
            "Default: 150 without --max-tokens, no limit with it.",
        ),
    ] = None,
    depths: Annotated[
        str,
        typer.Option(
            "--depths",
            help="Depths, in layers, that get an exit head, for example 2,4,8. "
            "Default: the service chooses.",
        ),
    ] = "",
    head_form: Annotated[
        str,
        typer.Option(
            "--head-form",
            help="Form of the exit heads: affine (a tuned lens), gated (a low-rank gated MLP), "
            "or auto (the service chooses).",
        ),
    ] = "auto",
    label: Annotated[
        str,
        typer.Option(
            "--label",
            help="What the routers learn to predict: agreement (the exit's token is the full model's) "
            "or cosine (the state is close to the final state).",
        ),
    ] = "agreement",
    draft_vocabulary: Annotated[
        int,
        typer.Option(
            "--draft-vocabulary",
            min=0,
            help="Number of tokens that the exit heads can propose. 0 means that the service chooses.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the calibration.")] = 0,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            help="Alias to point at the published version. May be given several times. Default: latest.",
        ),
    ] = None,
    request_id: Annotated[
        str,
        typer.Option(
            "--request-id",
            help="Id of the request. Repeating the command with the same id returns the same job "
            "and starts no second one. Default: a new id.",
        ),
    ] = "",
    start_service: Annotated[
        bool,
        typer.Option(
            "--start-service",
            help="Start a calibration service for this job alone, with the settings of the environment (NEAP_MODELS, NEAP_REGISTRY, "
            "NEAP_DEVICE, ...), and stop it at the end. --calibrator is then not used.",
        ),
    ] = False,
) -> None:
    """Calibrate a ladder for a model and publish it.

    Give at most one of --text, --dataset and --prompts. Without any of them the model writes its own text.
    Ctrl-C cancels the job. A cancelled job publishes nothing.
    """
    spec = pb.CalibrationSpec(
        model_id=model,
        max_tokens=max_tokens,
        rung_depths=parse_depths(depths),
        head_form=parse_choice("--head-form", head_form, HEAD_FORMS),
        label=parse_choice("--label", label, LABELS),
        draft_vocabulary_size=draft_vocabulary,
        seed=seed,
        aliases=alias or ["latest"],
    )
    set_source(spec, text=text, dataset=dataset, field=field, prompts=prompts)
    if time_budget is not None:
        spec.time_budget.CopyFrom(duration_of(time_budget, "--time-budget"))
    with (
        calibration_service() if start_service else nullcontext(calibrator) as address,
        connect(address) as client,
    ):
        job = client.create_calibration(spec, request_id=request_id or str(uuid.uuid4()))
        job = follow(client, job)
    if job.state == pb.STATE_FAILED:
        fail(f"the calibration failed: {job.failure.message} [{job.failure.reason}]")
    if job.state == pb.STATE_CANCELLED:
        fail("the calibration was cancelled; nothing was published")
    print_line(f"published version {job.router_version} ({job.manifest_digest})")


def follow(client: NeapClient, job: pb.Calibration) -> pb.Calibration:
    """Show a job's progress until it ends and return its last state.

    Ctrl-C cancels the job and waits for it to end. A second Ctrl-C leaves at once.
    """
    print_line(f"calibration {job.calibration_id}")
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
        last_said = ("", 0)
        for may_cancel in (True, False):
            try:
                for now in client.watch_calibration(job.calibration_id):
                    job = now
                    phase = phase_name(job)
                    progress.update(
                        task,
                        description=phase,
                        completed=job.fraction,
                        figures=escape(one_line(figures_line(job))),
                    )
                    said = (phase, int(10 * job.fraction))
                    if not out.is_terminal and said != last_said:
                        print_line(f"   {phase} {job.fraction:.0%} {figures_line(job)}")
                    last_said = said
                break
            except KeyboardInterrupt:
                if not may_cancel:
                    raise
                progress.console.print("cancelling the job")
                client.cancel_calibration(job.calibration_id)
    if job.state not in ENDED:
        job = client.get_calibration(job.calibration_id)
    return job


def phase_name(job: pb.Calibration) -> str:
    """Return the phase of a running job, or the state of any other, in words."""
    if job.state == pb.STATE_RUNNING and job.phase != pb.PHASE_UNSPECIFIED:
        return pb.Phase.Name(job.phase).removeprefix("PHASE_").replace("_", " ").lower()
    return pb.State.Name(job.state).removeprefix("STATE_").lower()


def figures_line(job: pb.Calibration) -> str:
    """Format the most useful figures: tokens, then agreement and loss per rung. The manifest holds all of them."""
    shown = [
        name
        for ending in FIGURES_SHOWN
        for name in sorted(job.figures)
        if name.rpartition(".")[2] == ending
    ]
    items = [(name, job.figures[name]) for name in shown[:MAX_FIGURES_SHOWN]]
    return "  ".join(
        f"{name} {value:,.0f}" if value.is_integer() else f"{name} {value:.3f}"
        for name, value in items
    )


def set_source(
    spec: pb.CalibrationSpec, *, text: Path | None, dataset: str, field: str, prompts: Path | None
) -> None:
    """Set the source of the text in `spec`. Raises InvalidInput if more than one source is given."""
    if sum((text is not None, bool(dataset), prompts is not None)) > 1:
        raise InvalidInput("give only one of --text, --dataset and --prompts")
    if text is not None:
        spec.text_file.CopyFrom(pb.TextFile(path=str(text.absolute()), field=field))
    elif dataset:
        name, config, split, *more = [*dataset.split(":"), "", ""]
        if any(more):
            raise InvalidInput(f"--dataset is {dataset!r}; it must be NAME[:CONFIG[:SPLIT]]")
        spec.hub_dataset.CopyFrom(pb.HubDataset(name=name, config=config, split=split, field=field))
    else:
        lines = read_prompts(prompts) if prompts is not None else []
        spec.self_generated.CopyFrom(pb.SelfGenerated(prompts=lines))


def read_prompts(path: Path) -> list[str]:
    """Return the non-blank lines of a file. Only a line feed ends a line. Raises InvalidInput, OSError."""
    try:
        # No str.splitlines: it also splits at Unicode line separators, which may be part of a prompt.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8", reason="NOT_UTF8") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise InvalidInput(f"{path} contains no prompt", reason="EMPTY_PROMPT")
    return prompts


def parse_depths(depths: str) -> list[int]:
    """Parse "2,4,8" to [2, 4, 8]. Raises InvalidInput."""
    try:
        return [int(part) for part in depths.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidInput(
            f"--depths is {depths!r}; it must be whole numbers separated by commas, such as 2,4,8"
        ) from error


def parse_choice(flag: str, value: str, choices: dict[str, T]) -> T:
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}", param_hint=flag)
    return choices[value]
