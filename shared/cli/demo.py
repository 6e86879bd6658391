"""`neap demo`: runs both services on this machine, calibrates a model, publishes the router, streams text and compares policies."""

import re
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration
from neap_client import NeapClient, generate_request
from neap_client.calibration.v1 import calibration_pb2
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import Policy
from neap_client.router.v1 import router_pb2

from shared.cli import charts
from shared.cli.connection import connect
from shared.cli.console import default_data_dir, exit_on_error, fail, out, print_line
from shared.cli.demo_model import MODEL_ID, demo_model, own_model, size_mb
from shared.cli.depth_view import DepthView
from shared.cli.generate import (
    NO_CHAT_TEMPLATE,
    PLAIN_TEXT_NOTE,
)
from shared.cli.job_progress import ENDED, cancel_and_follow, follow
from shared.cli.measure import PROMPTS, PolicyFigures, policy_table, run_one, statistics_line
from shared.cli.processes import ServiceProcess
from shared.errors import NeapError, NotFound

POLICIES: tuple[Policy, ...] = ("full", "exact")
ALIAS = "latest"
# The demo promises calibration in three minutes on two cores; this leaves some reserve.
CALIBRATION_BUDGET_S = 150
START_TIMEOUT_S = 180.0


@exit_on_error
def demo(
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="Folder for the model, the routers, the logs and the PNG. "
            "Default: the user's data folder.",
        ),
    ] = None,
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model-path",
            help="Use this Hugging Face folder or .gguf file. Default: fetch SmolLM2-135M-Instruct.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Maximum number of new tokens per prompt.")
    ] = 64,
    calibration_budget: Annotated[
        int,
        typer.Option(
            "--calibration-budget", min=1, help="Time limit of the calibration in seconds."
        ),
    ] = CALIBRATION_BUDGET_S,
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate", help="Calibrate even if a router of an earlier run could be reused."
        ),
    ] = False,
) -> None:
    """Fetch a small model, calibrate it, run four prompts under the policies full and exact, and compare the two."""
    started_s = time.monotonic()
    folder = (data_dir or default_data_dir()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    step(f"model (everything is kept in {folder})")
    if model_path is None:
        model_id, source = MODEL_ID, demo_model(folder, say)
    else:
        model_id, source = model_id_from_path(model_path), own_model(model_path.absolute())
    say(f"{model_id}: {source}")
    # SIGINT and SIGTERM must both raise KeyboardInterrupt, so that the `finally` blocks stop the services. SIGINT is set explicitly
    # because a shell starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with services(model_id, source, folder) as (calibrator, worker):
        step("router")
        router = None if recalibrate else fitting_router(calibrator, worker, model_id)
        if router is not None:
            say(f"reusing version {router.version}, published before")
        else:
            router = new_router(calibrator, model_id, calibration_budget)
        step("four prompts, each under full and exact")
        figures = compare(worker, model_id, max_tokens)
        step("result")
        out.print(policy_table(figures))
        picture = charts.write_report(
            folder / "demo-report.png",
            title=f"{model_id}, router version {router.version}",
            num_layers=worker.get_model(model_id).num_layers,
            figures=figures,
            manifest_json=router.manifest_json,
        )
        say(f"picture: {picture}")
        step("stopping both services")
    if figures[0].outputs != figures[1].outputs:
        fail("exact and full gave different outputs; this is a bug, please report it")
    out.print(f"done in {time.monotonic() - started_s:.0f} s")


@contextmanager
def services(model_id: str, source: Path, folder: Path) -> Iterator[tuple[NeapClient, NeapClient]]:
    """Start a calibrator and a worker on free loopback ports and yield clients of both. Both stop when the block is left."""
    shared_flags = ["--data-dir", str(folder), "--model", f"{model_id}={source}", "--grace-s", "0"]
    step("starting calibrator and worker")
    say(f"the worker loads {model_id}, {size_mb(source):.0f} MB; a large model takes minutes")
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                ServiceProcess(name, module, shared_flags, folder / "logs" / f"{name}.log")
            )
            for name, module in (
                ("calibrator", "calibrator_service"),
                ("worker", "inference_service"),
            )
        }
        clients = []
        for name, process in processes.items():
            started_s = time.monotonic()
            with out.status(f"waiting for the {name}"):  # on a terminal, with a spinner
                address = process.wait_serving(START_TIMEOUT_S)
            say(
                f"{name} serves on {address} after {time.monotonic() - started_s:.1f} s "
                f"(process {process.pid}, log {process.log_path})"
            )
            clients.append(stack.enter_context(connect(address, timeout_s=60.0)))
        yield clients[0], clients[1]


def new_router(calibrator: NeapClient, model_id: str, budget_s: int) -> router_pb2.RouterVersion:
    """Calibrate and publish. Raises NeapError if the job fails, KeyboardInterrupt if it is cancelled."""
    started_s = time.monotonic()
    # If an earlier demo was killed, its job resumes when the calibrator starts.
    unfinished = [job for job in calibrator.list_calibrations(model_id) if job.state not in ENDED]
    if unfinished:
        job = unfinished[-1]
        say("continuing the unfinished calibration of an earlier run")
    else:
        say(f"calibrating over gRPC for at most {budget_s} s; the model writes its own text")
        spec = calibration_pb2.CalibrationSpec(
            model_id=model_id,
            self_generated=calibration_pb2.SelfGenerated(),
            time_budget=Duration(seconds=budget_s),
            aliases=[ALIAS],
        )
        job = calibrator.create_calibration(spec, request_id=f"demo-{uuid.uuid4()}")
    print_line(f"calibration {job.calibration_id}")
    try:
        job = follow(calibrator, job.calibration_id)
    except KeyboardInterrupt:
        job = cancel_and_follow(calibrator, job.calibration_id, "the next demo continues it")
    if job.state == calibration_pb2.STATE_CANCELLED:
        raise KeyboardInterrupt
    if job.state != calibration_pb2.STATE_SUCCEEDED:
        raise NeapError(
            f"the calibration failed: {job.failure.message}", reason=job.failure.reason or "FAILED"
        )
    say(f"published version {job.router_version} after {time.monotonic() - started_s:.0f} s")
    return calibrator.get_version(model_id, version=job.router_version)


def fitting_router(
    calibrator: NeapClient, worker: NeapClient, model_id: str
) -> router_pb2.RouterVersion | None:
    """Return the published router. None if there is none or if it belongs to another revision of the model."""
    try:
        router = calibrator.get_version(model_id, alias=ALIAS)
    except NotFound:
        return None
    if router.model_fingerprint != worker.get_model(model_id).fingerprint:
        say(f"version {router.version} belongs to another revision of the model")
        return None
    return router


def compare(
    worker: NeapClient, model_id: str, max_tokens: int, *, router: str = ""
) -> list[PolicyFigures]:
    """Stream every prompt under every policy, the policies alternating, and sum up the figures.

    `router` is a version or an alias; empty means the worker's default.
    """
    num_layers = worker.get_model(model_id).num_layers
    figures = {policy: PolicyFigures(policy) for policy in POLICIES}
    is_chat = has_chat_template(worker, model_id)
    for policy in POLICIES:
        # The first request of each kind includes loading and warm-up, so it is not counted.
        warm_up = request_for(model_id, "Hello", policy, 8, is_chat, router)
        run_one(worker, warm_up, lambda _: None)
    for name, prompt in PROMPTS.items():
        for policy in POLICIES:
            out.print(f"\n[bold]{name}[/] under [bold]{policy}[/]")
            view = DepthView(out, num_layers, coloured=True)
            request = request_for(model_id, prompt, policy, max_tokens, is_chat, router)

            def show(event: pb.GenerateResponse, view: DepthView = view) -> None:
                if event.HasField("chunk"):
                    view.chunk(event.chunk)

            tokens, finished = run_one(worker, request, show)
            view.text(finished.text)
            figures[policy].add(name, tokens, finished)
            out.print()
            out.print(view.legend())
            out.print(statistics_line(finished), style="dim", markup=False)
    return list(figures.values())


def request_for(
    model_id: str, prompt: str, policy: Policy, max_tokens: int, is_chat: bool, router: str = ""
) -> pb.GenerateRequest:
    """Build a request with greedy decoding."""
    return generate_request(
        model_id,
        prompt,
        raw=not is_chat,
        policy=policy,
        router="" if policy == "full" else router,
        max_tokens=max_tokens,
    )


def has_chat_template(worker: NeapClient, model_id: str) -> bool:
    """Return whether the model has a chat template. A base model given with --model-path may have none."""
    try:
        run_one(worker, request_for(model_id, "Hi", "full", 1, True), lambda _: None)
    except NeapError as error:
        if error.reason != NO_CHAT_TEMPLATE:
            raise
        say(PLAIN_TEXT_NOTE)
        return False
    return True


def model_id_from_path(path: Path) -> str:
    """Derive a model id from a path, in lower case and with only the characters that a registry allows in names."""
    return re.sub(r"[^a-z0-9._-]+", "-", path.absolute().stem.lower()).strip("-._") or "model"


def step(text: str) -> None:
    out.print(f"\n[bold]==[/] {text}")


def say(text: str) -> None:
    out.print(f"   {text}", markup=False)
