"""`make demo`: runs both services on this machine and shows what routers are worth: a shipped one, one calibrated from
nothing, and one to which requests of a kind were added.

    python -m demo [--data-dir DIR] [--model-path FILE] [--max-tokens N] [--calibration-budget SECONDS] [--recalibrate]
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2
from neap_client.router.v1.router_pb2 import RouterVersion

from demo import charts
from demo.compare import FULL, Side, compare
from demo.figures import PROMPTS, PolicyFigures, policy_table
from demo.model import MODEL_ID, demo_model, own_model, size_mb
from demo.requests import LEARNED, MEASURED
from demo.routers import Catalogue, parent_digest, say
from demo.shipped_router import import_shipped, is_of_model
from neap_engine.cli.connection import connect
from neap_engine.cli.console import exit_on_error, fail, out
from neap_engine.cli.learned_view import learned_lines
from neap_engine.cli.processes import ServiceProcess, interrupt_on_signals
from neap_engine.cli.up import model_id_from_path

# Aliases of the demo's routers. Requests that name no router get `latest`.
SHIPPED, OWN, ADDED, LATEST = "shipped", "demo", "demo-one-kind", "latest"
# The demo promises five minutes on two cores; this leaves half of them for everything else.
CALIBRATION_BUDGET_S = 150
START_TIMEOUT_S = 180.0


@exit_on_error
def demo(
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Folder for the model, the routers, the logs and the PNG.")
    ] = Path(".neap"),
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model-path", help="Use this Hugging Face folder or .gguf file. Default: fetch SmolLM2-135M-Instruct."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Maximum number of new tokens per prompt.")
    ] = 64,
    calibration_budget: Annotated[
        int, typer.Option("--calibration-budget", min=1, help="Time limit of the calibration in seconds.")
    ] = CALIBRATION_BUDGET_S,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Calibrate even if a router of an earlier run could be reused.")
    ] = False,
) -> None:
    """Fetch a small model and compare full depth with early exits: with a shipped router, with one calibrated from
    nothing, and before and after requests of one kind are added to it."""
    started_s = time.monotonic()
    folder = data_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    step(f"model (everything is kept in {folder})")
    if model_path is None:
        model_id, source = MODEL_ID, demo_model(folder, say)
    else:
        model_id, source = model_id_from_path(model_path), own_model(model_path.absolute())
    say(f"{model_id}: {source}")
    interrupt_on_signals()
    with services(model_id, source, folder) as (calibrator, worker):
        stories = Stories(calibrator, worker, model_id, folder, max_tokens)
        stories.shipped()
        router = stories.from_nothing(calibration_budget, recalibrate=recalibrate)
        stories.one_kind(router, calibration_budget)
        step("result")
        picture = charts.write_stories(
            folder / "demo-report.png", title=f"{model_id}, tokens per second", stories=stories.told
        )
        say(f"picture: {picture}")
        step("stopping both services")
    for figures in stories.told.values():
        if any(side.outputs != figures[0].outputs for side in figures):
            fail("exact and full gave different outputs; this is a bug, please report it")
    out.print(f"done in {time.monotonic() - started_s:.0f} s")


@contextmanager
def services(model_id: str, source: Path, folder: Path) -> Iterator[tuple[NeapClient, NeapClient]]:
    """Start a calibrator and a worker on free loopback ports and yield clients of both.
    Both stop when the block is left."""
    shared_flags = ["--data-dir", str(folder), "--model", f"{model_id}={source}", "--grace-s", "0"]
    step("starting calibrator and worker")
    say(f"the worker loads {model_id}, {size_mb(source):.0f} MB; a large model takes minutes")
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(ServiceProcess(name, module, shared_flags, folder / "logs" / f"{name}.log"))
            for name, module in (("calibrator", "calibrator_service"), ("worker", "inference_service"))
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


class Stories:
    """What the demo shows, one router after the other. `told`: title -> the figures of its sides, full depth first."""

    def __init__(
        self, calibrator: NeapClient, worker: NeapClient, model_id: str, folder: Path, max_tokens: int
    ) -> None:
        self._worker, self._model_id, self._folder = worker, model_id, folder
        self._max_tokens = max_tokens
        fingerprint = worker.get_model(model_id).fingerprint
        self._catalogue = Catalogue(calibrator, model_id, fingerprint)
        self.told: dict[str, list[PolicyFigures]] = {}

    def shipped(self) -> None:
        """The router that neap ships, if it is one of this model: it serves at once."""
        step("1. the shipped router, imported: four prompts, each at full depth and with early exits")
        if not is_of_model(self._catalogue.fingerprint):
            say("neap ships no router for this model")
            return
        import_shipped(self._model_id, SHIPPED, self._folder)
        self._compare("shipped router", [FULL, Side("exact", "exact", SHIPPED)], streams=True)

    def from_nothing(self, budget_s: int, *, recalibrate: bool) -> RouterVersion:
        """A router that learns only from text that the model writes now. Returns it."""
        step(f"2. a router from nothing: the model writes text and a router learns from it, {budget_s} s")
        router = None if recalibrate else self._catalogue.published(OWN)
        if router is not None:
            say(f"reusing version {router.version}, published before")
        else:
            text = calibration_pb2.SelfGenerated()
            router = self._catalogue.calibrated(text, budget_s, (OWN, LATEST))
        manifest = json.loads(router.manifest_json)
        for line in learned_lines(manifest):
            say(line)
        say("the same four prompts, from which it has not learned")
        sides = [FULL, Side("exact", "exact", str(router.version))]
        # A router that is used again may have had another budget.
        self._compare(f"calibrated in {manifest['calibration']['seconds']['total']:.0f} s", sides)
        return router

    def one_kind(self, parent: RouterVersion, budget_s: int) -> None:
        """The router `parent` before and after requests of one kind are added to it, measured on other requests of that
        kind."""
        step(f"3. {len(LEARNED)} requests of one kind are added to version {parent.version}")
        say("each asks for the facts of a passage as JSON")
        if "statistics" not in json.loads(parent.manifest_json)["calibration"]:
            say("this model's statistics are too large to be kept with its router: nothing can be added")
            return
        router = self._catalogue.published(ADDED)
        if router is not None and parent_digest(router) == parent.manifest_digest:
            say(f"reusing version {router.version}, published before")
        else:
            text = calibration_pb2.SelfGenerated(prompts=LEARNED)
            router = self._catalogue.calibrated(text, budget_s, (ADDED,), parent=parent)
        say(f"{len(MEASURED)} other requests of the kind, from which neither version has learned")
        before = Side("exact before", "exact", str(parent.version))
        after = Side("exact after", "exact", str(router.version))
        self._compare(f"{len(LEARNED)} requests of one kind added", [FULL, before, after], MEASURED)

    def _compare(
        self, title: str, sides: list[Side], prompts: Mapping[str, str] = PROMPTS, *, streams: bool = False
    ) -> None:
        """Run the prompts and print the table."""
        figures = compare(self._worker, self._model_id, sides, prompts, self._max_tokens, streams=streams)
        self.told[title] = figures
        out.print(policy_table(figures))


def step(text: str) -> None:
    out.print(f"\n[bold]==[/] {text}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    app(prog_name="python -m demo")
