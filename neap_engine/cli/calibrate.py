"""`neap calibrate`: starts a calibration job, shows its progress, and cancels it on Ctrl-C."""

import json
import shlex
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.fields import FIELDS

from neap_engine.cli.connection import calls_service, connect, equivalent_command
from neap_engine.cli.console import DEFAULT_CALIBRATOR, Calibrator, Model, print_line
from neap_engine.cli.job_progress import cancel_and_follow, follow, how_to_watch, leave, note, print_result
from neap_engine.cli.processes import calibration_service
from neap_engine.cli.registry_commands import publish_files
from neap_engine.cli.routers import selector
from shared.errors import InvalidInput
from shared.rpc.durations import duration_of

SERVICE_ENDS = (
    "its service ends with this command, and the next calibration service on the same data folder continues the job, "
    "unless it was cancelled"
)


# Time budgets in seconds.
PRESETS = {"quick": 150.0, "hour": 3600.0, "night": 8 * 3600.0}
LABELS = {"agreement": pb.LABEL_AGREEMENT, "cosine": pb.LABEL_COSINE}


@calls_service
def calibrate(
    model: Model = "",
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
            "--field", help="With --text FILE.jsonl or --dataset: the field that holds the text. Default: text."
        ),
    ] = "",
    answers: Annotated[
        Path | None,
        typer.Option(
            "--answers",
            help="Calibrate on answers that the model gave before: a .jsonl file with a prompt, its answer and, "
            "optionally, the prompt's kind on each line.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Calibrate on the model's own answers to the prompts in this file, greedy and then sampled ones. "
            'A .jsonl file has an object with a "prompt" on each line, any other file a prompt.',
        ),
    ] = None,
    traffic: Annotated[
        str,
        typer.Option(
            "--traffic",
            metavar="POOL",
            help="Calibrate on the answers of this pool that workers have kept (their --learn).",
        ),
    ] = "",
    workers: Annotated[
        bool,
        typer.Option(
            "--workers",
            help="Let the inference workers that the service is configured with (--text-worker) write the text, at low "
            "priority. What they leave is written by the service.",
        ),
    ] = False,
    parent: Annotated[
        str,
        typer.Option(
            "--from",
            help="Go on from this router: its statistics and the new text's are added. A version number, an alias, or "
            "a folder or URL as for `neap routers import`, which is imported first, into NEAP_REGISTRY's registry.",
        ),
    ] = "",
    parent_share: Annotated[
        float,
        typer.Option(
            "--parent-share",
            help=f"With --from. {FIELDS['ParentRouter']['share'].described}",
        ),
    ] = 1.0,
    preset: Annotated[
        Literal["quick", "hour", "night"] | None,
        typer.Option(
            "--preset",
            help="A time budget: quick (150 seconds), hour or night (8 hours). --time-budget changes it. "
            "docs/running.md says what each of them buys.",
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            min=0,
            help="Stop collecting text at this many tokens. 0 means as many as the time budget allows. "
            "More text gives better drafts: 10000 is a start, a million is thorough.",
        ),
    ] = 0,
    time_budget: Annotated[
        float | None,
        typer.Option(
            "--time-budget",
            min=1,
            help="Time limit of the whole job in seconds, loading the model included. A large model needs more. "
            "Default: 150 without --max-tokens, no limit with it.",
        ),
    ] = None,
    depths: Annotated[
        str,
        typer.Option(
            "--depths", help="After how many layers a token may leave, for example 0,2,4. Default: the service chooses."
        ),
    ] = "",
    label: Annotated[
        Literal["agreement", "cosine"],
        typer.Option(
            "--label",
            help="When an exit counts as right: if it names the full model's token (agreement), "
            "or if its state is close to the model's last one (cosine).",
        ),
    ] = "agreement",
    draft_vocabulary: Annotated[
        int,
        typer.Option(
            "--draft-vocabulary",
            min=0,
            help=FIELDS["CalibrationSpec"]["draft_vocabulary_size"].described,
        ),
    ] = 0,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help=FIELDS["CalibrationSpec"]["ranks"].described)] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help=FIELDS["CalibrationSpec"]["seed"].described)] = 0,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            help="Alias to point at the published version; no other alias moves. May be given several times. Default: "
            "latest, with --traffic that of the pool.",
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
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Print the id of the job and end at once; the service runs the job. `neap jobs` watches and cancels "
            "it.",
        ),
    ] = False,
    start_service: Annotated[
        bool,
        typer.Option(
            "--start-service",
            help="Start a calibration service for this job alone, with the settings of the environment (NEAP_MODELS, "
            "NEAP_REGISTRY, NEAP_DEVICE, ...), and stop it at the end. --calibrator is then not used.",
        ),
    ] = False,
) -> None:
    """Make a router for a model from text, and publish it.
    Without flags it takes 150 seconds, and the model writes the text.

    Give at most one of --prompts, --answers, --text and --dataset. Prompts like those that will be served are best.
    Ctrl-C cancels the job and waits for its end; a second Ctrl-C leaves at once. A cancelled job publishes nothing.
    If the command is lost in another way, the job goes on: `neap jobs watch` shows it.
    """
    if time_budget is None:
        time_budget = PRESETS.get(preset or "")
    spec = pb.CalibrationSpec(
        model_id=model,
        max_tokens=max_tokens,
        exit_depths=parse_depths(depths),
        label=LABELS[label],
        draft_vocabulary_size=draft_vocabulary,
        seed=seed,
        aliases=alias,
        ranks=ranks,
    )
    set_source(spec, text=text, answers=answers, dataset=dataset, field=field, prompts=prompts, traffic=traffic)
    if workers:
        if spec.WhichOneof("source") != "self_generated":
            raise InvalidInput("--workers is for text that the model writes itself")
        spec.self_generated.use_workers = True
    if parent:
        spec.parent.CopyFrom(parent_of(parent, model, parent_share))
    if time_budget is not None:
        spec.time_budget.CopyFrom(duration_of(time_budget, "--time-budget"))
    if detach and start_service:
        raise typer.BadParameter(
            "cannot be combined with --start-service, whose service ends with the command", param_hint="--detach"
        )
    request = pb.CreateCalibrationRequest(request_id=request_id or str(uuid.uuid4()), spec=spec)
    with calibration_service() if start_service else nullcontext(calibrator) as address, connect(address) as client:
        if detach:
            start(client, request)
            return
        job = run(client, request, SERVICE_ENDS if start_service else "")
    print_result(job)


def start(client: NeapClient, request: pb.CreateCalibrationRequest) -> None:
    """Create a job and print its id."""
    try:
        job = create(client, request)
        print_line(job.calibration_id)
        note(f"the service runs the calibration; {how_to_watch(client, job.calibration_id)}")
    except KeyboardInterrupt:
        leave(unanswered(client, request))


def run(client: NeapClient, request: pb.CreateCalibrationRequest, afterwards: str) -> pb.Calibration:
    """Create a job and show its progress until it ends. Ctrl-C cancels it.

    `afterwards`: what becomes of the job if the command ends first. Empty means that the service continues it.
    """
    job = None
    try:
        job = create(client, request)
        print_line(f"calibration {job.calibration_id}")
        return follow(client, job.calibration_id)
    except KeyboardInterrupt:
        if job is None:
            leave(afterwards or unanswered(client, request))
        job_id = job.calibration_id
        return cancel_and_follow(client, job_id, afterwards or how_to_watch(client, job_id))


def create(client: NeapClient, request: pb.CreateCalibrationRequest) -> pb.Calibration:
    return client.create_calibration(request.spec, request_id=request.request_id)


def unanswered(client: NeapClient, request: pb.CreateCalibrationRequest) -> str:
    """Say what Ctrl-C means before the service has returned the id of the job."""
    jobs = equivalent_command("jobs", "list", calibrator=client.target)
    return (
        f"interrupted before the service answered, so the job may exist: `{jobs}` shows it, and the same `neap "
        f"calibrate` with --request-id {shlex.quote(request.request_id)} continues it"
    )


def parent_of(name: str, model: str, share: float) -> pb.ParentRouter:
    """The router that --from names; a folder or a URL is imported. Raises InvalidInput, and what the import raises."""
    if why := FIELDS["ParentRouter"]["share"].refusal(share):
        raise InvalidInput(f"--parent-share: {why}")
    if "://" not in name and not Path(name).is_dir():
        return pb.ParentRouter(**selector(name), share=share)
    published = publish_files(name, model, aliases=())
    note(f"{name} is version {published.version} of {published.model_id}")
    # The service may have another registry, where the number belongs to another router: it compares the digests.
    return pb.ParentRouter(version=published.version, manifest_digest=published.manifest_digest, share=share)


def set_source(
    spec: pb.CalibrationSpec,
    *,
    text: Path | None,
    answers: Path | None,
    dataset: str,
    field: str,
    prompts: Path | None,
    traffic: str,
) -> None:
    """Set the source of the text in `spec`. Raises InvalidInput if more than one source is given."""
    if sum((text is not None, answers is not None, bool(dataset), prompts is not None, bool(traffic))) > 1:
        raise InvalidInput("give only one of --text, --answers, --dataset, --prompts and --traffic")
    if text is not None:
        spec.text_file.CopyFrom(pb.TextFile(path=str(text.absolute()), field=field))
    elif answers is not None:
        spec.answer_file.CopyFrom(pb.AnswerFile(path=str(answers.absolute())))
    elif traffic:
        spec.served_traffic.CopyFrom(pb.ServedTraffic(pool=traffic))
    elif dataset:
        name, config, split, *more = [*dataset.split(":"), "", ""]
        if any(more):
            raise InvalidInput(f"--dataset is {dataset!r}; it must be NAME[:CONFIG[:SPLIT]]")
        spec.hub_dataset.CopyFrom(pb.HubDataset(name=name, config=config, split=split, field=field))
    else:
        lines = read_prompts(prompts) if prompts is not None else []
        spec.self_generated.CopyFrom(pb.SelfGenerated(prompts=lines))


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a .jsonl file, or the non-blank lines of another file. Only a line feed ends a line.

    Raises InvalidInput, OSError."""
    try:
        # No str.splitlines: it also splits at Unicode line separators, which may be part of a prompt.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8", reason="NOT_UTF8") from error
    filled = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_prompt_of(line, f"{path}:{number}") for number, line in filled]
    else:
        prompts = [line for _, line in filled]
    if not prompts:
        raise InvalidInput(f"{path} contains no prompt", reason="EMPTY_PROMPT")
    return prompts


def _prompt_of(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
        if isinstance(prompt, str) and prompt.strip():
            prompt.encode()  # raises ValueError for half of a surrogate pair
            return prompt
    except (ValueError, RecursionError, KeyError, TypeError):
        pass
    raise InvalidInput(f'{place}: a line must be {{"prompt": "text"}}', reason="BAD_PROMPT_FILE")


def parse_depths(depths: str) -> list[int]:
    """Parse "2,4,8" to [2, 4, 8]. Raises InvalidInput."""
    try:
        return [int(part) for part in depths.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidInput(
            f"--depths is {depths!r}; it must be whole numbers separated by commas, such as 2,4,8"
        ) from error
