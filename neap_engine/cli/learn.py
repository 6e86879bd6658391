"""`neap learn`: shows and removes what is kept of served answers. It opens the registry directly."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from neap_engine.cli.console import DataDir, RegistryUrl, exit_on_error, out, print_line
from neap_engine.cli.registry_commands import registry_there
from shared.errors import InvalidInput
from shared.pool_names import check_pool
from shared.registry.names import alias_in_pool, learning_note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.traffic.traffic import Batch

app = typer.Typer(help="What is kept of served answers, for routers to learn from.", no_args_is_help=True)


@app.command("status")
@exit_on_error
def status(registry: RegistryUrl = None, data_dir: DataDir = None) -> None:
    """Show what is kept of each model and pool, the version that its callers get, and when and why the calibration
    service lets it learn."""
    from contextlib import closing

    from shared.registry.factory import open_registry
    from shared.traffic.traffic import open_traffic

    name = registry_there(registry, data_dir)
    traffic = open_traffic(name)
    table = Table("model", "pool", "tokens", "objects", "from (UTC)", "to", "router")
    schedules = []
    with closing(open_registry(name)) as opened:
        for model in traffic.models():
            aliases = opened.aliases(model)
            for pool in traffic.pools(model):
                if batches := traffic.batches(model, pool):
                    own = aliases.get(alias_in_pool("latest", pool) or "latest")
                    table.add_row(model, pool, *_figures(batches), str(own or "the model's"))
                    if note := opened.note(learning_note(model, pool)):
                        schedules.append(f"{model}, pool {pool}: {_schedule(note, batches)}")
    if table.row_count:
        out.print(table)
        for schedule in schedules or ["no calibration service has looked at it: --learn-from-traffic lets one learn"]:
            print_line(schedule)
    else:
        print_line("nothing is kept: workers keep answers with --learn POOL=SHARE")


def _figures(batches: "list[Batch]") -> tuple[str, ...]:
    hours = (_hour(batches[0].hour), _hour(batches[-1].hour))
    return (str(sum(batch.num_tokens for batch in batches)), str(len(batches)), *hours)


def _schedule(note: "Mapping[str, Any]", batches: "list[Batch]") -> str:
    """What the calibration service has noted of a pool. A note of another build counts as far as it is understood."""
    last, least_tokens = note.get("last_job"), note.get("least_tokens", "?")
    line = "no job yet"
    if last:
        began = _time(note.get("began_s"), "%m-%d %H:%M")
        line = f"{last} began {began} UTC ({note.get('why')}): {note.get('outcome') or 'not ended yet'}"
    counted_s = note.get("counted_s") or 0.0
    num_new = sum(batch.num_tokens for batch in batches if batch.stored.last_modified_s > counted_s)
    when = _time(note.get("next_s"), "%m-%d %H:%M")
    return f"{line}; the next with {least_tokens} new tokens ({num_new} are there), not before {when} UTC"


def _hour(hour: int) -> str:
    return _time(hour * 3600, "%m-%d %H:00")


def _time(unix_s: Any, form: str) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime(form)
    except (OverflowError, ValueError, OSError, TypeError):  # neither a name nor a note is to be believed
        return "?"


@app.command("forget")
@exit_on_error
def forget(
    pool: Annotated[str, typer.Option("--pool", help="Pool whose answers are removed.")],
    model: Annotated[str, typer.Option("--model", help="Id of the model. Default: all models.")] = "",
    before: Annotated[
        str,
        typer.Option(
            "--before",
            metavar="TIME",
            help="Remove only hours that began before this time, such as 2026-11-28T12:00, in UTC unless it says "
            "otherwise. Default: everything.",
        ),
    ] = "",
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Remove what is kept of a pool's answers, now.

    What a worker has not written yet comes later, two minutes at most: without --learn for this pool, nothing comes.
    Versions that have been learned from the answers stay.
    """
    from shared.traffic.traffic import open_traffic

    check_pool(pool)
    before_s = _seconds(before) if before else None
    traffic = open_traffic(registry_there(registry, data_dir))
    removed = traffic.forget(pool, model_id=model or None, before_s=before_s)
    print_line(f"{removed.num_objects} objects ({removed.num_bytes} bytes) removed")


def _seconds(text: str) -> float:
    """Raises InvalidInput (BAD_TIME)."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidInput(
            f"--before is {text!r}; it must be a time such as 2026-11-28T12:00", reason="BAD_TIME"
        ) from error
