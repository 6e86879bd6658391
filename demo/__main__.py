"""`make demo`: runs `neap up` on this machine and sends it requests. It gets faster as it is used.

python -m demo [--data-dir DIR] [--model-path FILE] [--max-tokens N] [--budget SECONDS] [--gateway HOST:PORT]
"""

import shlex
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from demo.model import MODEL_ID, demo_model, own_model, size_mb
from demo.story import Story, kind_table, lines_of, say, step, words_beside
from demo.system import CALIBRATOR, WORKER, System, new_folder
from neap_engine.cli.connection import connect
from neap_engine.cli.console import exit_on_error, fail, out
from neap_engine.cli.learning_picture import draw
from neap_engine.cli.processes import interrupt_on_signals
from neap_engine.cli.up import LATEST, model_id_from_path
from shared.registry.factory import open_registry

# Seconds of each of the two calibrations.
BUDGET_S = 45
# Seconds of the trial of what was learned from requests.
TRIAL_S = 75.0
START_TIMEOUT_S = 600.0
# `neap up` waits for 20,000 tokens, and for half an hour between two calibrations, unless it is told otherwise.
LEARN_TOKENS = 2000
# A trial begins with 5 % of the requests, and workers report every ten seconds, unless they are told otherwise.
FIRST_SHARE, REPORT_S = 0.5, 0.5


@exit_on_error
def demo(
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Folder for the model, and in its folder demo for all else.")
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
    budget: Annotated[
        int, typer.Option("--budget", min=1, help="Time limit of each of the two calibrations in seconds.")
    ] = BUDGET_S,
    trial: Annotated[
        float, typer.Option("--trial", min=0, help="Seconds for which the trial of the second router is waited for.")
    ] = TRIAL_S,
    gateway: Annotated[
        str, typer.Option("--gateway", metavar="HOST:PORT", help="Where clients of OpenAI's API connect meanwhile.")
    ] = "127.0.0.1:0",
) -> None:
    """Run `neap up` on a small model and send it requests, each at full depth and with drafts. It begins without a
    router, learns one from the model's own text, and then from requests of one kind, by itself. What it has learned
    from requests is on trial until it is found to be faster."""
    began_s = time.time()
    step(f"model (everything is kept in {data_dir.absolute()})")
    data_dir.mkdir(parents=True, exist_ok=True)
    if model_path is None:
        model_id, source = MODEL_ID, demo_model(data_dir.absolute(), say)
    else:
        model_id, source = model_id_from_path(model_path), own_model(model_path.absolute())
    folder = new_folder(data_dir.absolute() / "demo")
    interrupt_on_signals()
    settings = {
        "NEAP_LEARN_TOKENS": str(LEARN_TOKENS),
        "NEAP_LEARN_INTERVAL_S": "0",
        "NEAP_LEARN_BUDGET_S": str(budget),
        "NEAP_JUDGE": "publications",
        "NEAP_JUDGE_FIRST_SHARE": str(FIRST_SHARE),
        "NEAP_REPORT_INTERVAL_S": str(REPORT_S),
    }
    flags = ["--model", f"{model_id}={source}", "--data-dir", str(folder), "--budget", str(budget)]
    flags += ["--gateway", gateway, "--worker", "127.0.0.1:0", "--calibrator", "127.0.0.1:0"]
    variables = " ".join(f"{name}={value}" for name, value in settings.items())
    step(f"neap up, which loads {size_mb(source):.0f} MB")
    say(f"{variables} neap up {shlex.join(flags)}")
    with ExitStack() as stack:
        system = stack.enter_context(System(flags, settings))
        worker, calibrator = (
            stack.enter_context(connect(system.address(pattern, START_TIMEOUT_S), timeout_s=60.0))
            for pattern in (WORKER, CALIBRATOR)
        )
        stack.enter_context(system.explaining())
        story = Story(system, worker, calibrator, model_id, max_tokens)
        story.day_0()
        story.first_router(budget)
        story.one_kind(budget, trial)
        step("result")
        out.print(kind_table(story.of_kind))
        with closing(open_registry(str(folder / "registry"))) as registry:
            changes = registry.alias_history(model_id, LATEST)[::-1]
        title, pairs = f"{model_id}: {len(story.pairs)} prompts, each at full depth and with drafts", story.pairs
        drawn = draw(folder / "demo.svg", title, lines_of(pairs, story.on_trial), changes, began_s, words_beside(pairs))
        say(f"picture: {drawn}")
        step("ending all of it")
    if different := sum(not pair.is_same for pair in story.pairs):
        fail(f"{different} of {len(story.pairs)} answers were not those of full depth; this is a bug, please report it")
    say(f"all {len(story.pairs)} answers of exact were those of full depth")
    say(f"neap up --model {model_id}={source} --data-dir {folder} goes on where this ended")
    out.print(f"done in {time.time() - began_s:.0f} s")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    app(prog_name="python -m demo")
