"""`neap learn`: shows and removes what is kept of served answers. It opens the registry directly."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from neap_engine.cli.console import DataDir, Model, RegistryUrl, exit_on_error, out, print_line
from neap_engine.cli.registry_commands import registry_there
from shared.errors import InvalidInput, NotFound
from shared.pool_names import check_pool
from shared.registry.names import alias_in_pool, learning_note, only_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.registry.registry import Registry
    from shared.traffic.traffic import Batch

PICTURES = (".svg", ".png", ".pdf")

app = typer.Typer(help="What is kept of served answers, for routers to learn from.", no_args_is_help=True)


@app.command("status")
@exit_on_error
def status(
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Draw, into this file (.svg, .png or .pdf), tokens per second of an alias' versions over time, as "
            "workers report them to the calibration service, with the changes of the alias and its canaries.",
        ),
    ] = None,
    alias: Annotated[
        str, typer.Option("--alias", help="With --picture: the alias, latest@POOL for a pool's.")
    ] = "latest",
    model: Model = "",
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Show what is kept of each model and pool, the version that its callers get, and when and why the calibration
    service lets it learn."""
    from contextlib import closing

    from shared.registry.factory import open_registry
    from shared.traffic.traffic import open_traffic

    if picture is not None and picture.suffix not in PICTURES:
        raise typer.BadParameter(f"the name of the picture must end with {', '.join(PICTURES)}")
    name = registry_there(registry, data_dir)
    traffic = open_traffic(name)
    table = Table("model", "pool", "tokens", "objects", "from (UTC)", "to", "router")
    schedules = []
    with closing(open_registry(name)) as opened:
        for model_id in traffic.models():
            aliases = opened.aliases(model_id)
            for pool in traffic.pools(model_id):
                if batches := traffic.batches(model_id, pool):
                    own = aliases.get(alias_in_pool("latest", pool) or "latest")
                    table.add_row(model_id, pool, *_figures(batches), str(own or "the model's"))
                    if note := opened.note(learning_note(model_id, pool)):
                        schedules.append(f"{model_id}, pool {pool}: {_schedule(note, batches)}")
        drawn = _drawn(picture, opened, only_model(model, opened.models()), alias) if picture else None
    if table.row_count:
        out.print(table)
        for schedule in schedules or ["no calibration service has looked at it: --learn-from-traffic lets one learn"]:
            print_line(schedule)
    else:
        print_line("nothing is kept: workers keep answers with --learn POOL=SHARE")
    if drawn:
        print_line(f"wrote {drawn}")


def _drawn(path: Path, registry: "Registry", model_id: str, alias: str) -> Path:
    """Draws a picture, and returns its absolute path. Raises NotFound, OSError."""
    from neap_engine.cli.learning_picture import Line, draw, router_name
    from shared.registry.speeds import kept_speeds

    changes = registry.alias_history(model_id, alias)[::-1]
    points = list(kept_speeds(registry, model_id, alias).points())
    if not points:
        raise NotFound(
            f"no speeds of alias {alias!r} are kept: workers report them with --report-to, and a calibration service "
            "keeps them within a minute"
        )
    lines = [
        Line(router_name(version), f"C{number}", [(at_s, speed) for whose, at_s, speed in points if whose == version])
        for number, version in enumerate(sorted({version for version, *_ in points}))
    ]
    return draw(path, f"{model_id}, {alias}", lines, changes, points[0][1], lambda version: f" {router_name(version)}")


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
