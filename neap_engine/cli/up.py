"""`neap up`: worker, calibrator and gateway of one model on this machine, started, watched and ended together."""

import json
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.router.v1.router_pb2 import AliasChange
from rich.console import Console

from neap_engine.cli.connection import InterruptibleClient, client_security
from neap_engine.cli.console import DEFAULT_CALIBRATOR, DEFAULT_WORKER, DataDir, exit_on_error, fail, out, print_line
from neap_engine.cli.job_progress import ENDED, SETTLED, figures_line, phase_name, problem_text
from neap_engine.cli.learned_view import learned_lines
from neap_engine.cli.live_line import Comparison, View
from neap_engine.cli.processes import ServiceProcess, interrupt_on_signals
from neap_engine.cli.routers import describe_change
from shared.calibrator_settings import CalibratorSettings
from shared.config import make_settings
from shared.errors import NeapError, NotFound
from shared.pool_names import DEFAULT_POOL
from shared.worker_settings import WorkerSettings

DEFAULT_GATEWAY = "127.0.0.1:8080"
DEFAULT_BUDGET_S = 150
NEWER_POLL_S = 5.0
# Models of many gigabytes take minutes.
START_TIMEOUT_S = 1800.0
POLL_S = 1.0
# Who learns gives way to who serves.
CALIBRATOR_NICENESS = 15
# The worker's share of a GPU's memory, unless its variable names another: the calibrator's model is there, too.
WORKER_SHARE = "0.45"
LATEST = "latest"


@exit_on_error
def up(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="[ID=]SOURCE",
            help="A Hugging Face folder, a .gguf file, or a name on the Hugging Face Hub. Default of the id: its name.",
        ),
    ],
    data_dir: DataDir = None,
    gateway: Annotated[
        str, typer.Option("--gateway", metavar="HOST:PORT", help="Where clients of OpenAI's API connect.")
    ] = DEFAULT_GATEWAY,
    worker: Annotated[
        str, typer.Option("--worker", metavar="HOST:PORT", help="Where gRPC clients connect. Port 0: a free one.")
    ] = DEFAULT_WORKER,
    calibrator: Annotated[
        str, typer.Option("--calibrator", metavar="HOST:PORT", help="Where the calibration service listens.")
    ] = DEFAULT_CALIBRATOR,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Learn a router from the model's own text if none has been published for it. The calibrator has the "
            "lowest priority, so answers come first.",
        ),
    ] = True,
    budget: Annotated[int, typer.Option("--budget", min=1, help="Seconds that this may take.")] = DEFAULT_BUDGET_S,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn/--no-learn",
            help="Learn from the answers that are served: they are kept in the data folder as token ids for a week, "
            "and the router goes on from them. docs/privacy.md says more.",
        ),
    ] = True,
) -> None:
    """Run everything that serves a model: worker, calibrator and HTTP gateway. It answers as soon as the model is
    loaded, with drafts that need no router, and takes up routers as they are learned, first from text of the model's
    own and then from what it serves. Ctrl-C ends all of it; the next start goes on where it was.

    Other settings are those of the services: variables NEAP_*, see `neap serve worker --help`.
    """
    model_id, source = named_source(model)
    check_free({"--worker": worker, "--gateway": gateway, "--calibrator": calibrator})
    settings = make_settings(WorkerSettings, data_dir=data_dir)
    is_judged = make_settings(CalibratorSettings, data_dir=data_dir).judge != "off"
    if is_judged and calibrator.endswith(":0"):
        calibrator = f"{calibrator[:-1]}{free_port()}"  # the worker, which starts first, reports there
    folder = settings.data_dir.absolute()
    shared_flags, logs = ["--model", f"{model_id}={source}", "--data-dir", str(folder)], folder / "logs"
    metrics = f"127.0.0.1:{free_port()}"
    print_line(f"{model_id}: {source}; logs in {logs}")
    check_interrupted = interrupt_on_signals()
    with ExitStack() as stack:

        def started(name: str, module: str, listen: str, *flags: str, niceness: int = 0) -> ServiceProcess:
            process = ServiceProcess(name, module, flags, logs / f"{name}.log", listen=listen, niceness=niceness)
            return stack.enter_context(process)

        flags = [*shared_flags, "--metrics-listen", metrics, *share_flags(settings)]
        flags += ["--learn", f"{DEFAULT_POOL}=1"] if learn else []
        flags += ["--report-to", calibrator] if is_judged and not settings.report_to else []
        processes = [started("worker", "inference_service", worker, *flags)]
        with out.status("loading the model"):
            serving = processes[0].wait_serving(START_TIMEOUT_S)
        processes.append(started("gateway", "neap_engine.gateway", gateway, "--workers", serving))
        http = processes[1].wait_listening(START_TIMEOUT_S)
        print_line(f"OpenAI's API: http://{http}/v1, gRPC: {serving}, metrics: http://{metrics}/metrics")
        print_line(f"""  curl http://{http}/v1/chat/completions -H 'Content-Type: application/json' \\""")
        print_line(f"""    -d '{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello"}}]}}'""")
        flags = [*shared_flags, "--grace-s", "0"]
        flags += ["--learn-from-traffic"] if learn else []
        processes.append(started("calibrator", "calibrator_service", calibrator, *flags, niceness=CALIBRATOR_NICENESS))
        learning = processes[2].wait_serving(START_TIMEOUT_S)
        print_line(f"calibration service: {learning}; Ctrl-C ends all of it")
        serves, learns = (
            stack.enter_context(
                InterruptibleClient(address, security=client_security(), num_attempts=1, timeout_s=10.0)
            )
            for address in (serving, learning)
        )
        states = chain(learned(serves, learns, model_id, budget if calibrate else 0), newer(learns, model_id))
        watch(processes, View(metrics, Comparison(serves, model_id)), states, out, check_interrupted)


def watch(
    processes: list[ServiceProcess],
    view: View,
    states: Iterator[str],
    console: Console,
    check_interrupted: Callable[[], None],
) -> None:
    """Shows what is served and learned until Ctrl-C. Raises `Unavailable` if one of the processes ends."""
    state = said = ""
    with console.status("") as status:
        try:
            while True:
                check_interrupted()
                check_alive(processes)
                try:
                    state = next(states, state) or state
                except NeapError:
                    time.sleep(POLL_S)
                    check_alive(processes)  # which says more
                    raise
                if (news := state.rstrip("0123456789%")) != said:
                    print_line(state)
                    view.begin_again()
                said = news
                status.update(f"{view.line()} · {state}")
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            console.print("ending")


def check_alive(processes: Sequence[ServiceProcess]) -> None:
    for process in processes:
        process.check_alive()


def learned(worker: NeapClient, client: NeapClient, model_id: str, budget_s: int) -> Iterator[str]:
    """What becomes of the model's router, said each time that it is asked for: published before, being learned, or why
    not. A calibration that an earlier start has left is waited for. Without `budget_s` none is begun."""
    fingerprint = worker.get_model(model_id).fingerprint
    with suppress(NotFound):
        router = client.get_version(model_id, alias=LATEST)
        if router.model_fingerprint == fingerprint:
            yield f"router {router.version}"
            return
        print_line(f"router {router.version} belongs to another revision of the model")
    jobs = [*client.list_calibrations(model_id)]
    job = next((each for each in reversed(jobs) if each.state not in ENDED), None)
    if job is None and budget_s:
        spec = pb.CalibrationSpec(
            model_id=model_id,
            self_generated=pb.SelfGenerated(),
            time_budget=Duration(seconds=budget_s),
            aliases=[LATEST],
        )
        job = client.create_calibration(spec, request_id=f"up-{uuid.uuid4()}")
    if job is None:
        yield "no router; `neap calibrate` learns one"
        return
    while job.state not in SETTLED:
        yield f"learning a router: {phase_name(job)}, {job.fraction:.0%}"
        try:
            job = client.get_calibration(job.calibration_id)
        except NeapError as error:
            yield f"the calibration service does not answer: {error.message} [{error.reason}]"
    if job.state == pb.STATE_SUCCEEDED:
        yield f"router {job.router_version} was learned; {figures_line(job)}"
    else:
        yield f"no router was learned: {problem_text(job)}"


def newer(client: NeapClient, model_id: str) -> Iterator[str]:
    """What becomes of the alias later, each time that it is asked; "" for nothing new. It never ends."""
    num_seen, asked_s = -1, float("-inf")
    while True:
        news = []
        if time.monotonic() - asked_s >= NEWER_POLL_S:
            asked_s = time.monotonic()
            try:
                changes = client.alias_history(model_id, LATEST)[::-1]
                if num_seen >= 0:
                    news = [change_text(client, model_id, change) for change in changes[num_seen:]]
                num_seen = len(changes)
            except NotFound:
                num_seen = 0
            except NeapError:
                news = []  # it is asked again
        yield from news or [""]


def change_text(client: NeapClient, model_id: str, change: AliasChange) -> str:
    """A later change of the alias in a line: what a version was learned from, a trial, or who moved the alias."""
    version = change.to_version
    if change.HasField("canary") or change.from_version >= version:
        return f"{describe_change(change)}; {change.reason}".removesuffix("; ")
    router = client.get_version(model_id, version=version)
    manifest = json.loads(router.manifest_json)
    source = manifest.get("calibration", {}).get("spec", {}).get("source", {})
    by = "was learned from what was served" if "pool" in source else "came"
    return "; ".join((f"router {version} {by}", *islice(learned_lines(manifest), 2)))


def share_flags(settings: WorkerSettings) -> Sequence[str]:
    """The worker's flags for its share of a GPU."""
    is_alone = not settings.device.startswith("cuda") or "gpu_memory_share" in settings.model_fields_set
    return () if is_alone else ("--gpu-memory-share", WORKER_SHARE)


def named_source(model: str) -> tuple[str, str]:
    """The id and the source of [ID=]SOURCE. A path becomes absolute, because the services may run elsewhere."""
    given, separator, source = model.partition("=")
    model_id, source = (given, source) if separator else ("", model)
    if Path(source).exists():
        source = str(Path(source).absolute())
    return model_id or model_id_from_path(source), source


def model_id_from_path(source: str | Path) -> str:
    """An id from a path or a name, in lower case and with only the characters that a registry allows in names."""
    name = Path(source).name.removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"


def check_free(addresses: Mapping[str, str]) -> None:
    """Fails with the flag whose address cannot be listened on, before minutes are spent on a model."""
    for flag, address in addresses.items():
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host.strip("[]"), int(port)), family=family).close()
        except (OSError, ValueError, OverflowError) as error:
            fail(f"cannot listen on {address}: {error}; {flag} HOST:PORT names another address")


def free_port() -> int:
    """A TCP port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
